"""How fast a whole optimizer step is: warm-up, then the median of device-timed steps, on synthetic tokens or on the
text of `data.input_dir`.

Our own step is the trainer's, not a copy of it. Peers are run from where the user has them; nothing of theirs is here.
"""

import importlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import layout_of, resolve, with_decay_steps
from fourfold.config.schema import Config
from fourfold.cost.flops import training_flops_per_token
from fourfold.cost.params import count_parameters
from fourfold.data.corpus import load_corpus
from fourfold.data.loader import Batch, TrainLoader, boundaries_of
from fourfold.errors import ConfigError
from fourfold.mesh.process import Process
from fourfold.optim.adamw import AdamW
from fourfold.optim.scaler import LossScale
from fourfold.parallelize.apply import parallelize
from fourfold.parallelize.precision import has_loss_scale
from fourfold.train.ahead import build_sender
from fourfold.train.build import Run, vocab_size_for
from fourfold.train.metrics import device_peak_flops, memory_gib
from fourfold.train.replay import STEPS_BEFORE, Replay, is_replayable
from fourfold.train.step import train_step

# size -> the preset, and the batch at which it is usually compared on one large GPU
SIZES = {
    "124M": ("gpt2-en", 64),
    "345M": ("gpt3-345M", 64),
    "1.3B": ("gpt3-1.3B", 16),
    "2.7B": ("gpt3-2.7B", 8),
    "6.7B": ("gpt3-6.7B", 4),
}

NextBatch = Callable[[], Batch]


