"""What a run says and leaves behind: the log line, the progress bar, metrics.jsonl and TensorBoard.

Only the first rank speaks. On a GPU a step's numbers are read back while the next step runs, so that logging every step
costs nothing; on a CPU they are read at once.
"""

import json
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fourfold.cost.flops import training_flops_per_token
from fourfold.cost.hardware import peak_flops
from fourfold.data.order import batch_in_epoch, epoch_of
from fourfold.errors import LaunchError
from fourfold.optim.schedule import learning_rate
from fourfold.train.build import Run
from fourfold.train.curves import reopen_curves
from fourfold.train.readback import read_later
from fourfold.train.step import StepResult
from fourfold.train.stragglers import Stragglers, find_slowest

log = logging.getLogger("fourfold")

LOG_FORMAT = "[%(asctime)s] [%(levelname)8s] - %(message)s"
# marks the lines of every step, evaluation and save, which a progress bar stands for on a terminal
ROUTINE = {"is_routine": True}
METRICS_FILE = "metrics.jsonl"


class Pending(NamedTuple):
    """A step whose numbers are on their way from the device: loss, gradient norm, steps skipped so far, loss scale, and
    the ranks' own times since the last one."""

    step: int
    read: Callable[[], torch.Tensor]
    steps: int
    """Since the last one."""
    step_s: float
    reader_s: float


