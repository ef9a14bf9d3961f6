"""Ringing, and what bells cost while nothing rings."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ExecStatus

from benchmarks.harness import (
    BODY,
    Bench,
    Crew,
    Result,
    Row,
    Sample,
    Size,
    at_least,
    at_most,
    clock,
    compared,
    keys_held,
    median_rate,
    percentile,
    rates,
    skipped,
    until,
    within,
)
from benchmarks.posting import Poster
from doorbell_postgres import Doorbell, MessageBus, calls, watch, wire
from doorbell_postgres.calls import Call
from doorbell_postgres.direct import numbered

# ---------------------------------------------------------------------------------------------------------------------
# From the post to the ring


class Ringer:
    """Posts, or notifies, one by one with pauses; says when each call began and ended."""

    def __init__(self, dsn: str, index: int) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._bus = MessageBus(dsn)

    def floor(self, count: int, gap: tuple[float, float]) -> list[tuple[int, float, float]]:
        numbers = iter(range(count))

        def notify() -> int:
            number = next(numbers)
            self._connection.execute("select pg_notify('bare', %s)", (str(number),), prepare=True)
            return number

        return self._with_pauses(notify, count, gap)

    def ours(self, count: int, gap: tuple[float, float]) -> list[tuple[int, float, float]]:
        until(lambda: keys_held(self._connection) > 0, timeout=10)
        return self._with_pauses(lambda: self._bus.post("rings", BODY, sender="bench").seq, count, gap)

    @staticmethod
    def _with_pauses(step: Callable[[], int], count: int, gap: tuple[float, float]) -> list[tuple[int, float, float]]:
        done = []
        for _ in range(count):
            time.sleep(random.uniform(*gap))
            began = clock()
            number = step()
            done.append((number, began, clock()))
        return done


class Waiter:
    """Waits again and again, in a process of its own; says when each ring came."""

    def __init__(self, dsn: str, index: int) -> None:
        self._listening = psycopg.connect(dsn, autocommit=True)
        self._listening.execute("listen bare")
        bus = MessageBus(dsn)
        bus.subscribe("worker", "rings")
        self._bell = Doorbell(bus, "worker")

    def floor(self, count: int) -> dict[int, float]:
        return {int(note.payload): clock() for note in self._listening.notifies(timeout=60, stop_after=count)}

    def ours(self, count: int) -> dict[int, float]:
        heard: dict[int, float] = {}
        while len(heard) < count and (event := self._bell.wait(10)) is not None:
            heard[event.seq] = clock()
        return heard


def rings(dsn: str, size: Size) -> Iterator[tuple[str, list[float], list[float]]]:
    """Rounds of the floor and of ours: seconds from the beginning of the call to the ring, and from its end."""
    with Crew(Ringer, dsn) as ringer, Crew(Waiter, dsn) as waiter:

        def some(which: str, count: int) -> tuple[list[float], list[float]]:
            waiter.begin(which, count)
            [sent] = ringer.call(which, count, size.gap)
            [heard] = waiter.end()
            assert len(heard) == len(sent), f"{len(sent) - len(heard)} of {len(sent)} did not ring"
            return [heard[number] - began for number, began, _ in sent], [heard[number] - ended for number, _, ended in sent]

        for which in ("floor", "ours"):
            some(which, 3)  # warming up
        for _ in range(size.rounds):
            round_: dict[str, tuple[list[float], list[float]]] = {"floor": ([], []), "ours": ([], [])}
            for _ in range(size.turns):
                for which, (from_begin, from_end) in round_.items():
                    begun, ended = some(which, size.rings // size.turns)
                    from_begin += begun
                    from_end += ended
            for which, (from_begin, from_end) in round_.items():
                yield which, from_begin, from_end


def ring(bench: Bench) -> Iterator[Result]:
    """ring across processes, against a bare NOTIFY to a waiting process"""
    samples: dict[str, list[list[float]]] = {"floor": [], "ours": [], "after": []}
    for which, from_begin, from_end in rings(bench.database(), bench.size):
        samples[which].append(from_begin)
        if which == "ours":
            samples["after"].append(from_end)

    def milliseconds(which: str, q: float) -> float:
        return 1000 * statistics.median(percentile(sample, q) for sample in samples[which])

    for q, name, bound in ((0.5, "p50", 3), (0.99, "p99", 4)):
        yield Row(
            f"ring across processes, from the call of post: {name}",
            "ms",
            milliseconds("floor", q),
            milliseconds("ours", q),
            at_most(bound),
            f"from when post returned, durable: {milliseconds('after', q):.2f} ms",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Posting beside sessions that wait for something else


# A bell that has armed looks so often before it comes to rest. The first times cost a session most.
EARLY_POLLS = 7


class Idle:
    """The session of a bell at rest, and what it asks."""

    def __init__(self, connection: psycopg.Connection[Any], poll: Call[Any], whole: Call[Any]) -> None:
        self.connection = connection
        self._pgconn = connection.pgconn
        for name, call in ((b"poll", poll), (b"whole", whole)):
            self._pgconn.prepare(name, numbered(call.sql))
        self._poll, self._whole = (
            [None if each is None else str(each).encode() for each in call.params] for call in (poll, whole)
        )

    def ask(self, *, whole: bool) -> None:
        """Take the answer to the poll before, and send the next one."""
        self._poll[0] = self._answer() or None
        self._pgconn.send_query_prepared(b"poll", self._poll)
        if whole:
            self._answer()
            self._pgconn.send_query_prepared(b"whole", self._whole)

    def _answer(self) -> bytes | None:
        """The snapshot, if it was a poll."""
        answer = None
        self._pgconn.consume_input()
        while result := self._pgconn.get_result():
            assert result.status == ExecStatus.TUPLES_OK, result.error_message
            answer = result.get_value(0, 0) if result.ntuples else None
        while self._pgconn.notifies():
            pass
        return answer


class Sessions:
    """Sessions as waiting bells hold them: LISTEN, their channel's key, the poll statement every half second.

    They stand for bells on other hosts. So one small process keeps them all, and what a bell's own process would do on
    its host is left out: this machine's processors serve the database and the posters. It does not wait for the answer to
    a poll, but takes it before it sends that session's next one.
    """

    def __init__(self, dsn: str, index: int) -> None:
        self._dsn = dsn
        self._bus = MessageBus(dsn)
        self._sessions: list[Idle] = []
        self._lock = threading.Lock()  # a session is not closed while it is asked
        self._polls = threading.Thread(target=self._poll, daemon=True)
        self._polls.start()

    def hold(self, count: int) -> int:
        """As many sessions as this, on a channel each; the number of keys that are held then."""
        while len(self._sessions) < count:
            self._sessions.append(self._session(len(self._sessions)))
        with self._lock:
            while len(self._sessions) > count:
                self._sessions.pop().connection.close()
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            until(lambda: keys_held(connection) == count, timeout=10)
            assert self._polls.is_alive()
            return keys_held(connection)

    def _session(self, number: int) -> Idle:
        handle, channel = f"idle-{number}", f"elsewhere-{number}"
        self._bus.subscribe(handle, channel)
        [floor] = self._bus.store.peek(calls.bell_floors(handle))
        connection = psycopg.connect(self._dsn, autocommit=True)
        connection.execute(*wire.on_connect(connection, read_only=True))
        connection.execute(wire.LISTEN)
        arm = calls.arm([floor.channel_id], [])
        assert arm.read(connection.execute(arm.sql, arm.params).fetchall()) == []
        question = calls.Question(handle, floor.channel_id, floor.seq, floor.created_at, floor.epoch)
        session = Idle(connection, calls.unmoved([question], None), calls.peek([question], preview=watch.PREVIEW))
        for _ in range(EARLY_POLLS):
            session.ask(whole=True)
        return session

    def _poll(self) -> None:
        due = clock()
        for polls in itertools.count():
            for number, session in enumerate(list(self._sessions)):
                due = max(due + 0.5 / max(1, len(self._sessions)), clock() - 0.5)
                time.sleep(max(0.0, due - clock()))
                with self._lock:
                    if not session.connection.closed:
                        # Not all of them look at everything in the same half second.
                        session.ask(whole=(polls + number) % (watch.WHOLE / 0.5) == 0)
            if not self._sessions:
                time.sleep(0.05)
                due = clock()


class Announcer(Poster):
    """A poster that also notifies with each post, whoever waits: what the gate is there to avoid."""

    def __init__(self, dsn: str, index: int) -> None:
        super().__init__(dsn, index)
        self._connection = psycopg.connect(dsn, autocommit=True)

    def ungated(self) -> None:
        self.own()
        self._connection.execute("select pg_notify('doorbell', '0')", prepare=True)


def idle_listeners(bench: Bench) -> Iterator[Result]:
    """8 processes posting while 100, and 300, idle listeners wait on other channels"""
    dsn, size = bench.database(), bench.size
    counts = (0, *size.listeners)
    with Crew(Announcer, dsn, size.posters) as posters, Crew(Sessions, dsn) as sessions:
        for method in ("own", "ungated"):
            posters.run(method, size.warm)
        gated: dict[int, list[Any]] = {count: [] for count in counts}
        ungated: dict[int, list[Any]] = {count: [] for count in counts}
        # There and back: a machine that grows slower meanwhile must not make the many look dear. The ungated come behind:
        # what they send has sessions busy for longer than they do.
        # And more often, for half as long, than others take turns: the machine has other speeds from one to the next.
        for kind, method, rounds in ((gated, "own", 2 * size.rounds), (ungated, "ungated", 1)):
            for count in [*counts, *reversed(counts)] * rounds:
                assert sessions.call("hold", count) == [count]
                kind[count].append(posters.run(method, size.seconds / 2))
    for count in size.listeners:
        yield compared(
            f"post, {size.posters} processes, beside {count} idle listeners, against none",
            "posts/s",
            there_and_back(gated[0]),
            there_and_back(gated[count]),
            at_least(0.85),
            f"with a NOTIFY after every post: {median_rate(ungated[count]) / median_rate(ungated[0]):.2f}",
        )


def there_and_back(samples: Sequence[Sample]) -> list[float]:
    """The rate of each round of two samples."""
    return [statistics.mean(pair) for pair in zip(rates(samples[::2]), rates(samples[1::2]), strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Bells while nothing rings


def transactions(watcher: psycopg.Connection[Any], dbname: str) -> int:
    """How many transactions the database has committed so far. `watcher` is on another one, so as not to count itself.

    A session reports what it has run when it has read a table, once a second at most. A bell's session at rest reads one
    in the first poll behind a commit, and so this makes one.
    """
    watcher.execute("select pg_current_xact_id()")
    time.sleep(1.6)
    row = watcher.execute("select xact_commit from pg_stat_database where datname = %s", (dbname,)).fetchone()
    assert row is not None
    return int(row[0])


def server_cpu(postmaster: int) -> float | None:
    """Seconds of processor time that the server and all its processes have taken; None where there is no /proc."""
    seconds = 0.0
    try:
        hertz = os.sysconf("SC_CLK_TCK")
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
                if postmaster not in (int(fields[1]), int(stat.parent.name)):
                    continue
                # In ns. The times in stat are sampled, and a poll is over long before the next sample.
                seconds += int(stat.with_name("schedstat").read_text().split()[0]) / 1e9
            except OSError:  # it has just ended, and its parent has the time
                continue
            if int(stat.parent.name) == postmaster:
                seconds += sum(map(int, fields[13:15])) / hertz  # of those that have ended
    except (OSError, ValueError):
        return None
    return seconds or None


def resident(pid: int) -> float | None:
    """The resident memory of a process, in MB; None where there is no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return None


