"""The device mesh of a layout, and the few things said over it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.layout.layout import AXES, Layout


def build_mesh(layout: Layout, device_type: str, timeout_s: float) -> DeviceMesh:
    mesh = init_device_mesh(device_type, layout.degrees, mesh_dim_names=AXES)
    for axis in AXES:  # a subgroup does not inherit the timeout of the whole group: it would wait for half an hour
        set_timeout(mesh.get_group(axis), timeout_s)
    return mesh


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    if dist.get_backend(group) != "fake":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def sum_over_all(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over every rank, on every rank, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
