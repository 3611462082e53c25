"""An evaluation gathers parameters and has no backward to free them; the checkpoint after it must still hold shards, in
float32, whatever the layout computes in."""

import json
from pathlib import Path

import pytest

from fourfold.config.load import dump_config, load_config
from tests.runs.cases import BASE, BF16, layout
from tests.runs.forked import Forks


def train(forks: Forks, folder: Path, keys: dict[str, object]) -> list[dict[str, float]]:
    folder.mkdir(exist_ok=True)
    flags = {**BASE, **keys, "output_dir": folder, "logging_freq": 1}
    config = load_config(None, [(key, str(value)) for key, value in flags.items()])
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    codes = forks.wait(forks.start(folder / "run.yaml", 2, folder / "said"))
    assert codes == [0, 0], (folder / "said").read_text(encoding="utf-8")[-4000:]
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: each[key] for key in ("step", "loss", "grad_norm")} for each in entries if "loss" in each]


@pytest.mark.parametrize("name", ["sd2-stage1", "dp2-bf16"])
def test_run_resumed_from_a_checkpoint_after_an_evaluation_goes_on_bit_for_bit(
    name: str, tmp_path: Path, forks: Forks
) -> None:
    keys = {"sd2-stage1": layout(sd=2), "dp2-bf16": layout(dp=2) | BF16}[name] | {"decay_steps": 6, "eval_freq": 3}
    whole = train(forks, tmp_path / "whole", keys | {"max_steps": 6})
    train(forks, tmp_path / "parts", keys | {"max_steps": 3})
    parts = train(forks, tmp_path / "parts", keys | {"max_steps": 6, "resume": "auto"})
    assert parts == whole
