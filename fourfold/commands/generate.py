"""`fourfold generate`: text from a trained model."""

from typing import Annotated, Literal

import typer

from fourfold.checkpoint.paths import locate
from fourfold.checkpoint.store import newest_checkpoint
from fourfold.commands.options import option
from fourfold.data.tokenizer import decode_stream
from fourfold.errors import CheckpointError, ConfigError
from fourfold.generate.load import load_for_generation
from fourfold.generate.sample import Sampling, generate_tokens
from fourfold.mesh.process import pick_device


def generate_command(
    source: Annotated[str, typer.Argument(metavar="OUTPUT_DIR", help="A run's output folder, or one checkpoint.")],
    prompt: Annotated[str | None, option("prompt", "The text to continue; by default a first character.")] = None,
    max_new_tokens: Annotated[int, option("max_new_tokens", "How many tokens to add.", min=1)] = 200,
    temperature: Annotated[float, option("temperature", "0 always takes the likeliest token.", min=0.0)] = 1.0,
    top_k: Annotated[int, option("top_k", "Choose among the k likeliest tokens; 0 among all.", min=0)] = 0,
    top_p: Annotated[float, option("top_p", "Choose among the likeliest with this probability.", min=0, max=1)] = 1.0,
    seed: Annotated[int, option("seed", "The same seed gives the same text.", min=0, max=2**63 - 1)] = 1234,
    device: Annotated[Literal["auto", "cpu", "gpu"], option("device", "Where to compute.")] = "auto",
    no_cache: Annotated[
        bool, option("no_cache", "Compute every token again for each new one: slower, same text.")
    ] = False,
    debug: Annotated[bool, option("debug", "Show tracebacks.")] = False,
) -> None:
    """Continue a text with a trained model."""
    path = newest_checkpoint(locate(source))
    if path is None:
        raise CheckpointError(f"{source} holds no checkpoint; name a run's output_dir, or one checkpoint in it")
    if prompt == "":
        raise ConfigError("--prompt is empty; give at least one character to continue, or leave it out")
    gpt, model, tokenizer = load_for_generation(path, pick_device(device, 0))
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, not no_cache)
    text = tokenizer.decode([0]) if prompt is None else prompt
    tokens = tokenizer.encode(text).tolist()
    if not tokens:
        raise ConfigError(
            f"--prompt = {text!r} gives no tokens with this model's tokenizer; give another, or leave it out"
        )
    print(text, end="", flush=True)
    for piece in decode_stream(tokenizer, generate_tokens(gpt, model, tokens, sampling, tokenizer.vocab_size)):
        print(piece, end="", flush=True)
    print()
