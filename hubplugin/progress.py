"""Progress for users: bars on a terminal, and occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hubplugin.vectors import Progress as ProgressCallback

LINE_SECONDS = 10.0
"""The time between two lines: a log stays short, but shows that the job is running."""


@contextmanager
def lines(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[ProgressCallback]:
    """Yield a callback that reports progress in lines, for a log.

    The first line names the work, later ones follow every `LINE_SECONDS`, and the last
    one gives the total time. A job without any work reports nothing.

    Args:
        say: The function that receives each line.
        clock: The function that returns the time in seconds.
    """
    start = clock()
    last_report: float | None = None

    def progress(work: str, done: int, total: int) -> None:
        nonlocal last_report
        if last_report is None:
            say(f"{work} ...")
        elif clock() - last_report < LINE_SECONDS:
            return
        else:
            say(f"{work}: {done:,} of {total:,}" if total else f"{work}: {done:,}")
        last_report = clock()

    yield progress
    if last_report is not None:
        say(f"took {clock() - start:.0f} s")


@contextmanager
def bars(console: Console | None = None) -> Iterator[ProgressCallback]:
    """Yield a callback that draws bars with the time left, on stderr or `console`.

        with bars() as progress:
            hubplugin.fit(gallery, bank, compute=hubplugin.Compute(progress=progress))

    Bars of finished work disappear. Without a terminal, nothing is drawn.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = console or Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as display:
        tasks: dict[str, TaskID] = {}

        def progress(work: str, done: int, total: int) -> None:
            if work not in tasks:
                # Hide the bars of earlier work.
                for task in tasks.values():
                    display.update(task, visible=False)
                tasks[work] = display.add_task(work, total=total or None)
            display.update(
                tasks[work], completed=done, total=total or None, visible=True
            )

        yield progress
