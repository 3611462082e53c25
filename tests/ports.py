"""Ports for servers that a test is about to start."""

import random
import socket

# Below those that the kernel gives to connections by itself: between looking and listening, one of them may be taken.
RANGE = range(10000, 20000)


def free_port() -> int:
    while True:
        port = random.choice(RANGE)
        with socket.socket() as free:
            try:
                free.bind(("", port))
                return port
            except OSError:
                continue
