"""What the documentation shows is so: its programs run as pasted, its commands, files and links exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import doorbell_postgres
from doorbell_postgres import cli, migrate
from support import run_script

ROOT = Path(__file__).resolve().parents[1]
# The package and its migrations may be installed elsewhere, with the sources out of reach.
PACKAGE = Path(doorbell_postgres.__file__).parent
ELSEWHERE = {"src/doorbell_postgres": PACKAGE, "migrations": migrate.directory()}

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(read(page)) if language in languages]


def prose(page: Path) -> str:
    return BLOCK.sub("", read(page))


def at(path: str) -> Path:
    """Where a path of the checkout is, also where the package is installed."""
    for prefix, place in ELSEWHERE.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return place / path[len(prefix) :].lstrip("/")
    return ROOT / path


# -- programs ---------------------------------------------------------------------------------------------------------


def test_the_readmes_programs_run_as_pasted_and_print_what_it_shows(dsn: str, sql: Callable[..., Any]) -> None:
    """In the order of the page, on one database, as somebody would who pastes all of it."""
    found = BLOCK.findall(read(README))
    shown = 0
    for (language, text), (after, output) in zip(found, [*found[1:], ("", "")], strict=True):
        if language == "sql":
            sql(text)
        elif language == "python":
            done = run_script(text, env={"DOORBELL_DSN": dsn})
            assert done.returncode == 0, done.stderr
            if after == "text":
                assert done.stdout == output
                shown += 1
    assert shown == len(blocks(README, "text")) >= 2, "a text block is the output of the Python block before it"


def test_the_second_run_of_the_readmes_sessions_prints_nothing(dsn: str) -> None:
    sessions = [text for text in blocks(README, "python") if "MessageBus()" in text]
    assert len(sessions) == 3
    for session in sessions:
        runs = [run_script(session, env={"DOORBELL_DSN": dsn}) for _ in range(2)]
        assert [done.returncode for done in runs] == [0, 0]
        assert (runs[0].stdout != "", runs[1].stdout) == (True, "")


@each_page
def test_sql_of_the_docs_runs(page: Path, sql: Callable[..., Any]) -> None:
    if page.name == "runbook.md":
        pytest.skip("tests/test_runbook.py runs it, each query on a database in its state")
    for text in blocks(page, "sql"):
        sql(text)


def test_the_demo_says_what_the_readme_shows_of_it() -> None:
    shown = next(text for language, text in BLOCK.findall(read(README)) if not language and "session 1" in text)
    done = run_script(f"import runpy; runpy.run_path({str(ROOT / 'examples/two_agents.py')!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of shell blocks, without comments, and those that the prose names in backticks."""
    for text in blocks(page, "sh"):
        for line in text.splitlines():
            if words := line.partition("#")[0].split():
                yield words
    for span in re.findall(r"`((?:make|doorbell) [^`\n]+)`", prose(page)):
        yield span.split()


@each_page
def test_commands_of_the_docs_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z]+):", read(ROOT / "Makefile"), re.M)
    for words in commands(page):
        match words:
            case ["make", *wanted]:
                assert {w for w in wanted if "=" not in w and not w.startswith("-") and '"' not in w} <= set(targets), words
            case ["doorbell", "--version"]:
                pass
            case ["doorbell", name, *arguments]:
                assert name in cli.main.commands, words
                said = CliRunner().invoke(cli.main, [name, "--help"]).output
                assert all(option in said for option in arguments if option.startswith("--")), words
            case ["uv", "run", "python", path, *_] | ["python", path, *_] | [".venv/bin/python", path, *_] if path != "-m":
                assert at(path).is_file(), words
            case ["uv", "run", "pytest", *_] | ["python", "-m", *_] | [".venv/bin/python", "-m", *_]:
                pass
            case ["docker", "compose", *_]:
                assert (ROOT / "docker-compose.yml").is_file()
            case ["pip", "install", what, *_]:
                extras = re.fullmatch(r"'(?:doorbell-postgres|\.)\[([a-z,]+)\]'", what)
                assert extras, words
                assert set(extras[1].split(",")) <= {"binary", "embedded", "metrics"}, words
            case ["export", assignment]:
                assert assignment.startswith("DOORBELL_"), words
            case ["bash", path, *_]:
                assert at(path).is_file(), words
            case [assignment, *_] if assignment.startswith("DOORBELL_"):
                pass
            case _:
                pytest.fail(f"{page.name} shows a command that no test knows: {' '.join(words)}")


