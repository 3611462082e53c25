"""Everything a run needs, made once in the order in which one thing needs another."""

import logging
from dataclasses import dataclass
from pathlib import Path

from fourfold.checkpoint.state import copy_tied, restore_progress, tensors_of
from fourfold.checkpoint.store import find_checkpoint, load_progress, load_tensors, verify_checkpoint
from fourfold.config.load import load_config
from fourfold.config.resolve import layout_of, with_decay_steps, with_vocab_size
from fourfold.config.schema import Config
from fourfold.data.corpus import Corpus, load_corpus
from fourfold.data.loader import TrainLoader
from fourfold.data.order import steps_for_epochs
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import CheckpointError, ConfigError
from fourfold.layout.layout import Layout
from fourfold.mesh.process import Process
from fourfold.optim.adamw import AdamW
from fourfold.optim.scaler import LossScale
from fourfold.parallelize.apply import ParallelModel, parallelize
from fourfold.parallelize.precision import has_loss_scale

log = logging.getLogger("fourfold")

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.yaml"


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
    resumed_from: Path | None

    @property
    def output_dir(self) -> Path:
        return Path(self.config.engine.output_dir)

    @property
    def rows(self) -> range:
        """Which rows of each global batch are this rank's."""
        share = self.config.global_.global_batch_size // self.layout.data_ranks
        first = self.layout.data_rank(self.process.rank) * share
        return range(first, first + share)

    def open_loader(self) -> TrainLoader:
        return TrainLoader(
            self.corpus.tokens,
            self.corpus.splits.train,
            self.config.data.max_seq_len,
            self.config.global_.seed,
            self.config.global_.global_batch_size,
            self.rows,
            self.first_step,
            self.config.data.num_workers,
            pin_memory=self.process.device.type == "cuda",
        )


def build_run(config: Config, process: Process) -> Run:
    layout = layout_of(config, process.world_size)
    checkpoint = find_checkpoint(Path(config.engine.output_dir), config.engine.resume)
    if checkpoint:
        verify_checkpoint(checkpoint)
    tokenizer = load_saved_tokenizer(checkpoint) if checkpoint else None
    corpus = load_corpus(config.data, config.global_.seed, config.engine.eval_iters != 0, tokenizer)
    config = with_vocab_size(config, vocab_size_for(config, corpus.tokenizer))
    total_steps = count_steps(config, len(corpus.splits.train))
    config = with_decay_steps(config, total_steps)
    parallel = parallelize(config, layout, process.rank, process.device, process.timeout_s)
    optimizer = AdamW(parallel.table(), parallel.named_parameters(), config.optimizer)
    loss_scale = LossScale(config.engine.scale_loss, has_loss_scale(config.engine), process.device)
    first_step = 0
    if checkpoint:
        check_same_model(checkpoint, config)
        load_tensors(checkpoint, tensors_of(parallel, optimizer))
        copy_tied(parallel, optimizer)
        progress = load_progress(checkpoint)
        restore_progress(progress, optimizer, loss_scale)
        first_step = progress.step
        if progress.corpus != corpus.fingerprint:
            log.warning(
                f"{config.data.input_dir} has changed since {checkpoint} was saved: what follows is not the run that "
                "would have been"
            )
    return Run(config, layout, process, corpus, parallel, optimizer, loss_scale, first_step, total_steps, checkpoint)


def check_beginning(config: Config) -> None:
    """Refuse to begin among newer checkpoints: they would keep this run's own from being saved under their names, and
    the next `resume: auto` would go on from them."""
    output_dir = Path(config.engine.output_dir)
    newest = find_checkpoint(output_dir, "auto")
    begin = find_checkpoint(output_dir, config.engine.resume)
    first_step = load_progress(begin).step if begin else 0
    if newest and load_progress(newest).step > first_step:
        raise CheckpointError(
            f"{newest} is newer than where this run begins with engine.resume = {config.engine.resume}, which is after "
            f"step {first_step}; write another engine.output_dir, engine.resume = auto, or move it away"
        )


def load_saved_tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint / TOKENIZER_FILE)


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


def count_steps(config: Config, num_samples: int) -> int:
    if config.engine.max_steps is not None:
        return config.engine.max_steps
    assert config.engine.num_train_epochs is not None
    return steps_for_epochs(num_samples, config.global_.global_batch_size, config.engine.num_train_epochs)


# What must be equal for a checkpoint's tensors to mean the same in this run.
SHAPE_KEYS = (
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "ffn_hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def check_same_model(checkpoint: Path, config: Config) -> None:
    saved = load_config(checkpoint / CONFIG_FILE)
    problems = [
        f"model.{key} = {getattr(config.model, key)} differs from {getattr(saved.model, key)} in the checkpoint "
        f"{checkpoint}; write the same, or start anew in another output_dir"
        for key in SHAPE_KEYS
        if getattr(config.model, key) != getattr(saved.model, key)
    ]
    if problems:
        raise CheckpointError("\n".join(problems))
