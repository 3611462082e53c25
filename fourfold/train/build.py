"""Everything a run needs, made once in the order in which one thing needs another."""

import logging
from dataclasses import dataclass
from pathlib import Path

from fourfold.checkpoint.manifest import Manifest, read_manifest
from fourfold.checkpoint.paths import AnyPath, local_folder, locate
from fourfold.checkpoint.state import copy_tied, pieces_of, restore_progress
from fourfold.checkpoint.store import load_progress, named_checkpoint, newest_checkpoint
from fourfold.checkpoint.texts import load_saved_tokenizer
from fourfold.checkpoint.together import find_together, load_together, on_first, verify_together
from fourfold.config.presets import find_preset
from fourfold.config.resolve import layout_of, with_decay_steps, with_vocab_size
from fourfold.config.schema import Config
from fourfold.data.corpus import Corpus, load_corpus
from fourfold.data.loader import TrainLoader, boundaries_of
from fourfold.data.order import Passes, steps_for_epochs
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import CheckpointError, ConfigError
from fourfold.layout.layout import Layout
from fourfold.mesh.process import Process
from fourfold.optim.adamw import AdamW
from fourfold.optim.scaler import LossScale
from fourfold.parallelize.apply import ParallelModel, parallelize
from fourfold.parallelize.precision import has_loss_scale
from fourfold.train.differences import check_same_model, tell_differences
from fourfold.train.fit import choose_micro_batch_size
from fourfold.train.replay import Replay, is_replayable

log = logging.getLogger("fourfold")


@dataclass(frozen=True)
class Run:
    config: Config
    """Resolved to the last key, the vocabulary's size included."""
    layout: Layout
    process: Process
    corpus: Corpus
    parallel: ParallelModel
    optimizer: AdamW
    loss_scale: LossScale
    first_step: int
    """Steps already taken by the run that this one continues."""
    total_steps: int
    resumed_from: AnyPath | None
    replay: Replay

    @property
    def output_dir(self) -> Path:
        """Where what is written line by line goes; checkpoints go to `engine.output_dir` itself."""
        return local_folder(self.config.engine.output_dir)

    @property
    def rows(self) -> range:
        """Which rows of each global batch are this rank's."""
        share = self.config.global_.global_batch_size // self.layout.data_ranks
        first = self.layout.data_rank(self.process.rank) * share
        return range(first, first + share)

    def open_loader(self) -> TrainLoader:
        return TrainLoader(
            self.corpus.splits.train,
            self.config.global_.seed,
            self.config.global_.global_batch_size,
            self.rows,
            self.first_step,
            self.config.data.num_workers,
            pin_memory=self.process.device.type == "cuda",
            boundaries=boundaries_of(self.config.data),
        )


def build_run(config: Config, process: Process) -> Run:
    layout = layout_of(config, process.world_size)
    checkpoint = find_together(locate(config.engine.output_dir), config.engine.resume)
    source = checkpoint or find_weights(config)
    tokenizer = load_saved_tokenizer(source) if source else None
    needs_valid = config.engine.eval_iters != 0
    corpus = load_corpus(config.data, config.global_.seed, needs_valid, tokenizer, config.model.vocab_size)
    config = with_vocab_size(config, vocab_size_for(config, corpus.tokenizer))
    total_steps = count_steps(config, corpus.splits.train.passes)
    config = with_decay_steps(config, total_steps)
    if config.global_.micro_batch_size == "auto":
        config = choose_micro_batch_size(config, layout, process.device)
    if source:
        check_same_model(source, config)
    parallel = parallelize(config, layout, process.rank, process.device, process.timeout_s)
    optimizer = AdamW(parallel.table(), parallel.named_parameters(), config.optimizer)
    loss_scale = LossScale(config.engine.scale_loss, has_loss_scale(config.engine), process.device)
    first_step = 0
    if source:
        load_together(source, pieces_of(parallel, optimizer if checkpoint else None))
        copy_tied(parallel, optimizer)
    if checkpoint:
        progress = load_progress(checkpoint)
        restore_progress(progress, optimizer, loss_scale)
        first_step = progress.step
        if process.is_first:
            tell_differences(checkpoint, config, progress.corpus == corpus.fingerprint)
    return Run(
        config,
        layout,
        process,
        corpus,
        parallel,
        optimizer,
        loss_scale,
        first_step,
        total_steps,
        checkpoint.path if checkpoint else None,
        Replay(is_replayable(config, process)),
    )


def check_beginning(output: AnyPath, resume: str) -> None:
    """Refuse to begin among newer checkpoints: they would keep this run's own from being saved under their names, and
    the next `resume: auto` would go on from them."""
    if resume == "auto":
        return

    def check() -> None:
        newest = newest_checkpoint(output)
        begin = None if resume == "never" else named_checkpoint("engine.resume", resume)
        first_step = read_manifest(begin).step if begin else 0
        if newest and read_manifest(newest).step > first_step:
            raise CheckpointError(
                f"{newest} is newer than where this run begins with engine.resume = {resume}, which is after "
                f"step {first_step}; write another engine.output_dir, engine.resume = auto, or move it away"
            )

    on_first(check)


def find_weights(config: Config) -> Manifest | None:
    """The checkpoint whose weights a new run starts from, every byte of it checked; None for fresh ones."""
    name = config.model.model_name_or_path
    if name is None or find_preset(name):
        return None
    found = verify_together(on_first(lambda: str(named_checkpoint("model.model_name_or_path", name))))
    log.info(f"starting with the weights of {found.path}")
    return found


def vocab_size_for(config: Config, tokenizer: Tokenizer) -> int:
    asked = config.model.vocab_size
    if asked == "auto":
        return tokenizer.vocab_size
    if asked < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {asked} is smaller than the tokenizer's {tokenizer.vocab_size} tokens; "
            f"write {tokenizer.vocab_size} or auto"
        )
    return asked


def count_steps(config: Config, passes: Passes) -> int:
    if config.engine.max_steps is not None:
        return config.engine.max_steps
    assert config.engine.num_train_epochs is not None
    return steps_for_epochs(passes, config.global_.global_batch_size, config.engine.num_train_epochs)
