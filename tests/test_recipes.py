from pathlib import Path

import pytest

from fourfold.config.load import dump_config, load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import processes_needed, resolve
from fourfold.config.schema import Config

RECIPES = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))
# The published layouts, as the recipes' names have them.
PROCESSES = {
    "gpt3_1.3B_dp8": 8,
    "gpt3_175B_mp8_pp16": 128,
    "gpt3_345M": 8,
    "gpt3_6.7B_sharding16": 16,
    "mingpt_char": 1,
    "quickstart": 1,
}

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def load_with_text(path: Path) -> Config:
    config = load_config(path)
    return load_config(path, [("input_dir", config.data.input_dir or "builtin:pydoc")])


@each_recipe
def test_a_recipe_has_no_problems_on_the_processes_it_needs(path: Path) -> None:
    config = load_with_text(path)
    assert processes_needed(config) == PROCESSES.get(path.stem, processes_needed(config))
    assert problems(config, processes_needed(config)) == []


@each_recipe
def test_a_recipe_dumps_to_a_file_that_loads_equal(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    for number, dumped in enumerate([config, resolve(config, processes_needed(config), has_gpu=True)]):
        copy = tmp_path / f"{number}.yaml"
        copy.write_text(dump_config(dumped))
        assert load_config(copy) == dumped


@each_recipe
def test_a_recipe_is_a_page_with_its_launch_line_on_top(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert 40 <= len(lines) <= 70
    head = "\n".join(line for line in lines[: lines.index("global:")])
    assert all(line.startswith("#") or not line for line in head.splitlines())
    assert f"fourfold train configs/{path.name}" in head or f"fourfold train -c configs/{path.name}" in head
    assert "sequences per update" in head


def test_the_minGPT_recipe_runs_on_any_number_of_gpus_that_divides_its_batch() -> None:
    config = load_with_text(next(path for path in RECIPES if path.stem == "mingpt_char"))
    assert all(problems(config, world_size) == [] for world_size in (1, 2, 3, 4, 6, 8))


def test_the_quickstart_needs_nothing_but_the_recipe() -> None:
    config = load_config(next(path for path in RECIPES if path.stem == "quickstart"))
    assert problems(config, 1) == []
