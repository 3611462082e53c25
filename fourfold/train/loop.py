"""A run, in the order in which it happens. Whoever reads this file knows what training does.

Per step: take the batch, step, record, save if due, evaluate if due. To change what a run does, edit these lines: there
are no hooks.
"""

import json
import time
from dataclasses import dataclass

from rich.console import Console

from fourfold.checkpoint.lock import Lock
from fourfold.checkpoint.paths import fetch_beside, locate, send_beside
from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.state import pieces_of, progress_of
from fourfold.checkpoint.texts import TOKENIZER_FILE
from fourfold.checkpoint.together import on_first
from fourfold.config.load import CONFIG_FILE, dump_config
from fourfold.config.schema import Config
from fourfold.cost.params import count_parameters
from fourfold.cost.sharding import sharding_stage
from fourfold.data.order import epoch_of
from fourfold.mesh.process import Process
from fourfold.train.ahead import build_sender
from fourfold.train.build import Run, build_run, check_beginning
from fourfold.train.evaluate import count_eval_batches, evaluate
from fourfold.train.interrupt import Agreement, Deadline, Interrupt, agree_on_exit_code
from fourfold.train.metrics import METRICS_FILE, Metrics, log, log_file
from fourfold.train.profile import profiling
from fourfold.train.step import Note, train_step
from fourfold.train.stragglers import busy_s
from fourfold.train.watch import Watch

DISK_TIMEOUT_S = 6 * 3600.0
"""How long ranks wait for the slowest disk among them, unless distributed.timeout is longer."""


@dataclass(frozen=True)
class Outcome:
    run: Run
    step: int
    """Steps finished, those of earlier runs included."""
    eval_loss: float | None
    exit_code: int
    """0 when the run reached its end, 128 + signal when it was asked to stop before, 75 when max_time was near."""


def train(config: Config, process: Process, console: Console) -> Outcome:
    output = locate(config.engine.output_dir)
    with Lock(output):
        outcome = train_alone(config, process, console)
        on_first(lambda: send_beside(outcome.run.output_dir, output))
        return outcome


def train_alone(config: Config, process: Process, console: Console) -> Outcome:
    """The run itself, once nobody else writes to its output_dir."""
    deadline, agreement = Deadline(config.engine.max_time), Agreement(process.device)
    output = locate(config.engine.output_dir)
    check_beginning(output, config.engine.resume)
    run = build_run(config, process)
    if run.resumed_from:
        on_first(lambda: fetch_beside(output, run.output_dir, METRICS_FILE))
    on_first(lambda: introduce(run))
    send = build_sender(process.device)
    step, eval_loss, is_stopping, own_s = run.first_step, None, False, 0.0
    with (
        Watch(process, run.config.engine, log_file()) as watch,
        run.open_loader() as loader,
        Metrics(run, watch.hosts, console) as metrics,
        Interrupt() as interrupt,
        Saver(run.config.engine, run.output_dir, max(process.timeout_s, DISK_TIMEOUT_S)) as saver,
        profiling(config.profiler, run.output_dir / "profile", process.device, process.rank) as profiled,
    ):
        saver.reserve(pieces_of(run.parallel, run.optimizer))
        for step in range(run.first_step + 1, run.total_steps + 1):
            watch.beat(step, "training")
            waited_s = loader.wait_s
            batch = send(loader.next_batch())
            is_asked = interrupt.signal is not None or saver.has_failed or deadline.is_near(saver.expected_s)
            began_s = busy_s()
            result = train_step(run, batch, step - 1, Note(is_asked, own_s))
            own_s = loader.wait_s - waited_s + busy_s() - began_s
            metrics.record(step - 1, result, loader.wait_s - waited_s)
            is_stopping = agreement.is_reached(result.stop_votes)
            is_last = step == run.total_steps or is_stopping
            is_saving = is_last or is_save_due(run, step)
            is_evaluating = not is_stopping and (is_last or is_eval_due(run, step, is_saving))
            eval_loss = measure(run, step, watch, metrics) if is_evaluating else None
            if is_saving:
                watch.beat(step, "saving")
                save(run, step, eval_loss, saver, metrics)
            profiled()
            if is_last:
                break
    return Outcome(run, step, eval_loss, agree_on_exit_code(interrupt.signal) if is_stopping else 0)


