"""How sync calls are sent: what psycopg's own way would give, also where a call is interrupted or its server goes away."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

from doorbell_postgres import MessageBus
from doorbell_postgres.direct import Direct
from doorbell_postgres.listener import Wire
from support.processes import run_script

Sql = Callable[..., list[tuple[Any, ...]]]
SLEEP = "select pg_sleep(%s::float8)"
Connect = Callable[..., psycopg.Connection[Any]]


@pytest.fixture
def direct(dsn: str) -> Iterator[Direct]:
    with Direct.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("text", ["", "plain", "Grüße, 世界 🔔", "a\nb\\c'd\"", "x" * 100_000, None]),
        ("bigint", [0, -1, 2**63 - 1, -(2**63), None]),
        ("integer", [0, 2**31 - 1, -(2**31)]),
        ("boolean", [True, False, None]),
        ("float8", [0.0, -0.0, 0.1, 1e-300, 1e300, 1764516123.123456, float("inf"), float("-inf"), None]),
        ("jsonb", ['{"a": [1, null, "é"]}', "{}", None]),
    ],
)
def test_values_come_through_as_they_are(direct: Direct, kind: str, values: list[Any]) -> None:
    """The first time by psycopg, then prepared."""
    query = f"select %s::{kind}, 7, %s::text, %s::{kind}"
    for value in [values[0], *values, *values]:
        text = None if value is None else str(value)
        expected = direct.execute(query, [value, text, value]).fetchall()
        assert direct.send(query, [value, text, value]) == expected


def test_no_rows_many_rows_and_rows_after_an_error(direct: Direct) -> None:
    query = "select n, 100 / n from generate_series(%s::bigint, %s::bigint) as n"
    for _ in range(3):
        assert direct.send(query, [1, 0]) == []
        assert direct.send(query, [1, 5000])[-1] == (5000, 0)
        with pytest.raises(errors.DivisionByZero, match="division by zero"):
            direct.send(query, [0, 5])
        assert direct.send(query, [2, 2]) == [(2, 50)]


def test_what_the_socket_does_not_take_at_once(dsn: str) -> None:
    with MessageBus(dsn) as bus:
        bus.subscribe("worker", "events")
        bodies = [letter * 12_000_000 for letter in "abcd"]
        for body in bodies:
            bus.post("events", body, sender="ci")
        assert [m.body == body for m, body in zip(bus.unacked("worker"), bodies, strict=True)] == [True] * 4


def test_a_server_that_goes_away_under_a_call(direct: Direct) -> None:
    query = "select pg_terminate_backend(pg_backend_pid()), pg_sleep(%s::float8)"
    for _ in range(2):
        direct._prepared_name(query)
    with pytest.raises(errors.AdminShutdown, match=r"^terminating connection"):
        direct.send(query, [10.0])
    assert direct.closed


def test_statements_that_the_user_has_deallocated_are_prepared_again(dsn: str) -> None:
    with MessageBus(dsn, max_size=1) as bus:
        for n in range(1, 7):
            assert bus.post("events", "b", sender="ci").seq == n
            if n == 4:
                with bus.transaction() as conn:
                    conn.execute("deallocate all")


@pytest.mark.parametrize("where", ["dsn", "environment"])
def test_another_client_encoding_changes_nothing(dsn: str, sql: Sql, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The first calls on a connection went by psycopg in that encoding, the others in UTF-8: a key was two keys."""
    if where == "dsn":
        dsn = make_conninfo(dsn, client_encoding="latin1")
    else:
        monkeypatch.setenv("PGCLIENTENCODING", "latin1")
    with MessageBus(dsn, max_size=1) as bus:
        bus.subscribe("wörker", "events")
        seqs = [bus.post("events", "Grüße 世界", sender="ü", idempotency_key="schlüssel").seq for _ in range(5)]
        assert seqs == [1] * 5
        assert [bus.post("events", f"Grüße {n}", sender="ü").body for n in range(5)] == [f"Grüße {n}" for n in range(5)]
        assert [m.body for m in bus.catch_up("wörker")] == ["Grüße 世界", *(f"Grüße {n}" for n in range(5))]
    monkeypatch.delenv("PGCLIENTENCODING", raising=False)
    assert sql("select distinct sender from doorbell.message") == [("ü",)]


