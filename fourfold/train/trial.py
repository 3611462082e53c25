"""A few steps of a config without leaving anything behind: what `fourfold verify` compares between layouts."""

import json
import math
from pathlib import Path
from typing import NamedTuple

from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.config.schema import Config
from fourfold.mesh.process import Process
from fourfold.train.build import build_run
from fourfold.train.evaluate import evaluate
from fourfold.train.step import train_step


class Trial(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    eval_loss: float
    skipped_steps: int


def difference(a: float, b: float) -> float:
    """Relative to `b`; infinite where either is not a finite number and they are not the same one."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    found = abs(a - b) / abs(b) if b else math.inf
    return found if math.isfinite(found) else math.inf


def worst_difference(ours: Trial, reference: Trial) -> float:
    """Over the losses and gradient norms of all steps and the evaluation; infinite if other steps were skipped."""
    if ours.skipped_steps != reference.skipped_steps:
        return math.inf
    pairs = [
        *zip(ours.losses, reference.losses, strict=True),
        *zip(ours.grad_norms, reference.grad_norms, strict=True),
        (ours.eval_loss, reference.eval_loss),
    ]
    return max(difference(a, b) for a, b in pairs)


def run_trial(config: Config, process: Process) -> Trial:
    """Train for all of the config's steps from fresh weights, then evaluate."""
    run = build_run(config, process)
    losses, grad_norms, skipped = [], [], 0
    with run.open_loader() as loader:
        for step in range(run.total_steps):
            result = train_step(run, loader.next_batch(), step)
            losses.append(result.loss.item())
            grad_norms.append(result.grad_norm.item())
            skipped += int(result.is_skipped)
    return Trial(losses, grad_norms, evaluate(run), skipped)


def run_trials(configs: dict[str, Path], process: Process, results: Path) -> None:
    """Several configs of one world size after each other in the same processes; the first rank writes the results, one
    JSON object per line, each as soon as it is known."""
    for name, path in configs.items():
        trial = run_trial(resolve(load_config(path), process.world_size, has_gpu=False), process)
        if process.is_first:
            with results.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": name, **trial._asdict()}) + "\n")
