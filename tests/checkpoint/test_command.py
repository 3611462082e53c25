"""`fourfold checkpoint` as a user meets it."""

import io
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from fourfold.checkpoint.store import checkpoint_path
from fourfold.cli import main
from fourfold.commands import options
from fourfold.data.tokenizer import CharacterTokenizer
from tests.checkpoint.test_store import flip_a_bit
from tests.tiny import run_training, tiny_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    keys = {"save_steps": 2, "eval_iters": 1, "keep_best": True, "keep_last": 0, "max_steps": 4}
    run_training(tiny_config(folder, **keys))
    return folder / "run"


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Exit code, what was printed, and what was complained about."""
    monkeypatch.setattr(sys, "argv", ["fourfold", *arguments])
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(options.screen, "_width", 200)  # its file follows sys.stdout by itself
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            return int(left.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def test_list_shows_every_checkpoint_and_the_best(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = run(["checkpoint", "list", str(trained)], monkeypatch)
    lines = [line for line in said.splitlines() if "step_" in line]
    assert code == 0 and len(lines) == 2
    assert "step_00000002" in lines[0] and "step_00000004" in lines[1]
    assert [("best" in line) for line in lines].count(True) == 1


def test_verify_reads_every_byte(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = run(["checkpoint", "verify", str(trained)], monkeypatch)
    assert code == 0 and said.count(": sound, 5 files") == 2
    shutil.copytree(trained, tmp_path / "run")
    file = checkpoint_path(tmp_path / "run", 4) / "tensors" / "rank_00000.safetensors"
    flip_a_bit(file)  # type: ignore[arg-type]
    code, said, complaint = run(["checkpoint", "verify", str(tmp_path / "run")], monkeypatch)
    assert code == 2 and said.count(": sound") == 1 and said.count(": damaged") == 1
    assert complaint.startswith(f"error: {file} does not match its checksum")


def test_inspect_tells_what_is_inside(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = run(["checkpoint", "inspect", str(trained)], monkeypatch)
    assert code == 0
    for words in ("step_00000004", "hidden_size              32", "pp1 x dp1 x sharding1 x mp1", "model.norm.weight"):
        assert words in said
    assert "optimizer.exp_avg_sq.embedding.tokens.weight" in said


@pytest.mark.parametrize("command", ["list", "verify", "inspect"])
def test_a_folder_without_checkpoints_is_a_sentence(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, complaint = run(["checkpoint", command, str(tmp_path)], monkeypatch)
    assert code == 2 and f"error: {tmp_path} holds no checkpoint" in complaint


def test_a_checkpoint_is_no_output_dir(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_path(trained, 4)
    before = sorted(path.rglob("*"))
    config = str(trained / "config.yaml")
    code, _, err = run(["train", config, "--output_dir", str(path)], monkeypatch)
    assert code == 2 and "is itself a checkpoint" in err and "engine.resume" in err
    assert sorted(path.rglob("*")) == before


def test_a_prompt_without_tokens_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CharacterTokenizer, "encode", lambda self, text: np.array([], dtype=np.uint16))
    code, _, err = run(["generate", str(trained), "--prompt", "a", "--device", "cpu"], monkeypatch)
    assert code == 2 and "gives no tokens" in err
