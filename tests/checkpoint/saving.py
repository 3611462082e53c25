"""Small checkpoints, saved as a run saves them, for the tests of this room."""

from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.paths import AnyPath, local_folder, locate
from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.state import Piece, Progress, whole_piece
from fourfold.checkpoint.store import checkpoint_path, complete_checkpoints, load_pieces, verify_checkpoint
from fourfold.config.schema import Engine

TEXTS = {"config.yaml": "model: {}\n", "tokenizer.json": "{}"}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.a": (3, 5), "model.b": (7,), "optimizer.exp_avg.a": (3, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def pieces(seed: int = 0) -> dict[str, Piece]:
    return {name: whole_piece(tensor) for name, tensor in tensors(seed).items()}


def progress(step: int, eval_loss: float | None = None) -> Progress:
    return Progress(step, step - 1, {"scale": 512.0, "good_steps": 3}, "abc", eval_loss)


def engine(folder: AnyPath | str, **keys: Any) -> Engine:
    return Engine(**{"output_dir": str(folder), "keep_last": 0, "async_save": False, **keys})


def save(folder: AnyPath | str, step: int = 4, seed: int = 0, eval_loss: float | None = None, **keys: Any) -> AnyPath:
    with Saver(engine(folder, **keys), local_folder(str(folder))) as saver:
        saver.save(pieces(seed), progress(step, eval_loss), TEXTS)
    return checkpoint_path(locate(str(folder)), step)


def loaded(path: AnyPath) -> dict[str, torch.Tensor]:
    found = {name: whole_piece(torch.full_like(tensor, torch.nan)) for name, tensor in tensors().items()}
    load_pieces(verify_checkpoint(path), found)
    return {name: piece.tensor for name, piece in found.items()}


def is_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def names(folder: AnyPath) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


def entries(folder: Path) -> list[str]:
    """Everything that lies beside the checkpoints, hidden or not."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())
