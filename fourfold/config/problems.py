"""Every rule between keys, and nothing else. `problems` returns all conflicts at once; it changes and fixes nothing.

Each rule is a function of the resolved config and its layout that yields sentences: key, value, rule, remedy. What a
single key may be is the schema's business; what depends on the machine or the files is found where they are opened.
"""

from collections.abc import Iterator
from math import gcd

from fourfold.config.resolve import (
    accumulation,
    divisors,
    known,
    layout_of,
    legal_micro_batch_sizes,
    padded_vocab_size,
    resolve,
)
from fourfold.config.schedules import INTERLEAVED, SPLITS_BACKWARD, fewest_micro_batches, is_count_legal
from fourfold.config.schema import Config
from fourfold.config.words import any_of, nearest_numbers
from fourfold.layout.layout import Layout
from fourfold.layout.stages import STAGE_ORDER, stages_per_rank

FLOAT8_MULTIPLE = 16
"""What matrix units ask of every dim of an 8-bit matrix."""


def problems(config: Config, world_size: int) -> list[str]:
    """Every conflict of a config that is to run on so many processes, as sentences; none means it can run."""
    layout = layout_of(config, world_size)
    # The device decides only use_amp and compile, whose `auto` never conflicts.
    resolved = resolve(config, world_size, has_gpu=False)
    return [*_world_size(layout, world_size), *(found for rule in RULES for found in rule(resolved, layout))]


def _world_size(layout: Layout, world_size: int) -> Iterator[str]:
    if layout.world_size == world_size:
        return
    names = ("pp_degree", "dp_degree", "sharding_degree", "mp_degree")
    product = " * ".join(f"{name} = {degree}" for name, degree in zip(names, layout.degrees, strict=True))
    fits = []
    for name, degree in zip(names, layout.degrees, strict=True):
        others = layout.world_size // degree
        if world_size % others == 0:
            fits.append(f"set {name} to {world_size // others}")
    yield (
        f"distributed: {product} makes {layout.world_size} processes, but there are {world_size}; "
        f"{any_of([*fits, f'start {layout.world_size} processes'])}"
    )


def _input(config: Config, layout: Layout) -> Iterator[str]:
    if config.data.input_dir is None:
        yield "data.input_dir is missing; give a text file, a folder of text files, token files, or builtin:pydoc"


def _shapes(config: Config, layout: Layout) -> Iterator[str]:
    model = config.model
    if model.hidden_size % model.num_attention_heads:
        legal = nearest_numbers(divisors(model.hidden_size), model.num_attention_heads)
        yield (
            f"model.num_attention_heads = {model.num_attention_heads} does not divide "
            f"model.hidden_size = {model.hidden_size}; num_attention_heads can be {any_of(legal)}"
        )
    positions, length = known(model.max_position_embeddings), config.data.max_seq_len
    if length > positions:
        yield (
            f"data.max_seq_len = {length} is longer than model.max_position_embeddings = {positions}; "
            f"max_seq_len can be at most {positions}, or raise max_position_embeddings"
        )


def _length(config: Config, layout: Layout) -> Iterator[str]:
    engine = config.engine
    if engine.max_steps is not None and engine.num_train_epochs is not None:
        yield (
            f"engine.max_steps = {engine.max_steps} and engine.num_train_epochs = {engine.num_train_epochs} both say "
            "when to stop; give one of them"
        )


def _split(config: Config, layout: Layout) -> Iterator[str]:
    training, validation, _ = config.data.split
    shares = ",".join(f"{share:g}" for share in config.data.split)
    if not any(config.data.split):
        yield f"data.split = {shares} leaves nothing at all; its shares can be 949,50,1"
    elif not training:
        yield f"data.split = {shares} leaves nothing to train on; its first share must be above 0, as in 949,50,1"
    elif not validation and config.engine.eval_iters:
        yield (
            f"data.split = {shares} leaves nothing to evaluate on, but engine.eval_iters = {config.engine.eval_iters}; "
            "set eval_iters to 0 or the second share above 0"
        )


def _schedule(config: Config, layout: Layout) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.lr_decay_style == "constant":
        return  # min_lr is not reached, and there is no decay that warm-up could crowd out.
    if optimizer.min_lr > optimizer.max_lr:
        yield (
            f"optimizer.min_lr = {optimizer.min_lr:g} is above optimizer.max_lr = {optimizer.max_lr:g}; "
            f"min_lr can be at most {optimizer.max_lr:g}"
        )
    if optimizer.warmup_rate == 1:
        yield (
            f"optimizer.warmup_rate = 1 leaves no step for the {optimizer.lr_decay_style} decay; "
            "warmup_rate must be below 1, or lr_decay_style constant"
        )