def test_a_call_that_is_interrupted_ends_its_query(dsn: str, sql: Sql, connect: Connect) -> None:
    """Ctrl-C while a post waits for its channel: nothing goes on waiting, nothing is posted, and the bus can be used again."""
    with connect() as holder:
        sql("select doorbell.post('events', 'b', 'ci')")
        holder.execute("select from doorbell.channel for update")
        done = run_script(
            """
import signal, sys, psycopg
from doorbell_postgres import MessageBus

with MessageBus(sys.argv[1], max_size=1, lock_timeout=60) as bus:
    for n in range(3):  # the third is prepared
        bus.post("elsewhere", "b", sender="ci")
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    for n in range(3):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            bus.post("events", "b", sender="ci")
        except KeyboardInterrupt:
            pass
        else:
            sys.exit("posted")
        with psycopg.connect(sys.argv[1]) as other:
            left = other.execute(
                "select query from pg_stat_activity where application_name = 'doorbell' and state = 'active'"
            ).fetchall()
        if left:
            sys.exit(f"left: {left}")
        bus.post("elsewhere", "b", sender="ci")
""",
            dsn,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert sql("select doorbell.head('events'), doorbell.head('elsewhere')") == [(1, 6)]


def interrupt_with_the_send(direct: Direct) -> None:
    """Ctrl-C as the call that sends returns: the query runs, and nobody has begun to wait for it."""
    for _ in range(2):
        name = direct._prepared_name(SLEEP)

    def interrupted(*args: Any) -> None:
        direct.pgconn.send_query_prepared(*args)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        direct._answer(interrupted, name, [b"60"])


def test_ctrl_c_that_comes_with_the_send_ends_the_query(direct: Direct, sql: Sql) -> None:
    interrupt_with_the_send(direct)
    pid = direct.info.backend_pid
    assert sql("select count(*) from pg_stat_activity where pid = %s and state = 'active'", pid) == [(0,)]
    assert direct.send(SLEEP, [0.0]) == direct.send("select %s::text", [""]) == [("",)]


def test_a_cancel_that_comes_too_soon_is_sent_again(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server forgets one that comes before it has begun with the query."""
    cancel_safe, sent = direct.cancel_safe, []

    def first_is_lost(*, timeout: float) -> None:
        sent.append(timeout)
        if len(sent) > 1:
            cancel_safe(timeout=timeout)

    monkeypatch.setattr(direct, "cancel_safe", first_is_lost)
    interrupt_with_the_send(direct)
    assert len(sent) > 1
    assert direct.send(SLEEP, [0.0]) == direct.send("select %s::text", [""]) == [("",)]


def test_what_is_announced_with_an_answer_is_heard(dsn: str, connect: Connect) -> None:
    """Once it is read, no poll of the socket shows it any more."""
    pulled, rope = socket.socketpair()
    with pulled, rope, Wire.connect(dsn, autocommit=True) as connection:
        connection.rope = rope
        connection.heard = []
        connection.add_notify_handler(lambda note: connection.heard.append(note.payload.encode()))  # as the listener has it
        connection.execute("listen doorbell")
        for n in range(1, 4):
            connection.send("select pg_notify('doorbell', %s::text)", [str(n)])
        assert connection.send("select %s::bigint", [1]) == connection.send("select %s::bigint", [1]) == [(1,)]
        heard = [*connection.heard, *(note.extra for note in iter(connection.pgconn.notifies, None))]
        assert sorted(heard) == [b"1", b"2", b"3"]
        assert connection.heard
        connection.heard.clear()
        for _ in range(3):
            with connect() as other:
                other.execute("notify doorbell, '4'")
            with pytest.raises(errors.DivisionByZero):
                connection.send("select pg_sleep(0.05), 1 / %s::integer", [0])
        assert connection.heard == [b"4"] * 3
