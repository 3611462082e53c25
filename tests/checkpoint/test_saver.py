import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fourfold.checkpoint import saver as module
from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.state import whole_piece
from fourfold.checkpoint.store import best_checkpoint, checkpoint_path
from fourfold.checkpoint.together import find_together
from fourfold.errors import CheckpointError
from tests.checkpoint.saving import TEXTS, engine, is_equal, loaded, names, pieces, progress, save, tensors
from tests.checkpoint.test_store import flip_a_bit
from tests.tiny import alone


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that waits for a word."""
    free, real = threading.Event(), module.write_share

    def waiting(*args: object) -> object:
        assert free.wait(20)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_share", waiting)
    return free


def test_training_goes_on_while_the_disk_is_slow_and_cannot_change_what_is_saved(
    tmp_path: Path, held: threading.Event
) -> None:
    mine = pieces()
    with Saver(engine(tmp_path, async_save=True), tmp_path) as saver:
        saver.save(mine, progress(4), TEXTS)
        for piece in mine.values():
            piece.tensor.zero_()
        assert names(tmp_path) == []
        held.set()
    assert is_equal(loaded(checkpoint_path(tmp_path, 4)), tensors())


def test_there_is_one_copy_and_the_next_save_waits_for_it(tmp_path: Path, held: threading.Event) -> None:
    mine = pieces()
    with Saver(engine(tmp_path, async_save=True), tmp_path) as saver:
        saver.save(mine, progress(1), TEXTS)
        memory = {name: copy.data_ptr() for name, copy in saver.copies.items()}
        threading.Timer(0.3, held.set).start()
        began_s = time.monotonic()
        saver.save(mine, progress(2), TEXTS)
        assert time.monotonic() - began_s > 0.2
        assert names(tmp_path)[:1] == ["step_00000001"]
        assert {name: copy.data_ptr() for name, copy in saver.copies.items()} == memory
    assert names(tmp_path) == ["step_00000001", "step_00000002"], "and the last one is waited for"


def test_an_error_of_training_still_waits_for_the_save(tmp_path: Path, held: threading.Event) -> None:
    with pytest.raises(ValueError), Saver(engine(tmp_path, async_save=True), tmp_path) as saver:
        saver.save(pieces(), progress(4), TEXTS)
        threading.Timer(0.2, held.set).start()
        raise ValueError
    assert names(tmp_path) == ["step_00000004"]


def test_a_second_interrupt_does_not_wait(tmp_path: Path, held: threading.Event) -> None:
    with pytest.raises(KeyboardInterrupt), Saver(engine(tmp_path, async_save=True), tmp_path) as saver:
        saver.save(pieces(), progress(4), TEXTS)
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    held.set()
    assert saver.thread
    saver.thread.join()


def test_blocks_that_another_rank_writes_are_neither_copied_nor_written(tmp_path: Path) -> None:
    mine = pieces()
    mine["model.b"] = mine["model.b"]._replace(is_written_here=False)
    mine["model.empty"] = mine["model.a"]._replace(tensor=torch.zeros(0, 5))
    with Saver(engine(tmp_path, async_save=True), tmp_path) as saver:
        saver.save(mine, progress(4), TEXTS)
        assert saver.copies.keys() == {"model.a", "optimizer.exp_avg.a"}


def test_auto_takes_the_newest_sound_one_and_says_loudly_what_it_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip_a_bit(checkpoint_path(tmp_path, 3) / "tensors" / "rank_00000.safetensors")
    (checkpoint_path(tmp_path, 2) / "progress.json").unlink()
    logging.getLogger("fourfold").propagate = True
    found = find_together(tmp_path, "auto")
    assert found and found.step == 1
    said = list(dict.fromkeys(record.message for record in caplog.records if record.levelno == logging.ERROR))
    assert len(said) == 2
    assert "PASSED OVER" in said[0] and "rank_00000.safetensors does not match its checksum" in said[0]
    assert "progress.json is missing" in said[1]
    # set aside, so that this run's own step 3 can be saved, and found
    assert is_equal(loaded(save(tmp_path, 3, seed=1)), tensors(1))
    assert (tmp_path / "checkpoints" / "step_00000003.damaged1").is_dir()


def test_a_path_never_falls_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    flip_a_bit(path / "config.yaml")
    for named in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"config.yaml does not match its checksum"):
            find_together(tmp_path, str(named))
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_auto_does_not_pass_over_what_it_merely_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails for a moment must not cost a good checkpoint."""
    save(tmp_path, 1)

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error", "somewhere")

    monkeypatch.setattr("fourfold.checkpoint.manifest.read_entry", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        find_together(tmp_path, "auto")
    assert names(tmp_path) == ["step_00000001"]


def test_resume_finds_the_newest_none_or_the_one_named(tmp_path: Path) -> None:
    assert find_together(tmp_path, "auto") is None
    paths = [save(tmp_path, step) for step in (2, 11)]
    expected = {"auto": paths[1], str(paths[0]): paths[0], str(tmp_path): paths[1]}
    for resume, path in expected.items():
        found = find_together(tmp_path, resume)
        assert found and found.path == path
    assert find_together(tmp_path, "never") is None
    with pytest.raises(CheckpointError, match=r"engine.resume = .*nowhere is not a checkpoint"):
        find_together(tmp_path, str(tmp_path / "nowhere"))


def test_a_failed_save_is_heard_of_even_if_tidying_up_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no route to host")

    for name in ("write_share", "remove_unfinished"):
        monkeypatch.setattr(module, name, fail)
    with pytest.raises(CheckpointError, match=r"step 4 could not be saved: .*no route to host"):
        save(tmp_path)
    logging.getLogger("fourfold").propagate = True
    with pytest.raises(ValueError), Saver(engine(tmp_path, async_save=True), tmp_path) as saver:
        saver.save(pieces(), progress(4), TEXTS)
        raise ValueError
    assert any("step 4 could not be saved" in record.message for record in caplog.records), "also beside another error"


@pytest.mark.parametrize("async_save", [False, True])
def test_the_first_save_is_expected_to_take_time(tmp_path: Path, held: threading.Event, async_save: bool) -> None:
    with Saver(engine(tmp_path, async_save=async_save), tmp_path) as saver:
        saver.reserve(pieces())
        saver.wait()
        one_s = saver.expected_s
        assert one_s == sum(tensor.nbytes for tensor in tensors().values()) / module.FIRST_GUESS_BYTES_PER_S
        if async_save:
            saver.save(pieces(), progress(4), TEXTS)
            assert saver.expected_s == 2 * one_s, "the next one waits for this one"
        held.set()


def test_a_copy_that_finds_no_room_is_a_sentence(tmp_path: Path) -> None:
    huge = {"model.a": whole_piece(torch.zeros(1).expand(2**50))}
    with (
        Saver(engine(tmp_path, async_save=True), tmp_path) as saver,
        pytest.raises(CheckpointError, match=r"4194304.0 GiB of host memory on rank 0.*set engine.async_save = false"),
    ):
        saver.reserve(huge)


def test_a_loss_that_is_not_finite_is_not_the_best(tmp_path: Path) -> None:
    paths = [save(tmp_path, step, eval_loss=loss) for step, loss in ((1, float("nan")), (2, 3.0), (3, float("-inf")))]
    assert best_checkpoint(paths) == paths[1]
    assert best_checkpoint(paths[:1]) is None
