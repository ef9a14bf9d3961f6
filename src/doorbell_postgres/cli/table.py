"""Tables: drawn for a terminal, plain tab-separated lines for a pipe; no control character in either, whatever the content."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from doorbell_postgres.cli import output
from doorbell_postgres.wakeline import sanitize

if TYPE_CHECKING:
    from rich.table import Table

# A cell in a pipe is not cut for looks, only kept from running away.
CELL_LEN = 1_000
NARROWEST = 40


@dataclass(frozen=True)
class Column:
    """A column: its title, whether its cells are numbers, and how much of the width it takes of what is left over."""

    title: str
    kind: Literal["text", "number"] = "text"
    ratio: int | None = None


def show(columns: Sequence[Column], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Print the rows to stdout. On a terminal they are fitted to its width; in a pipe they are complete, title left out."""
    for line in lines(columns, rows, title=title, width=width()):
        output.human(line)


def width() -> int | None:
    """Of the terminal that stdout is, or None when it is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def lines(
    columns: Sequence[Column], rows: Sequence[Sequence[object]], *, title: str | None = None, width: int | None
) -> list[str]:
    if width is None:
        shown = [[cell(value, raw=True) for value in row] for row in rows]
        return ["\t".join(column.title for column in columns), *("\t".join(row) for row in shown)]
    return drawn(table(columns, rows, title=title), width)


def table(columns: Sequence[Column], rows: Sequence[Sequence[object]], *, title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1))
    for column in columns:
        if column.kind == "number":
            result.add_column(column.title, justify="right", no_wrap=True)
        else:
            result.add_column(column.title, overflow="ellipsis", no_wrap=column.ratio is None, ratio=column.ratio)
    for row in rows:
        result.add_row(*(Text(cell(value)) for value in row))
    return result


def drawn(renderable: Any, width: int) -> list[str]:
    """What rich makes of it at this width, as lines without colours or other escapes."""
    from rich.console import Console

    paper = io.StringIO()
    Console(file=paper, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(renderable)
    return [line.rstrip() for line in paper.getvalue().strip("\n").splitlines()]


def cell(value: object, *, raw: bool = False) -> str:
    """The value as one printable line. Large numbers are grouped for people, and left alone for programs."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if raw else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if raw else f"{value:,.1f}"
    return sanitize(str(value), max_len=CELL_LEN)


def size(count: int | None) -> str:
    """Bytes in a unit that people read."""
    if count is None:
        return ""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
