"""Models and runs small enough for a test: what the tests of several rooms build on."""

import io
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import resolve
from fourfold.config.schema import Config, Model
from fourfold.cost.params import parameters
from fourfold.layout.stages import PipeStage
from fourfold.mesh.process import Process, join_processes
from fourfold.model.gpt import GPT
from fourfold.model.init import initialize_shard
from fourfold.train.loop import Outcome, train
from fourfold.train.metrics import METRICS_FILE, log, start_log

TEXT = "the quick brown fox jumps over a lazy dog while seven wizards, vexed, box my gin; why not 42 or 1337?"


def tiny_model(**keys: Any) -> Model:
    """A resolved model of two layers; keys given win."""
    defaults: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 16,
    }
    keys = {**defaults, **keys}
    return Model(**{"ffn_hidden_size": 4 * keys["hidden_size"], **keys})


def built(
    model: Model, seed: int = 1, compute_dtype: torch.dtype = torch.float32, stage: PipeStage | None = None
) -> GPT:
    """The model with its initial weights, in training mode."""
    gpt = GPT(model, compute_dtype, stage)
    by_name = dict(gpt.named_parameters())
    with torch.no_grad():
        for parameter in parameters(model, stage):
            initialize_shard(by_name[parameter.name], parameter, (0,) * len(parameter.shape), model, seed)
    return gpt


def random_tokens(batch: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(gpt: GPT) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient for {missing}"
    return {name: grad for name, grad in found.items() if grad is not None}


def write_text(folder: Path, characters: int = 4000) -> Path:
    """A text with something to learn: words in an order that looks random and never changes."""
    path = folder / "text.txt"
    known = TEXT.split()
    words, place, length = [], 7, 0
    while length < characters:
        place = (place * 75 + 74) % 65537
        words.append(known[place % len(known)])
        length += len(words[-1]) + 1
    path.write_text("\n".join(" ".join(words[i : i + 12]) for i in range(0, len(words), 12)), encoding="utf-8")
    return path


def tiny_config(folder: Path, **keys: Any) -> Config:
    """A run on the CPU of a few seconds at most, resolved for one process; keys are the schema's, wherever they lie."""
    defaults: dict[str, Any] = {
        "input_dir": str(folder / "text.txt"),
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "max_seq_len": 16,
        "global_batch_size": 8,
        "split": "80,20,0",
        "max_steps": 8,
        "max_lr": 1e-2,
        "min_lr": 1e-3,
        "warmup_rate": 0.1,
        "logging_freq": 1,
        "save_steps": 0,
        "eval_freq": 0,
        "eval_iters": 0,
        "compile": False,
    }
    if not (folder / "text.txt").exists():
        write_text(folder)
    config = load_config(None, [(key, spelled(value)) for key, value in {**defaults, **keys}.items()])
    assert problems(config, 1) == []
    return resolve(config, 1, has_gpu=False)


def spelled(value: object) -> str | bool:
    return value if isinstance(value, bool) else str(value)


def run_training(config: Config) -> Outcome:
    """The whole of a run, in this process."""
    with quiet_log(config), alone() as process:
        return train(config, process, Console(file=io.StringIO()))


def alone() -> AbstractContextManager[Process]:
    """A process group of one."""
    return join_processes("cpu", 60.0)


@contextmanager
def quiet_log(config: Config) -> Iterator[None]:
    """The run's log file, and nothing of it left open afterwards."""
    start_log(Path(config.engine.output_dir) / "logs", 0, None)
    try:
        yield
    finally:
        for handler in log.handlers:
            handler.close()
        log.handlers.clear()


def metrics_of(output_dir: Path | str) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl, in order."""
    text = (Path(output_dir) / METRICS_FILE).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def curve(output_dir: Path | str, key: str) -> dict[int, Any]:
    """A key's values by step."""
    return {values["step"]: values[key] for values in metrics_of(output_dir) if key in values}
