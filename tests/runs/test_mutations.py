"""A test of the tests: mistakes that other trainers have shipped, made on purpose, turn cases of the table red."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs.cases import CASES
from tests.runs.launch import run_trials, worst_difference

# mistake -> a case that it must break
BROKEN_BY = {
    "drop_the_tied_gradient_sum": "pp2",
    "clip_each_pipe_stage_by_its_own_norm": "pp2",
    "weigh_by_the_local_token_count": "dp2",
    "seed_initial_weights_per_rank": "mp2",
    "leave_replicated_gradients_partial": "mp2-sp",
    "free_parameters_under_split_backward": "sd2-pp2-stage3-zbv",
}


MUTATED = "tests.runs.mutated"
MISHAP = "overflow_on_the_last_rank_at_the_third_step"

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of every mistake's case, on one process and without the mistake."""
    cases = {mistake: CASES[name].reference for mistake, name in BROKEN_BY.items()}
    found, output = run_trials(tmp_path_factory.mktemp("references"), cases, 1)
    assert len(found) == len(cases), output[-4000:]
    return found


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Found, str]]:
    """What the mistakes lead to, and what was said, by world size: those of one size in one launch."""
    by_size: dict[int, dict[str, dict[str, object]]] = {}
    for mistake, name in BROKEN_BY.items():
        by_size.setdefault(CASES[name].world_size, {})[mistake] = CASES[name].keys
    return {
        size: run_trials(tmp_path_factory.mktemp(f"mutated{size}"), cases, size, MUTATED)
        for size, cases in by_size.items()
    }


@pytest.mark.parametrize("mistake", BROKEN_BY)
def test_mistake_made_on_purpose_is_noticed(
    mistake: str, references: Found, mutated: dict[int, tuple[Found, str]]
) -> None:
    case = CASES[BROKEN_BY[mistake]]
    found, output = mutated[case.world_size]
    # either the numbers are off or the run notices by itself that something is missing
    if mistake in found:
        assert worst_difference(found[mistake], references[mistake]) > 10 * case.tolerance
    else:
        assert "got no gradient" in output, output[-4000:]


def test_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    results = []
    for keys, world_size in ((CASES["sd2-pp2-stage2"].keys, 4), ({}, 1)):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        found, output = run_trials(folder, {MISHAP: keys}, world_size, MUTATED)
        assert found, output[-4000:]
        results.append(found[MISHAP])
    assert results[0]["skipped_steps"] == results[1]["skipped_steps"] == 1
    assert worst_difference(*results) <= 1e-5