class Metrics:
    """Open for the length of a run. `record` after every step, `record_evaluation` after every evaluation."""

    def __init__(self, run: Run, hosts: list[str], console: Console) -> None:
        self.run = run
        self.is_speaker = run.process.is_first
        self.tokens_per_step = run.config.global_.global_batch_size * run.config.data.max_seq_len
        self.flops_per_step = self.tokens_per_step * training_flops_per_token(
            run.config.model, run.config.data.max_seq_len
        )
        self.peak_flops = device_peak_flops(run.process.device) * run.process.world_size if self.is_speaker else 1.0
        self.reads_late = run.process.device.type == "cuda"
        self.pending: deque[Pending] = deque()
        # steps skipped before this run began are those that changed no weights
        self.skipped_steps = torch.tensor(run.first_step - run.optimizer.updates, device=run.process.device)
        self.skips_told: float = run.first_step - run.optimizer.updates
        self.rank_s = torch.zeros(len(hosts), device=run.process.device)
        self.stragglers = Stragglers(hosts)
        self.progress = progress_bar(console) if self.is_speaker and console.is_terminal else None
        self.task: TaskID | None = None

    def __enter__(self) -> Self:
        now = time.perf_counter()
        self.began_s, self.logged_s, self.logged_step, self.reader_s = now, now, self.run.first_step, 0.0
        if self.is_speaker:
            self.stream = reopen_metrics(self.run.output_dir / METRICS_FILE, self.run.first_step)
            self.curves = reopen_curves(self.run.output_dir / "tensorboard", self.run.output_dir / METRICS_FILE)
        if self.progress:
            self.progress.start()
            self.task = self.progress.add_task(
                "compiling" if self.run.config.engine.compile else "training",
                total=self.run.total_steps,
                completed=self.run.first_step,
                loss="-",
                speed="-",
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self.progress:
            self.progress.stop()
        if self.is_speaker:
            self.stream.close()
            self.curves.close()

    def record(self, step: int, result: StepResult, reader_s: float) -> None:
        """`reader_s` is how long the step waited for its batch."""
        self.skipped_steps = self.skipped_steps + result.is_skipped
        self.rank_s = self.rank_s + result.rank_s
        self.reader_s += reader_s
        done = step + 1
        is_logged = done % self.run.config.engine.logging_freq == 0 or step == self.run.first_step
        if self.is_speaker and (is_logged or done == self.run.total_steps):
            self._enqueue(step, result)
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=done, description="training")
        while len(self.pending) > (1 if self.reads_late else 0):
            self._write(self.pending.popleft())

    def _enqueue(self, step: int, result: StepResult) -> None:
        now = time.perf_counter()
        steps = max(1, step + 1 - self.logged_step)
        numbers = (result.loss, result.grad_norm, self.skipped_steps, self.run.loss_scale.scale)
        self.pending.append(
            Pending(
                step,
                read_later(torch.cat([torch.stack([each.float() for each in numbers]), self.rank_s])),
                steps,
                (now - self.logged_s) / steps,
                self.reader_s / steps,
            )
        )
        self.logged_s, self.logged_step, self.reader_s = now, step + 1, 0.0
        self.rank_s = torch.zeros_like(self.rank_s)

    def flush(self) -> None:
        while self.pending:
            self._write(self.pending.popleft())

    def _write(self, entry: Pending) -> None:
        config, done = self.run.config, entry.step + 1
        loss, grad_norm, skipped_steps, loss_scale, *summed_s = entry.read().tolist()
        passes, batch_size = self.run.corpus.splits.train.passes, config.global_.global_batch_size
        values: dict[str, Any] = {
            "step": done,
            "epoch": epoch_of(passes, batch_size, entry.step),
            "batch": batch_in_epoch(passes, batch_size, entry.step),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": learning_rate(done, config.optimizer),
            "tokens_per_s": self.tokens_per_step / entry.step_s,
            "step_s": entry.step_s,
            "reader_s": entry.reader_s,
            "mfu": self.flops_per_step / entry.step_s / self.peak_flops,
            "memory_gib": memory_gib(self.run.process.device),
            "skipped_steps": int(skipped_steps),
        }
        if self.run.loss_scale.is_dynamic:
            values["loss_scale"] = loss_scale
        rank_s = [float(f"{each / entry.steps:.4g}") for each in summed_s]
        if len(rank_s) > 1 and any(rank_s):  # told one step late: the first step knows of none
            slowest = find_slowest(rank_s)
            values |= {"rank_s": rank_s, "slowest_rank": slowest.rank}
            values |= {"slowest_rank_s": slowest.own_s, "median_rank_s": slowest.median_s}
        self._save(values)
        log.info(self.line(values), extra=ROUTINE)
        if grad_norm == 0.0:
            log.warning(f"global step {done} has a gradient norm of exactly zero: nothing is being learnt")
        if skipped_steps > self.skips_told:
            new = int(skipped_steps - self.skips_told)
            log.warning(
                f"by global step {done}, {new} more {'step was' if new == 1 else 'steps were'} skipped, and changed "
                f"nothing: a gradient norm was not finite ({int(skipped_steps)} skipped so far)"
            )
            self.skips_told = skipped_steps
        if "rank_s" in values:
            self.stragglers.add(rank_s, entry.steps, time.monotonic())
        if self.progress and self.task is not None:
            self.progress.update(self.task, loss=f"{values['loss']:.4f}", speed=f"{values['tokens_per_s']:,.0f}")

    def line(self, values: dict[str, Any]) -> str:
        """The seed documents' line, which shows the learning rate of the next update, with our own fields after it."""
        left_s = values["step_s"] * (self.run.total_steps - values["step"])
        line = (
            f"global step {values['step']}, epoch: {values['epoch']}, batch: {values['batch']}, "
            f"loss: {values['loss']:.9f}, avg_reader_cost: {values['reader_s']:.5f} sec, "
            f"avg_batch_cost: {values['step_s']:.5f} sec, speed: {1 / values['step_s']:.2f} step/s, "
            f"ips_total: {values['tokens_per_s']:.0f} tokens/s, "
            f"ips: {values['tokens_per_s'] / self.run.process.world_size:.0f} tokens/s, "
            f"learning rate: {learning_rate(values['step'] + 1, self.run.config.optimizer):.5e}, "
            f"grad_norm: {values['grad_norm']:.4f}, mfu: {100 * values['mfu']:.1f} %, "
            f"memory: {values['memory_gib']:.2f} GiB, eta: {duration(left_s)}"
        )
        return line + (f", loss_scale: {values['loss_scale']:.0f}" if "loss_scale" in values else "")

    def record_evaluation(self, step: int, loss: float, batches: int, took_s: float) -> None:
        """`step` counts the steps finished. The time an evaluation takes is not counted as training."""
        self.flush()
        self.logged_s += took_s
        if not self.is_speaker:
            return
        passes, batch_size = self.run.corpus.splits.train.passes, self.run.config.global_.global_batch_size
        epoch, batch = epoch_of(passes, batch_size, step - 1), batch_in_epoch(passes, batch_size, step - 1)
        self._save({"step": step, "epoch": epoch, "eval_loss": loss, "eval_s": took_s})
        log.info(
            f"valid step {step}, epoch: {epoch}, batch: {batch}, loss: {loss:f}, speed: {batches / took_s:.2f} step/s",
            extra=ROUTINE,
        )
        if self.progress:
            self.progress.console.print(f"step {step:>7,}  validation loss {loss:.4f}", highlight=False)

    def record_save(self, step: int, waited_s: float) -> None:
        """The time that training waited is not counted as training."""
        self.flush()
        self.logged_s += waited_s
        if self.is_speaker:
            log.info(f"saving step {step}: training waited {waited_s:.2f} s", extra=ROUTINE)

    def _save(self, values: dict[str, Any]) -> None:
        # JSON knows no infinity: the norm of a skipped step is null
        known = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        known["time"] = time.time()
        try:
            self.stream.write(json.dumps(known) + "\n")
            self.stream.flush()
            self.curves.add(known)
        except OSError as error:
            raise LaunchError(
                f"{self.stream.name} could not be written to ({error.strerror}); make room or write another "
                "engine.output_dir, and go on from the last checkpoint"
            ) from error


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        refresh_per_second=2,  # drawing it holds the interpreter, which launches the step's kernels
    )


