"""What one process does while another does the same: ordered by locks that are looked at, not by time."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from support import Api, Processes, background, bell_is_waiting, waiting_in_database, workers

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., "psycopg.Connection[Any]"]


@pytest.mark.failure_mode
def test_stale_ack_from_another_process(api: Api, dsn: str, bus: Any, sql: Sql, connect: Connect, processes: Processes) -> None:
    """A stale ack from another process moves the cursor back

    The clamp is `GREATEST` inside the UPDATE, and the row lock orders the acks: one that has waited for a later number
    to commit sees that number when it goes on, and returns it.
    """
    bus.subscribe("worker", "events")
    bus.post_many("events", [str(n) for n in range(10)], sender="ci")
    newer = connect()
    newer.execute("select doorbell.ack('worker', 'events', 8)")
    stale = processes.start(workers.ack_all, api.name, dsn, "worker", "events", [3])
    assert stale.hear() == "ready"
    stale.tell("go")
    waiting_in_database(sql)  # it has read a cursor of 0, and waits for the row
    newer.commit()
    assert stale.result() == [8]
    assert bus.store.acked_seq("worker", "events") == 8


@pytest.mark.failure_mode
def test_acks_racing_from_many_processes(api: Api, dsn: str, bus: Any, processes: Processes) -> None:
    """Acks that arrive late, twice and out of order leave the cursor wherever the last one put it

    Each ack returns a cursor at or beyond what it was told. No process ever sees it go back; it ends at the highest.
    """
    bus.subscribe("worker", "events")
    bus.post_many("events", [str(n) for n in range(120)], sender="ci")
    orders = [list(range(1, 118, 3)), list(range(119, 0, -3)), [n * 37 % 120 for n in range(1, 100)]]
    racing = [processes.start(workers.ack_all, api.name, dsn, "worker", "events", order) for order in orders]
    for worker in racing:
        worker.hear()
    for worker in racing:
        worker.tell("go")
    for worker, order in zip(racing, orders, strict=True):
        moved = worker.result()
        assert moved == sorted(moved)
        assert all(cursor >= told for cursor, told in zip(moved, order, strict=True))
    assert bus.store.acked_seq("worker", "events") == 119


@pytest.mark.failure_mode
def test_two_processes_posting_at_once(api: Api, dsn: str, bus: Any, sql: Sql, connect: Connect, processes: Processes) -> None:
    """Two processes post at the same time and get the same number

    The number is taken under the lock of the channel's row, in a statement that begins after the lock is held and so
    sees the rival's commit. A rival that rolls back gives its number back.
    """
    bus.post("events", "one", sender="ci")
    rival = connect()
    rival.execute("select doorbell.post('events', 'two', 'rival')")
    second = processes.start(workers.post_once, api.name, dsn, "events", "three", "ci", None)
    waiting_in_database(sql)
    assert bus.store.head("events") == 1
    rival.commit()
    assert second.result() == (3, "three")
    rival.execute("select doorbell.post('events', 'never', 'rival')")
    third = processes.start(workers.post_once, api.name, dsn, "events", "four", "ci", None)
    waiting_in_database(sql)
    rival.rollback()
    assert third.result() == (4, "four")
    assert [(m.seq, m.body) for m in bus.store.messages_after("events", 0)] == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
        (4, "four"),
    ]


@pytest.mark.failure_mode
def test_two_processes_posting_the_same_key_at_once(
    api: Api, dsn: str, bus: Any, sql: Sql, connect: Connect, processes: Processes
) -> None:
    """Two processes post under one key at the same time: both are taken, or one of them fails

    The key is looked up again under the channel's lock, in a new statement with a new snapshot. The one that waited
    gets the original back; if the original rolls back, it becomes the original.
    """
    bus.post("events", "one", sender="ci")
    rival = connect()
    rival.execute("select doorbell.post('events', 'from the rival', 'rival', 'k')")
    second = processes.start(workers.post_once, api.name, dsn, "events", "from the retry", "ci", "k")
    waiting_in_database(sql)
    rival.commit()
    assert second.result() == (2, "from the rival")
    rival.execute("select doorbell.post('events', 'from the rival', 'rival', 'k2')")
    third = processes.start(workers.post_once, api.name, dsn, "events", "from the retry", "ci", "k2")
    waiting_in_database(sql)
    rival.rollback()
    assert third.result() == (3, "from the retry")
    assert bus.store.head("events") == 3


@pytest.mark.failure_mode
def test_processes_racing_with_shared_keys(api: Api, dsn: str, bus: Any, processes: Processes) -> None:
    """Producers that retry each other's posts collide on numbers and keys

    Four processes post the same forty keys to one new channel: forty messages, numbered without a gap, and every
    process is told the same original for each key.
    """
    racing = [processes.start(workers.post_many_one_by_one, api.name, dsn, "events", f"p{n}", 40, "key") for n in range(4)]
    for worker in racing:
        worker.hear()
    for worker in racing:
        worker.tell("go")
    results = [worker.result() for worker in racing]
    assert results[0] == results[1] == results[2] == results[3]
    assert sorted(seq for seq, *_ in results[0]) == list(range(1, 41))
    log = bus.store.messages_after("events", 0, limit=1000)
    assert sorted((m.seq, m.sender, m.body) for m in log) == sorted(results[0])


def test_processes_posting_to_one_channel_are_numbered_without_a_gap(api: Api, dsn: str, bus: Any, processes: Processes) -> None:
    racing = [processes.start(workers.post_many_one_by_one, api.name, dsn, "events", f"p{n}", 50, None) for n in range(4)]
    for worker in racing:
        worker.hear()
    for worker in racing:
        worker.tell("go")
    results = [worker.result() for worker in racing]
    log = bus.store.messages_after("events", 0, limit=1000)
    assert [m.seq for m in log] == list(range(1, 201))
    assert Counter(m.sender for m in log) == {f"p{n}": 50 for n in range(4)}
    for result in results:
        assert [seq for seq, *_ in result] == sorted(seq for seq, *_ in result)
    assert sorted((m.seq, m.sender, m.body) for m in log) == sorted(row for result in results for row in result)


@pytest.mark.timing
def test_posts_ring_in_other_processes_without_waiting_for_their_polls(
    api: Api, dsn: str, bus: Any, sql: Sql, processes: Processes
) -> None:
    """From a bus, and from plain SQL that says so: within 2 s, where the next poll is further off."""
    bus.subscribe("one", "by a bus")
    bus.subscribe("two", "by SQL")
    waiters = [processes.start(workers.arm, api.name, dsn, handle, {"poll_interval": 50}) for handle in ("one", "two")]
    assert [waiter.hear() for waiter in waiters] == ["made", "made"]
    bell_is_waiting(sql, 2, silent_for=2.8, within=60)
    bus.post("by a bus", "hello", sender="ci")
    sql("select doorbell.post('by SQL', 'hello', 'psql', notify => true)")
    assert waiters[0].result(within=2) == ("by a bus", 1, "post")
    assert waiters[1].result(within=2) == ("by SQL", 1, "post")


def test_a_post_is_announced_by_its_number_only_where_a_bell_waits(
    api: Api, dsn: str, direct_dsn: str, bus: Any, sql: Sql, processes: Processes, announced: Callable[..., list[str]]
) -> None:
    direct = psycopg.connect(direct_dsn, autocommit=True)
    bus.subscribe("worker", "events")
    bus.post("events", "nobody waits", sender="ci")
    bus.ack("worker", "events", 1)
    waiter = processes.start(workers.arm, api.name, dsn, "worker", {"poll_interval": 50})
    bell_is_waiting(sql)
    bus.post("elsewhere", "nobody waits here either", sender="ci")
    ((channel_id,),) = sql("select id from doorbell.channel where name = 'events'")
    # That bell may find the post by an early poll and be gone before it is announced; this one stays.
    direct.execute("select doorbell.arm(array[%s::bigint], array[]::bigint[])", [channel_id])
    bus.post("events", "hello", sender="ci")
    assert announced() == [str(channel_id)]
    assert waiter.result() == ("events", 2, "post")
    assert announced(within=0.2) == []
    direct.close()


def test_a_post_without_notification_rings_by_the_poll(
    api: Api,
    dsn: str,
    open_bus: Callable[..., Any],
    sql: Sql,
    processes: Processes,
    announced: Callable[..., list[str]],
) -> None:
    bus = open_bus(notify="off")
    bus.subscribe("worker", "events")
    waiter = processes.start(workers.arm, api.name, dsn, "worker", {"poll_interval": 0.2})
    assert waiter.hear() == "made"
    bell_is_waiting(sql)
    bus.post("events", "hello", sender="ci")
    assert waiter.result(within=10) == ("events", 1, "post")
    assert announced(within=0.2) == []


def test_a_bell_without_notifications_rings_by_its_poll_and_asks_for_none(
    api: Api, bus: Any, open_bus: Callable[..., Any], sql: Sql, announced: Callable[..., list[str]]
) -> None:
    bus.subscribe("worker", "events")
    deaf = background(api.Doorbell(open_bus(notify="off"), "worker", poll_interval=0.2).wait, 30)
    bell_is_waiting(sql, armed=False)
    bus.post("events", "hello", sender="ci")
    assert deaf.result(10).reason == "post"
    assert announced(within=0.2) == []


@pytest.mark.timing
def test_rings_across_processes_are_fast(api: Api, dsn: str, bus: Any, processes: Processes) -> None:
    """The promise is a median under 5 ms on an idle machine; here anything far below the poll interval will do."""
    bus.subscribe("worker", "events")
    poster = processes.start(workers.post_on_command, api.name, dsn, "events", "ci")
    poster.hear()
    bell = api.Doorbell(bus, "worker", poll_interval=20)
    took = []
    for n in range(15):
        ring = background(lambda: (bell.wait(30), time.monotonic()))
        poster.tell(str(n))
        posted = poster.hear()
        event, heard = ring.result(30)
        assert event.seq == n + 1
        took.append(heard - posted)
    poster.tell(None)
    assert statistics.median(took) < 0.1, took


@pytest.mark.timing
def test_rings_without_notifications_take_at_most_the_poll(api: Api, dsn: str, bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=0.3)
    took = []
    for _ in range(4):
        ring = background(lambda: (bell.wait(30), time.monotonic()))
        bell_is_waiting(sql)
        posted = time.monotonic()
        sql("select doorbell.post('events', 'silent', 'psql')")
        event, heard = ring.result(30)
        assert event is not None
        took.append(heard - posted)
    assert max(took) < 0.3 + 1, took
