"""Randomness without state: a value is a hash of what it is for. Hidden dropout and initial weights use it.

The same (seed, place) gives the same value on every layout, device and restart, so nothing random has to be saved.
Integers wrap on purpose: torch has no unsigned arithmetic worth using, and two's complement gives the same bits.
"""

import hashlib

import torch

# Odd 64-bit multipliers (SplitMix64) and 32-bit ones (from a search for low-bias integer hashes), as signed numbers.
_M1 = 0xBF58476D1CE4E5B9 - 2**64
_M2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_N1 = 0x7FEB352D
_N2 = 0x846CA68B - 2**32


def key_of(*parts: object) -> int:
    """A signed 64-bit key for any few words and numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on an int64 tensor, in place: every input bit reaches every output bit."""
    x = x.add_(_GOLDEN)
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _M1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _M2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def mix32(x: torch.Tensor) -> torch.Tensor:
    """Two rounds of multiply and shift on an int32 tensor, in place; the high bits are the best."""
    x *= _N1
    x ^= (x >> 15) & 0x1FFFF
    x *= _N2
    return x


def bits32(rows_64: torch.Tensor, columns: range) -> torch.Tensor:
    """32 random bits for each (row, column), as int32, with one more dim than `rows_64`.

    The strong 64-bit hash runs once per row; an element then costs two 32-bit multiplications, which vectorise. That is
    what keeps this cheap without a fused kernel. Columns never meet a 64-bit constant: Triton's indices have 32 bits.
    """
    places = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=rows_64.device)
    rows = mix64(rows_64).to(torch.int32)
    return mix32(rows.unsqueeze(-1) ^ mix32(places + 1))


def bernoulli_btd(keys_b: torch.Tensor, site: int, positions_t: torch.Tensor, width: int, p: float) -> torch.Tensor:
    """A bool mask of shape (b, t, width), True with probability 1 - p."""
    rows_bt = mix64(keys_b + site)[:, None] + positions_t
    return bits32(rows_bt, range(width)) >= round(p * 2**32) - 2**31


def normal_(out: torch.Tensor, key: int, std: float, rows: range, columns: range) -> torch.Tensor:
    """Fill `out` with the given block of a virtual matrix of N(0, std) values.

    An element's value depends on the key and its place in the whole matrix alone (Box-Muller on the high 24 bits of two
    hashes), so a rank can draw just its shard.
    """
    step = max(1, 2**20 // max(1, len(columns)))  # about 1M elements at a time: scratch memory stays in cache
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        places_r = torch.arange(rows.start + first, rows.start + last, device=out.device)
        high, low = (bits32(mix64(places_r ^ key ^ half), columns) for half in (0, 1 << 62))
        radius = ((high >> 8) + (2**23 + 1)).float().mul_(2.0**-24).log_().mul_(-2.0).sqrt_()
        angle = (low >> 8).float().mul_(2.0 * torch.pi * 2.0**-24).cos_()
        torch.mul(radius, angle, out=out[first:last]).mul_(std)
    return out
