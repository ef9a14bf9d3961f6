"""What must not get slower: with a longer log, and beside an old snapshot that is held open. The long ones."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import psycopg

from benchmarks.harness import (
    BODY,
    Bench,
    Crew,
    Result,
    Row,
    alternate,
    at_least,
    at_most,
    clock,
    fill,
    median_percentile,
    percentile,
)
from benchmarks.posting import Poster
from doorbell_postgres import Doorbell, MessageBus

# ---------------------------------------------------------------------------------------------------------------------
# The length of the log


# Posting comes last: it makes both logs longer, and moves the head away from who is ten behind it.
CALLS = {"ack": "ack", "head": "head", "arm": "a bell, made and armed", "catch_up": "catch_up of 10", "post": "post"}
ACKERS = 20


class Client:
    """Does what clients do all day, on two logs that differ in length only."""

    def __init__(self, dsn: str, index: int, other: str) -> None:
        for length, session in (("short", _Session(dsn)), ("long", _Session(other))):
            for name in CALLS:
                setattr(self, f"{length}_{name}", getattr(session, name))


class _Session:
    def __init__(self, dsn: str) -> None:
        self._bus = MessageBus(dsn)
        self._acked = 0
        self._head = head = self._bus.store.head("log")
        self._bus.subscribe("waiting", "log")
        self._bus.subscribe("behind", "log", at="start")
        self._bus.ack("behind", "log", head - 10)
        for number in range(ACKERS):
            self._bus.subscribe(f"acker-{number}", "log", at="start")

    def ack(self) -> None:
        self._bus.ack(f"acker-{self._acked % ACKERS}", "log", min(self._acked // ACKERS + 1, self._head))
        self._acked += 1

    def head(self) -> None:
        self._bus.store.head("log")

    def arm(self) -> None:
        assert Doorbell(self._bus, "waiting").wait(0) is None

    def catch_up(self) -> None:
        assert len(self._bus.catch_up("behind")) == 10

    def post(self) -> None:
        self._bus.post("log", BODY, sender="bench")


def log_length(bench: Bench) -> Iterator[Result]:
    """post, ack, head, arm, catch_up of 10 at 10,000 and at 5,000,000 messages in the log"""
    size = bench.size
    dsns = []
    for count in (size.few, size.many):
        dsns.append(bench.database())
        began = clock()
        fill(dsns[-1], "log", count)
        bench.say(f"{count:,} messages in the log after {clock() - began:.0f} s")
    with psycopg.connect(dsns[0], autocommit=True) as connection:
        connection.execute("checkpoint")
    with Crew(Client, dsns[0], other=dsns[1]) as crew:
        for name, what in CALLS.items():
            samples = alternate(crew, [f"short_{name}", f"long_{name}"], size)
            short, long = (median_percentile(samples[f"{length}_{name}"], 0.5) for length in ("short", "long"))
            yield Row(f"{what}: p50 at {size.many:,} messages, against {size.few:,}", "ms", short, long, at_most(1.3))


# ---------------------------------------------------------------------------------------------------------------------
# An old snapshot


@contextmanager
def old_snapshot(dsn: str) -> Iterator[None]:
    """A transaction, such as a dump's, that sees the database as it is now, for as long as the block runs."""
    with psycopg.connect(dsn) as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select count(*) from doorbell.channel")
        yield
        with psycopg.connect(dsn, autocommit=True) as other:
            row = other.execute(
                "select backend_xmin is not null, age(backend_xmin) from pg_stat_activity where pid = %s",
                (connection.info.backend_pid,),
            ).fetchone()
        assert row is not None, "the session with the old snapshot is gone"
        assert row[0], "the snapshot was not held"
        assert row[1] > 0, "nothing was written beside the snapshot"


def _beside_floor(crew: Crew, method: str, seconds: float) -> tuple[float, float]:
    """The rates of the floor and of the method, in so many seconds of each."""
    before = crew.run("floor", seconds / 2).rate
    rate = crew.run(method, seconds).rate
    return (before + crew.run("floor", seconds / 2).rate) / 2, rate


