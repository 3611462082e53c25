"""What a device can do at most, by the name it reports. Vendors' dense figures, in FLOP/s, for MFU."""

import re

BF16_PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L4": 121e12,
    "V100": 125e12,
}


def peak_flops(device_name: str) -> float | None:
    """None for a device that is not in the table: measure it instead."""
    words = re.split(r"[ -]", device_name)
    return next((flops for name, flops in BF16_PEAK_FLOPS.items() if name in words), None)
