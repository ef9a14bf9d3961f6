"""What only the async shell promises: cancellation, event loops, tasks, and constructors that do nothing."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from doorbell_postgres import BusClosed, DatabaseUnavailable, InvalidInput, SchemaMismatch, WrongLoop
from doorbell_postgres.aio import AsyncDoorbell, AsyncMessageBus, AsyncStore
from doorbell_postgres.aio.store import Session
from support import backends, eventually, run_script
from support.proxy import Proxy

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., Any]
Main = Callable[[], Coroutine[Any, Any, Any]]

LOCKS = (
    "select l.pid from pg_locks as l join pg_database as d on d.oid = l.database"
    " where l.locktype = 'advisory' and d.datname = current_database()"
)
# So long that a ring within a test's patience cannot have come from the poll.
NEVER = 60.0


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as running:
        yield running


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


async def until(predicate: Callable[[], Any], *, within: float = 10.0) -> Any:
    ends = time.monotonic() + within
    while not (value := predicate()):
        assert time.monotonic() < ends, f"not within {within} s: {inspect.getsource(predicate).strip()}"
        await asyncio.sleep(0.005)
    return value


def waits_for_lock(sql: Sql) -> Callable[[], bool]:
    return lambda: bool(backends(sql, "wait_event_type = 'Lock'"))


# -- opening ----------------------------------------------------------------------------------------------------------


def test_making_a_bus_a_store_and_a_bell_does_no_io(dsn: str, sql: Sql) -> None:
    bus, _ = AsyncMessageBus(dsn), AsyncStore(dsn)
    bell = AsyncDoorbell(bus, "worker")
    assert not backends(sql)
    assert bus.listener.kind == "idle"
    assert (bus.closed, bell.closed) == (False, False)
    AsyncMessageBus(make_conninfo(dsn, dbname="not there"))


def test_what_is_wrong_with_the_arguments_is_said_at_once(dsn: str) -> None:
    for make in (
        lambda: AsyncMessageBus("team.sqlite3"),
        lambda: AsyncMessageBus(dsn, max_size=0),
        lambda: AsyncDoorbell(AsyncMessageBus(dsn), ""),
        lambda: AsyncDoorbell(AsyncMessageBus(dsn), "worker", poll_interval=0),
    ):
        with pytest.raises(InvalidInput):
            make()


def test_first_calls_at_the_same_moment_open_once(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        bus = AsyncMessageBus(dsn, max_size=1)
        hasty = [asyncio.create_task(bus.store.head("events")) for _ in range(20)]
        await asyncio.sleep(0)
        for each in hasty[:10]:  # whoever came first, its cancellation does not stop the others
            each.cancel()
        results = await asyncio.gather(*hasty, return_exceptions=True)
        assert [type(r) for r in results[:10]] == [asyncio.CancelledError] * 10
        assert results[10:] == [0] * 10
        assert len(backends(sql)) <= 1
        await bus.close()
        assert not others()

    asyncio.run(main())


def test_opening_that_failed_is_tried_again_by_the_next_call(empty_dsn: str) -> None:
    from doorbell_postgres import migrate

    async def main() -> None:
        bus = AsyncMessageBus(empty_dsn)
        for _ in range(2):
            with pytest.raises(SchemaMismatch, match="doorbell migrate"):
                await bus.post("events", "x", sender="ci")
        await asyncio.to_thread(migrate.upgrade, empty_dsn)
        assert (await bus.post("events", "x", sender="ci")).seq == 1
        await bus.close()
        away = AsyncMessageBus("host=127.0.0.1 port=1 dbname=x")
        with pytest.raises(DatabaseUnavailable):
            await away.catch_up("worker")
        await away.close()
        assert not others()

    asyncio.run(main())


def test_a_bus_that_was_never_opened_is_closed_like_any_other(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        bus = AsyncMessageBus(dsn)
        await bus.close()
        await bus.close()
        assert bus.listener.kind == "closed"
        with pytest.raises(BusClosed):
            await bus.store.channels()
        assert await AsyncDoorbell(bus, "worker").wait(10) is None
        assert not backends(sql)

    asyncio.run(main())


def test_a_bell_takes_its_floors_when_it_is_armed_or_first_waits(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            early, late = AsyncDoorbell(bus, "worker"), AsyncDoorbell(bus, "worker")
            await early.arm()
            await early.arm()
            async with AsyncDoorbell(bus, "worker") as entered:
                await bus.post("events", "one", sender="ci")
                reasons = [event and event.reason for event in [await bell.wait(5) for bell in (early, late, entered)]]
            assert reasons == ["post", "backlog", "post"]
            assert await entered.wait(10) is None

    asyncio.run(main())


# -- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_random_cancellations_leave_the_bus_whole(dsn: str, sql: Sql, seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        bus = AsyncMessageBus(dsn, max_size=2, retry_for=20)
        await bus.subscribe("worker", "events")
        await bus.subscribe("worker", "alerts")
        await bus.post_many("events", ["x" * 1000] * 50, sender="ci")
        bells = [AsyncDoorbell(bus, "worker", match=m, poll_interval=0.05) for m in (None, lambda m: False)]

        async def transaction() -> None:
            async with bus.transaction() as conn:
                await conn.execute("select pg_sleep(%s)", [chance.random() * 0.02])
                await bus.post("events", "in a transaction", sender="ci", conn=conn)

        async def read() -> None:
            async for _ in bus.unacked("worker", page_size=10):
                await asyncio.sleep(0)

        calls: list[Main] = [
            lambda: bus.post("events", "no key", sender="ci"),
            lambda: bus.post("alerts", "key", sender="ci", idempotency_key=str(chance.randrange(50))),
            lambda: bus.post_many("events", ["a", "b"], sender="ci"),
            lambda: bus.subscribe(f"handle {chance.randrange(5)}", "events"),
            lambda: bus.catch_up("worker", page_size=20),
            lambda: bus.ack("worker", "events", chance.randrange(50)),
            lambda: bells[0].wait(0.05),
            lambda: bells[1].wait(0.05),
            lambda: AsyncDoorbell(bus, "worker").arm(),
            lambda: bus.wait_until_quiet(timeout=0.05),
            transaction,
            read,
        ]

        cancelled = 0
        while cancelled < 1000:
            tasks = [asyncio.create_task(chance.choice(calls)()) for _ in range(8)]
            for task in tasks:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                await asyncio.sleep(chance.choice((0, 0, 0.001, 0.003, 0.01)))
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                cancelled += isinstance(result, asyncio.CancelledError)
                assert not isinstance(result, Exception), repr(result)

        # The pool is whole: both connections can be had at once, and nothing is out.
        async with asyncio.timeout(20), bus.transaction() as one, bus.transaction() as two:
            assert one is not two
            assert [(await (await c.execute("select 1")).fetchone()) for c in (one, two)] == [(1,), (1,)]
        await until(lambda: not any(task.get_name() == "doorbell-pool" for task in others()))
        assert not backends(sql, "state <> 'idle'")
        assert len(backends(sql)) <= 3
        await until(lambda: not sql(LOCKS))
        assert (await bus.store.messages_after("events", 0, limit=10_000))[-1].seq == await bus.store.head("events")
        fresh = AsyncDoorbell(bus, "fresh")
        await bus.subscribe("fresh", "events")
        await fresh.arm()
        await bus.post("events", "and it still rings", sender="ci")
        assert await fresh.wait(10) is not None
        await bus.close()
        assert not others()

    asyncio.run(main())
    gc.collect()


def test_a_cancelled_post_ends_on_the_server_too(dsn: str, sql: Sql, connect: Connect) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn, max_size=1) as bus:
            holder = connect()
            holder.execute("select doorbell.post('events', 'held', 'holder')")
            for post in (
                lambda: bus.post("events", "cancelled", sender="ci"),
                lambda: bus.post("events", "cancelled", sender="ci", idempotency_key="k"),
            ):
                posting = asyncio.create_task(post())
                await until(waits_for_lock(sql))
                began = time.monotonic()
                posting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await posting
                assert time.monotonic() - began < 2
                assert not backends(sql, "wait_event_type = 'Lock'")
            assert await bus.store.head("events") == 0  # the one connection is there again
            holder.rollback()
            assert (await bus.post("events", "one", sender="ci")).seq == 1

    asyncio.run(main())


def test_a_cancel_that_comes_too_soon_is_sent_again(
    dsn: str, sql: Sql, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server forgets one that comes before it has begun with the query."""
    lost: list[object] = []
    cancel_safe = Session.cancel_safe

    async def first_is_lost(self: Session, *, timeout: float = 30.0) -> None:
        lost.append(self)
        if len(lost) > 1:
            await cancel_safe(self, timeout=timeout)

    async def main() -> None:
        async with AsyncMessageBus(dsn, max_size=1) as bus:
            holder = connect()
            holder.execute("select doorbell.post('events', 'held', 'holder')")
            posting = asyncio.create_task(bus.post("events", "cancelled", sender="ci"))
            ((pid, *_),) = await until(lambda: backends(sql, "wait_event_type = 'Lock'"))
            monkeypatch.setattr(Session, "cancel_safe", first_is_lost)
            posting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posting
            assert len(lost) > 1
            assert sql("select state from pg_stat_activity where pid = %s", pid) == [("idle",)], "the connection is kept"
            holder.rollback()
            assert await bus.store.head("events") == 0

    asyncio.run(main())


