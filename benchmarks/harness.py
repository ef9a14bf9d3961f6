"""How things are measured: crews of processes, alternating rounds, rows with a target.

A measure is a function that takes a `Bench` and yields `Row`s and `Breakdown`s. Its work is done by *actors*: objects
that live in processes of their own, made by spawn, each with the floor and ours as methods. A `Crew` runs one method in
all of its processes at once, for a time, and gets every single latency back.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.connection import Connection as Pipe
from typing import Any, Literal, TypeAlias

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from doorbell_postgres import migrate, throwaway

BODY = "The quick brown fox jumps over the lazy dog, and 0123456789. " * 3 + "Two hundred bytes."
"""The body of every message that is posted: about 200 bytes."""


@dataclass(frozen=True)
class Size:
    """How much of everything. The tiny one only shows that the measures work."""

    seconds: float = 2.0
    rounds: int = 3
    turns: int = 4  # in which each side takes its part of a round: the machine has other speeds from second to second
    warm: float = 0.3
    processes: int = 32
    messages: int = 100_000
    batch: int = 1_000
    rings: int = 100
    gap: tuple[float, float] = (0.03, 0.07)
    tasks: int = 32
    listeners: tuple[int, ...] = (100, 300)
    posters: int = 8
    waits: int = 100
    bells: int = 200
    idle: float = 20.0  # whole rounds of watch.WHOLE: what a session at rest has run is counted when it looks at everything
    settle: float = 11.0  # a session that falls idle reports its last transactions to the statistics after 10 s
    starts: int = 7
    few: int = 10_000
    many: int = 5_000_000
    snapshot: float = 60.0
    window: float = 5.0
    ack_handles: int = 50
    ack_rate: float = 200.0
    profile: int = 2_000


FULL = Size()
TINY = Size(
    seconds=0.1,
    rounds=1,
    turns=1,
    warm=0.02,
    processes=2,
    messages=300,
    batch=20,
    rings=3,
    gap=(0.02, 0.03),
    tasks=4,
    listeners=(3,),
    posters=2,
    waits=1,
    bells=5,
    idle=1.5,
    settle=0.5,
    starts=1,
    few=50,
    many=500,
    snapshot=1.2,
    window=0.4,
    ack_handles=4,
    ack_rate=40.0,
    profile=20,
)


# ---------------------------------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True)
class Target:
    """`at_least` and `at_most` are for the ratio of ours to the floor; `within` is for ours itself."""

    kind: Literal["at_least", "at_most", "within"]
    bound: float

    def holds(self, ours: float, ratio: float | None) -> bool:
        if self.kind == "within":
            return ours <= self.bound
        if ratio is None:
            return False
        return ratio >= self.bound if self.kind == "at_least" else ratio <= self.bound


def at_least(bound: float) -> Target:
    return Target("at_least", bound)


def at_most(bound: float) -> Target:
    return Target("at_most", bound)


def within(bound: float) -> Target:
    return Target("within", bound)


@dataclass(frozen=True)
class Row:
    """One line of the table. Without `ours` it was not measured, and `note` says why."""

    name: str
    unit: str = ""
    floor: float | None = None
    ours: float | None = None
    target: Target | None = None
    note: str = ""
    paired: float | None = None  # the median of the rounds' ratios, where the two took turns in rounds

    @property
    def ratio(self) -> float | None:
        if self.paired is not None:
            return self.paired
        return self.ours / self.floor if self.ours is not None and self.floor else None

    @property
    def ok(self) -> bool | None:
        """None where there is nothing to hold."""
        if self.ours is None or self.target is None:
            return None
        return self.target.holds(self.ours, self.ratio)


def compared(
    name: str, unit: str, floor: Sequence[float], ours: Sequence[float], target: Target | None, note: str = "", *, each: int = 1
) -> Row:
    """Two sides by their rates in the same rounds, in calls of `each` a second. A machine that is slower in one round than in
    the next is so for both, and each round has a ratio of its own: theirs is the median of these.
    """
    paired = statistics.median(o / f for f, o in zip(floor, ours, strict=True))
    return Row(name, unit, each * statistics.median(floor), each * statistics.median(ours), target, note, paired)


def skipped(name: str, why: str) -> Row:
    return Row(name, note=f"not measured: {why}")


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one call goes: the parts add up to the whole, in milliseconds."""

    name: str
    whole: float
    parts: Sequence[tuple[str, float]]
    note: str = ""


