"""A run's config against that of the checkpoint it begins from: what may not differ, and what is merely told."""

import logging
from typing import Any

from fourfold.checkpoint.manifest import Manifest
from fourfold.checkpoint.texts import load_saved_config
from fourfold.config.keys import LEAVES, Leaf
from fourfold.config.load import SHAPE_KEYS
from fourfold.config.schema import Config
from fourfold.errors import CheckpointError

log = logging.getLogger("fourfold")

# Keys that change what a run computes, besides those that make it another model. What text and tokenizer hold is
# compared by itself, wherever they lie.
DECIDING = {"global": {"seed", "global_batch_size"}, "engine": {"use_amp", "amp_dtype", "scale_loss"}}
DECIDING_SECTIONS = ("model", "data", "optimizer")
NOT_DECIDING = {
    "input_dir",
    "tokenizer",
    "cache_dir",
    "num_workers",
    "use_recompute",
    "recompute_granularity",
    "model_name_or_path",
}


def check_same_model(checkpoint: Manifest, config: Config) -> None:
    saved = load_saved_config(checkpoint)
    problems = [
        f"model.{key} = {getattr(config.model, key)} differs from {getattr(saved.model, key)} in the checkpoint "
        f"{checkpoint.path}; write the same, or start anew in another output_dir"
        for key in SHAPE_KEYS
        if getattr(config.model, key) != getattr(saved.model, key)
    ]
    if problems:
        raise CheckpointError("\n".join(problems))


def tell_differences(checkpoint: Manifest, config: Config, is_same_text: bool) -> None:
    """Everything in which this run differs from the one it goes on from; loudly where that changes the result."""
    saved, ours = values_of(load_saved_config(checkpoint)), values_of(config)
    consequence = "what follows is not the run that would have been"
    for leaf in LEAVES.values():
        if saved[leaf.key] == ours[leaf.key]:
            continue
        change = f"{leaf.name} is {ours[leaf.key]}, and was {saved[leaf.key]} in {checkpoint.path}"
        if is_deciding(leaf):
            log.warning(f"{change}: {consequence}")
        else:
            log.info(change)
    if not is_same_text:
        log.warning(f"{config.data.input_dir} has changed since {checkpoint.path} was saved: {consequence}")


def is_deciding(leaf: Leaf) -> bool:
    section = leaf.path[0]
    return leaf.key not in NOT_DECIDING and (section in DECIDING_SECTIONS or leaf.key in DECIDING.get(section, ()))


def values_of(config: Config) -> dict[str, Any]:
    """By leaf key, which are unique."""
    found: dict[str, Any] = {}

    def read(section: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in section.items():
            if key in LEAVES and LEAVES[key].path == path:
                found[key] = value
            else:
                read(value, (*path, key))

    read(config.model_dump(by_alias=True), ())
    return found