def test_a_timeout_around_a_call_is_a_cancellation_like_any_other(dsn: str, connect: Connect) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn, max_size=1) as bus:
            holder = connect()
            holder.execute("select doorbell.post('events', 'held', 'holder')")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await bus.post("events", "x", sender="ci")
            holder.rollback()
            assert await bus.store.channels() == []

    asyncio.run(main())


def test_a_cancelled_transaction_rolls_back_and_gives_its_connection_back(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn, max_size=1) as bus:
            inside = asyncio.Event()

            async def body(in_sql: bool) -> None:
                async with bus.transaction() as conn:
                    await bus.post("events", "never", sender="ci", conn=conn)
                    inside.set()
                    await (conn.execute("select pg_sleep(60)") if in_sql else asyncio.sleep(60))

            for in_sql in (False, True):
                inside.clear()
                task = asyncio.create_task(body(in_sql))
                await inside.wait()
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert await bus.store.head("events") == 0
            assert len(backends(sql)) == 1

    asyncio.run(main())


def test_a_call_that_is_cancelled_on_a_dead_network_ends_soon_and_gives_its_connection_up(proxy: Proxy) -> None:
    async def main() -> None:
        bus = AsyncMessageBus(proxy.dsn, max_size=1)
        await bus.store.channels()
        proxy.freeze_all()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bus.store.channels(), 0.3)
        assert time.monotonic() - began < 2.5
        proxy.thaw(resume=False)
        assert await bus.store.channels() == []
        await bus.close()
        assert not others()

    asyncio.run(main())


