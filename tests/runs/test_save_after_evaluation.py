"""An evaluation gathers parameters and has no backward to free them; the checkpoint after it must still hold shards, in
float32, whatever the layout computes in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.cases import BASE, BF16, layout


def train(folder: Path, keys: dict[str, object]) -> list[dict[str, float]]:
    flags = [f"--{key}={value}" for key, value in {**BASE, **keys, "output_dir": folder, "logging_freq": 1}.items()]
    command = [sys.executable, "-m", "fourfold", "train", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: each[key] for key in ("step", "loss", "grad_norm")} for each in entries if "loss" in each]


@pytest.mark.parametrize("name", ["sd2-stage1", "dp2-bf16"])
def test_run_resumed_from_a_checkpoint_after_an_evaluation_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    keys = {"sd2-stage1": layout(sd=2), "dp2-bf16": layout(dp=2) | BF16}[name] | {"decay_steps": 6, "eval_freq": 3}
    whole = train(tmp_path / "whole", keys | {"max_steps": 6})
    train(tmp_path / "parts", keys | {"max_steps": 3})
    parts = train(tmp_path / "parts", keys | {"max_steps": 6, "resume": "auto"})
    assert parts == whole
