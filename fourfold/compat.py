"""Differences between PyTorch versions, one function each, with the reason and when it can go."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """2.13 renamed all_gather_tensor to all_gather_single. Remove when 2.13 is the oldest version supported."""
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    return funcol.wait_tensor(gather(x, dim, group))  # type: ignore[no-untyped-call, no-any-return]


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """2.13 renamed reduce_scatter_tensor to reduce_scatter_single. Remove when 2.13 is the oldest version supported."""
    scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    return funcol.wait_tensor(scatter(x, "sum", dim, group))  # type: ignore[no-untyped-call, no-any-return]


def fsdp_groups(state: Any) -> list[Any]:
    """2.11 has at most one group per FSDP state, by another name. Remove when 2.13 is the oldest version supported."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)


def allow_views() -> None:
    """2.13 warns of every module under FSDP that returns a view, in case somebody changes it in place. A block returns
    what its last product gives, which is one, and nobody does. Remove when PyTorch warns of the change instead."""
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
