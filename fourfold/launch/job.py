"""A run that is to be spread over machines: its layout, how many nodes that takes, and the command that they run.

Pure functions of the config and the shape of a node; what becomes of them is in `slurm.py` and `kubernetes.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fourfold.checkpoint.paths import local_folder
from fourfold.config.flags import parse_flags
from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import divisors, is_any_inferred, layout_of, processes_needed
from fourfold.config.schema import Config
from fourfold.config.words import any_of
from fourfold.errors import ConfigError
from fourfold.layout.layout import AXES, Layout


@dataclass(frozen=True)
class Job:
    config_path: str
    settings: tuple[str, ...]
    """`key=value`, those given and the degrees that follow from the number of nodes."""
    layout: Layout
    nodes: int
    processes_per_node: int
    uses_gpus: bool
    output_dir: str

    @property
    def name(self) -> str:
        return self.output_dir.rstrip("/").rpartition("/")[2] or "fourfold"

    @property
    def folder(self) -> Path:
        """Where the run leaves its logs, and the job its script."""
        return local_folder(self.output_dir)

    @property
    def train_arguments(self) -> list[str]:
        """`train CONFIG -o key=value ...`"""
        return ["train", self.config_path, *as_flags(self.settings)]


def plan_job(config_path: str, settings: list[str], nodes: int | None, processes_per_node: int) -> Job:
    """The job of a config on nodes of this size, or every problem at once."""
    path, overrides = parse_flags([config_path, *as_flags(settings)])
    config = load_config(path, overrides)
    nodes = count_nodes(config, nodes, processes_per_node)
    world_size = nodes * processes_per_node
    found = problems(config, world_size)
    if found:
        raise ConfigError(found)
    layout = layout_of(config, world_size)
    # written down, even where it is 1: in a job the number of tasks is not the number of processes
    inferred = [
        f"{axis}_degree={degree}"
        for axis, degree, on_more in zip(AXES, layout.degrees, layout_of(config, 2 * world_size).degrees, strict=True)
        if degree != on_more
    ]
    return Job(
        config_path=config_path,
        settings=(*settings, *inferred),
        layout=layout,
        nodes=nodes,
        processes_per_node=processes_per_node,
        uses_gpus=config.global_.device != "cpu",
        output_dir=config.engine.output_dir,
    )


def count_nodes(config: Config, nodes: int | None, processes_per_node: int) -> int:
    """As many as the layout fills. Where a degree was left out and follows from the world size, as many as given."""
    needed = processes_needed(config)
    is_open = is_any_inferred(config)
    if nodes is not None and (is_open or nodes * processes_per_node == needed):
        return nodes
    layout = layout_of(config, needed)
    if needed % processes_per_node:
        remedy = f"gpus_per_node can be {any_of(divisors(needed))}"
        if is_open:
            remedy = f"a degree was left out, so write --nodes and it follows from their number, or {remedy}"
        raise ConfigError(
            f"--gpus_per_node {processes_per_node} does not divide the {needed} processes of the layout {layout}; "
            f"{remedy}"
        )
    if nodes is not None:
        raise ConfigError(
            f"--nodes {nodes} with --gpus_per_node {processes_per_node} makes {nodes * processes_per_node} processes, "
            f"but the layout {layout} needs {needed}; write --nodes {needed // processes_per_node}, leave --nodes out, "
            "or change a degree"
        )
    return needed // processes_per_node


def as_flags(settings: Iterable[str]) -> list[str]:
    return [word for each in settings for word in ("-o", each)]
