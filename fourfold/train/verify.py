"""Proving a layout before renting a cluster: the user's config made small enough for this machine, with everything that
the layout could break kept as it is, and the same numbers asked of one process.

What is made small: widths, layers, vocabulary, sequence, batch, and degrees where there are too many processes; each
stays divisible, or not, in the way it was. Computation is in float32, where a difference cannot hide in rounding.
"""

from dataclasses import dataclass
from itertools import product
from math import isfinite, lcm, prod

from fourfold.config.problems import problems
from fourfold.config.resolve import accumulation, divisors, padded_vocab_size, resolve
from fourfold.config.schedules import is_count_legal
from fourfold.config.schema import Config
from fourfold.layout.layout import AXES, Layout
from fourfold.layout.stages import stages_per_rank
from fourfold.train.trial import Trial, worst_difference

TOLERANCE = 1e-5
CORPUS = "builtin:pydoc"
HEAD_WIDTH = 8


def shrink_layout(layout: Layout, most: int) -> Layout:
    """At most this many processes: the largest degree gives way first, and what was split stays split if it can."""
    degrees = dict(zip(AXES, layout.degrees, strict=True))
    while prod(degrees.values()) > most:
        largest = max(AXES, key=lambda axis: degrees[axis])
        degrees[largest] //= min(divisor for divisor in divisors(degrees[largest]) if divisor > 1)
    return Layout(**degrees)


def shrink(config: Config, layout: Layout, steps: int) -> Config:
    """The small config on this layout, resolved. `config` is resolved for the layout it was written for."""
    model, distributed = config.model, config.distributed
    stages = layout.pp * stages_per_rank(distributed.pp_schedule, distributed.virtual_pp_degree) if layout.pp > 1 else 1
    layers = max(2, stages + model.num_layers % stages)
    heads = lcm(2, layout.mp)
    hidden = heads * HEAD_WIDTH
    padding = 0 if model.vocab_size == "auto" else padded_vocab_size(model.vocab_size) - model.vocab_size
    seq_len = lcm(16, layout.mp)
    micro_batches = small_count(config, layout)
    values = config.model_dump(by_alias=True)
    values["global"] |= {"device": "cpu", "micro_batch_size": 2}
    values["global"]["global_batch_size"] = 2 * micro_batches * layout.data_ranks
    values["model"] |= {"model_name_or_path": None, "num_layers": layers, "num_attention_heads": heads}
    values["model"] |= {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "attention_probs_dropout_prob": 0.0}
    # twice the least that mp divides leaves room for the corpus's characters under the same padding
    values["model"] |= {"vocab_size": 2 * lcm(128, layout.mp) - padding, "max_position_embeddings": seq_len}
    values["data"] |= {"input_dir": CORPUS, "split": (90, 10, 0), "split_by": "position", "truncate": 1.0}
    values["data"] |= {"max_seq_len": seq_len, "sample_stride": seq_len, "tokenizer": "characters"}
    # a line end of the corpus stands in for the end of a document
    values["data"] |= {"eos_token_id": 0}
    values["optimizer"] |= {"decay_steps": steps, "warmup_rate": 0.0, "max_lr": 1e-2, "min_lr": 1e-3}
    values["distributed"] |= {f"{axis}_degree": getattr(layout, axis) for axis in ("pp", "dp", "mp")}
    values["distributed"]["sharding"] |= {"sharding_degree": layout.sharding}
    if layout.mp == 1:
        values["distributed"]["sequence_parallel"] = False
    if layout.sharding == 1:
        values["distributed"]["sharding"]["sharding_stage"] = 1
    if layout.pp == 1:
        values["distributed"] |= {"virtual_pp_degree": 1, "pp_schedule": "1F1B"}
    values["engine"] |= {"max_steps": steps, "num_train_epochs": None, "eval_iters": 2, "resume": "never"}
    values["engine"] |= {"use_amp": False, "compile": False}
    return Config.model_validate(values)


def small_count(config: Config, layout: Layout) -> int:
    """Few micro batches, but several if the config has several, and a number that its schedule takes."""
    count = min(accumulation(config), 2)
    while not is_count_legal(config.distributed.pp_schedule, layout.pp, count):
        count += 1
    return count


def on_one_process(small: Config) -> Config:
    """The same run without a layout: the reference."""
    values = small.model_dump(by_alias=True)
    values["distributed"] = {}
    values["global"]["micro_batch_size"] = "auto"
    values["model"]["use_recompute"] = False
    return resolve(Config.model_validate(values), 1, has_gpu=False)


def legal_layouts(config: Config, world_size: int) -> dict[str, Layout]:
    """Every layout of this many processes that the model itself allows, by name."""
    found = {}
    for degrees in product(divisors(world_size), repeat=4):
        layout = Layout(*degrees)
        if layout.world_size == world_size and not model_problems(config, layout):
            found[str(layout)] = layout
    return found


def model_problems(config: Config, layout: Layout) -> list[str]:
    values = config.model_dump(by_alias=True)
    values["distributed"] |= {f"{axis}_degree": getattr(layout, axis) for axis in ("pp", "dp", "mp")}
    values["distributed"]["sharding"] |= {"sharding_degree": layout.sharding}
    values["distributed"] |= {"sequence_parallel": False, "virtual_pp_degree": 1, "pp_schedule": "1F1B"}
    values["distributed"]["sharding"]["sharding_stage"] = 1
    values["global"] |= {"global_batch_size": layout.data_ranks * 2 * layout.pp, "micro_batch_size": 1}
    values["data"]["input_dir"] = CORPUS
    return problems(Config.model_validate(values), layout.world_size)


@dataclass(frozen=True)
class Comparison:
    ours: Trial
    reference: Trial

    @property
    def worst(self) -> float:
        return worst_difference(self.ours, self.reference)

    @property
    def passes(self) -> bool:
        """Two runs that both went astray prove nothing."""
        return self.worst <= TOLERANCE and all(map(isfinite, self.reference.losses))
