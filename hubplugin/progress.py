"""Progress bars for whoever sits at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from hubplugin.vectors import Progress as ProgressCallback


class RateColumn(ProgressColumn):
    """How much is done a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


@contextmanager
def bars(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A `Progress` callback that draws one bar a kind of work, with its rate and the time left, on stderr or `console`.

        with bars() as progress:
            hubplugin.fit(bank, targets=gallery, progress=progress)

    Bars of finished work vanish; nothing is drawn where the output is no terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = console or Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    display.update(task, visible=False)
                tasks[what] = display.add_task(what, total=total or None)
            display.update(tasks[what], completed=done, total=total or None, visible=True)

        yield progress
