"""Reading and acking: a long backlog in one go, cursors, and turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import psycopg

from benchmarks import floor
from benchmarks.harness import (
    Bench,
    Crew,
    Result,
    Row,
    alternate,
    alternate_anew,
    at_least,
    compared,
    fill,
    median_percentile,
    median_rate,
    rates,
    skipped,
)
from doorbell_postgres import MessageBus

# The columns and expressions that ours reads, in one statement and without paging.
ROWS = """
select 'log', seq, sender, body, extract(epoch from created_at)::float8, nullif(headers, '{}'), idempotency_key
from doorbell.message
where channel_id = (select id from doorbell.channel where name = 'log')
order by seq
"""


class Reader:
    """Reads the whole channel, each way."""

    def __init__(self, dsn: str, index: int, expected: int) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._bus = MessageBus(dsn)
        self._expected = expected

    def floor(self) -> None:
        self._check(len(self._connection.execute(ROWS, prepare=True).fetchall()))

    def catch_up(self) -> None:
        self._check(len(self._bus.catch_up("reader")))

    def unacked(self) -> None:
        count = 0
        for _ in self._bus.unacked("reader"):
            count += 1
        self._check(count)

    def _check(self, count: int) -> None:
        assert count == self._expected, f"{count} messages, not {self._expected}"


def read(bench: Bench) -> Iterator[Result]:
    """catch_up and unacked of 100,000 messages, against fetching the same rows"""
    dsn, count = bench.database(), bench.size.messages
    fill(dsn, "log", count, handle="reader")
    with Crew(Reader, dsn, expected=count) as crew:
        samples = alternate(crew, ["floor", "catch_up", "unacked"], bench.size)
    for name in ("catch_up", "unacked"):
        yield compared(
            f"{name} of {count:,} messages",
            "messages/s",
            rates(samples["floor"]),
            rates(samples[name]),
            at_least(0.5),
            each=count,
        )


class Acker:
    """Moves one cursor, message by message; beside it the floor, and an UPDATE of one row by its primary key."""

    def __init__(self, dsn: str, index: int) -> None:
        self._writer = floor.Writer(dsn)
        self._bus = MessageBus(dsn)
        self._acked = self.acked()
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute(
            "create table if not exists plain_cursor (channel_id bigint, handle text, acked_seq bigint, acked_at timestamptz,"
            " primary key (channel_id, handle)) with (fillfactor = 50)"
        )
        self._connection.execute("insert into plain_cursor values (1, 'worker', 0, now()) on conflict do nothing")
        self._cursor = self._connection.cursor()
        self.floor = self._writer.insert

    def read(self) -> None:
        """An ack of a message that this bus has read says which message it means, and that is looked at: the usual case."""
        for _ in islice(self._bus.unacked("worker", page_size=1_000), 10_000):
            pass

    def ours(self) -> None:
        self._acked += 1
        self._bus.ack("worker", "log", self._acked)

    def update(self) -> None:
        self._cursor.execute(
            "update plain_cursor set acked_seq = acked_seq + 1, acked_at = clock_timestamp()"
            " where channel_id = %s and handle = %s returning acked_seq",
            (1, "worker"),
            prepare=True,
        ).fetchone()

    def acked(self) -> int:
        return self._bus.store.acked_seq("worker", "log")


def ack(bench: Bench) -> Iterator[Result]:
    """ack"""
    dsn = bench.database()
    fill(dsn, "log", max(20_000, bench.size.messages), handle="worker")
    samples = alternate_anew(Acker, dsn, ["floor", "update", "ours"], bench.size, before="read")
    yield compared(
        "ack",
        "acks/s",
        rates(samples["floor"]),
        rates(samples["ours"]),
        at_least(0.9),
        f"a plain UPDATE of one row: {median_rate(samples['update']):,.0f}/s",
    )
    yield Row("ack: p99", "ms", median_percentile(samples["floor"], 0.99), median_percentile(samples["ours"], 0.99))


class Worker:
    """Admits message after message and finishes each; the floor is two inserts, since that is two commits."""

    def __init__(self, dsn: str, index: int) -> None:
        self._writer = floor.Writer(dsn)
        self._bus: Any = MessageBus(dsn)
        self._messages = deque(self._bus.catch_up("worker", page_size=1000))

    def floor(self) -> None:
        self._writer.insert()
        self._writer.insert()

    def ours(self) -> None:
        turn = self._bus.admit("worker", self._messages.popleft())
        assert turn.should_run
        turn.finish()

    def acked(self) -> int:
        return int(self._bus.store.acked_seq("worker", "log"))


def admission(bench: Bench) -> Iterator[Result]:
    """admit and finish, against two floors"""
    if not hasattr(MessageBus, "admit"):
        yield skipped("admit + finish, against two floors", "there is no admission here")
        return
    dsn = bench.database()
    fill(dsn, "log", max(3_000, bench.size.messages // 4), handle="worker")
    with Crew(Worker, dsn) as crew:
        samples = alternate(crew, ["floor", "ours"], bench.size)
    yield compared(
        "admit + finish, against two floors",
        "turns/s",
        rates(samples["floor"]),
        rates(samples["ours"]),
        at_least(0.4),
    )