def _batch(config: Config, layout: Layout) -> Iterator[str]:
    batch, micro = config.global_.global_batch_size, known(config.global_.micro_batch_size)
    ranks = f"dp_degree = {layout.dp} * sharding_degree = {layout.sharding}"
    if batch % layout.data_ranks:
        legal = _multiples_around(batch, layout.data_ranks)
        yield (
            f"global.global_batch_size = {batch} is not a multiple of {ranks}; "
            f"global_batch_size can be {any_of(legal)}, or any other multiple of {layout.data_ranks}"
        )
    elif (batch // layout.data_ranks) % micro:
        share = batch // layout.data_ranks
        legal = nearest_numbers(divisors(share), micro)
        batches = _multiples_around(batch, micro * layout.data_ranks)
        yield (
            f"global.micro_batch_size = {micro} does not divide the {share} sequences that global_batch_size = {batch} "
            f"over {ranks} leaves each data rank; micro_batch_size can be {any_of(legal)}, "
            f"or global_batch_size {any_of(batches)}"
        )


def _tensor_parallel(config: Config, layout: Layout) -> Iterator[str]:
    model = config.model
    split = {
        f"model.num_attention_heads = {model.num_attention_heads}": model.num_attention_heads,
        f"model.ffn_hidden_size = {model.ffn_hidden_size}": known(model.ffn_hidden_size),
    }
    if model.vocab_size != "auto":
        padded = padded_vocab_size(model.vocab_size)
        split[f"model.vocab_size = {model.vocab_size}, padded to {padded},"] = padded
    legal = nearest_numbers(divisors(gcd(*split.values())), layout.mp)
    for name, size in split.items():
        if size % layout.mp:
            yield f"{name} cannot be split by mp_degree = {layout.mp}; mp_degree can be {any_of(legal)}"


def _sequence_parallel(config: Config, layout: Layout) -> Iterator[str]:
    if not config.distributed.sequence_parallel:
        return
    if layout.mp == 1:
        yield (
            "distributed.sequence_parallel = true does nothing with mp_degree = 1; "
            "set sequence_parallel to false or mp_degree above 1"
        )
    length = config.data.max_seq_len
    if length % layout.mp:
        yield (
            f"data.max_seq_len = {length} cannot be split by mp_degree = {layout.mp}, as sequence_parallel asks; "
            f"max_seq_len can be {any_of(_multiples_around(length, layout.mp))}, or set sequence_parallel to false"
        )


def _pipe_stages(config: Config, layout: Layout) -> Iterator[str]:
    schedule, virtual = config.distributed.pp_schedule, config.distributed.virtual_pp_degree
    given = f"distributed.virtual_pp_degree = {virtual}"
    if layout.pp == 1:
        if virtual > 1:
            yield f"{given} does nothing with pp_degree = 1; virtual_pp_degree can be 1, or set pp_degree above 1"
        return
    if STAGE_ORDER[schedule] == "v":
        if virtual > 2:
            yield f"{given} does not suit pp_schedule = {schedule}, which has 2 pipe stages on a process; use 1 or 2"
    elif virtual > 1 and schedule not in INTERLEAVED:
        yield (
            f"{given} does not suit pp_schedule = {schedule}, which has one pipe stage on a process; "
            f"virtual_pp_degree can be 1, or pp_schedule {any_of(sorted(INTERLEAVED))}"
        )
    layers, per_process = config.model.num_layers, stages_per_rank(schedule, virtual)
    stages = layout.pp * per_process
    if stages > layers:
        most = layers // per_process
        yield (
            f"model.num_layers = {layers} is fewer than the {stages} pipe stages of pp_degree = {layout.pp} with "
            f"{per_process} on each process; "
            + (f"pp_degree can be at most {most}" if most else f"num_layers must be at least {stages}")
        )


def _micro_batches(config: Config, layout: Layout) -> Iterator[str]:
    schedule, pp = config.distributed.pp_schedule, layout.pp
    batch, micro = config.global_.global_batch_size, known(config.global_.micro_batch_size)
    if batch % (layout.data_ranks * micro):
        return  # `_batch` has said so; there is no whole number to judge.
    count = accumulation(config)
    if is_count_legal(schedule, pp, count):
        return
    fewest = fewest_micro_batches(schedule, pp)
    rule = f"at least {fewest} micro batches per step with pp_degree = {pp}"
    if schedule in INTERLEAVED:
        rule = f"a multiple of {count // pp} (= {count} // pp_degree) micro batches per step with pp_degree = {pp}"
    # A whole number of rounds through the pipe suits every schedule.
    round_size = micro * layout.data_ranks * max(pp, fewest)
    remedies = [f"global_batch_size can be {any_of(_multiples_around(batch, round_size))}"]
    sizes = legal_micro_batch_sizes(config, layout)
    if sizes:
        remedies.insert(0, f"micro_batch_size can be {any_of(nearest_numbers(sizes, micro))}")
    yield (
        f"distributed.pp_schedule = {schedule} needs {rule}, but global_batch_size = {batch} with "
        f"micro_batch_size = {micro} on {layout.data_ranks} data ranks makes {count}; {', or '.join(remedies)}"
    )


def _compiled_pipe(config: Config, layout: Layout) -> Iterator[str]:
    schedule = config.distributed.pp_schedule
    if config.engine.compile is True and layout.pp > 1 and schedule in SPLITS_BACKWARD:
        yield (
            f"engine.compile = true does not work with pp_schedule = {schedule}, which splits the backward pass; "
            "set compile to false, or pp_schedule to GPipe, 1F1B or Interleaved1F1B"
        )


def _float8(config: Config, layout: Layout) -> Iterator[str]:
    if config.engine.amp_dtype != "float8":
        return
    model, step = config.model, FLOAT8_MULTIPLE
    rows = known(config.global_.micro_batch_size) * config.data.max_seq_len
    sizes = {
        f"model.hidden_size = {model.hidden_size}": (model.hidden_size, "hidden_size"),
        f"model.ffn_hidden_size = {model.ffn_hidden_size}": (known(model.ffn_hidden_size), "ffn_hidden_size"),
    }
    if "head" not in config.engine.float8_except and model.vocab_size != "auto":
        padded = padded_vocab_size(model.vocab_size)
        sizes[f"model.vocab_size = {model.vocab_size}, padded to {padded},"] = (padded, "vocab_size")
    for name, (size, key) in sizes.items():
        if size % (step * layout.mp):
            legal = any_of(_multiples_around(size, step * layout.mp))
            yield f"{name} does not make 8-bit matrices of a multiple of {step} on each process; {key} can be {legal}"
    if rows % step:
        yield (
            f"global.micro_batch_size = {config.global_.micro_batch_size} times data.max_seq_len = "
            f"{config.data.max_seq_len} makes {rows} rows, but amp_dtype = float8 needs a multiple of {step}; "
            f"max_seq_len can be {any_of(_multiples_around(config.data.max_seq_len, step))}"
        )


def _sharding(config: Config, layout: Layout) -> Iterator[str]:
    stage = config.distributed.sharding.sharding_stage
    if stage > 1 and layout.sharding == 1:
        yield (
            f"distributed.sharding.sharding_stage = {stage} does nothing with sharding_degree = 1; "
            "set sharding_degree above 1 or sharding_stage to 1"
        )


def _keep_best(config: Config, layout: Layout) -> Iterator[str]:
    if config.engine.keep_best and config.engine.eval_iters == 0:
        yield (
            "engine.keep_best = true needs evaluations to compare, but engine.eval_iters = 0 never evaluates; "
            "eval_iters can be -1 or at least 1, or set keep_best to false"
        )


def _profiler(config: Config, layout: Layout) -> Iterator[str]:
    profiler, last = config.profiler, config.engine.max_steps
    if not profiler.enable:
        return
    if profiler.stop_step < profiler.start_step:
        yield (
            f"profiler.stop_step = {profiler.stop_step} comes before profiler.start_step = {profiler.start_step}; "
            f"stop_step must be at least {profiler.start_step}"
        )
    if last is not None and profiler.start_step > last:
        yield (
            f"profiler.start_step = {profiler.start_step} comes after engine.max_steps = {last}; "
            f"start_step can be at most {last}"
        )


RULES = (
    _input,
    _shapes,
    _length,
    _split,
    _schedule,
    _batch,
    _tensor_parallel,
    _sequence_parallel,
    _pipe_stages,
    _micro_batches,
    _compiled_pipe,
    _float8,
    _sharding,
    _keep_best,
    _profiler,
)


def _multiples_around(value: int, step: int) -> list[int]:
    """The nearest positive multiples of a step, below and above."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]
