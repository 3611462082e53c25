"""Two hosts with addresses of their own: every way to start gives the same bits, and both tell the same story."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs.hosts import ROOT, TORCHRUN, Host, two_hosts
from tests.tiny import curve

CONFIG = """
global: {device: cpu, global_batch_size: 8}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2}
data: {input_dir: builtin:pydoc, truncate: 0.1, max_seq_len: 16, split: "90,10,0"}
optimizer: {max_lr: 1.0e-2, decay_steps: 100}
distributed: {dp_degree: 4}
engine: {max_steps: 20, logging_freq: 1, eval_freq: 0, eval_iters: 0, save_steps: 0}
"""
FOURFOLD = ("-m", "fourfold", "train", "-c")
STATIC = "--nnodes=2 --nproc_per_node=2 --node_rank={rank} --master_addr=10.77.0.1 --master_port=29500"
C10D = (
    "--nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=10.77.0.1:29400 --rdzv_id=job "
    "--rdzv_conf=is_host={is_first} --max_restarts=2"
)
STEPS, LONG = 20, 160
PATIENCE_S = 180


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "config.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(config: Path) -> Path:
    """The run of a plain `fourfold train` on one machine, for as long as the longest of the others."""
    output = config.parent / "plain"
    run_here([*FOURFOLD, str(config), "--output_dir", str(output), "--max_steps", str(LONG)])
    return output


def run_here(arguments: list[str]) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def start_host(
    hosts: tuple[Host, Host], rank: int, form: str, config: Path, output: Path, *flags: str
) -> subprocess.Popen[str]:
    options = form.format(rank=rank, is_first=1 - rank).split()
    return hosts[rank].start(
        *TORCHRUN,
        *options,
        *FOURFOLD,
        str(config),
        "--output_dir",
        str(output),
        *flags,
        log=log_of(output, rank),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
    )


def log_of(output: Path, rank: int) -> Path:
    return output.with_name(f"{output.name}.host{rank}.log")


def logs(output: Path) -> str:
    return "".join(f"\n== {rank}\n{log_of(output, rank).read_text(encoding='utf-8')}" for rank in (0, 1))


def wait_until(condition: Callable[[], bool], output: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, logs(output)
        time.sleep(0.02)


def steps_done(output: Path) -> int:
    return max(curve(output, "loss"), default=0) if (output / "metrics.jsonl").exists() else 0


def test_torchrun_on_one_machine_gives_the_bits_of_a_plain_start(config: Path, reference: Path) -> None:
    output = config.parent / "torchrun"
    form = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    run_here([*form, *FOURFOLD, str(config), "--output_dir", str(output)])
    assert_same_bits(output, reference)


def assert_same_bits(output: Path, reference: Path) -> None:
    for key in ("loss", "grad_norm"):
        assert list(curve(output, key).items()) == list(curve(reference, key).items())[:STEPS]
    assert len(curve(output, "loss")) == STEPS


@pytest.mark.parametrize("form", [STATIC, C10D], ids=["static", "c10d"])
def test_two_hosts_give_the_bits_of_one(
    hosts: tuple[Host, Host], config: Path, reference: Path, form: str, request: pytest.FixtureRequest
) -> None:
    output = config.parent / request.node.callspec.id
    started = [start_host(hosts, rank, form, config, output) for rank in (0, 1)]
    assert [process.wait(PATIENCE_S) for process in started] == [0, 0], logs(output)
    assert_same_bits(output, reference)
    interfaces = {host.interface for host in hosts}
    chosen = {
        line.split("GLOO_SOCKET_IFNAME = ")[1].split(",")[0]
        for file in (output / "logs").glob("workerlog.*")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "GLOO_SOCKET_IFNAME" in line
    }
    assert chosen == interfaces


@pytest.mark.slow
def test_a_lost_host_that_comes_back_goes_on_exactly_and_one_lost_for_good_leaves_half_the_ranks(
    hosts: tuple[Host, Host], config: Path, reference: Path
) -> None:
    output, flags = config.parent / "lost", ("--max_steps", str(LONG), "--save_steps", "5")
    first, second = (start_host(hosts, rank, C10D, config, output, *flags) for rank in (0, 1))
    wait_until(lambda: steps_done(output) >= 12, output)
    hosts[1].kill()
    second.wait(PATIENCE_S)
    lost_s, lost_at = time.monotonic(), steps_done(output)
    assert lost_at < LONG - 20, "it went too fast to lose a host"
    second = start_host(hosts, 1, C10D, config, output, *flags)
    wait_until(lambda: is_resumed(output) and steps_done(output) > lost_at + 10, output)
    print(f"past where it was {time.monotonic() - lost_s:.1f} s after the host was lost")
    expected = curve(reference, "loss")
    assert all(loss == expected[step] for step, loss in curve(output, "loss").items())

    hosts[1].kill()
    hosts[0].kill()
    first.wait(PATIENCE_S)
    last = steps_done(output) + 10  # rounding differs from here on, and grows
    assert last < LONG, "it went too fast to lose a host again"
    half = ("--dp_degree", "2", "--output_dir", str(output), "--max_steps", str(last))
    alone = hosts[0].start(sys.executable, *FOURFOLD, str(config), *half, log=log_of(output, 0))
    assert alone.wait(PATIENCE_S) == 0, logs(output)
    ours = curve(output, "loss")
    assert list(ours) == list(range(1, last + 1))
    assert all(ours[step] == pytest.approx(expected[step], rel=1e-5) for step in ours)


def is_resumed(output: Path) -> bool:
    return "going on from" in logs(output)


def start_by_hand(
    hosts: tuple[Host, Host], config: list[Path], output: Path, *command: str
) -> list[subprocess.Popen[str]]:
    """A rank on each host, with nothing but the variables that say which."""
    return [
        host.start(
            *(command or (sys.executable, *FOURFOLD)),
            str(config[rank]),
            "--dp_degree",
            "2",
            "--output_dir",
            str(output),
            log=log_of(output, rank),
            RANK=rank,
            WORLD_SIZE=2,
            LOCAL_RANK=0,
            LOCAL_WORLD_SIZE=1,
            MASTER_ADDR="hostA",
            MASTER_PORT=29600,
        )
        for rank, host in enumerate(hosts)
    ]


def errors(output: Path, rank: int) -> list[str]:
    text = log_of(output, rank).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_hosts_with_different_configs_say_so_in_the_same_words(hosts: tuple[Host, Host], config: Path) -> None:
    other, output = config.with_name("other.yaml"), config.parent / "different"
    other.write_text(CONFIG.replace("max_lr: 1.0e-2", "max_lr: 2.0e-2"), encoding="utf-8")
    started = start_by_hand(hosts, [config, other], output)
    assert [process.wait(PATIENCE_S) for process in started] == [2, 2], logs(output)
    assert errors(output, 0) == errors(output, 1)
    assert "optimizer.max_lr is 0.01 for rank 0 on hostA, 0.02 for rank 1 on hostB" in errors(output, 0)[0]
    assert not output.exists() and "Traceback" not in logs(output)


def test_a_config_that_one_host_cannot_read_is_told_on_both(hosts: tuple[Host, Host], config: Path) -> None:
    output = config.parent / "unread"
    started = start_by_hand(hosts, [config, config.with_name("not_there.yaml")], output)
    assert [process.wait(PATIENCE_S) for process in started] == [2, 2], logs(output)
    assert "not_there.yaml" in errors(output, 1)[0]
    assert errors(output, 0)[0].startswith("error: rank 1 on hostB cannot take part: ")
    assert "not_there.yaml" in errors(output, 0)[0]


def test_a_rank_that_fails_on_one_host_is_named_on_both(hosts: tuple[Host, Host], config: Path) -> None:
    output, script = config.parent / "failing", config.with_name("failing.py")
    script.write_text(
        "import sys, torch.distributed as dist\n"
        "from fourfold.train import loop\n"
        "honest = loop.train_step\n"
        "def failing(run, batch, step, asked):\n"
        "    if step == 2 and dist.get_rank() == 0: raise ValueError('the third step went wrong here')\n"
        "    return honest(run, batch, step, asked)\n"
        "loop.train_step = failing\n"
        "from fourfold.cli import main\n"
        "sys.argv[1:1] = ['train', '-c']\n"
        "main()\n",
        encoding="utf-8",
    )
    started = start_by_hand(hosts, [config, config], output, sys.executable, str(script))
    assert [process.wait(PATIENCE_S) for process in started] == [1, 1], logs(output)
    assert errors(output, 0) == errors(output, 1)
    assert errors(output, 0)[0] == "error: rank 0 on hostA failed first: ValueError: the third step went wrong here"
    assert f"hostA:{output}/logs/workerlog.0" in errors(output, 0)[1]
    assert "Traceback" not in logs(output)
    assert "the third step went wrong here" in (output / "logs" / "workerlog.0").read_text(encoding="utf-8")
    assert json.dumps(errors(output, 0)).count("error: ") == 2
