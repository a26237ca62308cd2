"""Progress of long work: a rich bar with rate and time left on a terminal, plain lines elsewhere; always on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Advance = Callable[..., None]


@contextlib.contextmanager
def progress(description: str, total: float, unit: str = "it", done: float = 0) -> Iterator[Advance]:
    """Yields `advance(n, note="")`. `done` is what an earlier, interrupted run already did (not counted in the rate)."""
    if sys.stderr.isatty():
        yield from _bar(description, total, unit, done)
    else:
        yield from _lines(description, total, unit, done)


def _bar(description: str, total: float, unit: str, done: float) -> Iterator[Advance]:
    from rich import progress as r
    from rich.console import Console

    start = time.monotonic()
    about, bar, counts = "{task.description:<28}", r.BarColumn(), r.MofNCompleteColumn()
    times = ("{task.fields[rate]}", r.TimeElapsedColumn(), "left", r.TimeRemainingColumn(), "{task.fields[note]}")
    with r.Progress(about, bar, counts, *times, console=Console(stderr=True)) as shown:
        task = shown.add_task(description, total=total, completed=int(done), rate="", note="")
        fresh = 0.0

        def advance(n: float = 1, note: str = "") -> None:
            nonlocal fresh
            fresh += n
            rate = f"{fresh / max(time.monotonic() - start, 1e-9):,.1f} {unit}/s"
            shown.update(task, advance=n, rate=rate, note=note)

        yield advance


def _lines(description: str, total: float, unit: str, done: float) -> Iterator[Advance]:
    start = last = time.monotonic()
    fresh, latest = 0.0, ""

    def line() -> None:
        elapsed = time.monotonic() - start
        rate = fresh / max(elapsed, 1e-9)
        left = (total - done - fresh) / rate if rate > 0 else 0.0
        print(
            f"{description}: {done + fresh:,.0f}/{total:,.0f} {unit}, {rate:,.1f} {unit}/s, "
            f"{elapsed:.0f} s, {max(left, 0):.0f} s left{'  ' + latest if latest else ''}",
            file=sys.stderr,
            flush=True,
        )

    def advance(n: float = 1, note: str = "") -> None:
        nonlocal fresh, last, latest
        fresh += n
        latest = note or latest
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            line()

    yield advance
    line()
