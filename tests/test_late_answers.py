"""An answer that comes when the wait it was for has ended: it is for nobody. The bell's next wait has a look of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest

from doorbell_postgres import SchemaMismatch, watch
from support import Api, aio, backends, background, bell_is_waiting, eventually, waiting_in_database

Sql = Callable[..., list[tuple[Any, ...]]]
OpenBus = Callable[..., Any]
Joined = Callable[[int], None]

# So long that a ring within a test's patience cannot have come from a poll.
NEVER = 60.0
KEYS = (
    "select l.pid from pg_locks as l join pg_database as d on d.oid = l.database"
    " where l.locktype = 'advisory' and d.datname = current_database()"
)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    """`joined(n)` waits until n waits have begun. A look that waits for a lock is not given up, and no poll comes between."""
    monkeypatch.setattr(watch, "PATIENCE", NEVER)
    monkeypatch.setattr(watch, "MOST_PATIENCE", NEVER)
    monkeypatch.setattr(watch, "EARLY", NEVER)
    begun: list[watch.Watch] = []
    add = watch.Watchlist.add

    def signal(self: watch.Watchlist, each: watch.Watch, now: float) -> None:
        add(self, each, now)
        begun.append(each)

    monkeypatch.setattr(watch.Watchlist, "add", signal)
    return lambda count: eventually(lambda: len(begun) == count, what=f"{count} waits begun")


@pytest.fixture
def holder(direct_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction of which looks can be made to wait for a lock."""
    with psycopg.connect(direct_dsn) as connection:
        yield connection


def end(bell: Any, wait: Future[Any]) -> None:
    """End the wait in this moment, as its deadline or `close` would; the bell is left open for another."""
    if isinstance(bell, aio.Doorbell):
        loop = aio.loop()
        (ends,) = bell._real._deadlines
        loop.call_soon_threadsafe(lambda: ends.reschedule(loop.time()))
    else:
        bell._mailbox.put("closed")
    assert wait.result(10) is None


@pytest.mark.parametrize("begun", [True, False], ids=["the next has begun", "the next comes later"])
@pytest.mark.parametrize("look", ["on joining", "made ready"])
def test_a_wait_that_ends_before_its_answer_comes_takes_no_ring_along(
    api: Api,
    open_bus: OpenBus,
    joined: Joined,
    holder: psycopg.Connection[Any],
    sql: Sql,
    caplog: pytest.LogCaptureFixture,
    look: str,
    begun: bool,
) -> None:
    """Neither with the look that a wait begins with, nor with the one that is sent when a post is announced."""
    bus = open_bus()
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=NEVER)
    post = "select doorbell.post('events', 'b', 'ci', notify => true)"
    lock = "lock table doorbell.meta"  # which looks read, and posts do not
    if look == "on joining":
        sql(post)
        holder.execute(lock)
        first = background(bell.wait, 60)
    else:
        first = background(bell.wait, 60)
        bell_is_waiting(sql)
        holder.execute(lock)
        sql(post)
    waiting_in_database(sql)
    assert len(backends(sql, "wait_event_type = 'Lock' and query ~ 'doorbell[.]glance'")) == 1
    end(bell, first)
    if begun:
        second = background(bell.wait, 60)
        joined(2)
        holder.rollback()
    else:
        holder.rollback()
        eventually(lambda: sql(KEYS) == [], what="the answer, after which the listener lets its keys go")
        second = background(bell.wait, 60)
    event = second.result(20)
    assert event is not None
    assert event.seq == 1
    assert bell.wait(0) is None, "rung twice"
    sql(post)
    event = bell.wait(20)
    assert event is not None
    assert event.seq == 2
    assert [m.seq for m in bus.catch_up("worker")] == [1, 2]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_refusal_that_comes_when_its_wait_has_ended_is_not_kept_from_the_next(
    api: Api, open_bus: OpenBus, joined: Joined, holder: psycopg.Connection[Any], sql: Sql
) -> None:
    bus = open_bus()
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=NEVER)
    holder.execute("alter table doorbell.meta rename to gone")
    first = background(bell.wait, 60)
    waiting_in_database(sql)
    end(bell, first)
    second = background(bell.wait, 60)
    joined(2)
    holder.commit()
    with pytest.raises(SchemaMismatch):
        second.result(20)
