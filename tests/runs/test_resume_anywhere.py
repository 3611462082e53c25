"""Any checkpoint on any layout: saved under one, loaded under every other, weights and moments bit-identical, and the
losses go on as those of the run that was never stopped."""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.load import dump_config, load_config
from fourfold.config.problems import problems
from fourfold.launch.torchrun import LOCAL_ENVIRONMENT
from tests.runs import reshard
from tests.runs.cases import BASE, DEGREES, FP16, SCHEDULES, SP, TWICE, UNTIED, layout
from tests.tiny import alone

# Five layers: no pipe divides them evenly. The batch is 16, as the table of parity cases has it.
MODEL = {"num_layers": 5, "max_steps": 8, "keep_last": 0, "hidden_dropout_prob": 0.1}
OFFLOAD = {"sharding_offload": True}

LAYOUTS: dict[str, dict[str, object]] = {
    "one": layout(),
    "mp2-sp": layout(mp=2) | SP,
    "pp2-uneven": layout(pp=2),
    "pp2-zbv": layout(pp=2) | SCHEDULES["zbv"],
    "sd2-stage3-offload": layout(sd=2, stage=3) | OFFLOAD,
    "dp2-sd2-stage1": layout(dp=2, sd=2) | {"micro_batch_size": 2},
    "sd2-mp2-stage3": layout(sd=2, mp=2, stage=3),
    "sd2-pp2-stage2-interleaved": layout(sd=2, pp=2, stage=2) | TWICE,
    "pp2-sd2-mp2-stage3-sp": layout(pp=2, sd=2, mp=2, stage=3) | SP,
    "dp2-sd2-mp2-stage2": layout(dp=2, sd=2, mp=2, stage=2),
}
FOR_UNTIED = ("one", "pp2-uneven", "sd2-stage3-offload", "sd2-mp2-stage3")


# A second family, with a loss scale: its checkpoints are loaded among themselves.
CASES = LAYOUTS | {f"untied-fp16-{name}": LAYOUTS[name] | UNTIED | FP16 for name in FOR_UNTIED}


# Where a new run starts from the weights alone that one process has saved.
STARTED = ("pp2-zbv", "sd2-mp2-stage3", "pp2-sd2-mp2-stage3-sp")


def is_untied(name: str) -> bool:
    return name.startswith("untied")


def world_size(keys: dict[str, object]) -> int:
    return prod(int(str(keys[degree])) for degree in DEGREES)


class Matrix:
    """Every layout of some world sizes saves, and every one of them loads what all have saved."""

    def __init__(self, folder: Path, cases: dict[str, dict[str, object]]) -> None:
        self.folder = folder
        self.keys = cases
        self.worlds = sorted({world_size(keys) for keys in self.keys.values()})
        self.saved: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}
        self.started: dict[str, Any] = {}

    def run(self) -> None:
        """Those with the most processes save and load in one launch; this process is the layout of one."""
        *smaller, largest = self.worlds
        for world in smaller:
            self.launch(world, is_saving=True, is_loading=False)
        self.launch(largest, is_saving=True, is_loading=True)
        for world in reversed(smaller):
            self.launch(world, is_saving=False, is_loading=True)

    def launch(self, world: int, is_saving: bool, is_loading: bool) -> None:
        mine = {name: self.config(name) for name, keys in self.keys.items() if world_size(keys) == world}
        jobs: dict[str, Any] = {"save": mine if is_saving else {}, "load": {}, "start": {}}
        for name, path in mine.items():
            if is_loading:
                sources = {there: str(self.folder / there) for there, here in self.pairs() if here == name}
                jobs["load"][name] = {"config": path, "sources": sources}
                if name in STARTED:
                    jobs["start"][name] = {"config": path, "source": str(self.folder / "one")}
        results = self.alone(jobs) if world == 1 else self.together(jobs, world)
        self.saved |= results["saved"]
        self.loaded |= results["loaded"]
        self.started |= results["started"]

    def config(self, name: str) -> str:
        keys = {**BASE, **MODEL, **self.keys[name], "output_dir": str(self.folder / name)}
        config = load_config(None, [(key, str(value)) for key, value in keys.items()])
        assert problems(config, world_size(self.keys[name])) == [], name
        path = self.folder / f"{name}.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        return str(path)

    def alone(self, jobs: dict[str, Any]) -> dict[str, Any]:
        with alone() as process:
            return reshard.work(jobs, process)

    def together(self, jobs: dict[str, Any], world: int) -> dict[str, Any]:
        listing, results = self.folder / "jobs.json", self.folder / "results.json"
        listing.write_text(json.dumps(jobs))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        done = subprocess.run(
            [*torchrun, "-m", "tests.runs.reshard", str(listing), str(results)],
            env=LOCAL_ENVIRONMENT | os.environ,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return json.loads(results.read_text())  # type: ignore[no-any-return]

    def pairs(self) -> list[tuple[str, str]]:
        return [(there, here) for there in self.keys for here in self.keys if is_untied(there) == is_untied(here)]

    def check(self) -> None:
        assert self.started and all(found["different"] == 0 for found in self.started.values())
        assert {(there, here) for here in self.loaded for there in self.loaded[here]} == set(self.pairs())
        for there, here in self.pairs():
            found, saved = self.loaded[here][there], self.saved[there]
            what = f"saved on {there}, loaded on {here}"
            assert found["different"] == 0, what
            assert found["scale"] == saved["scale"], what
            rest = saved["losses"][reshard.SAVED_STEPS :]
            tolerance = 5e-3 if is_untied(here) else 1e-5
            assert found["losses"] == (rest if there == here else pytest.approx(rest, rel=tolerance)), what


def test_any_checkpoint_of_up_to_two_ranks_on_any_layout(tmp_path: Path) -> None:
    names = (
        "one",
        "pp2-uneven",
        "mp2-sp",
        "pp2-zbv",
        "sd2-stage3-offload",
        "untied-fp16-one",
        "untied-fp16-pp2-uneven",
    )
    matrix = Matrix(tmp_path, {name: CASES[name] for name in names})
    matrix.run()
    assert len(matrix.pairs()) == 5 * 5 + 2 * 2
    matrix.check()


@pytest.mark.slow
def test_any_checkpoint_of_up_to_eight_ranks_on_any_layout(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, CASES)
    matrix.run()
    assert len(matrix.pairs()) == 10 * 10 + 4 * 4
    matrix.check()