def command() -> list[str]:
    """The command `doorbell` of this environment."""
    script = Path(sys.executable).with_name("doorbell")
    return [str(script)] if script.exists() else [sys.executable, "-m", "doorbell_postgres"]


@contextmanager
def waits(dsn: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes `doorbell wait`, each on a channel of its own, all of them armed."""
    with MessageBus(dsn) as bus:
        for number in range(count):
            bus.subscribe(f"wait-{number}", f"quiet-{number}")
    started: list[subprocess.Popen[bytes]] = []
    try:
        environment = {**os.environ, "DOORBELL_DSN": dsn}
        for number in range(count):
            arguments = [*command(), "wait", f"wait-{number}", "--timeout", "600"]
            started.append(subprocess.Popen(arguments, env=environment))
        with psycopg.connect(dsn, autocommit=True) as connection:
            until(lambda: keys_held(connection) == count, timeout=30 + 2 * count, pause=0.1)
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def idle_waits(bench: Bench) -> Iterator[Result]:
    """100 `doorbell wait` processes, idle: the server's processor time, transactions a second, their memory"""
    dsn, size = bench.database(), bench.size
    dbname = str(conninfo_to_dict(dsn)["dbname"])
    who = f"{size.waits} idle `doorbell wait` processes"
    with waits(dsn, size.waits) as processes, psycopg.connect(bench.server.dsn(), autocommit=True) as watcher:
        time.sleep(size.settle)
        done, begin, cpu = transactions(watcher, dbname), clock(), server_cpu(bench.server.pid)
        time.sleep(size.idle)
        elapsed, spent = clock() - begin, server_cpu(bench.server.pid)
        rate = (transactions(watcher, dbname) - done) / (clock() - begin)
        memory = [m for m in map(resident, [process.pid for process in processes]) if m is not None]
        assert all(process.poll() is None for process in processes), "a wait has ended"
    if cpu is None or spent is None:
        yield skipped(f"{who}: server CPU", "this system has no /proc")
    else:
        yield Row(f"{who}: server CPU", "% of a core", ours=100 * (spent - cpu) / elapsed, target=within(4.0))
    yield Row(f"{who}: transactions", "/s", ours=rate, target=within(250.0))
    if memory:
        yield Row("`doorbell wait`: resident memory", "MB", ours=statistics.median(memory), target=within(60.0))
    else:
        yield skipped("`doorbell wait`: resident memory", "this system has no /proc")


class Bells:
    """Many bells in one process, each waiting in a thread of its own."""

    def __init__(self, dsn: str, index: int, bells: int) -> None:
        self._bus = MessageBus(dsn)
        for number in range(bells):
            self._bus.subscribe(f"bell-{number}", f"quiet-{number % 50}")
            bell = Doorbell(self._bus, f"bell-{number}", idle_timeout=600)
            threading.Thread(target=bell.wait, daemon=True).start()

    def waiting(self) -> str:
        return self._bus.listener.kind


def idle_bells(bench: Bench) -> Iterator[Result]:
    """200 idle bells in one process: statements a second"""
    dsn, size = bench.database(), bench.size
    dbname = str(conninfo_to_dict(dsn)["dbname"])
    with Crew(Bells, dsn, bells=size.bells) as crew, psycopg.connect(bench.server.dsn(), autocommit=True) as watcher:
        time.sleep(size.settle)
        assert crew.call("waiting") == ["listening"]
        done, begin = transactions(watcher, dbname), clock()
        time.sleep(size.idle)
        rate = (transactions(watcher, dbname) - done) / (clock() - begin)
    yield Row(f"{size.bells} idle bells in one process: statements", "/s", ours=rate, target=within(3.0))
