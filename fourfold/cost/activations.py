"""Bytes of activations: what the forward of one micro batch leaves for its backward, and what a moment needs besides.

The table is counted from model/gpt.py and tested against what autograd keeps. In a compiled block PyTorch's
partitioner makes those masks of dropout again that backward begins with, and nothing else whose uses are far apart;
what wide models make again besides is marked (`makes_gelu_again`).
No torch.
"""

from typing import Literal, NamedTuple

from fourfold.config.resolve import accumulation, known
from fourfold.config.schema import Config
from fourfold.cost.params import Parameter, block_parameters, sizes
from fourfold.cost.sharding import is_sharded, sharding_stage
from fourfold.layout.layout import Layout
from fourfold.layout.stages import PipeStage

FLOAT32_BYTES = 4
INT64_BYTES = 8

Width = Literal["hidden", "qkv", "ffn", "heads", "pair", "sequence"]
Kind = Literal["compute", "input", "again", "float32", "dropout", "last dropout", "documents"]
Cut = Literal["features", "sequence", "nothing"]


class Kept(NamedTuple):
    """A tensor that a block keeps for backward, per token."""

    name: str
    width: Width
    kind: Kind
    """What decides the bytes of an element: `element_bytes`."""
    cut: Cut
    """What of it mp divides: its features, its sequence if sequence_parallel is on, or nothing."""
    forgotten: tuple[str, ...]
    """The recompute granularities that make it again; "compiled ..." where one graph holds what is recomputed and what
    comes after it."""


BLOCK, ATTENTION, CORE = ("full",), ("full", "full_attn"), ("full", "full_attn", "core_attn")
AFTER_CORE = (*ATTENTION, "compiled core_attn")

KEPT = (
    Kept("norm1's input, from which a block begins", "hidden", "compute", "sequence", ()),
    Kept("norm1's mean and deviation", "pair", "float32", "sequence", BLOCK),
    Kept("qkv's input", "hidden", "input", "nothing", ATTENTION),  # gathered by then, if it was cut
    Kept("queries, keys and values", "qkv", "compute", "features", ATTENTION),
    Kept("attention's output, which is out's input", "hidden", "compute", "features", AFTER_CORE),
    Kept("logarithms of attention's sums", "heads", "float32", "features", CORE),
    Kept("mask of documents", "sequence", "documents", "nothing", CORE),
    Kept("dropout1's mask", "hidden", "dropout", "sequence", BLOCK),
    Kept("norm2's input", "hidden", "compute", "sequence", BLOCK),
    Kept("norm2's mean and deviation", "pair", "float32", "sequence", BLOCK),
    Kept("up's input", "hidden", "input", "nothing", BLOCK),
    Kept("gelu's input", "ffn", "compute", "features", BLOCK),
    Kept("gelu's output, which is down's input", "ffn", "again", "features", BLOCK),
    Kept("dropout2's mask", "hidden", "last dropout", "sequence", BLOCK),
)

BEGINNINGS = {
    "full_attn": (Kept("norm1's output, from which attention begins", "hidden", "compute", "sequence", ()),),
}
"""What recomputing a part begins from, where the table does not hold it anyway."""

GELU_AGAIN_FROM = 4096
"""So wide, a compiled model in half precision on a GPU makes gelu's output again in backward: a quarter of what a block
keeps, and the wider the model, the less it costs."""

CHUNK_LOGITS, MOST_CHUNKS = 2**28, 8
"""The loss cuts no finer than into so many logits or chunks: each chunk is a pass over the head's gradient."""
FLOAT16_ROWS = 4096
"""A sum over more rows, which is weighted after it, could leave float16's range, and no loss scale would help."""


def compute_bytes(config: Config) -> int:
    return 2 if config.engine.use_amp else FLOAT32_BYTES


def has_float8(config: Config) -> bool:
    return bool(config.engine.use_amp) and config.engine.amp_dtype == "float8"


def is_float8(config: Config, layer: int) -> bool:
    """Whether a block multiplies in 8 bits."""
    ends = {0: "first", config.model.num_layers - 1: "last"}
    return has_float8(config) and ends.get(layer) not in config.engine.float8_except


def element_bytes(config: Config, layout: Layout, layer: int) -> dict[Kind, int]:
    compute, float8 = compute_bytes(config), is_float8(config, layer)
    has_dropout = config.model.hidden_dropout_prob > 0.0
    return {
        "compute": compute,
        "input": 1 if float8 else compute,
        "again": 0 if float8 or makes_gelu_again(config) else compute,
        "float32": FLOAT32_BYTES,
        "dropout": int(has_dropout),
        "last dropout": int(has_dropout and not compiles_blocks(config, layout)),
        "documents": compute if config.data.reset_attention_mask else 0,
    }


