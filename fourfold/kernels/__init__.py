"""Own kernels for GPUs, each where it wins by measurement (docs/speed.md), beside the plain version of the function.

The plain version is the reference of the tests, and what runs on a CPU. Triton's code lies in code.py alone, which is
imported where Triton is installed.
"""
