"""How fast a whole optimizer step is: warm-up, then the median of device-timed steps, on synthetic tokens.

Our own step is the trainer's, not a copy of it. Peers are run from where the user has them; nothing of theirs is here.
"""

import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import layout_of, resolve, with_decay_steps
from fourfold.config.schema import Config
from fourfold.cost.flops import training_flops_per_token
from fourfold.cost.params import count_parameters
from fourfold.data.loader import Batch
from fourfold.errors import ConfigError
from fourfold.mesh.process import Process
from fourfold.optim.adamw import AdamW
from fourfold.optim.scaler import LossScale
from fourfold.parallelize.apply import parallelize
from fourfold.parallelize.precision import has_loss_scale
from fourfold.train.build import Run
from fourfold.train.metrics import device_peak_flops, memory_gib
from fourfold.train.step import train_step

# size -> the preset, and the batch at which it is usually compared on one large GPU
SIZES = {
    "124M": ("gpt2-en", 64),
    "345M": ("gpt3-345M", 64),
    "1.3B": ("gpt3-1.3B", 16),
    "2.7B": ("gpt3-2.7B", 8),
    "6.7B": ("gpt3-6.7B", 4),
}

StepFunction = Callable[[int], Any]
"""Takes the number of the step; one whole update."""


@dataclass(frozen=True)
class Measured:
    name: str
    size: str
    batch: int
    parameters: int
    tokens_per_s: float
    step_ms: float
    mfu: float
    peak_gib: float
    first_step_s: float
    last_loss: float


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
    wrong = problems(config.model_copy(update={"data": config.data.model_copy(update={"input_dir": "-"})}), 1)
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


def our_step(config: Config, process: Process) -> StepFunction:
    layout = layout_of(config, process.world_size)
    parallel = parallelize(config, layout, process.rank, process.device, process.timeout_s)
    optimizer = AdamW(parallel.table(), parallel.named_parameters(), config.optimizer)
    loss_scale = LossScale(config.engine.scale_loss, has_loss_scale(config.engine), process.device)
    run = Run(config, layout, process, None, parallel, optimizer, loss_scale, 0, 1000, None)  # type: ignore[arg-type]
    batch = synthetic_batch(config, process.device)
    return lambda step: train_step(run, batch, step).loss


def nanogpt_step(config: Config, device: torch.device, path: Path) -> StepFunction:
    """As its own train.py does a step: autocast to bfloat16, compiled, fused AdamW, clipping."""
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
    model = theirs.GPT(shape).to(device)
    optimizer = model.configure_optimizers(
        config.optimizer.weight_decay, config.optimizer.max_lr, (0.9, 0.95), device.type
    )
    return _autocast_step(config, device, model, optimizer, lambda call, x, y: call(x, y)[1])


def huggingface_step(config: Config, device: torch.device) -> StepFunction:
    """GPT2LMHeadModel, compiled, under autocast."""
    transformers = importlib.import_module("transformers")
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
    model = transformers.GPT2LMHeadModel(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.max_lr, fused=True)

    def loss(call: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = call(x).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    return _autocast_step(config, device, model, optimizer, loss)


def _autocast_step(config: Config, device: torch.device, model: Any, optimizer: Any, loss_of: Any) -> StepFunction:
    call = torch.compile(model) if config.engine.compile else model
    batch = synthetic_batch(config, device)
    enabled = bool(config.engine.use_amp)
    torch.set_float32_matmul_precision("high")

    def step(_: int) -> torch.Tensor:
        tokens, targets = (tensor.to(device, non_blocking=True) for tensor in batch[:2])
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            loss = loss_of(call, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def time_steps(step: StepFunction, device: torch.device, warmup: int, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step, seconds to the end of the first one, and the last loss."""
    began_s = time.perf_counter()
    step(0).item()
    first_s = time.perf_counter() - began_s
    for number in range(1, warmup):
        step(number)
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for number in range(steps):
            loss = step(warmup + number)
            marks[number + 1].record()
        last_loss = float(loss)
        times = [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]
    else:
        times = []
        for number in range(steps):
            began_s = time.perf_counter()
            last_loss = float(step(warmup + number))
            times.append(time.perf_counter() - began_s)
    return statistics.median(times), first_s, last_loss


def measure(
    name: str, size: str, config: Config, process: Process, peer_path: Path, warmup: int, steps: int
) -> Measured:
    device = process.device
    contenders: dict[str, Callable[[], StepFunction]] = {
        "fourfold": lambda: our_step(config, process),
        "nanogpt": lambda: nanogpt_step(config, device, peer_path),
        "hf": lambda: huggingface_step(config, device),
    }
    step_s, first_s, last_loss = time_steps(contenders[name](), device, warmup, steps)
    batch, seq_len = config.global_.global_batch_size, config.data.max_seq_len
    flops = training_flops_per_token(config.model, seq_len) * batch * seq_len
    return Measured(
        name,
        size,
        batch,
        count_parameters(config.model),
        batch * seq_len / step_s,
        1000 * step_s,
        flops / step_s / device_peak_flops(device),
        memory_gib(device),
        first_s,
        last_loss,
    )
