"""How `micro_batch_size: auto` is chosen by memory, and what is said where memory does not suffice."""

from pathlib import Path

import pytest
import torch

from fourfold.config.load import load_config
from fourfold.config.resolve import layout_of, legal_micro_batch_sizes, resolve
from fourfold.config.schema import Config
from fourfold.cost.peak import ROOM, largest_peak
from fourfold.errors import ConfigError
from fourfold.layout.layout import Layout
from fourfold.train import fit
from fourfold.train.build import build_run
from fourfold.train.fit import choose_micro_batch_size, is_out_of_memory, out_of_memory, remedies
from tests.tiny import alone, run_training, tiny_config

CPU = torch.device("cpu")


def open_config(folder: Path, **keys: object) -> Config:
    """As `resolve` leaves it for a run on GPUs."""
    config = tiny_config(folder, **keys)
    return config.model_copy(update={"global_": config.global_.model_copy(update={"micro_batch_size": "auto"})})


def memory_for(folder: Path, size: int, **keys: object) -> int:
    """Just enough for micro batches of this size."""
    config = tiny_config(folder, micro_batch_size=size, vocab_size=128, **keys)
    return round(largest_peak(config, Layout()) / ROOM) + 1


def test_a_run_takes_the_largest_micro_batch_that_fits_and_leaves_it_in_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_for(tmp_path, 4)
    monkeypatch.setattr(fit, "memory_bytes", lambda device: memory)
    outcome = run_training(open_config(tmp_path, max_steps=2))
    assert outcome.run.config.global_.micro_batch_size == 4
    assert load_config(tmp_path / "run" / "config.yaml").global_.micro_batch_size == 4
    logged = (tmp_path / "run" / "logs" / "workerlog.0").read_text()
    assert "micro batch 4: forecast 0.0 of 0.0 GiB; 8 would take 0.0" in logged
    assert "global batch 8 = micro batch 4 x 1 data ranks x 2 accumulated" in logged


def test_the_smallest_gpu_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_config(tmp_path, vocab_size=128)
    others = [memory_for(tmp_path, 8), memory_for(tmp_path, 2), memory_for(tmp_path, 8)]
    monkeypatch.setattr(fit, "memory_bytes", lambda device: others[0])
    monkeypatch.setattr(fit, "tell_all", lambda mine: others)
    assert choose_micro_batch_size(config, Layout(), CPU).global_.micro_batch_size == 2


def test_where_nothing_fits_the_run_is_refused_with_what_is_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "memory_bytes", lambda device: 2**10)
    with alone() as process, pytest.raises(ConfigError) as refused:
        build_run(open_config(tmp_path), process)
    assert str(refused.value) == (
        "global.micro_batch_size = auto finds no size that fits: 1 is forecast to take 0.0 GiB, and of the 0.0 GiB of "
        "the smallest GPU 0.0 may be filled; set use_recompute to true, sharding_degree above 1 or mp_degree above 1, "
        "or micro_batch_size to 1 to try it all the same"
    )


def test_remedies_are_what_is_not_yet_done(tmp_path: Path) -> None:
    keys = {"use_recompute": True, "recompute_granularity": "core_attn"}
    config = tiny_config(tmp_path, **keys)
    layout = Layout(sharding=2, mp=2)
    assert remedies(config, layout) == [
        "recompute_granularity to full",
        "sequence_parallel to true",
        "sharding_stage to 3",
        "sharding_degree above 2",
        "mp_degree above 2",
    ]
    offloaded = tiny_config(tmp_path, sharding_offload=True, **keys)
    assert "sharding_stage to 3" not in remedies(offloaded, layout), "it behaves so already"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_auto_stays_open_only_where_a_gpu_decides(device: str) -> None:
    config = load_config(None, [("device", device), ("global_batch_size", "64")])
    assert resolve(config, 4, has_gpu=False).global_.micro_batch_size == 16
    left = resolve(config, 4, has_gpu=False, leaves_micro_batch=True).global_.micro_batch_size
    assert left == (16 if device == "cpu" else "auto")
    given = load_config(None, [("device", device), ("micro_batch_size", "2")])
    assert resolve(given, 4, has_gpu=False, leaves_micro_batch=True).global_.micro_batch_size == 2


# Out of memory after all


def test_out_of_memory_is_told_with_the_next_smaller_size(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, global_batch_size=12, micro_batch_size=6)
    told = out_of_memory(config, Layout(), rank=3)
    assert told.exit_code == 2, "another start would end alike"
    assert str(told) == (
        "the GPU of rank 3 has no memory left for global.micro_batch_size = 6; set micro_batch_size to 4, "
        "use_recompute to true, sharding_degree above 1 or mp_degree above 1"
    )
    assert legal_micro_batch_sizes(config, layout_of(config, 1)) == [1, 2, 3, 4, 6, 12]


def test_the_size_that_auto_chose_is_the_one_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_config(tmp_path, max_steps=1)
    assert "micro_batch_size below what the log says was chosen" in str(out_of_memory(config, Layout(), rank=0))
    memory = memory_for(tmp_path, 4)
    monkeypatch.setattr(fit, "memory_bytes", lambda device: memory)
    run_training(config)
    told = str(out_of_memory(config, Layout(), rank=0))
    assert "global.micro_batch_size = 4; set micro_batch_size to 2" in told


def test_an_error_that_a_pipe_stage_wraps_is_known_for_what_it_is() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("[Stage 0] failed to run forward") from error
    except RuntimeError as error:
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("CUDA error"))
