"""docs/failure-modes.md, and the README's rows of it, written from the docstrings of the tests that prove them.

    python tests/matrix.py            print the page
    python tests/matrix.py --write    write it, and put its first rows between the README's markers
    python tests/matrix.py --check    exit 1 when either is another one

A row is a test marked `failure_mode`: the first paragraph of its docstring is what goes wrong elsewhere, the rest is
why it cannot happen here. The files are parsed, never imported: no database, no dependency.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
README = TESTS.parent / "README.md"
PAGE = TESTS.parent / "docs" / "failure-modes.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
SHOWN = 5
# The contract first, then what several processes do to it, then everything else by name of its file.
FIRST = ("test_failure_modes.py", "test_cross_process.py", "test_wakeline.py", "test_postgres_modes.py")


@dataclass(frozen=True)
class Row:
    mode: str
    holds: str
    test: str
    file: str


def rows(tests: Path = TESTS) -> list[Row]:
    """The rows by file, then by place in it. ValueError names the marked tests without both halves of a docstring."""
    found: list[Row] = []
    for path in sorted(tests.glob("test_*.py"), key=_place):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        everywhere = any(isinstance(node, ast.Assign) and _is_mark(node) for node in tree.body)
        for node in _tests(tree):
            if everywhere or any(map(_says_failure_mode, node.decorator_list)):
                mode, _, holds = (ast.get_docstring(node) or "").partition("\n\n")
                found.append(Row(_one_line(mode), _one_line(holds), node.name, path.name))
    halves = [f"{row.file}::{row.test}" for row in found if not row.mode or not row.holds]
    if halves:
        raise ValueError(f"need a docstring (the failure mode, an empty line, why not here): {', '.join(halves)}")
    return found


def _place(path: Path) -> tuple[int, str]:
    return FIRST.index(path.name) if path.name in FIRST else len(FIRST), path.name


def _is_mark(node: ast.Assign) -> bool:
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names == ["pytestmark"] and _says_failure_mode(node.value)


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                yield inner


def _says_failure_mode(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "failure_mode" for n in ast.walk(node))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(found: Sequence[Row], tests: str) -> str:
    lines = ["| What goes wrong elsewhere | What holds here | Test |", "|---|---|---|"]
    lines += [f"| {row.mode} | {row.holds} | [`{row.test}`]({tests}/{row.file}) |" for row in found]
    return "\n".join(lines) + "\n"


def page(found: Sequence[Row]) -> str:
    return (
        "# Failure modes\n\n"
        "<!-- Written from the docstrings of the tests: python tests/matrix.py --write -->\n\n"
        f"{len(found)} of them. Each row is a test.\n\n{table(found, '../tests')}"
    )


def excerpt(found: Sequence[Row]) -> str:
    return (
        f"[All {len(found)} of them](docs/failure-modes.md), each a test. The first {SHOWN}:\n\n{table(found[:SHOWN], 'tests')}"
    )


def has_markers(readme: str) -> bool:
    return readme.count(BEGIN) == readme.count(END) == 1 and readme.index(BEGIN) < readme.index(END)


def updated(readme: str, matrix: str) -> str:
    """The README with `matrix` between its markers."""
    if not has_markers(readme):
        raise ValueError(f"README.md has no place for the matrix: it needs {BEGIN} and, below it, {END}.")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{matrix}\n{END}{after}"


def main(args: list[str]) -> int:
    if args not in ([], ["--write"], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    found = rows()
    if not args:
        print(page(found), end="")
        return 0
    wanted = {PAGE: page(found), README: updated(README.read_text(encoding="utf-8"), excerpt(found))}
    for path, text in wanted.items():
        if args == ["--write"]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is not what the tests say. Run: python tests/matrix.py --write")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