Result: TypeAlias = Row | Breakdown


@dataclass(frozen=True)
class Sample:
    """One round: what all processes did in it. Each process is a run of calls without a pause: each latency."""

    runs: Sequence[array[float]]

    @classmethod
    def of(cls, turns: Sequence[Sample]) -> Sample:
        """The turns of one round as one."""
        return cls([array("d", chain.from_iterable(run)) for run in zip(*(t.runs for t in turns), strict=True)])

    @property
    def count(self) -> int:
        return sum(len(latencies) for latencies in self.runs)

    @property
    def rate(self) -> float:
        """Calls a second, of all processes together."""
        return sum(len(latencies) / sum(latencies) for latencies in self.runs if latencies)

    def percentile(self, q: float) -> float:
        """In milliseconds."""
        return percentile(list(chain.from_iterable(self.runs)), q) * 1000


def percentile(values: Iterable[float], q: float) -> float:
    """The value that the share `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def rates(samples: Sequence[Sample]) -> list[float]:
    return [sample.rate for sample in samples]


def median_rate(samples: Sequence[Sample]) -> float:
    return statistics.median(rates(samples))


def median_percentile(samples: Sequence[Sample], q: float) -> float:
    return statistics.median(sample.percentile(q) for sample in samples)


# ---------------------------------------------------------------------------------------------------------------------
# Processes

_spawn = multiprocessing.get_context("spawn")
clock = time.monotonic
"""One clock for all processes: the machine's."""


class ActorFailed(Exception):
    """What an actor raised, with its traceback as text."""


def _repeat(step: Callable[[], object], begin: float, end: float) -> array[float]:
    latencies = array("d")
    time.sleep(max(0.0, begin - clock()))
    now = clock()
    while now < end:
        step()
        after = clock()
        latencies.append(after - now)
        now = after
    return latencies