class ScreenHandler(logging.Handler):
    """What is said once, on a terminal, above the progress bar; the bar stands for the steps' own lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.addFilter(lambda record: not hasattr(record, "is_routine"))

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        self.console.print(record.getMessage(), style=style, markup=False, soft_wrap=True)


def start_log(folder: Path, rank: int, console: Console | None) -> None:
    """Log to workerlog.<rank> in this folder, and to the console if one is given: in a pipe the same lines."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handlers: list[logging.Handler] = [logging.FileHandler(folder / f"workerlog.{rank}", encoding="utf-8")]
    except OSError as error:
        raise LaunchError(
            f"the log folder {folder} cannot be written to ({error.strerror}); write another engine.output_dir or "
            "--log_dir"
        ) from error
    if console is not None:
        handlers.append(ScreenHandler(console) if console.is_terminal else logging.StreamHandler())
    logging.raiseExceptions = False  # a full disk that takes no more lines is told by what else it refuses
    log.handlers.clear()
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        log.addHandler(handler)


def log_file() -> Path | None:
    """Where this rank logs to."""
    files = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    return Path(files[0].baseFilename) if files else None


def log_failure(rank: int) -> None:
    """The traceback of what is being handled, to the log file alone: the launcher shows the first failure of all."""
    files: list[logging.Handler] = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    log.handlers[:] = files or [logging.StreamHandler()]
    log.exception(f"rank {rank} failed")


def reopen_metrics(path: Path, first_step: int) -> Any:
    """Append, after dropping what an earlier run wrote for steps that this one takes again."""
    kept = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(text)
            except json.JSONDecodeError:  # a line cut off by a kill
                continue
            if values["step"] <= first_step:
                kept.append(text + "\n")
    beside = path.with_name(f".{path.name}.writing")  # a kill must not leave half of what there was
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)
    return path.open("a", encoding="utf-8")


def memory_gib(device: torch.device) -> float:
    """The peak so far: of the device, or of this process's resident memory on a CPU."""
    if device.type == "cuda":
        # max_memory_allocated lists some hundred figures first
        return torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"] / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def device_peak_flops(device: torch.device) -> float:
    """The vendor's figure for a known GPU; otherwise what a matrix product reaches here."""
    known = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known or measured_peak_flops(device)


def measured_peak_flops(device: torch.device, tries: int = 4) -> float:
    is_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_cuda else (1024, torch.float32)
    a = torch.rand(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(tries):
        began_s = time.perf_counter()
        (a @ a)[0, 0].item()
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s


def duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
