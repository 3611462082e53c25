"""`python -m tests.mesh.four_ranks FOLDER`: one process imports everything, then is four ranks by forking. Each prints
a JSON object: the timeout of every group it is in, and what a folder that is not shared made it say.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.config.resolve import layout_of
from fourfold.errors import LaunchError
from fourfold.mesh import shared
from fourfold.mesh.process import join_processes
from fourfold.parallelize.apply import parallelize
from tests.ports import free_port
from tests.tiny import tiny_config

TIMEOUT_S = 77.0
RANKS = 4


def be_rank(rank: int, port: int, folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    torch.set_num_threads(2)
    with join_processes("cpu", TIMEOUT_S) as process:
        layout = layout_of(pipe_config(folder), RANKS)
        parallelize(pipe_config(folder), layout, process.rank, process.device, process.timeout_s)
        groups = [
            group
            for group in dist.distributed_c10d._world.pg_map
            if dist.distributed_c10d._rank_not_in_group(group) is False
        ]
        found = {
            "rank": rank,
            "threads": torch.get_num_threads(),
            "timeouts_s": [backend_timeout_s(group) for group in groups],
            "group_sizes": [dist.get_world_size(group) for group in groups],
            "shared": said(folder / "one"),
            "not_shared": said(folder / ("one" if rank < 2 else "another")),
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def pipe_config(folder: Path):  # type: ignore[no-untyped-def]
    """Two pipe stages x two shards: groups of every kind, the one of the tied embedding included."""
    config = tiny_config(folder, vocab_size=97)
    sharding = config.distributed.sharding.model_copy(update={"sharding_degree": 2, "sharding_stage": 3})
    degrees = {"pp_degree": 2, "dp_degree": 1, "mp_degree": 1, "sharding": sharding}
    distributed = config.distributed.model_copy(update=degrees)
    return config.model_copy(
        update={
            "distributed": distributed,
            "global_": config.global_.model_copy(update={"micro_batch_size": 1}),
        }
    )


def backend_timeout_s(group: dist.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def said(folder: Path) -> str:
    try:
        shared.check_shared(folder)
    except LaunchError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "another").mkdir()
    shared.PATIENCE_S = 0.5
    tiny_config(folder)  # writes its text
    port = free_port()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                be_rank(rank, port, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
