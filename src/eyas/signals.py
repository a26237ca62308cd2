"""Signals that ask a long job to end."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def on_signals(numbers: tuple[int, ...], act: Callable[[int], None]) -> Iterator[None]:
    """Call act(number) at the first of these signals; a second one does what it did before.

    One that is ignored (SIGHUP under nohup) stays ignored, and outside the main thread nothing changes.
    """
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: Any) -> None:
        restore()
        act(number)

    with suppress(ValueError):  # not in the main thread
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
