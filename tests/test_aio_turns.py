"""What only turns of the async shell promise: tasks of one bus are twins, and a cancelled task holds nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg

from doorbell_postgres.aio import AsyncMessageBus, AsyncTurn
from doorbell_postgres.contract import Message

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]


def run(dsn: str, body: Callable[[AsyncMessageBus, Message], Coroutine[Any, Any, None]]) -> None:
    """`body(bus, message)` in a loop of its own, on a channel with one message."""

    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            await body(bus, await bus.post("events", "mention", sender="ci"))

    asyncio.run(main())


async def until_blocked(connection: psycopg.Connection[Any]) -> None:
    query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    for _ in range(2000):
        if connection.execute(query).fetchone() == (1,):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nobody waits for a lock")


def test_eight_tasks_of_one_bus_admit_one_turn(dsn: str) -> None:
    async def body(bus: AsyncMessageBus, message: Message) -> None:
        for state in ("new", "resumed", "resumed"):
            turns = await asyncio.gather(*(bus.admit("worker", message) for _ in range(8)))
            assert sorted(turn.state for turn in turns) == sorted([state] + ["running"] * 7)
            await next(turn for turn in turns if turn.should_run).release()

    run(dsn, body)


def test_a_task_that_is_cancelled_in_its_turn_gives_it_back(dsn: str) -> None:
    async def body(bus: AsyncMessageBus, message: Message) -> None:
        inside = asyncio.Event()

        async def work() -> None:
            async with bus.turn("worker", message, max_attempts=1):
                inside.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        (left,) = await bus.unfinished_turns("worker")
        assert (left.held, left.error) == (False, "CancelledError"), "an interruption is no failure"
        async with bus.turn("worker", message) as turn:
            assert turn.state == "resumed"
        assert await bus.wait_until_quiet(handle="worker", timeout=0)

    run(dsn, body)


def test_an_admission_that_is_cancelled_is_given_back(dsn: str, connect: Connect) -> None:
    """Whether it had committed is not known to the task that was cancelled; nobody may be left holding the turn."""
    blocker = connect(autocommit=True)

    async def body(bus: AsyncMessageBus, message: Message) -> None:
        for _ in range(20):
            admitting = asyncio.create_task(bus.admit("worker", message))
            for _ in range(20):
                await asyncio.sleep(0.0005)
                if admitting.done():
                    break
            admitting.cancel()
            try:
                turn: AsyncTurn = await admitting
            except asyncio.CancelledError:
                pass
            else:
                await turn.release()
        assert (await bus.admit("worker", message)).state in ("new", "resumed")

    run(dsn, body)
    assert blocker.execute("select count(*) from doorbell.turn").fetchone() == (1,)


def test_a_second_cancellation_does_not_stop_the_release(dsn: str, connect: Connect) -> None:
    blocker, watcher = connect(), connect(autocommit=True)

    async def body(bus: AsyncMessageBus, message: Message) -> None:
        inside = asyncio.Event()

        async def work() -> None:
            async with bus.turn("worker", message):
                inside.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await inside.wait()
        blocker.execute("select from doorbell.turn for update")
        task.cancel()
        await until_blocked(watcher)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        blocker.rollback()
        assert (await bus.admit("worker", message)).state == "resumed"

    run(dsn, body)


def test_an_async_step_commits_with_what_it_writes(dsn: str, sql: Sql) -> None:
    sql("create table done (step text)")

    async def body(bus: AsyncMessageBus, message: Message) -> None:
        async with bus.turn("worker", message) as turn:
            for pending in (True, False):
                async with turn.step("dispatch") as step:
                    assert step.pending is pending
                    if step.pending:
                        await step.conn.execute("insert into done values ('dispatch')")

    run(dsn, body)
    assert sql("select step from done") == [("dispatch",)]
    assert sql("select steps, state from doorbell.turns") == [(1, "finished")]