def _act(make: Callable[..., Any], dsn: str, index: int, options: dict[str, Any], pipe: Pipe) -> None:
    try:
        actor = make(dsn, index, **options)
        pipe.send((True, None))
        while True:
            what, method, *arguments = pipe.recv()
            done = getattr(actor, method)
            pipe.send((True, _repeat(done, *arguments) if what == "repeat" else done(*arguments)))
    except (EOFError, KeyboardInterrupt):  # the crew is dismissed
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Crew:
    """Processes with an actor each: `make(dsn, index, **options)`, with `index` from 0. Ends with its `with` block."""

    def __init__(self, make: Callable[..., Any], dsn: str, processes: int = 1, **options: Any) -> None:
        self._workers: list[tuple[Any, Pipe]] = []
        for index in range(processes):
            here, there = _spawn.Pipe()
            process = _spawn.Process(target=_act, args=(make, dsn, index, options, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        try:
            self.end()
        except BaseException:
            self.dismiss()
            raise

    def run(self, method: str, seconds: float) -> Sample:
        """Call the method again and again in all processes for this long."""
        begin = clock() + 0.05
        for _, pipe in self._workers:
            pipe.send(("repeat", method, begin, begin + seconds))
        return Sample(self.end())

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the method once in each process; what each returned."""
        self.begin(method, *arguments)
        return self.end()

    def begin(self, method: str, *arguments: Any) -> None:
        for _, pipe in self._workers:
            pipe.send(("call", method, *arguments))

    def end(self) -> list[Any]:
        """What each process returned, in order. Raises ActorFailed."""
        answers = []
        for _, pipe in self._workers:
            try:
                good, answer = pipe.recv()
            except EOFError:
                raise ActorFailed("the process has died") from None
            if not good:
                raise ActorFailed(answer)
            answers.append(answer)
        return answers

    def dismiss(self) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.dismiss()


def alternate(crew: Crew, methods: Sequence[str], size: Size, *, before: str | None = None) -> dict[str, list[Sample]]:
    """Floor, ours, floor, ours …: `size.rounds` samples of each method, after a short run of each that does not count. A
    round takes `size.seconds` a method, in `size.turns` turns.

    `before` is called ahead of every round, and not timed.
    """
    if before is not None:
        crew.call(before)
    for method in methods:
        crew.run(method, size.warm)
    samples: dict[str, list[Sample]] = {method: [] for method in methods}
    for _ in range(size.rounds):
        if before is not None:
            crew.call(before)
        turns: dict[str, list[Sample]] = {method: [] for method in methods}
        for _ in range(size.turns):
            for method in methods:
                turns[method].append(crew.run(method, size.seconds / size.turns))
        for method in methods:
            samples[method].append(Sample.of(turns[method]))
    return samples


def alternate_anew(
    make: Callable[..., Any], dsn: str, methods: Sequence[str], size: Size, *, before: str | None = None
) -> dict[str, list[Sample]]:
    """As `alternate`, of one process; a new one for each of twice as many rounds of half the length. Where its memory comes to
    lie makes a process up to a twentieth faster or slower than the next, for as long as it lives.
    """
    samples: dict[str, list[Sample]] = {method: [] for method in methods}
    half = replace(size, rounds=1, seconds=size.seconds / 2, turns=max(1, size.turns // 2))
    for _ in range(2 * size.rounds):
        with Crew(make, dsn) as crew:
            for method, found in alternate(crew, methods, half, before=before).items():
                samples[method] += found
    return samples


# ---------------------------------------------------------------------------------------------------------------------
# The server

DURABLE = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",  # so that a checkpoint forced by one side's writes does not fall on the other's round
    "max_connections": "600",
}


@dataclass
class Bench:
    """What a measure gets: a durable server, and how much to do."""

    server: throwaway.Server
    size: Size = FULL
    _template: str | None = field(default=None, repr=False)
    _made: list[str] = field(default_factory=list, repr=False)

    def database(self) -> str:
        """The DSN of a database for this measure alone: our schema, and the floor's table."""
        from benchmarks import floor

        if self._template is None:
            dsn = self.server.create_database()
            migrate.upgrade(dsn)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(floor.TABLE)
                self._template = connection.info.dbname
        dsn = self.server.create_database(self._template)
        self._made.append(str(conninfo_to_dict(dsn)["dbname"]))
        return dsn

    def clean(self) -> None:
        """Drop what the measure made, and write out what is dirty, so that nothing of it is left to do during the next one."""
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            for name in self._made:
                connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
            connection.execute("checkpoint")
        self._made.clear()

    def say(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)


def fill(dsn: str, channel: str, count: int, *, handle: str | None = None, body: str = BODY) -> None:
    """Put `count` messages into a new channel in one statement, past the functions; `handle` subscribes before them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("insert into doorbell.channel (name) values (%s) returning id", (channel,)).fetchone()
        assert row is not None
        connection.execute(
            "insert into doorbell.message (channel_id, seq, sender, body, headers, idempotency_key, created_at)"
            " select %s, n, 'filler', %s, '{}', null, clock_timestamp() from generate_series(1, %s) as n",
            (row[0], body, count),
        )
        if handle is not None:
            connection.execute(
                "insert into doorbell.cursor (channel_id, handle, acked_seq, subscribed_at) values (%s, %s, 0, now())",
                (row[0], handle),
            )
        connection.execute("vacuum (analyze) doorbell.message, doorbell.channel, doorbell.cursor")


def keys_held(connection: psycopg.Connection[Any]) -> int:
    """How many keys of bells are held on this database: one for each session that waits on one channel."""
    row = connection.execute(
        "select count(*) from pg_locks where locktype = 'advisory' and granted and mode = 'ShareLock' and objsubid = 1"
        " and classid::bigint >> 24 in (82, 83)"
        " and database = (select oid from pg_database where datname = current_database())"
    ).fetchone()
    assert row is not None
    return int(row[0])


def until(holds: Callable[[], bool], *, timeout: float, pause: float = 0.002) -> float:
    """Wait until it holds; the clock's time then."""
    ends = clock() + timeout
    while not holds():
        if clock() > ends:
            raise TimeoutError(f"still not so after {timeout:g} s")
        time.sleep(pause)
    return clock()


Measure: TypeAlias = Callable[[Bench], Iterator[Result]]
