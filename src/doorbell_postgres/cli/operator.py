"""What the commands of operators share: an `admin` connection, lengths of time, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import click

from doorbell_postgres.admin import Admin
from doorbell_postgres.cli.command import dsn_of, with_units


@contextmanager
def opened(dsn: str | None, *, read_only: bool = False) -> Iterator[Admin]:
    with Admin(dsn_of(dsn), read_only=read_only) as admin:
        yield admin


def length(_: click.Context, __: click.Parameter, value: str | None) -> timedelta | None:
    """A length of time: numbers with units, such as 30d, 12h or 1d12h. A bare one is refused: --keep 30 may mean days."""
    if value is None:
        return None
    seconds = with_units(value)
    if seconds is None:
        raise click.BadParameter(
            f"{value!r} is no length of time; it must be numbers with units s, m, h, d, w, such as 30d or 1d12h."
        )
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise click.BadParameter(f"{value!r} is longer than anything lasts.") from None


@contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr where that is a terminal, and nothing where it is not. Call it with what, how much is done, of how much."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, Any] = {}
    with bar:

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{title}: {what}", total=of)
            bar.update(tasks[what], completed=done, total=of)

        yield tell
