"""Who works on a turn reads as alive, whatever becomes of the session that says so: it is dropped, frozen, ended again and
again, or on another server. A rival of another bus asks each time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from doorbell_postgres import calls, watch
from doorbell_postgres.contract import Message
from doorbell_postgres.errors import DatabaseUnavailable
from support import eventually
from support.proxy import Proxy

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]
OpenBus = Callable[..., Any]

HOLDERS = (
    "select l.pid from pg_locks as l where l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and l.granted"
    " and l.database = (select oid from pg_database where datname = current_database()) and l.classid::bigint >> 24 = 84"
)


@pytest.fixture
def messages(bus: Any) -> list[Message]:
    """Those of the channel events; worker is subscribed. The bus has admitted nothing."""
    bus.subscribe("worker", "events")
    return [bus.post("events", f"mention {n}", sender="ci") for n in range(5)]


@pytest.fixture
def admitting(open_bus: OpenBus, proxy: Proxy, messages: list[Message]) -> Any:
    """A bus behind the proxy that has admitted the last message; its listener's connection is the last one there."""
    opened = open_bus(dsn=proxy.dsn, application_name="admitting")
    opened.store.head("events")
    with opened.turn("worker", messages[-1]):
        settle(opened, messages)
    return opened


def settle(admitting: Any, messages: list[Message]) -> None:
    """Admissions that change nothing: after them the bus has no more reason to ask for its token."""
    for _ in range(2):
        assert not admitting.admit("worker", messages[-1]).should_run


@pytest.mark.failure_mode
@pytest.mark.parametrize("how", ["on its own", "in a transaction"])
def test_admission_over_a_session_that_is_gone_without_a_word(
    admitting: Any, bus: Any, proxy: Proxy, messages: list[Message], sql: Sql, connect: Connect, how: str
) -> None:
    """The server has ended the session that says "alive", in a failover or behind a firewall, and its client does not know. It
    goes on admitting; everybody else reads its turns as nobody's, and the work is done twice.

    The database gives no turn to a session that it does not see. The client then takes its token again, and asks again.
    """
    proxy.drop()
    eventually(lambda: not sql(HOLDERS))
    if how == "on its own":
        turn = admitting.admit("worker", messages[0])
    else:
        own = connect()
        turn = admitting.admit("worker", messages[0], conn=own)
        own.commit()
    assert (turn.state, turn.attempt) == ("new", 1)
    assert bus.admit("worker", messages[0]).state == "running"
    turn.finish()
    assert admitting.admit("worker", messages[0]).state == "duplicate"


def test_admissions_while_all_sessions_are_ended_read_as_running(
    admitting: Any, bus: Any, messages: list[Message], sql: Sql
) -> None:
    bus.admit("worker", messages[-1])
    for message in messages[:4]:
        settle(admitting, messages)
        sql("select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'admitting'")
        assert admitting.admit("worker", message).state == "new"
        assert bus.admit("worker", message).state == "running"


def test_a_turn_whose_session_the_server_has_dropped_is_held_again_unasked(
    admitting: Any, bus: Any, proxy: Proxy, messages: list[Message], sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.1)
    turn = admitting.admit("worker", messages[0])
    first = sql(HOLDERS)
    sql("select pg_terminate_backend(%s)", first[0][0])  # the next one beats faster
    second = eventually(lambda: (held := sql(HOLDERS)) not in ([], first) and held)
    proxy.drop()
    eventually(lambda: sql(HOLDERS) not in ([], second))
    assert bus.admit("worker", messages[0]).state == "running"
    turn.finish()


@pytest.mark.failure_mode
def test_admission_while_the_server_keeps_the_frozen_session(
    admitting: Any, bus: Any, proxy: Proxy, messages: list[Message], sql: Sql
) -> None:
    """A connection freezes, and its client makes a new one; the server believes in the old session for half a minute more.
    The new one cannot have the lock that says "alive", and whatever it takes on is unprotected.

    It takes another token, and the old one as soon as that is free: who owns a turn reads as alive before and after.
    """
    early = admitting.admit("worker", messages[0])
    ((frozen,),) = sql(HOLDERS)
    since = admitting.listener.since
    proxy.freeze(since=proxy.established - 1)
    admitting.store.peek(calls.bell_floors("nobody"))  # whoever uses the connection finds that it is dead
    assert admitting.listener.since > since
    late = admitting.admit("worker", messages[1])
    assert (early.state, late.state) == ("new", "new")
    assert (frozen,) in sql(HOLDERS)
    assert [bus.admit("worker", message).state for message in messages[:2]] == ["running", "running"]
    sql("select pg_terminate_backend(%s)", frozen)
    eventually(lambda: len(held := sql(HOLDERS)) == 3 and (frozen,) not in held, what="both tokens, and that of the rival")
    assert [bus.admit("worker", message).state for message in messages[:2]] == ["running", "running"]
    assert admitting.admit("worker", messages[0]).state == "running", "a twin, under another token"
    early.finish()
    late.finish()


@pytest.mark.timing
def test_a_session_that_has_served_is_replaced_at_once_each_time(admitting: Any, sql: Sql) -> None:
    """Without bells nothing else tells the listener that its last connection was a good one."""
    gaps = []
    for _ in range(4):
        eventually(lambda: time.monotonic() - admitting.listener.since > 1.1)
        ((pid,),) = sql(HOLDERS)
        sql("select pg_terminate_backend(%s, 1000)", pid)
        began = time.monotonic()
        eventually(lambda: sql(HOLDERS))
        gaps.append(time.monotonic() - began)
    assert sorted(gaps)[2] < 0.1, gaps


def test_a_session_on_a_server_where_nobody_admits_is_replaced(admitting: Any, messages: list[Message], sql: Sql) -> None:
    """The listener holds its token and the database does not see it: so it was left behind by a failover. It dials anew."""
    before = sql(HOLDERS)
    sql("create sequence public.asked")
    sql(
        "create or replace function doorbell._unheld(holder bigint) returns boolean"
        " language sql volatile as $$ select nextval('public.asked') <= 2 $$"
    )
    assert admitting.admit("worker", messages[0]).state == "new"
    assert sql("select last_value from public.asked") == [(3,)]
    assert sql(HOLDERS) not in ([], before)


@pytest.mark.slow
def test_a_session_that_is_never_seen_admits_nothing_and_says_so(open_bus: OpenBus, messages: list[Message], sql: Sql) -> None:
    sql("create or replace function doorbell._unheld(holder bigint) returns boolean language sql as $$ select true $$")
    with pytest.raises(DatabaseUnavailable, match="target_session_attrs=read-write"):
        open_bus(retry_for=1.0).admit("worker", messages[0])
    assert sql("select count(*) from doorbell.turn") == [(0,)]
