"""A worker that measures, between two micro batches, the bytes of weights, gradients and optimizer state it holds, and
writes them beside what the cost model says. `torchrun -m tests.runs.measure_state TRIALS RESULTS`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.cost.memory import state_bytes
from fourfold.mesh.process import Process, join_processes
from fourfold.optim.adamw import local_tensor
from fourfold.parallelize import accumulate
from fourfold.train.build import Run, build_run
from fourfold.train.step import train_step


def stored_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else local_tensor(tensor).untyped_storage().size()


def used_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else local_tensor(tensor).numel() * tensor.element_size()


def measure(run: Run) -> list[int]:
    weights = gradients = 0
    for parameter in run.parallel.named_parameters().values():
        if not any(isinstance(part, FSDPModule) for part in run.parallel.parts):
            weights += used_bytes(parameter)
            gradients += used_bytes(parameter.grad)
    for part in run.parallel.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    gradients += used_bytes(group._partial_reduce_output)  # shards that await the sum over dp
                    for held in group.fsdp_params:
                        whole = getattr(held, "_unsharded_param", None)
                        weights += used_bytes(held.sharded_param) + stored_bytes(whole)
                        gradients += used_bytes(held.sharded_param.grad) + used_bytes(held.unsharded_accumulated_grad)
                        gradients += used_bytes(None if whole is None else whole.grad)
    optimizer = sum(used_bytes(each) for moment in run.optimizer.moments().values() for each in moment.values())
    return [weights, gradients, optimizer]


def measured_run(config_path: Path, process: Process) -> dict[str, Any]:
    run = build_run(resolve(load_config(config_path), process.world_size, has_gpu=False), process)
    seen: list[list[int]] = []
    with_pipe = PipelineStage.backward_maybe_with_nosync
    without = accumulate.set_micro_batch

    def before_last(gpt: Any, stage: Any, is_last: bool) -> None:
        if is_last:
            seen.append(measure(run))
        without(gpt, stage, is_last)

    def before_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(measure(run))
        return with_pipe(self, *args, **kwargs)

    accumulate.set_micro_batch = before_last
    PipelineStage.backward_maybe_with_nosync = before_backward  # type: ignore[method-assign]
    with run.open_loader() as loader:
        train_step(run, loader.next_batch(), 0)
    accumulate.set_micro_batch = without
    PipelineStage.backward_maybe_with_nosync = with_pipe  # type: ignore[method-assign]
    # the moment just before the last micro batch's backward; without a pipe, just before its forward
    said = state_bytes(run.config, run.layout, run.parallel.at)
    return {"measured": seen[-1], "said": list(said)}


if __name__ == "__main__":
    configs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with join_processes("cpu", timeout_s=60.0) as process:
        for name, path in configs.items():
            found: list[Any] = [None] * process.world_size
            dist.all_gather_object(found, measured_run(Path(path), process))
            if process.is_first:
                with Path(sys.argv[2]).open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({"name": name, "ranks": found}) + "\n")
