import pytest
import torch

from fourfold.optim import scaler
from fourfold.optim.scaler import LossScale

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(False), torch.tensor(True)


def scales(loss_scale: LossScale, steps: list[torch.Tensor]) -> list[float]:
    found = []
    for is_skipped in steps:
        loss_scale.update(is_skipped)
        found.append(loss_scale.scale.item())
    return found


def test_a_bad_step_halves_the_scale_at_once() -> None:
    assert scales(LossScale(1024.0, True, CPU), [GOOD, BAD, GOOD, BAD, BAD]) == [1024, 512, 512, 256, 128]


def test_the_scale_doubles_after_a_long_run_of_good_steps() -> None:
    found = scales(LossScale(8.0, True, CPU), [GOOD] * (2 * scaler.GROWTH_INTERVAL))
    assert [step for step in range(1, len(found)) if found[step] != found[step - 1]] == [
        scaler.GROWTH_INTERVAL - 1,
        2 * scaler.GROWTH_INTERVAL - 1,
    ]
    assert found[-1] == 32.0


def test_a_bad_step_starts_the_count_of_good_ones_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "GROWTH_INTERVAL", 3)
    steps = [GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD]
    assert scales(LossScale(8.0, True, CPU), steps) == [8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_the_scale_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scales(LossScale(2.0, True, CPU), [BAD] * 3) == [1, 1, 1]
    monkeypatch.setattr(scaler, "GROWTH_INTERVAL", 1)
    largest = scaler.MAX_SCALE
    assert scales(LossScale(largest / 2, True, CPU), [GOOD] * 3) == [largest] * 3


def test_without_float16_the_scale_is_one_whatever_happens() -> None:
    loss_scale = LossScale(32768.0, False, CPU)
    assert scales(loss_scale, [GOOD, BAD] * 3) == [1.0] * 6


def test_saved_and_loaded_it_goes_on_as_if_it_had_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "GROWTH_INTERVAL", 3)
    one = LossScale(8.0, True, CPU)
    scales(one, [BAD, GOOD, GOOD])
    other = LossScale(32768.0, True, CPU)
    other.load_state(one.state())
    assert scales(other, [GOOD, BAD]) == scales(one, [GOOD, BAD]) == [8, 4]


def test_a_float16_run_may_go_on_in_float32() -> None:
    loss_scale = LossScale(1.0, False, CPU)
    loss_scale.load_state({"scale": 512.0, "good_steps": 7})
    assert loss_scale.scale.item() == 1.0
