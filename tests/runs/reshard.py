"""Worker: saves checkpoints under some layouts and loads them under others, in the processes of one launch.

`python -m tests.runs.reshard jobs.json results.jsonl`, under torchrun or alone. Every rank compares every block it has
read with the same block of the whole tensors, which are put together from the files by another reader than ours.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fourfold.checkpoint.manifest import read_manifest
from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.state import copy_tied, pieces_of, progress_of, restore_progress
from fourfold.checkpoint.store import checkpoint_path, load_progress
from fourfold.checkpoint.together import load_together
from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.mesh.process import Process, join_processes
from fourfold.optim.adamw import local_tensor
from fourfold.parallelize.tied import EMBEDDING, HEAD
from fourfold.train.build import Run, build_run
from fourfold.train.loop import texts_of
from fourfold.train.step import train_step

SAVED_STEPS, MORE_STEPS = 3, 2


def build(path: str, process: Process, resume: str, *overrides: tuple[str, str]) -> Run:
    config = load_config(path, [("resume", resume), *overrides])
    return build_run(resolve(config, process.world_size, has_gpu=False), process)


def losses_of(run: Run, first: int, steps: int) -> list[float]:
    with replace(run, first_step=first).open_loader() as loader:
        return [train_step(run, loader.next_batch(), step).loss.item() for step in range(first, first + steps)]


def save_case(path: str, process: Process) -> dict[str, Any]:
    """A few steps, a checkpoint, and a few steps more of the run that was never stopped."""
    run = build(path, process, "never")
    before = losses_of(run, 0, SAVED_STEPS)
    with Saver(run.config.engine, run.output_dir) as saver:
        progress = progress_of(SAVED_STEPS, run.optimizer, run.loss_scale, run.corpus.fingerprint)
        saver.save(pieces_of(run.parallel, run.optimizer), progress, texts_of(run))
        after = losses_of(run, SAVED_STEPS, MORE_STEPS)
    return {"losses": before + after, "scale": progress.loss_scale}


def load_cases(path: str, sources: dict[str, str], process: Process) -> dict[str, Any]:
    """The first as a run that resumes does it; the others are read into the same model, which is faster."""
    run: Run | None = None
    found = {}
    for name, output_dir in sources.items():
        source = checkpoint_path(Path(output_dir), SAVED_STEPS)
        if run is None:
            run = build(path, process, str(source))
        else:
            manifest = read_manifest(source)
            load_together(manifest, pieces_of(run.parallel, run.optimizer))
            copy_tied(run.parallel, run.optimizer)
            restore_progress(load_progress(manifest), run.optimizer, run.loss_scale)
        different = count_different(run, whole_tensors(source))
        assert run.optimizer.updates == load_progress(read_manifest(source)).updates
        scale = run.loss_scale.state()
        found[name] = {"losses": losses_of(run, SAVED_STEPS, MORE_STEPS), "different": different, "scale": scale}
    return found


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    files = {file.name: load_file(file) for file in (path / "tensors").glob("*.safetensors")}
    whole = {}
    for name, entry in json.loads((path / "tensors" / "index.json").read_text()).items():
        whole[name] = torch.full(entry["shape"], torch.nan)
        for piece in entry["pieces"]:
            where = tuple(slice(a, a + n) for a, n in zip(piece["offsets"], piece["shape"], strict=True))
            whole[name][where] = files[piece["file"]][name]
        assert not whole[name].isnan().any()
    return whole


def start_from(path: str, output_dir: str, process: Process) -> dict[str, Any]:
    """A new run with the weights of a checkpoint and a fresh optimizer."""
    source = checkpoint_path(Path(output_dir), SAVED_STEPS)
    run = build(path, process, "never", ("model_name_or_path", str(source)))
    moments = [tensor for named in run.optimizer.moments().values() for tensor in named.values()]
    assert not any(local_tensor(tensor).any() for tensor in moments) and run.optimizer.updates == run.first_step == 0
    return {"different": count_different(run, whole_tensors(source), is_weights_alone=True)}


def count_different(run: Run, whole: dict[str, torch.Tensor], is_weights_alone: bool = False) -> int:
    """Blocks that are not bit-identical, over all ranks."""
    mine = 0
    for name, piece in pieces_of(run.parallel, None if is_weights_alone else run.optimizer).items():
        where = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        mine += not torch.equal(piece.tensor, whole[name][where])
    for named in (run.parallel.named_parameters(), *run.optimizer.moments().values()):
        if EMBEDDING in named and HEAD in named and run.config.model.tie_word_embeddings:
            mine += not torch.equal(local_tensor(named[HEAD]), local_tensor(named[EMBEDDING]))
    total = torch.tensor(mine)
    dist.all_reduce(total)
    return int(total)


def work(jobs: dict[str, Any], process: Process) -> dict[str, Any]:
    saved = {name: save_case(path, process) for name, path in jobs["save"].items()}
    loaded = {name: load_cases(job["config"], job["sources"], process) for name, job in jobs["load"].items()}
    started = {name: start_from(job["config"], job["source"], process) for name, job in jobs["start"].items()}
    return {"saved": saved, "loaded": loaded, "started": started}


def main() -> None:
    torch.set_num_threads(1)
    with join_processes("cpu", 300.0) as process:
        results = work(json.loads(Path(sys.argv[1]).read_text()), process)
        if process.is_first:
            Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
