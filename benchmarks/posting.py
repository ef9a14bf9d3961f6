"""Posting: from one process and from many, one message a call and a thousand, from threads and from tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg

from benchmarks import floor
from benchmarks.harness import (
    BODY,
    Bench,
    Crew,
    Result,
    Row,
    alternate,
    alternate_anew,
    at_least,
    at_most,
    clock,
    compared,
    median_percentile,
    rates,
    skipped,
)
from doorbell_postgres import MessageBus


class Poster:
    """One writer: the floor, a channel of its own, and one that all share."""

    def __init__(self, dsn: str, index: int) -> None:
        self._writer = floor.Writer(dsn)
        self.bus = MessageBus(dsn)
        self._own = f"own-{index}"
        self.floor = self._writer.insert

    def own(self) -> None:
        self.bus.post(self._own, BODY, sender="bench")

    def shared(self) -> None:
        self.bus.post("shared", BODY, sender="bench")


def post(bench: Bench) -> Iterator[Result]:
    """post, 1 process"""
    dsn = bench.database()
    samples = alternate_anew(Poster, dsn, ["floor", "own"], bench.size)
    note = floor.pgbench_note(dsn, 1, bench.size.seconds)
    yield compared("post, 1 process", "posts/s", rates(samples["floor"]), rates(samples["own"]), at_least(0.80), note)


def post_processes(bench: Bench) -> Iterator[Result]:
    """post, 32 processes, on channels of their own and on one"""
    dsn, count = bench.database(), bench.size.processes
    with Crew(Poster, dsn, count) as crew:
        samples = alternate(crew, ["floor", "own"], bench.size)
        contended = alternate(crew, ["floor", "shared"], bench.size)
    note = floor.pgbench_note(dsn, count, bench.size.seconds)
    own, shared = samples["own"], contended["shared"]
    yield compared(
        f"post, {count} processes, {count} channels",
        "posts/s",
        rates(samples["floor"]),
        rates(own),
        at_least(0.70),
        note,
    )
    yield compared(
        f"post, {count} processes, 1 channel",
        "posts/s",
        rates(contended["floor"]),
        rates(shared),
        at_least(0.50),
    )
    yield Row(
        f"post, {count} processes, 1 channel: p99",
        "ms",
        median_percentile(contended["floor"], 0.99),
        median_percentile(shared, 0.99),
        at_most(2),
    )


class Batcher:
    """One writer of many rows a transaction: COPY, and post_many."""

    def __init__(self, dsn: str, index: int, batch: int) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._bus = MessageBus(dsn)
        self._bodies = [BODY] * batch

    def floor(self) -> None:
        with self._connection.cursor().copy("copy floor (channel_id, sender, body, headers) from stdin") as copy:
            for body in self._bodies:
                copy.write_row((1, "bench", body, "{}"))

    def ours(self) -> None:
        self._bus.post_many("batches", self._bodies, sender="bench")


def post_many(bench: Bench) -> Iterator[Result]:
    """post_many, 1,000 messages a call, against COPY"""
    batch = bench.size.batch
    with Crew(Batcher, bench.database(), batch=batch) as crew:
        samples = alternate(crew, ["floor", "ours"], bench.size)
    yield compared(
        f"post_many, {batch:,} messages a call, against COPY",
        "messages/s",
        rates(samples["floor"]),
        rates(samples["ours"]),
        at_least(0.30),
        each=batch,
    )


class Concurrent:
    """One process that posts from many threads, or from many tasks; the floor has a connection for each of them."""

    def __init__(self, dsn: str, index: int, width: int) -> None:
        self._dsn = dsn
        self._width = width
        self._runner = asyncio.Runner()
        self._writers = [floor.Writer(dsn) for _ in range(width)]
        self._bus = MessageBus(dsn)
        self._async: Any = None

    def threads_floor(self, seconds: float) -> float:
        return self._threads([writer.insert for writer in self._writers], seconds)

    def threads_ours(self, seconds: float) -> float:
        return self._threads([lambda: self._bus.post("threads", BODY, sender="bench")] * self._width, seconds)

    def _threads(self, steps: list[Callable[[], object]], seconds: float) -> float:
        counts = [0] * len(steps)
        begin = clock()
        end = begin + seconds

        def work(place: int) -> None:
            while clock() < end:
                steps[place]()
                counts[place] += 1

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(steps))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (clock() - begin)

    def tasks_floor(self, seconds: float) -> float:
        return self._runner.run(self._tasks_floor(seconds))

    def tasks_ours(self, seconds: float) -> float:
        return self._runner.run(self._tasks_ours(seconds))

    async def _tasks_floor(self, seconds: float) -> float:
        if self._async is None:
            self._async = [await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) for _ in range(self._width)]

        def step(connection: psycopg.AsyncConnection[Any]) -> Callable[[], Awaitable[object]]:
            cursor = connection.cursor()

            async def insert() -> object:
                await cursor.execute(floor.INSERT, floor.VALUES, prepare=True)
                return await cursor.fetchone()

            return insert

        return await self._tasks([step(connection) for connection in self._async], seconds)

    async def _tasks_ours(self, seconds: float) -> float:
        from doorbell_postgres.aio import AsyncMessageBus

        async with AsyncMessageBus(self._dsn) as bus:
            await bus.post("tasks", BODY, sender="bench")
            return await self._tasks([lambda: bus.post("tasks", BODY, sender="bench")] * self._width, seconds)

    async def _tasks(self, steps: list[Callable[[], Awaitable[object]]], seconds: float) -> float:
        begin = clock()
        end = begin + seconds

        async def work(step: Callable[[], Awaitable[object]]) -> int:
            done = 0
            while clock() < end:
                await step()
                done += 1
            return done

        counts = await asyncio.gather(*map(work, steps))
        return sum(counts) / (clock() - begin)


def post_concurrent(bench: Bench) -> Iterator[Result]:
    """post from 32 tasks and from 32 threads of one process, on one channel"""
    size = bench.size
    with Crew(Concurrent, bench.database(), width=size.tasks) as crew:
        for kind in ("tasks", "threads"):
            name = f"post, {size.tasks} {kind} of one process, 1 channel"
            if kind == "tasks":
                try:
                    import doorbell_postgres.aio  # noqa: F401
                except ImportError:
                    yield skipped(name, "there is no doorbell_postgres.aio here")
                    continue
            found: dict[str, list[float]] = {"floor": [], "ours": []}
            for which in found:
                crew.call(f"{kind}_{which}", size.warm)
            for _ in range(size.rounds * size.turns):
                for which, measured in found.items():
                    measured += crew.call(f"{kind}_{which}", size.seconds / size.turns)
            yield compared(name, "posts/s", found["floor"], found["ours"], at_least(1.5))
