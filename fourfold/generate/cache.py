"""Keys and values of the tokens already seen, so that each new token costs one position and not all of them."""

import torch

from fourfold.config.schema import Model


class Cache:
    """Room for `capacity` tokens of every layer, allocated once."""

    def __init__(
        self, model: Model, batch: int, capacity: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        width = model.hidden_size // model.num_attention_heads
        shape = (model.num_layers, batch, model.num_attention_heads, capacity, width)
        self.length = 0
        self.num_layers = model.num_layers
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)

    def extend(self, layer: int, k_bhtk: torch.Tensor, v_bhtk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' keys and values and return those of all tokens so far."""
        end = self.length + k_bhtk.shape[2]
        self.keys[layer, :, :, self.length : end] = k_bhtk
        self.values[layer, :, :, self.length : end] = v_bhtk
        if layer == self.num_layers - 1:  # all layers have seen the tokens now
            self.length = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