def introduce(run: Run) -> None:
    """Leave the resolved config behind, and say what is about to happen."""
    (run.output_dir / CONFIG_FILE).write_text(dump_config(run.config), encoding="utf-8")
    batch, micro = run.config.global_.global_batch_size, run.config.global_.micro_batch_size
    log.info(run.corpus.description)
    log.info(
        f"samples of {run.config.data.max_seq_len} tokens: "
        + ", ".join(f"{len(part):,} {name}" for name, part in run.corpus.splits._asdict().items())
    )
    log.info(f"{count_parameters(run.config.model):,} parameters, layout {run.layout}, on {run.process.device}")
    log.info(
        f"global batch {batch} = micro batch {micro} x {run.layout.data_ranks} data ranks x "
        f"{batch // (micro * run.layout.data_ranks)} accumulated, {run.total_steps:,} steps"  # type: ignore[operator]
    )
    if run.corpus.passed_over:
        names = ", ".join(str(path) for path in run.corpus.passed_over[:5])
        log.warning(f"{len(run.corpus.passed_over)} files were passed over: {names}")
    if run.config.data.split_by == "window":
        log.warning("data.split_by = window: the validation windows overlap the training text, so their loss flatters")
    if run.config.engine.amp_dtype == "float8" and not run.config.engine.use_amp:
        log.warning("engine.amp_dtype = float8 has no effect: use_amp is false, which is what auto means on a CPU")
    if (
        run.config.distributed.sharding.sharding_stage == 3
        and not sharding_stage(run.config, run.layout).frees_after_forward
    ):
        schedule = run.config.distributed.pp_schedule
        log.warning(
            f"sharding_stage = 3 keeps parameters whole under {schedule}, which computes backward in two halves"
        )
    if run.resumed_from:
        log.info(f"going on from {run.resumed_from}, after step {run.first_step:,}")


def is_save_due(run: Run, step: int) -> bool:
    engine = run.config.engine
    if engine.save_steps and step % engine.save_steps == 0:
        return True
    if not engine.save_epochs:
        return False
    passes, batch = run.corpus.splits.train.passes, run.config.global_.global_batch_size
    before, after = epoch_of(passes, batch, step - 1), epoch_of(passes, batch, step)
    return before // engine.save_epochs != after // engine.save_epochs  # a batch may hold several epochs


def is_eval_due(run: Run, step: int, is_saving: bool) -> bool:
    engine = run.config.engine
    return (bool(engine.eval_freq) and step % engine.eval_freq == 0) or (engine.keep_best and is_saving)


def save(run: Run, step: int, eval_loss: float | None, saver: Saver, metrics: Metrics) -> None:
    metrics.flush()  # what is known of the steps before a checkpoint comes before it
    waited_s = saver.save(
        pieces_of(run.parallel, run.optimizer),
        progress_of(step, run.optimizer, run.loss_scale, run.corpus.fingerprint, eval_loss),
        texts_of(run),
    )
    metrics.record_save(step, waited_s)


def texts_of(run: Run) -> dict[str, str]:
    """The small files that lie beside the tensors of a checkpoint."""
    return {CONFIG_FILE: dump_config(run.config), TOKENIZER_FILE: json.dumps(run.corpus.tokenizer.to_json())}


def measure(run: Run, step: int, watch: Watch, metrics: Metrics) -> float | None:
    batches = count_eval_batches(run)
    if not batches:
        return None
    began_s = time.perf_counter()
    loss = evaluate(run, lambda: watch.beat(step, "evaluating"))
    metrics.record_evaluation(step, loss, batches, time.perf_counter() - began_s)
    return loss
