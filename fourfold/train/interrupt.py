"""Being asked to stop. The first SIGINT or SIGTERM is remembered and answered between two steps; the second SIGINT
stops at once.
"""

import signal
from types import FrameType
from typing import Self

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupt:
    """Catches the signals for the length of a `with` block. `signal` is the one that came, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