def compiles_blocks(config: Config, layout: Layout) -> bool:
    """Each as one graph. Under mp, with recomputation, only pieces of them are compiled (parallelize/apply.py)."""
    return bool(config.engine.compile) and not (layout.mp > 1 and config.model.use_recompute)


def makes_gelu_again(config: Config) -> bool:
    """As `multiply_then_gelu` does (model/linear.py). In 8 bits it is made again in any case."""
    is_fast = config.global_.device == "gpu" and bool(config.engine.use_amp and config.engine.compile)
    return is_fast and config.model.hidden_size >= GELU_AGAIN_FROM


def widths(config: Config) -> dict[Width, int]:
    hidden, ffn, _, _ = sizes(config.model)
    return {
        "hidden": hidden,
        "qkv": 3 * hidden,
        "ffn": ffn,
        "heads": config.model.num_attention_heads,
        "pair": 2,
        "sequence": config.data.max_seq_len,
    }


def tokens_of(config: Config) -> int:
    """Of one micro batch."""
    return known(config.global_.micro_batch_size) * config.data.max_seq_len


def between_blocks_bytes(config: Config, layout: Layout) -> int:
    """The hidden states of one micro batch, as they go from block to block and from stage to stage."""
    return tokens_of(config) * config.model.hidden_size * compute_bytes(config) // sequence_shares(config, layout)


def sequence_shares(config: Config, layout: Layout) -> int:
    """Into how many the mp ranks cut what lies between the layers that they share."""
    return layout.mp if config.distributed.sequence_parallel else 1


def granularity(config: Config) -> str | None:
    return config.model.recompute_granularity if config.model.use_recompute else None


