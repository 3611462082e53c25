"""The format: any block from any blocks, no byte unchecked, nothing that could run."""

import json
import os
import random
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fourfold.checkpoint import manifest, store
from fourfold.checkpoint.manifest import FORMAT, DamagedError, read_manifest, render_manifest
from fourfold.checkpoint.state import Piece, whole_piece
from fourfold.checkpoint.store import checkpoint_path, complete_checkpoints, load_pieces, verify_checkpoint
from fourfold.errors import CheckpointError
from tests.checkpoint.saving import TEXTS, entries, is_equal, progress, save, tensors
from tests.tiny import alone

TENSORS = "tensors/rank_00000.safetensors"


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    with alone():
        yield


@pytest.mark.parametrize("seed", range(5))
def test_any_block_can_be_read_from_any_blocks(tmp_path: Path, seed: int) -> None:
    """A tensor cut at random is read into other random blocks of it."""
    rng = random.Random(seed)
    whole = torch.randn(11, 6, 4, generator=torch.Generator().manual_seed(seed))
    folder = store.begin_checkpoint(tmp_path, 1)
    shares = [
        store.write_share(folder, rank, {"model.x": block}) for rank, block in enumerate(random_blocks(whole, rng, 2))
    ]
    store.commit_checkpoint(tmp_path, progress(1), TEXTS, shares)
    path = verify_checkpoint(checkpoint_path(tmp_path, 1))
    for block in random_blocks(whole, rng, 3):
        found = torch.full_like(block.tensor, torch.nan)
        load_pieces(path, {"model.x": block._replace(tensor=found)})
        assert torch.equal(found, block.tensor)


def random_blocks(whole: torch.Tensor, rng: random.Random, cuts: int) -> Iterator[Piece]:
    ranges = (pairwise(sorted({0, size, *rng.sample(range(size), cuts)})) for size in whole.shape)
    for (a, b), (c, d), (e, f) in product(*ranges):
        yield Piece(whole[a:b, c:d, e:f].contiguous(), tuple(whole.shape), (a, c, e), True)


def test_any_tool_that_knows_safetensors_reads_the_tensors(tmp_path: Path) -> None:
    assert is_equal(load_file(save(tmp_path) / TENSORS), tensors())


def test_nothing_that_is_saved_is_a_pickle_and_nothing_that_reads_unpickles(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".yaml", ".safetensors"}
    for module in Path(str(store.__file__)).parent.glob("*.py"):
        text = module.read_text(encoding="utf-8").replace("1 held pickled data", "")
        assert "pickle" not in text and "torch.load" not in text, module.name


def test_order_is_by_step_whatever_the_clock_said(tmp_path: Path) -> None:
    for step, time_s in ((1, 3e9), (2, 2e9), (100_000_000, 1e9), (3, 4e9)):
        os.utime(save(tmp_path, step), (time_s, time_s))
    assert [path.name for path in complete_checkpoints(tmp_path)][-2:] == ["step_00000003", "step_100000000"]
    save(tmp_path, 100_000_001, keep_last=2)
    assert entries(tmp_path) == ["step_100000000", "step_100000001"]


def test_the_best_is_the_first_of_equals_and_needs_an_evaluation(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.5, 3: 2.0, 4: None, 5: 1.5}
    kept = {1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [2, 5]}
    for step, loss in losses.items():
        save(tmp_path, step, eval_loss=loss, keep_last=1, keep_best=True)
        assert entries(tmp_path) == [f"step_{each:08d}" for each in kept[step]]


@pytest.mark.parametrize("name", ["extra.bin", "tensors/rank_00001.safetensors", ".hidden"])
def test_a_foreign_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    (path / name).write_bytes(b"x")
    with pytest.raises(DamagedError, match=r"is not a file of this checkpoint: manifest.json does not list") as caught:
        verify_checkpoint(path)
    assert str(caught.value).startswith(str(path / name))


def test_a_file_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    path, other = save(tmp_path, 4), save(tmp_path, 8, seed=1)
    (path / TENSORS).write_bytes((other / TENSORS).read_bytes())
    with pytest.raises(DamagedError, match="does not match its checksum"):
        verify_checkpoint(path)


def test_what_changes_between_checking_and_reading_is_found(tmp_path: Path) -> None:
    path = save(tmp_path)
    checked = verify_checkpoint(path)
    content = bytearray((path / TENSORS).read_bytes())
    content[-1] ^= 128
    (path / TENSORS).write_bytes(content)
    wanted = {name: whole_piece(torch.zeros_like(tensor)) for name, tensor in tensors().items()}
    with pytest.raises(DamagedError, match=r"rank_00000.safetensors is damaged where optimizer.exp_avg.a lies in it"):
        load_pieces(checked, wanted)


def test_every_one_of_500_changed_bytes_is_found(tmp_path: Path) -> None:
    """At random places over all files, small ones as often as large ones."""
    path, rng = save(tmp_path), random.Random(20)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for _ in range(500):
        file = rng.choice(files)
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= rng.randrange(1, 256)
        file.write_bytes(changed)
        with pytest.raises(CheckpointError):
            verify_checkpoint(path)
        file.write_bytes(whole)
    verify_checkpoint(path)


def test_a_manifest_that_nests_without_end_is_a_sentence(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DamagedError, match=r"manifest.json is damaged"):
        verify_checkpoint(path)


def test_the_format_that_held_pickles_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "manifest.json").write_text(json.dumps({"format": FORMAT - 1, "step": 4, "files": {}}))
    with pytest.raises(CheckpointError, match="format 1, which is not read any more") as caught:
        verify_checkpoint(path)
    assert not isinstance(caught.value, DamagedError)


def test_a_manifest_leads_to_no_file_outside(tmp_path: Path) -> None:
    path = save(tmp_path)
    files = {**read_manifest(path).files, "../secret": manifest.FileEntry(0, "")}
    (path / "manifest.json").write_bytes(render_manifest(4, files))
    with pytest.raises(DamagedError, match=r"manifest.json is damaged"):
        verify_checkpoint(path)
