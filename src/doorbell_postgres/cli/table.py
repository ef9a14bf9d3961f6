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
    """A column: its title, whether its cells are numbers, its share of the width that is left over, and whether what does not
    fit goes on in the next line instead of being cut."""

    title: str
    kind: Literal["text", "number"] = "text"
    ratio: int | None = None
    wrap: bool = False


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
    return drawn(table(columns, rows, title=title, width=width), width)


def table(columns: Sequence[Column], rows: Sequence[Sequence[object]], *, title: str | None, width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    result = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1))
    for column, its_width in zip(columns, _widths(columns, cells, width), strict=True):
        result.add_column(
            column.title,
            justify="right" if column.kind == "number" else "left",
            overflow="fold" if column.wrap else "ellipsis",
            no_wrap=not column.wrap,
            width=its_width,
        )
    for row in cells:
        result.add_row(*map(Text, row))
    return result


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """What each column needs; where that is too much, those with a ratio share what the others leave."""
    from rich.cells import cell_len

    needed = [max(cell_len(text) for text in (column.title, *(row[n] for row in cells))) for n, column in enumerate(columns)]
    left = width - 2 - 3 * (len(columns) - 1) - sum(n for n, column in zip(needed, columns, strict=True) if column.ratio is None)
    shares = {n: column.ratio for n, column in enumerate(columns) if column.ratio is not None}
    while shares and sum(needed[n] for n in shares) > left:
        fits = [n for n in shares if needed[n] <= left * shares[n] // sum(shares.values())]
        if not fits:  # all that are left want more than their share
            for n, ratio in shares.items():
                needed[n] = max(3, left * ratio // sum(shares.values()))
            break
        for n in fits:
            left -= needed[n]
            del shares[n]
    return needed


def drawn(renderable: Any, width: int) -> list[str]:
    """What rich makes of it at this width, as lines without colours or other escapes."""
    from rich.console import Console

    paper = io.StringIO()
    Console(file=paper, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(renderable)
    lines = [line.rstrip() for line in paper.getvalue().splitlines()]
    return lines[next((n for n, line in enumerate(lines) if line), 0) : -1 if lines and not lines[-1] else None]


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