def block_bytes(config: Config, layout: Layout, layer: int, recomputed: str | None) -> int:
    """What one block keeps of one micro batch, where `recomputed` is made again in backward."""
    width, each = widths(config), element_bytes(config, layout, layer)
    shares = {"features": layout.mp, "sequence": sequence_shares(config, layout), "nothing": 1}
    words = {recomputed, f"compiled {recomputed}"} if compiles_blocks(config, layout) else {recomputed}
    kept = [*(line for line in KEPT if not words & {*line.forgotten}), *BEGINNINGS.get(recomputed or "", ())]
    activations = sum(tokens_of(config) * width[line.width] * each[line.kind] // shares[line.cut] for line in kept)
    return activations + weight_copy_bytes(config, layout, layer, recomputed)


def weight_copy_bytes(config: Config, layout: Layout, layer: int, recomputed: str | None) -> int:
    """A block's weights as backward multiplies with them, where each forward keeps its own: the casts of a compiled
    model (eagerly, backward casts again), or those to 8 bits, turned. What is sharded is gathered in its dtype, and
    counted as weights."""
    if is_float8(config, layer):
        freed = is_sharded(config, layout) and sharding_stage(config, layout).frees_after_forward
        each = 0 if freed or keeps_casts(config, layout) else 1
    else:
        each = 2 if config.engine.use_amp and config.engine.compile and not is_sharded(config, layout) else 0
    if recomputed == "full":
        return 0
    listed = matrices(config, layer)
    # under mp, attention whose core is recomputed is not compiled (parallelize/apply.py)
    is_eager = recomputed == "core_attn" and layout.mp > 1 and not is_float8(config, layer)
    if recomputed == "full_attn" or is_eager:
        listed = [parameter for parameter in listed if ".attention." not in parameter.name]
    return each * sum(parameter.size // layout.mp for parameter in listed)


def matrices(config: Config, layer: int) -> list[Parameter]:
    return [p for p in block_parameters(config.model, layer) if p.kind in ("matrix", "projection")]


def keeps_casts(config: Config, layout: Layout) -> bool:
    """Whether weights are cast to 8 bits once for all micro batches of a step, as parallelize/precision.py says."""
    return accumulation(config) > 1 and not is_sharded(config, layout)


def cast_bytes(config: Config, layout: Layout, stages: list[PipeStage]) -> int:
    """Those casts, as they lie and turned, which are there from the first step on."""
    layers = [layer for stage in stages for layer in stage.layers if is_float8(config, layer)]
    if not keeps_casts(config, layout):
        return 0
    return sum(2 * parameter.size // layout.mp for layer in layers for parameter in matrices(config, layer))


def stage_bytes(config: Config, layout: Layout, stage: PipeStage) -> int:
    """What a pipe stage keeps of one micro batch that waits for its backward."""
    recomputed, tokens = granularity(config), tokens_of(config)
    hidden, _, vocab, _ = sizes(config.model)
    kept = sum(block_bytes(config, layout, layer, recomputed) for layer in stage.layers)
    if config.data.reset_attention_mask:
        kept += tokens * config.data.max_seq_len  # the mask itself, a byte per pair
    if stage.has_embedding:
        mask = tokens * hidden * element_bytes(config, layout, 0)["last dropout"]
        kept += tokens * INT64_BYTES + mask // sequence_shares(config, layout)
    if stage.has_head:  # the last norm's input; both gradients, which the loss makes in forward
        kept += between_blocks_bytes(config, layout)
        kept += tokens * hidden * compute_bytes(config) + FLOAT32_BYTES * vocab * hidden // layout.mp
    return kept


def head_moment_bytes(config: Config, layout: Layout) -> int:
    """What the loss needs besides what it keeps: in forward chunks of logits, its input and the head's cast; in
    backward both gradients once more, scaled."""
    hidden, _, vocab, _ = sizes(config.model)
    rows, tokens, compute = vocab // layout.mp, tokens_of(config), compute_bytes(config)
    is_gpu, is_amp = config.global_.device == "gpu", bool(config.engine.use_amp)
    is_float8_head = has_float8(config) and "head" not in config.engine.float8_except
    chunk = chunk_rows(tokens, rows, is_amp and config.engine.amp_dtype == "float16")
    logits = rows * chunk * compute  # the gradient takes their place
    if is_float8_head:
        logits += rows * chunk * 2  # cast, as it lies and turned
    if not is_gpu:
        logits += rows * chunk * 3 * FLOAT32_BYTES  # where there is no kernel for it
    # in half precision a GPU's matrix unit adds a chunk's gradient of the head to that of the others itself
    new = 0 if is_gpu and is_amp and not is_float8_head else FLOAT32_BYTES
    forward = logits + tokens * hidden * compute + rows * hidden * (compute + new)
    backward = tokens * hidden * compute + max(tokens, rows) * hidden * FLOAT32_BYTES  # one after the other
    return max(forward, backward)


def block_moment_bytes(config: Config, layout: Layout, layer: int) -> int:
    """What one block needs in backward besides what was kept: gradients, and all that it makes again. The most is there
    when gelu's gradient is made."""
    hidden, ffn, _, _ = sizes(config.model)
    compute, ffn = compute_bytes(config), ffn // layout.mp
    again = block_bytes(config, layout, layer, None) - block_bytes(config, layout, layer, granularity(config))
    has_hashes = config.model.hidden_dropout_prob > 0.0 and not compiles_blocks(config, layout)
    hashes = 3 * FLOAT32_BYTES if has_hashes else 0
    gradients = 2 * ffn * compute + hidden * (2 * compute + hashes)
    if is_float8(config, layer):
        gradients += ffn + 2 * hidden  # down's input turned; its gradient both ways
    elif makes_gelu_again(config):
        gradients += ffn * compute
    return max(0, again) + tokens_of(config) * gradients


def chunk_rows(num_rows: int, vocab: int, is_float16: bool) -> int:
    """Rows of logits that the loss holds at a time: a power of two, which suits matrix units, or all of them."""
    most = max(1, CHUNK_LOGITS // vocab, num_rows // MOST_CHUNKS)
    if is_float16:
        most = min(most, FLOAT16_ROWS)
    return num_rows if num_rows <= most else 1 << (most.bit_length() - 1)


def forwards_in_flight(config: Config, layout: Layout, pp_rank: int, micro_batches: int) -> int:
    """At most so many forwards of its pipe stages wait on a rank for their backward; one, without a pipe. These are the
    rules of `torch.distributed.pipelining.schedules`."""
    pp, schedule, virtual = layout.pp, config.distributed.pp_schedule, config.distributed.virtual_pp_degree
    if pp == 1:
        return 1
    per_round = micro_batches // max(1, micro_batches // pp)
    most = {
        "GPipe": micro_batches,
        "1F1B": min(micro_batches, pp - pp_rank),
        "Interleaved1F1B": min(virtual * micro_batches, (virtual - 1) * per_round + 2 * (pp - 1 - pp_rank) + 1),
        "InterleavedZeroBubble": min(virtual * micro_batches, (virtual - 1) * per_round + pp),
        "ZBV": 2 * min(micro_batches, pp),
        "DualPipeV": 2 * min(micro_batches, pp) + 1,
    }
    return most[schedule]