def snapshot_posts(bench: Bench) -> Iterator[Result]:
    """posts after 60 s at full rate under an old open snapshot

    The machine has other speeds from minute to minute, so both ends are taken against the floor before and behind them, which
    an old snapshot does not touch.
    """
    size = bench.size
    for processes, method, name in (
        (size.posters, "own", f"plain path ({size.posters} processes, {size.posters} channels)"),
        (size.processes, "shared", f"{size.processes} processes, 1 channel"),
    ):
        dsn = bench.database()
        with Crew(Poster, dsn, processes) as crew:
            for each in ("floor", method):
                crew.run(each, size.warm)
            with old_snapshot(dsn):
                before, start = _beside_floor(crew, method, size.window)
                crew.run(method, size.snapshot - 2 * size.window)
                after, end = _beside_floor(crew, method, size.window)
        yield Row(
            f"post after {size.snapshot:g} s under an old snapshot, against the start: {name}",
            "posts/s",
            start,
            end,
            at_least(0.75),
            f"floor at the start {before:,.0f}/s, at the end {after:,.0f}/s",
            paired=end / after / (start / before),
        )


class PacedAcker:
    """Acks at a fixed rate, one handle after the other, in one database and right after it in another."""

    def __init__(self, dsn: str, index: int, handles: int, beside: str) -> None:
        self._buses = [MessageBus(dsn), MessageBus(beside)]
        self._acked = 0
        self._handles = [f"worker-{index}-{number}" for number in range(handles)]
        for bus in self._buses:
            for handle in self._handles:
                bus.subscribe(handle, "log", at="start")

    def ack(self, rate: float, begin: float, seconds: float) -> list[tuple[float, list[float]]]:
        """When each was called for, and how long it took here and there."""
        done = []
        due = begin + random.uniform(0, 1 / rate)
        while due < begin + seconds:
            time.sleep(max(0.0, due - clock()))
            handle, seq = self._handles[self._acked % len(self._handles)], self._acked // len(self._handles) + 1
            times = [clock()]
            for bus in self._buses:
                bus.ack(handle, "log", seq)
                times.append(clock())
            done.append((times[0] - begin, [end - start for start, end in pairwise(times)]))
            self._acked += 1
            due += 1 / rate
        return done


def snapshot_acks(bench: Bench) -> Iterator[Result]:
    """200 acks/s spread over 50 handles for 60 s under an old open snapshot

    The machine has other speeds from minute to minute, so both ends are taken against the same acks in a database beside
    it, where no snapshot is open.
    """
    size, processes = bench.size, 2
    dsn, beside = bench.database(), bench.database()
    for each in (dsn, beside):
        fill(each, "log", 10_000)
    with Crew(PacedAcker, dsn, processes, handles=size.ack_handles // processes, beside=beside) as crew:
        crew.call("ack", size.ack_rate / processes, clock(), size.warm)
        with old_snapshot(dsn):
            acks = [each for one in crew.call("ack", size.ack_rate / processes, clock(), size.snapshot) for each in one]

    def medians(begin: float, end: float) -> list[float]:
        return [1000 * percentile(side, 0.5) for side in zip(*(took for at, took in acks if begin <= at < end), strict=True)]

    start, start_beside = medians(0, 2 * size.window)
    end, end_beside = medians(size.snapshot - 2 * size.window, size.snapshot)
    yield Row(
        f"{size.ack_rate:g} acks/s over {size.ack_handles} handles, {size.snapshot:g} s under an old snapshot:"
        " p50 against the start",
        "ms",
        start,
        end,
        at_most(1.5),
        f"without a snapshot {start_beside:.2f} ms and {end_beside:.2f} ms; {len(acks) / size.snapshot:.0f} acks/s reached",
        paired=end / end_beside / (start / start_beside),
    )
