from pathlib import Path

import pytest
import torch

from fourfold.config.load import load_config
from fourfold.config.presets import PRESETS
from fourfold.config.resolve import layout_of, processes_needed, resolve, with_vocab_size
from fourfold.config.schema import Model
from fourfold.cost.params import count_parameters, parameters
from fourfold.layout.stages import PipeStage, pipe_stages, stages_per_rank
from fourfold.model.gpt import GPT
from tests.tiny import tiny_model

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def built_shapes(model: Model, stage: PipeStage | None = None) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        gpt = GPT(model, stage=stage)
    return {name: tuple(parameter.shape) for name, parameter in gpt.named_parameters()}


def listed_shapes(model: Model, stage: PipeStage | None = None) -> dict[str, tuple[int, ...]]:
    listed = list(parameters(model, stage))
    shapes = {parameter.name: parameter.shape for parameter in listed}
    assert len(shapes) == len(listed), "a name is listed twice"
    return shapes


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_table_is_the_built_model_by_name_and_shape(num_stages: int, is_tied: bool) -> None:
    model = tiny_model(num_layers=5, ffn_hidden_size=80, tie_word_embeddings=is_tied)
    for stage in pipe_stages(5, num_stages):
        assert listed_shapes(model, stage) == built_shapes(model, stage)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_pipe_holds_the_parameters_of_the_whole_model_and_a_copy_of_a_tied_head(is_tied: bool) -> None:
    model = tiny_model(num_layers=5, tie_word_embeddings=is_tied)
    staged = [name for stage in pipe_stages(5, 3) for name in listed_shapes(model, stage)]
    extra = ["head.weight"] if is_tied else []
    assert sorted(staged) == sorted([*listed_shapes(model), *extra])


def test_mp_divides_rows_of_what_it_feeds_and_columns_of_what_it_collects() -> None:
    dims = {parameter.name: parameter.mp_dim for parameter in parameters(tiny_model(num_layers=1))}
    rows = {"embedding.tokens.weight"}
    rows |= {f"blocks.0.{part}.{kind}" for part in ("attention.qkv", "feedforward.up") for kind in ("weight", "bias")}
    columns = {"blocks.0.attention.out.weight", "blocks.0.feedforward.down.weight"}
    assert {name for name, dim in dims.items() if dim == 0} == rows
    assert {name for name, dim in dims.items() if dim == 1} == columns


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_table_is_the_built_model_of_every_recipe(path: Path) -> None:
    config = load_config(path)
    config = with_vocab_size(resolve(config, processes_needed(config), has_gpu=True), 59)
    pipe = config.distributed
    per_rank = stages_per_rank(pipe.pp_schedule, pipe.virtual_pp_degree)
    num_stages = layout_of(config, processes_needed(config)).pp * per_rank
    for stage in pipe_stages(config.model.num_layers, num_stages):
        assert listed_shapes(config.model, stage) == built_shapes(config.model, stage)


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2-en", 124_475_904),  # OpenAI's 124,439,808 and 47 more rows of 768 in the vocabulary
        ("gpt2-medium-en", 354_871_296),
        ("gpt2-xl-en", 1_557_686_400),
        ("gpt3-345M", 354_871_296),
        ("gpt3-1.3B", 1_313_722_368),
        ("gpt3-6.7B", 6_654_402_560),
        ("gpt3-13B", 12_848_384_000),
        ("gpt3-175B", 174_592_253_952),
    ],
)
def test_published_sizes_have_as_many_parameters_as_their_names_say(preset: str, count: int) -> None:
    fields = PRESETS[preset]
    model = Model(**fields, ffn_hidden_size=4 * fields["hidden_size"])
    assert count_parameters(model) == count == by_hand(**fields)


def by_hand(num_layers: int, hidden_size: int, vocab_size: int, max_position_embeddings: int, **_: int) -> int:
    block = 12 * hidden_size**2 + 13 * hidden_size
    return num_layers * block + (vocab_size + max_position_embeddings + 2) * hidden_size
