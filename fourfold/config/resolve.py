"""What `auto` stands for. Pure functions: a Config and the number of processes in, a new Config or a number out.

Nothing is judged here: a config that `problems.py` objects to still resolves, to something that cannot run. What
depends on the data (vocab_size, and decay_steps when the run is counted in epochs) stays `auto` until it is known; so
does, for a run on GPUs, micro_batch_size, which depends on their memory.
"""

from math import isqrt, prod
from typing import Any, TypeVar

from fourfold.config.schedules import SPLITS_BACKWARD, is_count_legal
from fourfold.config.schema import Config, Distributed, Section
from fourfold.layout.layout import Layout
from fourfold.layout.stages import stages_per_rank

VOCAB_MULTIPLE = 128

AnySection = TypeVar("AnySection", bound=Section)


def resolve(config: Config, world_size: int, has_gpu: bool, leaves_micro_batch: bool = False) -> Config:
    """The config with every `auto` replaced that can be known without the data.

    `leaves_micro_batch` keeps micro_batch_size open on GPUs, for whoever knows their memory; otherwise it becomes as
    large as the layout allows.
    """
    layout = layout_of(config, world_size)
    is_gpu = config.global_.device == "gpu" or (config.global_.device == "auto" and has_gpu)
    distributed = config.distributed
    sharding = _with(distributed.sharding, sharding_degree=layout.sharding)
    splits_backward = layout.pp > 1 and distributed.pp_schedule in SPLITS_BACKWARD
    is_open = is_gpu and leaves_micro_batch
    micro = config.global_.micro_batch_size if is_open else micro_batch_size(config, layout)
    model, data, engine = config.model, config.data, config.engine
    epochs = 1 if engine.max_steps is None and engine.num_train_epochs is None else engine.num_train_epochs
    return _with(
        config,
        global_=_with(config.global_, device="gpu" if is_gpu else "cpu", micro_batch_size=micro),
        model=_with(
            model,
            ffn_hidden_size=_or(model.ffn_hidden_size, 4 * model.hidden_size),
            max_position_embeddings=_or(model.max_position_embeddings, data.max_seq_len),
        ),
        data=_with(data, sample_stride=_or(data.sample_stride, data.max_seq_len)),
        optimizer=_with(config.optimizer, decay_steps=_or(config.optimizer.decay_steps, engine.max_steps or "auto")),
        distributed=_with(
            distributed, pp_degree=layout.pp, dp_degree=layout.dp, mp_degree=layout.mp, sharding=sharding
        ),
        engine=_with(
            engine,
            num_train_epochs=epochs,
            use_amp=_or(engine.use_amp, is_gpu),
            compile=_or(engine.compile, is_gpu and not splits_backward),
        ),
    )


def layout_of(config: Config, world_size: int) -> Layout:
    """The degrees, the missing one inferred: the only `auto`, or dp among several, whose others are then 1.

    The product is the world size only if the given degrees allow it.
    """
    given = _given_degrees(config.distributed)
    missing = [axis for axis, degree in given.items() if degree == "auto"]
    degrees = {axis: 1 if degree == "auto" else degree for axis, degree in given.items()}
    if len(missing) == 1 or "dp" in missing:
        inferred = missing[0] if len(missing) == 1 else "dp"
        degrees[inferred] = max(1, world_size // prod(degrees.values()))
    return Layout(**degrees)


def processes_needed(config: Config) -> int:
    """The product of the degrees that are given."""
    return prod(degree for degree in _given_degrees(config.distributed).values() if degree != "auto")


def is_any_inferred(config: Config) -> bool:
    """Whether the number of processes decides a degree."""
    given = _given_degrees(config.distributed)
    return given["dp"] == "auto" or list(given.values()).count("auto") == 1


def micro_batch_size(config: Config, layout: Layout) -> int:
    """As given, or as large as the layout allows: larger micro batches are faster, but fewer leave the pipe idle."""
    if config.global_.micro_batch_size != "auto":
        return config.global_.micro_batch_size
    share = max(1, config.global_.global_batch_size // layout.data_ranks)
    if layout.pp == 1:
        return share
    stages = layout.pp * stages_per_rank(config.distributed.pp_schedule, config.distributed.virtual_pp_degree)
    sizes = legal_micro_batch_sizes(config, layout)
    # Two micro batches per pipe stage keep the pipe busy most of the time, one per process fills it at least once.
    for fewest in (2 * stages, layout.pp):
        enough = [size for size in sizes if share // size >= fewest]
        if enough:
            return max(enough)
    return min(sizes, default=1)


def legal_micro_batch_sizes(config: Config, layout: Layout) -> list[int]:
    """The sizes that divide a data rank's share of the batch into a number of micro batches the schedule accepts."""
    share = config.global_.global_batch_size // layout.data_ranks
    schedule = config.distributed.pp_schedule
    return [size for size in divisors(share) if is_count_legal(schedule, layout.pp, share // size)]


def accumulation(config: Config) -> int:
    """Micro batches per step and data rank, of a resolved config."""
    distributed = config.distributed
    sizes = (config.global_.micro_batch_size, distributed.dp_degree, distributed.sharding.sharding_degree)
    return config.global_.global_batch_size // prod(known(size) for size in sizes)


def with_vocab_size(config: Config, vocab_size: int) -> Config:
    """The config with the tokenizer's size in place of `auto`; a size that was given stays."""
    return _with(config, model=_with(config.model, vocab_size=_or(config.model.vocab_size, vocab_size)))


def with_micro_batch_size(config: Config, size: int) -> Config:
    """The config with this size, whatever it had."""
    return _with(config, global_=_with(config.global_, micro_batch_size=size))


def with_decay_steps(config: Config, last_step: int) -> Config:
    """The config with the run's last step in place of `auto`; a number that was given stays."""
    decay_steps = _or(config.optimizer.decay_steps, last_step)
    return _with(config, optimizer=_with(config.optimizer, decay_steps=decay_steps))


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the token embedding: padded whatever the layout, so that shapes never depend on it."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def known(value: int | str) -> int:
    """A number that resolving has put in place of `auto`."""
    assert isinstance(value, int), "the config is not resolved"
    return value


def _given_degrees(distributed: Distributed) -> dict[str, Any]:
    return {
        "pp": distributed.pp_degree,
        "dp": distributed.dp_degree,
        "sharding": distributed.sharding.sharding_degree,
        "mp": distributed.mp_degree,
    }


def _with(section: AnySection, **values: object) -> AnySection:
    return section.model_copy(update=values)


def _or(value: object, otherwise: object) -> object:
    return otherwise if value == "auto" else value
