"""Stage 1 shards the optimizer alone, 2 gradients too, 3 parameters too: measured bytes against the cost model."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from fourfold.launch.torchrun import LOCAL_ENVIRONMENT
from tests.runs.cases import BF16, layout
from tests.runs.launch import TIMEOUT_S, write_configs

FOUR = {"micro_batch_size": 2, "global_batch_size": 16}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, layout()),
    "dp2": (2, layout(dp=2)),
    "mp2": (2, layout(mp=2)),
    "sd2-stage1": (2, layout(sd=2)),
    "sd2-stage2": (2, layout(sd=2, stage=2)),
    "sd2-stage3": (2, layout(sd=2, stage=3)),
    "sd2-stage1-bf16": (2, layout(sd=2) | BF16),
    "sd2-stage2-bf16": (2, layout(sd=2, stage=2) | BF16),
    "sd2-stage3-offload": (2, layout(sd=2, stage=3) | {"sharding_offload": True}),
    "sd2-mp2-stage2": (4, layout(sd=2, mp=2, stage=2)),
    "dp2-sd2-stage3": (4, layout(dp=2, sd=2, stage=3)),
    "sd2-pp2-stage1": (4, layout(sd=2, pp=2)),
    "sd2-pp2-stage2": (4, layout(sd=2, pp=2, stage=2)),
    "sd2-pp2-stage3": (4, layout(sd=2, pp=2, stage=3)),
}


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, list[int]]]]:
    found = {}
    by_world: dict[int, dict[str, dict[str, object]]] = defaultdict(dict)
    for name, (world_size, keys) in LAYOUTS.items():
        by_world[world_size][name] = keys | FOUR
    for world_size, cases in by_world.items():
        folder = tmp_path_factory.mktemp(f"state{world_size}")
        listing, results = write_configs(folder, cases, world_size), folder / "results.jsonl"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
        done = subprocess.run(
            [*torchrun, "-m", "tests.runs.measure_state", str(listing), str(results)],
            env=LOCAL_ENVIRONMENT | os.environ,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        for line in results.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found[entry["name"]] = entry["ranks"]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_held_between_micro_batches_are_those_of_the_cost_model(
    name: str, measured: dict[str, list[dict[str, list[int]]]]
) -> None:
    for rank in measured[name]:
        for what, said, found in zip(
            ("weights", "gradients", "optimizer"), rank["said"], rank["measured"], strict=True
        ):
            # what is gathered for the unit at work, and padding to equal shards, are on top
            assert said <= found * 1.0001, (what, said, found)
            assert found <= said * 1.02 + 4096, (what, said, found)
