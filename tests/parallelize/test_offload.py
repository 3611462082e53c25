from pathlib import Path

import pytest
import torch

from fourfold.config.resolve import layout_of
from fourfold.cost.sharding import STAGES, sharding_stage
from fourfold.layout.layout import Coordinate, Layout
from fourfold.model.gpt import GPT
from fourfold.parallelize.apply import materialize
from tests.tiny import curve, run_training, tiny_config


@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_one_process_that_offloads_trains_as_one_that_does_not(tmp_path: Path, micro_batch_size: int) -> None:
    for offload in (True, False):
        keys = {"sharding_offload": offload, "micro_batch_size": micro_batch_size, "max_steps": 4, "eval_iters": 1}
        run_training(tiny_config(tmp_path, output_dir=tmp_path / str(offload), **keys))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert curve(tmp_path / "True", key) == pytest.approx(curve(tmp_path / "False", key), rel=1e-5)


def test_offloaded_weights_are_drawn_on_the_device_to_the_same_values(tmp_path: Path) -> None:
    """`cpu:0` is another device than `cpu` to all who compare them."""
    drawn = {}
    for offload in (True, False):
        config = tiny_config(tmp_path, sharding_offload=offload, vocab_size=97)
        with torch.device("meta"):
            gpt = GPT(config.model)
        materialize(gpt, config, layout_of(config, 1), Coordinate(0, 0, 0, 0), torch.device("cpu", 0))
        drawn[offload] = dict(gpt.named_parameters())
    assert drawn[True].keys() == drawn[False].keys()
    for name, parameter in drawn[True].items():
        assert parameter.requires_grad and torch.equal(parameter, drawn[False][name])


def test_what_is_offloaded_is_not_kept_whole_on_the_device_whatever_the_stage(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, sharding_offload=True)
    assert sharding_stage(config, Layout(1, 1, 1, 1)) == STAGES[3]
