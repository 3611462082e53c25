"""A run, in the order in which it happens. Whoever reads this file knows what training does.

Per step: take the batch, step, record, save if due, evaluate if due. To change what a run does, edit these lines: there
are no hooks.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fourfold.checkpoint.state import progress_of, tensors_of
from fourfold.checkpoint.store import save_checkpoint
from fourfold.config.load import dump_config
from fourfold.config.schema import Config
from fourfold.cost.params import count_parameters
from fourfold.data.order import epoch_of
from fourfold.mesh.process import Process
from fourfold.train.build import CONFIG_FILE, TOKENIZER_FILE, Run, build_run, check_beginning
from fourfold.train.evaluate import count_eval_batches, evaluate
from fourfold.train.interrupt import Agreement, Interrupt, exit_code
from fourfold.train.metrics import Metrics, log
from fourfold.train.profile import profiling
from fourfold.train.step import train_step


@dataclass(frozen=True)
class Outcome:
    run: Run
    step: int
    """Steps finished, those of earlier runs included."""
    eval_loss: float | None
    exit_code: int
    """0 when the run reached its end, 128 + signal when it was asked to stop before."""


def train(config: Config, process: Process, console: Console) -> Outcome:
    check_beginning(config)
    run = build_run(config, process)
    introduce(run)
    step, eval_loss, is_stopping = run.first_step, None, False
    agreement = Agreement(process.device)
    with (
        run.open_loader() as loader,
        Metrics(run, console) as metrics,
        Interrupt() as interrupt,
        profiling(config.profiler, run.output_dir / "profile", process.device, process.rank) as profiled,
    ):
        for step in range(run.first_step + 1, run.total_steps + 1):
            waited_s = loader.wait_s
            batch = loader.next_batch()
            result = train_step(run, batch, step - 1, interrupt.signal is not None)
            metrics.record(step - 1, result, loader.wait_s - waited_s)
            is_stopping = agreement.is_reached(result.stop_votes)
            is_last = step == run.total_steps or is_stopping
            if is_last or is_save_due(run, step):
                save(run, step, metrics)
            if (is_last and not is_stopping) or is_eval_due(run, step):
                eval_loss = measure(run, step, metrics)
            profiled()
            if is_last:
                break
    return Outcome(run, step, eval_loss, exit_code(interrupt.signal) if is_stopping else 0)


def introduce(run: Run) -> None:
    """Leave the resolved config behind, and say what is about to happen."""
    if not run.process.is_first:
        return
    (run.output_dir / CONFIG_FILE).write_text(dump_config(run.config), encoding="utf-8")
    vocab_size = run.corpus.tokenizer.vocab_size
    batch, micro = run.config.global_.global_batch_size, run.config.global_.micro_batch_size
    log.info(f"{run.config.data.input_dir}: {run.corpus.num_characters:,} characters, {vocab_size} unique")
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
        log.warning(f"{len(run.corpus.passed_over)} files that are not text were passed over: {names}")
    if run.config.data.split_by == "window":
        log.warning("data.split_by = window: the validation windows overlap the training text, so their loss flatters")
    if run.resumed_from:
        log.info(f"going on from {run.resumed_from}, after step {run.first_step:,}")


def is_save_due(run: Run, step: int) -> bool:
    engine = run.config.engine
    if engine.save_steps and step % engine.save_steps == 0:
        return True
    num_samples, batch = len(run.corpus.splits.train), run.config.global_.global_batch_size
    before, after = epoch_of(num_samples, batch, step - 1), epoch_of(num_samples, batch, step)
    return bool(engine.save_epochs) and before != after and after % engine.save_epochs == 0


def is_eval_due(run: Run, step: int) -> bool:
    return bool(run.config.engine.eval_freq) and step % run.config.engine.eval_freq == 0


def save(run: Run, step: int, metrics: Metrics) -> Path:
    began_s = time.perf_counter()
    texts = {CONFIG_FILE: dump_config(run.config), TOKENIZER_FILE: json.dumps(run.corpus.tokenizer.to_json())}
    path = save_checkpoint(
        run.output_dir,
        tensors_of(run.parallel, run.optimizer),
        progress_of(step, run.optimizer, run.loss_scale, run.corpus.fingerprint),
        texts,
        run.config.engine.keep_last,
    )
    metrics.record_save(path, time.perf_counter() - began_s)
    return path


def measure(run: Run, step: int, metrics: Metrics) -> float | None:
    batches = count_eval_batches(run)
    if not batches:
        return None
    began_s = time.perf_counter()
    loss = evaluate(run)
    metrics.record_evaluation(step, loss, batches, time.perf_counter() - began_s)
    return loss
