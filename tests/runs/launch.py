"""Runs trials in real processes and gives back what they wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fourfold.config.load import dump_config, load_config
from fourfold.config.problems import problems
from fourfold.launch.torchrun import LOCAL_ENVIRONMENT
from fourfold.train import trial
from fourfold.train.trial import Trial
from tests.runs.cases import BASE

TIMEOUT_S = 900


def write_configs(folder: Path, cases: dict[str, dict[str, object]], world_size: int) -> Path:
    paths = {}
    for number, (name, keys) in enumerate(cases.items()):
        config = load_config(None, [(key, str(value)) for key, value in {**BASE, **keys}.items()])
        assert problems(config, world_size) == [], name
        paths[name] = str(folder / f"{number}.yaml")
        Path(paths[name]).write_text(dump_config(config), encoding="utf-8")
    listing = folder / "trials.json"
    listing.write_text(json.dumps(paths), encoding="utf-8")
    return listing


def run_trials(
    folder: Path, cases: dict[str, dict[str, object]], world_size: int, module: str = "fourfold trials"
) -> tuple[dict[str, dict[str, Any]], str]:
    """Results by case, those of one launch of `world_size` processes, and what it printed."""
    listing, results = write_configs(folder, cases, world_size), folder / "results.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    worker = ["-m", *module.split()]
    done = subprocess.run(
        [*torchrun, *worker, str(listing), str(results)],
        env=LOCAL_ENVIRONMENT | os.environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = {entry["name"]: entry for entry in map(json.loads, lines)}
    return found, done.stdout + done.stderr


def worst_difference(ours: dict[str, Any], reference: dict[str, Any]) -> float:
    trials = [Trial(**{key: value for key, value in each.items() if key != "name"}) for each in (ours, reference)]
    return trial.worst_difference(*trials)
