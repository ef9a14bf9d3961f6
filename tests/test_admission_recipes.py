"""The recipes of docs/admission.md run as they stand there: `conn=` in SQLAlchemy's and in Django's transactions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import run_script

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "admission.md"
Sql = Callable[..., list[tuple[Any, ...]]]

SETUP = """
import sys
from doorbell_postgres import MessageBus
dsn, outcome = sys.argv[1:]
bus = MessageBus(dsn)
(message,) = bus.catch_up("worker")
"""
DJANGO = """
import django.conf, psycopg.conninfo
given = psycopg.conninfo.conninfo_to_dict(dsn)
django.conf.settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": given["dbname"], "USER": given.get("user", ""),
    "PASSWORD": given.get("password", ""), "HOST": given.get("host", ""), "PORT": given.get("port", "")}})
"""


def recipe(name: str) -> str:
    found = re.search(rf"^```python {name}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"docs/admission.md shows no recipe for {name}"
    return found[1]


@pytest.mark.parametrize("outcome", ["commit", "roll back"])
@pytest.mark.parametrize("name", ["sqlalchemy", "django"])
def test_a_recipe_commits_the_marker_with_the_applications_row_or_neither(dsn: str, sql: Sql, name: str, outcome: str) -> None:
    sql("create table job (event bigint)")
    sql("select doorbell.subscribe('worker', 'events')")
    sql("select doorbell.post('events', 'b', 'ci', headers => '{\"a\": \"b\"}')")
    text = recipe(name)
    if outcome == "roll back":
        # It fails behind everything that it does and before its commit.
        text = re.sub(r"^( *)(turn\.finish\(.*\))$", r"\1\2; 1 / 0", text, flags=re.M)
        indented = re.sub("^", "    ", text, flags=re.M)
        text = f"try:\n{indented}\n    sys.exit('not rolled back')\nexcept ZeroDivisionError:\n    pass\n"
    done = run_script(SETUP + (DJANGO if name == "django" else "") + text, dsn, outcome)
    assert done.returncode == 0, done.stderr
    committed = outcome == "commit"
    assert sql("select event from job") == [(1,)] * committed
    assert sql("select state from doorbell.turns") == [("finished",)] * committed
    assert sql("select doorbell.acked_seq('worker', 'events')") == [(int(committed),)]


def test_djangos_connection_posts_and_reads_originals(dsn: str, sql: Sql) -> None:
    """Its connection loads jsonb as text and binds on the client's side."""
    sql("select doorbell.subscribe('worker', 'events')")
    sql("select doorbell.post('events', 'b', 'ci')")
    text = """
from django.db import connection, transaction
with transaction.atomic():
    connection.ensure_connection()
    conn = connection.connection
    turn = bus.admit("worker", message, conn=conn)
    at = turn.reserve("mail", conn=conn)
    first = turn.post("answers", "100 % of it", correlation_id="a", headers={"re": "x"}, conn=conn)
    again = turn.post("answers", "other", correlation_id="a", conn=conn)
    assert (again, dict(again.headers)) == (first, {"re": "x"}), again
    keyed = [bus.post("answers", body, sender="worker", idempotency_key="k", headers={"a": "b"}, conn=conn) for body in "12"]
    assert keyed[0] == keyed[1] and dict(keyed[1].headers) == {"a": "b"}
    with turn.step("s", conn=conn) as step:
        assert step.pending
    assert turn.reserve("mail", conn=conn) == at
    turn.fail("no", notice_to="answers", conn=conn)
"""
    done = run_script(SETUP + DJANGO + text, dsn, "commit")
    assert done.returncode == 0, done.stderr
    assert sql("select state, posts from doorbell.turns") == [("failed", 1)]


# The example runs itself again for each session.
TEAMMATE = "import runpy, sys; sys.argv = [{path!r}, *sys.argv[1:]]; runpy.run_path({path!r}, run_name='__main__')"


@pytest.mark.parametrize(
    "points",
    [[], *(pytest.param(points, marks=pytest.mark.slow) for points in (
        ["before-admit"], ["inside-record"], ["inside-dispatch"], ["before-finish"], ["before-model"], ["after-model"],
        ["after-reserve", "between-steps", "after-post", "after-model"]))],
    ids=lambda points: " ".join(points) or "default",
)  # fmt: skip
def test_the_teammates_answer_once_wherever_they_are_killed(dsn: str, points: list[str]) -> None:
    arguments = [argument for point in points for argument in ("--crash-at", point)]
    done = run_script(TEAMMATE.format(path=str(ROOT / "examples/teammate.py")), "--dsn", dsn, *arguments, within=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nproof ") == 5
    assert done.stdout.count(" KILLED ") == (len(points) or 2)
