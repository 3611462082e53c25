"""fourfold pretrains GPT models in four dimensions of parallelism on PyTorch's own distributed engine."""

__version__ = "0.1.0"
