import signal

import pytest

from fourfold.train.interrupt import Interrupt


def test_only_a_second_sigint_stops_at_once_and_the_first_signal_is_remembered() -> None:
    with Interrupt() as interrupt:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
        assert interrupt.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
