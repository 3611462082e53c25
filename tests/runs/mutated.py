"""Workers with one mistake built in on purpose: the parity table must notice each of them.

`python -m tests.runs.mutated TRIALS RESULTS` is `fourfold trials TRIALS RESULTS`, each trial with the mistake that it
is named after.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fourfold.cost import sharding
from fourfold.mesh.process import join_processes
from fourfold.parallelize import apply
from fourfold.train import step
from fourfold.train.trial import run_trials


def drop_the_tied_gradient_sum() -> None:
    apply.sum_tied_gradients = lambda gradients, group: None  # type: ignore[assignment]


def clip_each_pipe_stage_by_its_own_norm() -> None:
    def own_norm(run: Any, summed_loss: torch.Tensor, counted: list[torch.Tensor], is_asked_to_stop: bool) -> Any:
        loss, _, votes = honest(run, summed_loss, counted, is_asked_to_stop)
        return loss, step.squared_norm(counted), votes

    honest = step.sum_results
    step.sum_results = own_norm


def weigh_by_the_local_token_count() -> None:
    step.sum_over_all, honest = (
        (lambda tensor: tensor if tensor.dtype == torch.int64 else honest(tensor)),
        step.sum_over_all,
    )


def seed_initial_weights_per_rank() -> None:
    honest = apply.initialize_shard

    def per_rank(shard: Any, parameter: Any, offsets: Any, model: Any, seed: int) -> None:
        honest(shard, parameter, offsets, model, seed + torch.distributed.get_rank())

    apply.initialize_shard = per_rank


def leave_replicated_gradients_partial() -> None:
    apply.sum_replicated_gradients = lambda gradients, model, group: None  # type: ignore[assignment]


def free_parameters_under_split_backward() -> None:
    sharding.SPLITS_BACKWARD = frozenset()


def overflow_on_the_last_rank_at_the_third_step() -> None:
    """Not a mistake but a mishap: every rank must skip that step, and no other."""
    honest = apply.ParallelModel.finish_gradients
    calls = [0]

    def overflowing(self: apply.ParallelModel, gradients: dict[str, torch.Tensor]) -> None:
        honest(self, gradients)
        calls[0] += 1
        if calls[0] == 3 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            next(iter(gradients.values())).fill_(torch.inf)

    apply.ParallelModel.finish_gradients = overflowing  # type: ignore[method-assign]


MISTAKES: dict[str, Callable[[], None]] = {
    mistake.__name__: mistake
    for mistake in (
        drop_the_tied_gradient_sum,
        clip_each_pipe_stage_by_its_own_norm,
        weigh_by_the_local_token_count,
        seed_initial_weights_per_rank,
        leave_replicated_gradients_partial,
        free_parameters_under_split_backward,
        overflow_on_the_last_rank_at_the_third_step,
    )
}


@contextmanager
def made(mistake: str) -> Iterator[None]:
    places = (apply, sharding, step)
    before, finish_gradients = [dict(vars(place)) for place in places], apply.ParallelModel.finish_gradients
    MISTAKES[mistake]()
    yield
    for place, names in zip(places, before, strict=True):
        vars(place).update(names)
    apply.ParallelModel.finish_gradients = finish_gradients  # type: ignore[method-assign]


if __name__ == "__main__":
    configs = {name: Path(path) for name, path in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items()}
    with join_processes("cpu", timeout_s=60.0) as process:
        for name, path in configs.items():
            with made(name):
                run_trials({name: path}, process, Path(sys.argv[2]))
