"""A program written against the SQLite reference sees the same here, to the letter, after one changed import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.processes import plain_environment

HERE = Path(__file__).parent / "drop_in"
EXPECTED = (HERE / "drop_in.expected").read_text(encoding="utf-8")


def printed(*args: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, HERE / "drop_in.py", "doorbell_postgres", *args],
        env=plain_environment(PYTHONIOENCODING="utf-8", **env),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_of_the_reference_prints_the_same_on_a_dsn(dsn: str) -> None:
    assert printed(dsn) == EXPECTED


def test_a_program_of_the_reference_prints_the_same_in_memory() -> None:
    assert printed(":memory:") == EXPECTED


def test_a_program_of_the_reference_prints_the_same_with_no_argument() -> None:
    assert printed() == EXPECTED


def test_a_program_of_the_reference_prints_the_same_on_the_dsn_of_the_environment(dsn: str) -> None:
    assert printed(DOORBELL_DSN=dsn) == EXPECTED