NEEDS_MORE = {"grant", "import", "metrics"}  # a role, a file, a port: their own tests have these


@pytest.mark.parametrize("heading", ["Waiting from a harness", "Operating it"])
def test_the_readmes_commands_run_as_pasted(heading: str, dsn: str) -> None:
    section = read(README).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = next(text for language, text in BLOCK.findall(section) if language == "sh").splitlines()
    pasted = [line for line in lines if line.split()[1] not in NEEDS_MORE]
    assert len(pasted) >= 3
    run = "import shlex, sys; from doorbell_postgres.cli import main; main(shlex.split(sys.argv[1], comments=True)[1:])"
    for line in pasted:
        done = run_script(run, line, env={"DOORBELL_DSN": dsn})
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def test_every_decision_is_listed() -> None:
    index = ROOT / "docs" / "decisions" / "README.md"
    listed = re.findall(r"^(\d+)\. \[([^\]]+)\]\((\d{4})-[^)]+\.md\)", read(index), re.M)
    assert [int(number) for number, _, _ in listed] == list(range(1, len(listed) + 1))
    assert [f"{int(number):04}" for number, _, _ in listed] == [file for _, _, file in listed]
    assert sorted(file for _, _, file in listed) == sorted(page.name[:4] for page in index.parent.glob("0*.md"))


# -- files and links --------------------------------------------------------------------------------------------------


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert at(str(file.relative_to(ROOT))).exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in [slug(heading) for heading in re.findall(r"^#+ (.+)$", read(file), re.M)], target


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each_page
def test_files_that_the_docs_name_exist(page: Path) -> None:
    for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|sql|md|toml|yml|txt|expected))`", prose(page)):
        places = [at(name), page.parent / name, PACKAGE / name, at(f"migrations/{name}"), at(f"tests/{name}")]
        assert any(place.is_file() for place in places), f"{page.name} names {name}"
    for name in re.findall(r"`((?:src|docs|migrations|examples|tests|\.ci)/[\w./-]*)`", prose(page)):
        assert at(name.rstrip("/")).exists(), f"{page.name} names {name}"


# -- the architecture page --------------------------------------------------------------------------------------------


def test_the_architecture_page_lists_every_table_and_column(sql: Callable[..., Any]) -> None:
    section = read(ARCHITECTURE).partition("## Tables")[2].partition("\n#")[0]
    shown = {name: re.findall(r"`(\w+)`", columns) for name, columns in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.M)}
    found: dict[str, list[str]] = {}
    for table, column in sql(
        "select c.relname, a.attname from pg_class as c join pg_attribute as a on a.attrelid = c.oid"
        " where c.relnamespace = 'doorbell'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped"
        " order by c.relname, a.attnum"
    ):
        found.setdefault(table, []).append(column)
    assert shown == found


def test_the_architecture_page_lists_every_module() -> None:
    named = set(re.findall(r"`(\w+\.py)`", read(ARCHITECTURE)))
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert modules <= named


def test_the_architecture_page_lists_every_log_event() -> None:
    page = read(ARCHITECTURE)
    events = [event for path in PACKAGE.rglob("*.py") for event in log_events(path)]
    assert events
    assert [event for event in events if f"`{event}`" not in page] == []


def log_events(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(read(path))):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "_log")), args=[ast.Constant(value=str(text)), *_]):
                yield text


def test_the_architecture_page_names_the_keys_in_use() -> None:
    assert f"`0x{migrate.GUARD >> 56:x}`" in read(ARCHITECTURE)
