"""The layout changes the speed, never the result: every case of the table against one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.cases import CASES, Case
from tests.runs.launch import run_trials, worst_difference

Results = tuple[dict[str, dict[str, Any]], str]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """One process, once for each config that differs in more than its layout."""
    wanted = {str(case.reference): case.reference for case in selected(request)}
    found, output = run_trials(tmp_path_factory.mktemp("reference"), wanted, 1)
    assert len(found) == len(wanted), output[-4000:]
    return found


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[int], Results]:
    """All selected cases of a world size in one launch, at the first call for it."""
    done: dict[int, Results] = {}

    def results(world_size: int) -> Results:
        if world_size not in done:
            cases = {case.name: case.keys for case in selected(request) if case.world_size == world_size}
            done[world_size] = run_trials(Path(tmp_path_factory.mktemp(f"world{world_size}")), cases, world_size)
        return done[world_size]

    return results


def selected(request: pytest.FixtureRequest) -> list[Case]:
    names = {getattr(item, "callspec", None) and item.callspec.params.get("name") for item in request.session.items}
    return [case for case in CASES.values() if case.name in names]


@pytest.mark.parametrize(
    "name", [pytest.param(case.name, marks=[pytest.mark.slow] if case.is_slow else []) for case in CASES.values()]
)
def test_layout_gives_the_losses_and_gradient_norms_of_one_process(
    name: str, references: dict[str, dict[str, Any]], launch: Callable[[int], Results]
) -> None:
    case = CASES[name]
    found, output = launch(case.world_size)
    assert name in found, f"{name} did not finish; its launch ended with:\n{output[-6000:]}"
    reference = references[str(case.reference)]
    assert found[name]["skipped_steps"] == reference["skipped_steps"]
    assert worst_difference(found[name], reference) <= case.tolerance


def test_two_runs_on_one_layout_agree_to_the_last_bit(tmp_path: Path) -> None:
    keys = CASES["sd2-pp2-stage3-dropout"].keys | {"attention_probs_dropout_prob": 0.1}
    found, output = run_trials(tmp_path, {"first": keys, "second": keys}, 4)
    assert len(found) == 2, output[-4000:]
    assert {**found["first"], "name": ""} == {**found["second"], "name": ""}