class Stepped(NamedTuple):
    """Still on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


StepFunction = Callable[[int], Stepped]
"""Takes the number of the step; one whole update."""


class Times(NamedTuple):
    step_s: list[float]
    first_s: float
    """To the end of the very first step, with what it compiles."""
    last_loss: float
    last_grad_norm: float


@dataclass(frozen=True)
class Measured:
    name: str
    size: str
    precision: str
    batch: int
    parameters: int
    tokens_per_s: float
    step_ms: float
    """The median."""
    step_ms_p10: float
    step_ms_p90: float
    tflops_per_s: float
    """Of the model, in units of 10^12 per second: what MFU is a part of."""
    mfu: float
    peak_gib: float
    first_step_s: float
    last_loss: float | None
    last_grad_norm: float | None
    """None where it is not finite, which JSON has no word for."""

    @property
    def has_learnt(self) -> bool:
        return bool(self.last_grad_norm)


def bench_config(size: str, batch: int, seq_len: int, flags: list[tuple[str, str]], device: torch.device) -> Config:
    keys = {
        "model_name_or_path": SIZES[size][0],
        "global_batch_size": str(batch),
        "max_seq_len": str(seq_len),
        "max_position_embeddings": str(seq_len),
        "max_steps": "1000",
        "warmup_rate": "0.1",
    }
    config = load_config(None, [*keys.items(), *flags])
    named = config.data.model_copy(update={"input_dir": config.data.input_dir or "-"})
    wrong = problems(config.model_copy(update={"data": named}), 1)
    if wrong:
        raise ConfigError(wrong)
    return with_decay_steps(resolve(config, 1, has_gpu=device.type == "cuda"), 1000)


def synthetic_batch(config: Config, device: torch.device) -> Batch:
    """Random tokens, the same for every contender."""
    assert isinstance(config.model.vocab_size, int)
    generator = torch.Generator().manual_seed(0)
    shape = (config.global_.global_batch_size, config.data.max_seq_len + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    keys_b = torch.randint(-(2**62), 2**62, shape[:1], generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), keys_b)
    return batch.pin_memory() if device.type == "cuda" else batch


@contextmanager
def open_batches(config: Config, device: torch.device) -> Iterator[NextBatch]:
    """What every step takes, on the host: the same for every contender. Real tokens come as a run gets them."""
    if not config.data.input_dir:
        batch = synthetic_batch(config, device)
        yield lambda: batch
        return
    corpus = load_corpus(config.data, config.global_.seed, needs_valid=False, vocab_size=config.model.vocab_size)
    vocab_size_for(config, corpus.tokenizer)  # refuses tokens that the model does not know
    with TrainLoader(
        corpus.splits.train,
        config.global_.seed,
        config.global_.global_batch_size,
        range(config.global_.global_batch_size),
        num_workers=config.data.num_workers,
        pin_memory=device.type == "cuda",
        boundaries=boundaries_of(config.data),
    ) as loader:
        yield loader.next_batch


def our_step(config: Config, process: Process, next_batch: NextBatch) -> StepFunction:
    layout = layout_of(config, process.world_size)
    parallel = parallelize(config, layout, process.rank, process.device, process.timeout_s)
    optimizer = AdamW(parallel.table(), parallel.named_parameters(), config.optimizer)
    loss_scale = LossScale(config.engine.scale_loss, has_loss_scale(config.engine), process.device)
    replay = Replay(is_replayable(config, process))
    run = Run(config, layout, process, None, parallel, optimizer, loss_scale, 0, 1000, None, replay)  # type: ignore[arg-type]
    send = build_sender(process.device)

    def step(number: int) -> Stepped:
        result = train_step(run, send(next_batch()), number)
        return Stepped(result.loss, result.grad_norm)

    return step


def nanogpt_step(config: Config, device: torch.device, next_batch: NextBatch, path: Path) -> StepFunction:
    """As its own train.py does a step: autocast to bfloat16, compiled, fused AdamW, clipping."""
    if not (path / "model.py").is_file():
        raise ConfigError(f"--peer_path = {path} holds no model.py; clone nanoGPT and write the clone's folder")
    sys.path.insert(0, str(path))
    theirs = importlib.import_module("model")
    shape = theirs.GPTConfig(
        block_size=config.data.max_seq_len,
        vocab_size=config.model.vocab_size,
        n_layer=config.model.num_layers,
        n_head=config.model.num_attention_heads,
        n_embd=config.model.hidden_size,
        dropout=0.0,
        bias=True,
    )
    with device:  # where billions of numbers are drawn faster
        model = theirs.GPT(shape)
    optimizer = model.configure_optimizers(
        config.optimizer.weight_decay, config.optimizer.max_lr, (0.9, 0.95), device.type
    )
    return _autocast_step(config, device, next_batch, model, optimizer, lambda call, x, y: call(x, y)[1])


def huggingface_step(config: Config, device: torch.device, next_batch: NextBatch) -> StepFunction:
    """GPT2LMHeadModel, compiled, under autocast."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"--against hf needs transformers ({error}); pip install transformers") from None
    shape = transformers.GPT2Config(
        vocab_size=config.model.vocab_size,
        n_positions=config.data.max_seq_len,
        n_embd=config.model.hidden_size,
        n_layer=config.model.num_layers,
        n_head=config.model.num_attention_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    with device:
        model = transformers.GPT2LMHeadModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.max_lr, fused=True)

    def loss(call: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = call(x).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    return _autocast_step(config, device, next_batch, model, optimizer, loss)


def _autocast_step(
    config: Config, device: torch.device, next_batch: NextBatch, model: Any, optimizer: Any, loss_of: Any
) -> StepFunction:
    call = torch.compile(model) if config.engine.compile else model
    enabled = bool(config.engine.use_amp)
    torch.set_float32_matmul_precision("high")

    def step(_: int) -> Stepped:
        tokens, targets = (tensor.to(device, non_blocking=True) for tensor in next_batch()[:2])
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            loss = loss_of(call, tokens, targets)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Stepped(loss.detach(), grad_norm)

    return step


def time_steps(step: StepFunction, device: torch.device, warmup: int, steps: int) -> Times:
    began_s = time.perf_counter()
    last = step(0)
    last.loss.item()
    first_s = time.perf_counter() - began_s
    warmup = max(warmup, STEPS_BEFORE + 1)  # recording a step is not timed
    for number in range(1, warmup):
        step(number)
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for number in range(steps):
            last = step(warmup + number)
            marks[number + 1].record()
        marks[-1].synchronize()
        times = [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]
    else:
        times = []
        for number in range(steps):
            began_s = time.perf_counter()
            last = step(warmup + number)
            times.append(time.perf_counter() - began_s)
    return Times(times, first_s, last.loss.item(), last.grad_norm.item())


def measure(
    name: str, size: str, config: Config, process: Process, peer_path: Path, warmup: int, steps: int
) -> Measured:
    device = process.device
    contenders: dict[str, Callable[[NextBatch], StepFunction]] = {
        "fourfold": lambda batches: our_step(config, process, batches),
        "nanogpt": lambda batches: nanogpt_step(config, device, batches, peer_path),
        "hf": lambda batches: huggingface_step(config, device, batches),
    }
    with open_batches(config, device) as next_batch:
        times = time_steps(contenders[name](next_batch), device, warmup, steps)
    batch, seq_len = config.global_.global_batch_size, config.data.max_seq_len
    step_s = statistics.median(times.step_s)
    flops_per_s = training_flops_per_token(config.model, seq_len) * batch * seq_len / step_s
    lower = config.engine.amp_dtype if name == "fourfold" else "bfloat16"
    return Measured(
        name,
        size,
        lower if config.engine.use_amp else "float32",
        batch,
        count_parameters(config.model),
        batch * seq_len / step_s,
        1000 * step_s,
        1000 * percentile(times.step_s, 10),
        1000 * percentile(times.step_s, 90),
        flops_per_s / 1e12,
        flops_per_s / device_peak_flops(device),
        memory_gib(device),
        times.first_s,
        finite(times.last_loss),
        finite(times.last_grad_norm),
    )


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[round((len(values) - 1) * percent / 100)]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