def test_a_cancelled_wait_loses_no_ring(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            chance = random.Random(5)
            bell = AsyncDoorbell(bus, "worker", poll_interval=0.02)
            await bell.arm()
            rang = []
            for seq in range(1, 41):
                await bus.post("events", "x", sender="ci")
                while len(rang) < seq:
                    waiting = asyncio.create_task(bell.wait(5))
                    await asyncio.sleep(chance.random() * 0.01)
                    waiting.cancel()
                    try:
                        event = await waiting
                    except asyncio.CancelledError:
                        continue
                    assert event is not None
                    rang.append(event.seq)
            assert rang == list(range(1, 41))

    asyncio.run(main())


def test_cancelled_while_match_is_thinking_the_message_rings_in_the_next_wait(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            await bus.post("events", "one", sender="ci")
            thinking = asyncio.Event()

            async def match(message: Any) -> bool:
                if not thinking.is_set():
                    thinking.set()
                    await asyncio.sleep(60)
                return True

            bell = AsyncDoorbell(bus, "worker", match=match)
            waiting = asyncio.create_task(bell.wait(30))
            await thinking.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            event = await bell.wait(5)
            assert event is not None
            assert event.seq == 1

    asyncio.run(main())


def test_a_cancelled_close_goes_on(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        bus = AsyncMessageBus(dsn)
        await bus.store.channels()
        closing = asyncio.create_task(bus.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert bus.closed
        await bus.close()  # waits for the one under way
        assert not others()

    asyncio.run(main())
    eventually(lambda: not backends(sql), what="all sessions gone")


# -- loops ------------------------------------------------------------------------------------------------------------


def test_a_bus_made_outside_works_in_its_first_loop_and_refuses_a_second(dsn: str, sql: Sql) -> None:
    bus = AsyncMessageBus(dsn)
    bell = AsyncDoorbell(bus, "worker")

    async def first() -> None:
        await bus.subscribe("worker", "events")
        assert (await bus.post("events", "one", sender="ci")).seq == 1
        assert await bell.wait(5) is not None

    async def second() -> None:
        for call in (
            lambda: bus.post("events", "two", sender="ci"),
            lambda: bus.catch_up("worker"),
            lambda: bell.wait(5),
            lambda: AsyncDoorbell(bus, "worker").arm(),
            bus.transaction().__aenter__,
        ):
            with pytest.raises(WrongLoop, match=r"event loop.*Make a new bus") as caught:
                async with asyncio.timeout(2):
                    await call()
            assert isinstance(caught.value, RuntimeError)
        await bus.close()  # nothing of the first loop is left to await: its connections are hung up
        await bell.close()
        assert bus.closed
        with pytest.raises(BusClosed):
            await bus.store.channels()

    asyncio.run(first())
    asyncio.run(second())
    eventually(lambda: not backends(sql), what="all sessions gone")


def test_while_its_loop_runs_a_bus_is_closed_only_there(dsn: str) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    bus = AsyncMessageBus(dsn)

    def there(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    there(bus.post("events", "one", sender="ci"))
    for call in (bus.store.channels, bus.close):
        with pytest.raises(WrongLoop):
            asyncio.run(call())
    assert there(bus.store.channels()) == ["events"]
    there(bus.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_loop_that_psycopg_cannot_use_is_refused_with_words(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(asyncio, "ProactorEventLoop", type(asyncio.get_running_loop()), raising=False)
        with pytest.raises(WrongLoop, match="SelectorEventLoop"):
            await AsyncMessageBus(dsn).store.channels()

    asyncio.run(main())


FORKS = """
import asyncio, os, sys
from doorbell_postgres import ForkedBus
from doorbell_postgres.aio import AsyncDoorbell, AsyncMessageBus

async def parent(bus):
    await bus.subscribe("worker", "events")
    return (await bus.post("events", "x", sender="parent")).seq

async def child(bus, bell):
    said = []
    for call in (lambda: bus.post("events", "x", sender="child"), lambda: bus.catch_up("worker"), lambda: bell.wait(5),
                 bell.arm, bus.transaction().__aenter__, lambda: bus.ack("worker", "events", 1)):
        try:
            said.append(repr(await call()))
        except ForkedBus as error:
            assert "new bus in the child" in str(error)
            said.append("ForkedBus")
    await bus.close()
    async with AsyncMessageBus(sys.argv[1]) as own:
        said.append((await own.post("events", "x", sender="child")).seq)
    print(*said, flush=True)

with asyncio.Runner() as runner:
    bus = AsyncMessageBus(sys.argv[1])
    bell = AsyncDoorbell(bus, "worker")
    runner.run(parent(bus))
    pid = os.fork()
    if pid == 0:
        asyncio.set_event_loop(None)
        asyncio.new_event_loop().run_until_complete(child(bus, bell))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(runner.run(parent(bus)))
    runner.run(bus.close())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_so(dsn: str) -> None:
    done = run_script(FORKS, dsn)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ForkedBus " * 6 + "2\n3\n"


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_activity_is_a_condition_of_asyncio(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus, AsyncMessageBus(dsn) as elsewhere:
            assert isinstance(bus.activity, asyncio.Condition)
            await bus.subscribe("worker", "events")

            async def next_news() -> None:
                async with asyncio.timeout(10), bus.activity:
                    news.set()
                    await bus.activity.wait()

            async def hear(what: Coroutine[Any, Any, Any]) -> None:
                news.clear()
                waiting = asyncio.create_task(next_news())
                await news.wait()
                await what
                await waiting

            news = asyncio.Event()
            await hear(bus.post("events", "one", sender="ci"))
            bell = AsyncDoorbell(bus, "worker", match=lambda m: m.body == "three")
            ring = asyncio.create_task(bell.wait(20))
            await until(lambda: bus.listener.kind == "listening")
            await hear(elsewhere.post("events", "two", sender="ci"))
            await hear(bell.close())
            assert await ring is None
            await hear(bus.close())

    asyncio.run(main())


def test_whoever_holds_the_condition_stops_neither_a_post_nor_a_close(dsn: str) -> None:
    async def main() -> None:
        bus = AsyncMessageBus(dsn)
        async with asyncio.timeout(10), bus.activity:
            await bus.post("events", "one", sender="ci")
            await bus.post("events", "two", sender="ci")
            await bus.close()
        await until(lambda: not others())

    asyncio.run(main())


def test_two_hundred_bells_share_one_connection_and_one_statement(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn, application_name="many") as bus, AsyncMessageBus(dsn) as poster:
            for n in range(200):
                await bus.subscribe(f"worker {n}", f"channel {n}")
            bells = [AsyncDoorbell(bus, f"worker {n}", poll_interval=NEVER) for n in range(200)]
            await asyncio.gather(*(bell.arm() for bell in bells))
            rings = [asyncio.create_task(bell.wait(60)) for bell in bells]
            # All of them in one statement; more than 16 channels are the wildcard key.
            await until(lambda: len(sql(LOCKS)) == 1)
            assert len(backends(sql, "query ~ 'doorbell.(peek|heads?_moved|arm|bell_floors)|^listen'")) == 1
            for n in (3, 77, 199):
                await poster.post(f"channel {n}", "for one", sender="ci")
                event = await asyncio.wait_for(rings[n], 10)
                assert event is not None
                assert event.channel == f"channel {n}"
            assert sum(ring.done() for ring in rings) == 3
            await asyncio.gather(*(poster.post(f"channel {n}", "for all", sender="ci") for n in range(200)))
            events = await asyncio.wait_for(asyncio.gather(*rings), 30)
            assert [event.channel for event in events] == [f"channel {n}" for n in range(200)]
            await until(lambda: not sql(LOCKS))  # armed is who waits

    asyncio.run(main())


def test_tasks_that_wait_on_one_bell_hear_one_message_each(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            bell = AsyncDoorbell(bus, "worker")
            rings = [asyncio.create_task(bell.wait(30)) for _ in range(3)]
            await bus.post_many("events", ["1", "2", "3"], sender="ci")
            assert sorted(event.seq for event in await asyncio.gather(*rings) if event) == [1, 2, 3]
            late = [asyncio.create_task(bell.wait(30)) for _ in range(3)]
            await asyncio.sleep(0.05)
            await bell.close()
            assert await asyncio.wait_for(asyncio.gather(*late), 2) == [None] * 3

    asyncio.run(main())


def test_match_may_be_plain_or_awaited_and_what_it_raises_leaves_wait(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            await bus.post_many("events", [str(n) for n in range(50)], sender="ci")
            here = asyncio.current_task()

            async def awaited(message: Any) -> bool:
                await asyncio.sleep(0)
                return bool(message.body == "30" and asyncio.current_task() is here)

            def picky(message: Any) -> bool:
                if message.body == "7":
                    raise TimeoutError("cannot read 7")
                return message.seq == 10

            event = await AsyncDoorbell(bus, "worker", match=awaited).wait(5)
            assert event is not None
            assert event.seq == 31
            bell = AsyncDoorbell(bus, "worker", match=picky)
            with pytest.raises(TimeoutError, match="cannot read 7"):
                await bell.wait(5)
            event = await bell.wait(5)
            assert event is not None
            assert event.seq == 10

    asyncio.run(main())


def test_unacked_may_be_left_half_way(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn, max_size=1) as bus:
            await bus.subscribe("worker", "events")
            await bus.post_many("events", ["1", "2", "3"], sender="ci")
            async for message in bus.unacked("worker", page_size=1):
                assert message.seq == 1
                assert not backends(sql, "state <> 'idle'")
                break
            with pytest.raises(InvalidInput, match="page_size"):
                bus.unacked("worker", page_size=0)
            assert [m.seq async for m in bus.unacked("worker", page_size=2)] == [1, 2, 3]

    asyncio.run(main())


def test_a_bus_that_is_dropped_in_a_running_loop_is_closed(dsn: str, sql: Sql) -> None:
    async def main() -> None:
        bus = AsyncMessageBus(dsn)
        await bus.subscribe("worker", "events")
        await AsyncDoorbell(bus, "worker").wait(0)
        del bus
        gc.collect()
        await until(lambda: not others())
        await until(lambda: not backends(sql))

    asyncio.run(main())


# -- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("opened", [True, False], ids=["open", "not opened yet"])
def test_a_wait_and_a_close_end_in_time_where_nothing_answers(proxy: Proxy, dsn: str, opened: bool) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as direct:
            await direct.subscribe("worker", "events")
        bus = AsyncMessageBus(proxy.dsn)
        bell, other = AsyncDoorbell(bus, "worker"), AsyncDoorbell(bus, "worker", match=lambda m: True)
        if opened:
            await asyncio.gather(bell.wait(0), other.arm(), bus.post("events", "backlog", sender="ci"))
        proxy.freeze_all()
        began = time.monotonic()
        results = await asyncio.gather(bell.wait(2), other.wait(1), AsyncDoorbell(bus, "worker").wait(0.5))
        assert time.monotonic() - began < 2.5
        assert results == [None, None, None]
        waiting = asyncio.create_task(bell.wait(60))
        calling = asyncio.create_task(bus.store.channels())
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await bell.close()
        assert await waiting is None
        await bus.close()
        assert time.monotonic() - began < 3
        calling.cancel()
        await asyncio.wait({calling})
        assert others() == set()

    asyncio.run(main())


@pytest.mark.timing
def test_a_wait_ends_at_its_deadline_while_match_is_thinking(dsn: str) -> None:
    async def main() -> None:
        async with AsyncMessageBus(dsn) as bus:
            await bus.subscribe("worker", "events")
            await bus.post("events", "one", sender="ci")
            began = time.monotonic()
            assert await AsyncDoorbell(bus, "worker", match=lambda m: asyncio.sleep(60, True)).wait(0.7) is None
            assert 0.6 < time.monotonic() - began < 2

    asyncio.run(main())


# -- scripts that never close -----------------------------------------------------------------------------------------

NEVER_CLOSES = """
import asyncio, sys, time
from doorbell_postgres.aio import AsyncDoorbell, AsyncMessageBus

bus = AsyncMessageBus(sys.argv[1])

async def main():
    await bus.subscribe("worker", "events")
    bell = AsyncDoorbell(bus, "worker")
    await bus.post("events", "hello", sender="ci")
    print((await bell.wait(10)).wake_line, await bell.wait(0), time.time(), sep="|", flush=True)
"""
STILL_WAITS = """
    globals()["waiting"] = asyncio.create_task(bell.wait(60))
    await asyncio.sleep(0.2)
"""
ENDINGS = {
    "asyncio.run": "asyncio.run(main())",
    "asyncio.run while a bell waits": STILL_WAITS + "asyncio.run(main())",
    "a loop that is left": "asyncio.new_event_loop().run_until_complete(main())",
    "a loop that is kept": "loop = asyncio.new_event_loop(); loop.run_until_complete(main())",
    "a loop that is closed": "loop = asyncio.new_event_loop(); loop.run_until_complete(main()); loop.close()",
    "a loop in a thread": "import threading; loop = asyncio.new_event_loop()\n"
    "threading.Thread(target=loop.run_forever, daemon=True).start()\n"
    "asyncio.run_coroutine_threadsafe(main(), loop).result()",
}


@pytest.mark.timing
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_never_closes_its_bus_exits_by_itself(dsn: str, sql: Sql, ending: str) -> None:
    done = run_script(NEVER_CLOSES + ENDINGS[ending], dsn, within=30)
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, "")
    wake_line, nothing, last = done.stdout.split("|")
    assert (wake_line, nothing) == ("'events'#1 from 'ci': [untrusted] 'hello'", "None")
    assert ended - float(last) < 2
    eventually(lambda: not backends(sql), what="all sessions gone")


def test_a_script_that_ends_in_an_exception_still_exits(dsn: str) -> None:
    done = run_script(NEVER_CLOSES + "    raise LookupError('the end')\nasyncio.run(main())", dsn, within=30)
    assert done.returncode == 1
    assert done.stderr.endswith("LookupError: the end\n")
    assert "destroyed" not in done.stderr


def test_a_script_that_posts_last_has_announced_it(dsn: str, connect: Connect, sql: Sql) -> None:
    script = """
import asyncio, sys
from doorbell_postgres.aio import AsyncMessageBus
async def main():
    bus = AsyncMessageBus(sys.argv[1])
    await bus.post("events", "last words", sender="script")
asyncio.run(main())
"""
    sql("select doorbell.subscribe('worker', 'events')")
    listening = connect(autocommit=True)
    listening.execute("listen doorbell")
    listening.execute("select doorbell.arm(array[0]::bigint[], '{}'::bigint[])")
    done = run_script(script, dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(listening.notifies(timeout=5, stop_after=1))) == 1


def test_memory_works_in_a_loop_and_leaves_nothing() -> None:
    done = run_script(NEVER_CLOSES + "asyncio.run(main())", ":memory:", within=60)
    assert done.returncode == 0, done.stderr
    assert "throwaway" in done.stderr
    assert len(done.stderr.splitlines()) == 1
