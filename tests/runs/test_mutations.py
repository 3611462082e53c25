"""A test of the tests: mistakes that other trainers have shipped, made on purpose, turn cases of the table red."""

from pathlib import Path

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


@pytest.mark.parametrize("mistake", BROKEN_BY)
def test_mistake_made_on_purpose_is_noticed(mistake: str, tmp_path: Path) -> None:
    case = CASES[BROKEN_BY[mistake]]
    reference_folder, folder = tmp_path / "reference", tmp_path / "mutated"
    reference_folder.mkdir()
    folder.mkdir()
    reference, output = run_trials(reference_folder, {case.name: case.reference}, 1)
    assert reference, output[-4000:]
    found, output = run_trials(folder, {case.name: case.keys}, case.world_size, mistake)
    # either the numbers are off or the run notices by itself that something is missing
    assert not found or worst_difference(found[case.name], reference[case.name]) > 10 * case.tolerance, output[-2000:]
    if not found:
        assert "got no gradient" in output, output[-4000:]


def test_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    mishap = "overflow_on_the_last_rank_at_the_third_step"
    results = {}
    for name, world_size in (("sd2-pp2-stage2", 4), ("one process", 1)):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        keys = CASES[name].keys if world_size > 1 else {}
        found, output = run_trials(folder, {name: keys}, world_size, mishap)
        assert found, output[-4000:]
        results[name] = found[name]
    assert results["sd2-pp2-stage2"]["skipped_steps"] == results["one process"]["skipped_steps"] == 1
    assert worst_difference(results["sd2-pp2-stage2"], results["one process"]) <= 1e-5
