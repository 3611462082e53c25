from pathlib import Path

import pytest
import torch

from fourfold.checkpoint.store import complete_checkpoints
from fourfold.config.schema import Model
from fourfold.errors import CheckpointError
from fourfold.generate.cache import Cache
from fourfold.generate.load import load_for_generation
from fourfold.generate.sample import Sampling, generate_tokens, pick_token
from fourfold.model.gpt import GPT
from tests.tiny import alone, built, random_tokens, run_training, tiny_config, tiny_model

MODEL = tiny_model(initializer_range=0.3)  # opinionated enough that tokens differ in probability
WINDOW = 16
GREEDY = Sampling(max_new_tokens=3 * WINDOW, temperature=0.0)
SAMPLED = Sampling(max_new_tokens=3 * WINDOW)


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return built(MODEL)


def generate(gpt: GPT, sampling: Sampling, prompt: list[int], model: Model = MODEL) -> list[int]:
    return list(generate_tokens(gpt, model, prompt, sampling))


def changed(sampling: Sampling, **values: object) -> Sampling:
    return Sampling(**{**vars(sampling), **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, changed(SAMPLED, top_k=5), changed(SAMPLED, top_p=0.9)])
@pytest.mark.parametrize("prompt_length", [1, 5, WINDOW - 1, WINDOW, 2 * WINDOW])
def test_the_cache_changes_only_the_speed(gpt: GPT, sampling: Sampling, prompt_length: int) -> None:
    prompt = random_tokens(1, prompt_length, 97)[0].tolist()
    tokens = generate(gpt, sampling, prompt)
    assert len(tokens) == 3 * WINDOW
    assert tokens == generate(gpt, changed(sampling, use_cache=False), prompt)


@torch.no_grad()
def test_logits_through_the_cache_are_those_without_however_the_text_is_fed(gpt: GPT) -> None:
    tokens = random_tokens(2, WINDOW, 97)
    expected = gpt(tokens)
    for cuts in ([WINDOW], [1] * WINDOW, [5, 1, 7, 3], [3, 13]):
        cache = Cache(MODEL, 2, WINDOW, torch.device("cpu"))
        found = torch.cat([gpt(part, cache=cache) for part in tokens.split(cuts, 1)], 1)
        assert cache.length == WINDOW
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_greedy_takes_the_likeliest_token_of_the_whole_text_so_far(gpt: GPT) -> None:
    text = [3, 1, 4]
    for token in generate(gpt, changed(GREEDY, max_new_tokens=WINDOW - 3), text):
        assert token == gpt(torch.tensor([text]))[0, -1].argmax().item()
        text = [*text, token]


def test_one_token_to_choose_from_is_greedy(gpt: GPT) -> None:
    greedy = generate(gpt, GREEDY, [1, 2, 3])
    assert len(set(greedy)) > 1
    assert generate(gpt, changed(SAMPLED, top_k=1), [1, 2, 3]) == greedy
    assert generate(gpt, changed(SAMPLED, top_p=1e-9), [1, 2, 3]) == greedy
    assert generate(gpt, changed(SAMPLED, temperature=1e-6), [1, 2, 3]) == greedy


def test_no_probability_at_all_still_leaves_the_likeliest_token(gpt: GPT) -> None:
    assert generate(gpt, changed(SAMPLED, top_p=0.0), [1, 2, 3]) == generate(gpt, GREEDY, [1, 2, 3])


def test_a_temperature_next_to_zero_is_greedy_and_not_an_error(gpt: GPT) -> None:
    assert generate(gpt, changed(SAMPLED, temperature=1e-39), [1, 2, 3]) == generate(gpt, GREEDY, [1, 2, 3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_diverged_is_a_sentence(temperature: float) -> None:
    gpt = built(MODEL)
    with torch.no_grad():
        gpt.get_parameter("norm.weight").fill_(torch.nan)
    with pytest.raises(CheckpointError, match="its training has diverged"):
        generate(gpt, changed(SAMPLED, temperature=temperature), [1])


def test_the_same_seed_gives_the_same_text_and_another_another(gpt: GPT) -> None:
    assert generate(gpt, SAMPLED, [1]) == generate(gpt, SAMPLED, [1])
    assert generate(gpt, SAMPLED, [1]) != generate(gpt, changed(SAMPLED, seed=99), [1])
    torch.manual_seed(5)  # what else is drawn meanwhile does not matter
    assert generate(gpt, SAMPLED, [1]) == generate(gpt, SAMPLED, [1])


def drawn(logits: torch.Tensor, sampling: Sampling, count: int = 4000) -> torch.Tensor:
    """How often each token is picked, as a share."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.tensor([pick_token(logits, sampling, generator) for _ in range(count)])
    return torch.bincount(picked, minlength=len(logits)) / count


def test_only_tokens_that_the_tokenizer_has_are_drawn(gpt: GPT) -> None:
    tokens = list(generate_tokens(gpt, MODEL, [1], changed(SAMPLED, max_new_tokens=200), vocab_size=10))
    assert len(set(tokens)) > 5 and set(tokens) <= set(range(10))


LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05]))


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ({}, [0.05, 0.4, 0.3, 0.2, 0.05]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 99}, [0.05, 0.4, 0.3, 0.2, 0.05]),
        ({"top_p": 0.69}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [0, 4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 0.5}, [0.0085, 0.5424, 0.3051, 0.1356, 0.0085]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 3 / 7, 0, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(keys: dict[str, float], shares: list[float]) -> None:
    found = drawn(LOGITS, changed(SAMPLED, **keys))
    assert found.tolist() == pytest.approx(shares, abs=0.03)
    assert [share == 0 for share in found.tolist()] == [share == 0 for share in shares]


def test_beyond_the_window_the_newest_half_is_remembered(gpt: GPT) -> None:
    """A prompt longer than the window counts with its end alone."""
    prompt = random_tokens(1, 40, 97)[0].tolist()
    assert generate(gpt, GREEDY, prompt) == generate(gpt, GREEDY, prompt[-WINDOW:])
    assert generate(gpt, GREEDY, prompt) != generate(gpt, GREEDY, prompt[-WINDOW + 4 :])


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_smallest_windows_work(window: int) -> None:
    model = tiny_model(max_position_embeddings=window)
    gpt = built(model)
    tokens = generate(gpt, SAMPLED, [1, 2], model)
    assert len(tokens) == 3 * WINDOW
    assert tokens == generate(gpt, changed(SAMPLED, use_cache=False), [1, 2], model)


@pytest.mark.parametrize("keys", [{}, {"use_recompute": True, "hidden_dropout_prob": 0.3}], ids=str)
def test_a_checkpoint_generates_what_its_run_would(tmp_path: Path, keys: dict[str, object]) -> None:
    outcome = run_training(tiny_config(tmp_path, max_steps=2, **keys))
    [path] = complete_checkpoints(tmp_path / "run")
    with alone():
        gpt, model, tokenizer = load_for_generation(path, torch.device("cpu"))
    assert model == outcome.run.config.model
    assert tokenizer == outcome.run.corpus.tokenizer
    prompt = tokenizer.encode("the ").tolist()
    assert generate(gpt, SAMPLED, prompt, model) == generate(outcome.run.parallel.parts[0], SAMPLED, prompt, model)


def test_a_damaged_checkpoint_generates_nothing(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=1))
    [path] = complete_checkpoints(tmp_path / "run")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 2 bytes"):
        load_for_generation(path, torch.device("cpu"))
