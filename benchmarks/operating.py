"""What operating costs: `python -m benchmarks.operating [--small]`. On a private, durable server of its own.

Views and status on two million messages in 200 channels with 50 handles, and what posts, acks and head cost beside them;
pruning a million messages under a load of posts and acks.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
from click.testing import CliRunner

from benchmarks.harness import DURABLE
from doorbell_postgres import cli, migrate, operations, throwaway
from doorbell_postgres.admin import Admin

VIEWS = ("backlog", "channels", "turns", "health", "violations")
Connection = psycopg.Connection[Any]


def fill(connection: Connection, channels: int, per_channel: int, handles: int, turns: int) -> None:
    """Straight into the tables; every handle is some messages behind on every channel."""
    connection.execute("insert into doorbell.channel (name) select 'channel ' || n from generate_series(1, %s) as n", (channels,))
    connection.execute(
        "insert into doorbell.message (channel_id, seq, sender, body, idempotency_key, created_at)"
        " select c.id, n, 'ci', repeat('x', 200), case when n %% 10 = 0 then 'key ' || n end, now() - interval '40 days'"
        " from doorbell.channel as c, generate_series(1, %s) as n order by n, c.id",
        (per_channel,),
    )
    connection.execute(
        "insert into doorbell.cursor (channel_id, handle, acked_seq, acked_at)"
        " select c.id, 'handle ' || h, greatest(0, %s - h * 10), now() from doorbell.channel as c, generate_series(0, %s) as h",
        (per_channel, handles - 1),
    )
    connection.execute(
        "insert into doorbell.turn (channel_id, handle, event_seq, state, ended_at, origin_channel_id, origin_seq)"
        " select c.id, 'handle 0', n, 'finished', now(), c.id, n from doorbell.channel as c, generate_series(1, %s) as n",
        (turns // channels,),
    )
    connection.execute("vacuum analyze")


def milliseconds(function: Callable[[], Any], times: int = 5) -> float:
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        function()
        took.append((time.perf_counter() - begun) * 1000)
    return statistics.median(took)


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * p))] for p in (0.5, 0.99, 1.0)]
    return "p50 {:.2f} ms, p99 {:.2f} ms, max {:.1f} ms".format(*at) + f" of {len(ordered):,}"


class Load:
    """Two posters and an acker without a pause, each on a connection of its own; latencies in milliseconds."""

    def __init__(self, dsn: str, channels: list[str], acker: str) -> None:
        self.posts: list[float] = []
        self.acks: list[float] = []
        self.errors: list[Exception] = []
        self._over = threading.Event()
        post = "select doorbell.post(%s, repeat('y', 200), 'load')"
        ack = "select doorbell.ack(%s, %s, doorbell.head(%s))"
        self._threads = [
            threading.Thread(target=self._run, args=(dsn, post, lambda c: (c,), channels, self.posts)) for _ in range(2)
        ]
        self._threads.append(threading.Thread(target=self._run, args=(dsn, ack, lambda c: (acker, c, c), channels, self.acks)))

    def _run(self, dsn: str, query: Any, params: Callable[[str], Any], channels: list[str], into: list[float]) -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                n = 0
                while not self._over.is_set():
                    begun = time.perf_counter()
                    connection.execute(query, params(channels[n % len(channels)]), prepare=True)
                    into.append((time.perf_counter() - begun) * 1000)
                    n += 1
                    time.sleep(0.002)
        except Exception as exc:
            self.errors.append(exc)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def views(dsn: str, channels: int, per_channel: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        begun = time.monotonic()
        fill(connection, channels, per_channel, 50, channels * 100)
        print(
            f"{channels * per_channel:,} messages in {channels} channels, 50 handles, filled in {time.monotonic() - begun:.0f} s"
        )
        for view in VIEWS:
            took = milliseconds(lambda view=view: connection.execute(f"select * from doorbell.{view}").fetchall(), 3)  # type: ignore[misc]
            print(f"  {view}: {took:.0f} ms")
    for command in ("status", "channels", "handles", "doctor"):
        took = milliseconds(lambda command=command: CliRunner().invoke(cli.main, [command, "--dsn", dsn]), 3)  # type: ignore[misc]
        print(f"  doorbell {command}: {took:.0f} ms")
    names = [f"channel {n}" for n in range(1, channels + 1)]
    with psycopg.connect(dsn, autocommit=True) as looking, Load(dsn, names, "handle 0") as alone:
        ends, before = time.monotonic() + 10, []
        while time.monotonic() < ends:
            before.append(milliseconds(lambda: looking.execute("select doorbell.head('channel 7')"), 1))
            time.sleep(0.05)
    with psycopg.connect(dsn, autocommit=True) as looking, Load(dsn, names, "handle 0") as beside:
        ends, looks = time.monotonic() + 10, 0
        after: list[float] = []
        while time.monotonic() < ends:
            for view in VIEWS[:-1]:
                looking.execute(f"select * from doorbell.{view}".encode()).fetchall()
            looks += 1
            for _ in range(20):  # a dashboard, not a benchmark of the views
                after.append(milliseconds(lambda: looking.execute("select doorbell.head('channel 7')"), 1))
                time.sleep(0.05)
    print(f"  beside: the four cheap views, all rows, {looks} times in 10 s")
    print(f"  head alone:  {percentiles(before)}\n  head beside: {percentiles(after)}")
    print(f"  post alone:  {percentiles(alone.posts)}\n  post beside: {percentiles(beside.posts)}")
    print(f"  ack alone:   {percentiles(alone.acks)}\n  ack beside:  {percentiles(beside.acks)}")


def prune(dsn: str, total: int) -> None:
    channels = 10
    with psycopg.connect(dsn, autocommit=True) as connection:
        fill(connection, channels, total // channels, 1, channels)
        names = [f"channel {n}" for n in range(1, channels + 1)]
        lagging, working = 1_000, 2_000
        connection.execute(
            "select doorbell.subscribe('slow', 'channel 1', 'start'), doorbell.ack('slow', 'channel 1', %s)", (lagging,)
        )
        connection.execute("select doorbell.admit('handle 0', 'channel 2', %s, 'an event')", (working,))
        with Load(dsn, names, "handle 0") as alone:
            time.sleep(10)
        removed, held, begun = 0, {}, time.monotonic()
        with Admin(dsn) as admin, Load(dsn, names, "handle 0") as beside:
            for name in names:
                more = True
                while more:
                    result = admin.run(operations.prune(timedelta(days=30), name))
                    removed, more = removed + result.removed, result.more
                if result.held_because:
                    held[name] = (result.held_because, result.held_by, result.held_at)
        took = time.monotonic() - begun
        print(f"{removed:,} of {total:,} messages pruned in {took:.1f} s beside posts and acks; held: {held}")
        print(f"  post without: {percentiles(alone.posts)}\n  post with:    {percentiles(beside.posts)}")
        print(f"  ack without:  {percentiles(alone.acks)}\n  ack with:     {percentiles(beside.acks)}")
        rows = connection.execute("select channel, head, first_kept, messages from doorbell.channels order by channel").fetchall()
        posted = len(alone.posts) + len(beside.posts)
        kept = sum(row[3] for row in rows)
        real = connection.execute("select count(*) from doorbell.message").fetchone()
        print(f"  kept {kept:,} = {total:,} - {removed:,} + {posted:,} posted; rows in the table: {real}")
        assert real == (kept,)
        assert kept == total - removed + posted
        assert all(row[3] >= 1 for row in rows)
        assert {row[0]: row[2] for row in rows}["channel 1"] == lagging + 1
        assert {row[0]: row[2] for row in rows}["channel 2"] == working
        assert not connection.execute("select * from doorbell.violations").fetchall()
        unread = connection.execute("select count(*) from doorbell.unacked('slow', page_size => 2000000)").fetchone()
        print(f"  slow still reads all of its {unread and unread[0]:,} messages; no violation")


def main() -> None:
    small = "--small" in sys.argv
    with throwaway.Server.start(settings=DURABLE) as server:
        for measure, size in (
            (views, (20, 1_000) if small else (200, 10_000)),
            (prune, (20_000,) if small else (1_250_000,)),  # of which 1,000,000 go: two channels are held
        ):
            dsn = server.create_database()
            migrate.upgrade(dsn)
            measure(dsn, *size)


if __name__ == "__main__":
    main()
