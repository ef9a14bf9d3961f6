"""What comes out: a table for people, JSON for programs, and the tables of docs/performance.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.harness import Breakdown, Result, Row, Target

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
COLUMNS = ("measure", "floor", "ours", "ratio", "target", "ok")


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{shown}{unit}" if unit.startswith("/") or not unit else f"{shown} {unit}"


def _target(target: Target | None) -> str:
    if target is None:
        return ""
    return {"at_least": "≥ {:g}", "at_most": "≤ {:g} ×", "within": "at most {:g}"}[target.kind].format(target.bound)


def cells(row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: "yes", False: "NO"}[row.ok]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, number(row.floor, row.unit), number(row.ours, row.unit), ratio, _target(row.target), verdict


def table(results: Iterable[Result]) -> str:
    """The table for a terminal, with notes below their rows and breakdowns at the end."""
    rows = [result for result in results if isinstance(result, Row)]
    body = [cells(row) for row in rows]
    widths = [max(len(line[column]) for line in (COLUMNS, *body)) for column in range(len(COLUMNS))]

    def padded(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()

    out = [padded(COLUMNS), padded(["-" * width for width in widths])]
    for row, line in zip(rows, body, strict=True):
        out.append(padded(line))
        if row.note:
            out.append(f"    {row.note}")
    for result in results:
        if isinstance(result, Breakdown):
            out += ["", f"{result.name}: {number(result.whole)} ms"]
            out += [f"  {part:<70} {number(spent):>8} ms  {spent / result.whole:4.0%}" for part, spent in result.parts]
            out += [f"    {result.note}"] if result.note else []
    return "\n".join(out)


def as_json(where: dict[str, Any], results: Iterable[Result]) -> dict[str, Any]:
    rows, breakdowns = [], []
    for result in results:
        if isinstance(result, Row):
            rows.append({**asdict(result), "ratio": result.ratio, "ok": result.ok})
        else:
            breakdowns.append(asdict(result))
    return {"machine": where, "rows": rows, "breakdowns": breakdowns}


# ---------------------------------------------------------------------------------------------------------------------
# docs/performance.md


def markdown(where: dict[str, Any], results: Sequence[Result]) -> str:
    out = [f"Measured on {where['date']}:", "", *(f"- {line}" for line in machine.lines(where)), ""]
    rows = [result for result in results if isinstance(result, Row)]
    if rows:
        out += [f"| {' | '.join(COLUMNS)} | beside it |", f"|{'---|' * (len(COLUMNS) + 1)}"]
        out += [f"| {' | '.join((*cells(row), row.note))} |" for row in rows]
    for result in results:
        if isinstance(result, Breakdown):
            out += ["", f"**{result.name}: {number(result.whole)} ms**", "", "| where | ms | share |", "|---|---|---|"]
            out += [f"| {part} | {number(spent)} | {spent / result.whole:.0%} |" for part, spent in result.parts]
            out += ["", result.note] if result.note else []
    return "\n".join(out)


def write(block: str, text: str, page: Path = PAGE) -> None:
    """Put `text` between the markers of that block."""
    before = page.read_text()
    marked = re.compile(rf"(<!-- begin {block}[^>]*-->\n).*?(<!-- end {block} -->)", re.DOTALL)
    after, count = marked.subn(lambda found: f"{found[1]}{text}\n{found[2]}", before)
    if count != 1:
        raise SystemExit(f"{page.name} has {count} places marked '{block}'; it must have one.")
    page.write_text(after)
