"""The rest of the API: what a program may rely on beside the contract itself."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import inspect
import logging
import os
import pickle
import queue
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import doorbell_postgres
from doorbell_postgres import MessageBus, direct
from doorbell_postgres.contract import Backlog, Draft, Message
from doorbell_postgres.errors import BusClosed, ChannelBusy, InvalidInput, LogRewound, UnknownChannel
from support import Api, backends, background, bell_is_waiting, eventually, run_script, waiting_in_database

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., "psycopg.Connection[Any]"]
OpenBus = Callable[..., Any]
Announced = Callable[..., list[str]]


# -- names and signatures ---------------------------------------------------------------------------------------------


def test_the_package_exports_the_names_of_the_reference_and_the_errors() -> None:
    names = "Doorbell Message MessageBus Store WakeEvent sanitize wake_line __version__ DoorbellError InvalidInput"
    names += " UnknownChannel NotSubscribed AckBeyondHead BusClosed ForkedBus DatabaseUnavailable SchemaMismatch ChannelBusy"
    names += " OutcomeUnknown HistoryPruned LogRewound TurnLost"
    assert set(names.split()) <= set(doorbell_postgres.__all__)
    for name in doorbell_postgres.__all__:
        assert getattr(doorbell_postgres, name) is not None


def test_names_are_where_the_reference_has_them() -> None:
    places = {"bus": ["MessageBus"], "store": ["Store"], "waiter": ["Doorbell"], "wakeline": ["sanitize", "wake_line"]}
    for module, names in places.items():
        for name in names:
            assert getattr(importlib.import_module(f"doorbell_postgres.{module}"), name) is getattr(doorbell_postgres, name)


SIGNATURES = {
    "MessageBus": "(dsn=None, *, migrate=False, notify='coalesced', max_size=4, application_name=None, connect_timeout=5,"
    " retry_for=30, lock_timeout=5)",
    "MessageBus.post": "(self, channel, body, *, sender, idempotency_key=None, headers=None, conn=None)",
    "MessageBus.post_many": "(self, channel, messages, *, sender, conn=None)",
    "MessageBus.subscribe": "(self, handle, channel, *, at='head')",
    "MessageBus.unsubscribe": "(self, handle, channel)",
    "MessageBus.catch_up": "(self, handle, *, page_size=100)",
    "MessageBus.unacked": "(self, handle, *, page_size=100, max_bytes=8388608)",
    "MessageBus.ack": "(self, handle, channel, up_to)",
    "MessageBus.backlog": "(self, handle=None)",
    "MessageBus.transaction": "(self)",
    "MessageBus.wait_until_quiet": "(self, *, channel=None, handle=None, timeout)",
    "MessageBus.close": "(self)",
    "Store": "(dsn=None, *, migrate=False)",
    "Store.channels": "(self)",
    "Store.head": "(self, channel)",
    "Store.post": "(self, channel, sender, body, *, idempotency_key=None)",
    "Store.messages_after": "(self, channel, after_seq, *, limit=100)",
    "Store.subscribe": "(self, handle, channel, *, at='head')",
    "Store.subscriptions": "(self, handle)",
    "Store.acked_seq": "(self, handle, channel)",
    "Store.ack": "(self, handle, channel, up_to)",
    "Store.close": "(self)",
    "Doorbell": "(bus, handle, *, match=None, idle_timeout=300.0, poll_interval=0.5)",
    "Doorbell.wait": "(self, timeout=None)",
    "Doorbell.close": "(self)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_the_documented_one(api: Api, name: str) -> None:
    """Further parameters may follow by keyword, as long as they have a default."""
    owner, _, method = name.partition(".")
    found = inspect.signature(getattr(getattr(api, owner), method) if method else getattr(api, owner)).parameters
    namespace: dict[str, Any] = {}
    exec(f"def documented{SIGNATURES[name]}: ...", namespace)
    documented = inspect.signature(namespace["documented"]).parameters
    plain = [(p.name, p.kind, p.default) for p in found.values() if p.name in documented]
    assert plain == [(p.name, p.kind, p.default) for p in documented.values()]
    for extra in found.keys() - documented.keys():
        assert found[extra].kind is inspect.Parameter.KEYWORD_ONLY
        assert found[extra].default is not inspect.Parameter.empty


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_the_same_value_whoever_returned_it(bus: Any, open_bus: OpenBus) -> None:
    bus.subscribe("worker", "events")
    posted = bus.post("events", "one", sender="ci", idempotency_key="k", headers={"a": "b"})
    (batch,) = bus.post_many("events", ["two"], sender="ci")
    fetched = open_bus().catch_up("worker")
    assert fetched == [posted, batch] == list(bus.unacked("worker")) == bus.store.messages_after("events", 0)
    assert {posted, fetched[0]} == {posted}
    assert abs(posted.created_at - time.time()) < 60
    assert posted.headers == fetched[0].headers == {"a": "b"}
    assert (posted.idempotency_key, batch.idempotency_key, dict(batch.headers)) == ("k", None, {})


def test_a_message_that_was_read_is_as_one_that_was_constructed(bus: Any) -> None:
    bus.post("events", "one", sender="ci", idempotency_key="k", headers={"a": "b"})
    (fetched,) = bus.store.messages_after("events", 0)
    made = Message(*(getattr(fetched, field.name) for field in dataclasses.fields(fetched)))
    assert type(fetched) is Message
    assert repr(fetched) == repr(made)
    for field in dataclasses.fields(fetched):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(fetched, field.name, None)
    copied = pickle.loads(pickle.dumps(fetched))
    assert (copied, copied.headers, copied.idempotency_key) == (fetched, {"a": "b"}, "k")
    assert dataclasses.replace(fetched, body="two") == dataclasses.replace(made, body="two") != fetched


def test_headers_and_keys_stay_outside_comparison_and_cannot_be_written(bus: Any) -> None:
    given = {"a": "b"}
    message = bus.post("events", "one", sender="ci", headers=given, idempotency_key="k")
    given["a"] = "changed later"
    assert message.headers["a"] == "b"
    with pytest.raises(TypeError):
        message.headers["a"] = "c"
    bare = Message(message.channel, message.seq, message.sender, message.body, message.created_at)
    assert bare == message
    assert hash(bare) == hash(message)


def test_post_many_numbers_one_run_in_the_order_given(bus: Any) -> None:
    first = bus.post("events", "zero", sender="ci", idempotency_key="known")
    got = bus.post_many(
        "events",
        ["a", Draft("b", "new"), Draft("c", "known"), Draft("d", "new", {"x": "y"}), Draft("e", None, {"x": "y"})],
        sender="ci",
    )
    assert [(m.seq, m.body) for m in got] == [(2, "a"), (3, "b"), (1, "zero"), (3, "b"), (4, "e")]
    assert got[2] == first
    assert got[1] == got[3]
    assert [dict(m.headers) for m in got] == [{}, {}, {}, {}, {"x": "y"}]
    assert bus.store.messages_after("events", 0) == [first, got[0], got[1], got[4]]


def test_post_many_of_nothing_writes_nothing(bus: Any) -> None:
    assert bus.post_many("events", [], sender="ci") == []
    assert bus.store.head("events") == 0


def test_post_many_takes_any_iterable_once(bus: Any) -> None:
    assert [m.seq for m in bus.post_many("events", (str(n) for n in range(1000)), sender="ci")] == list(range(1, 1001))


def test_post_many_rings_once_for_the_first_and_waits_go_on_from_there(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=20)
    ring = background(bell.wait, 30)
    bus.post_many("events", ["a", "b", "c"], sender="ci")
    assert ring.result(10).seq == 1
    assert [bell.wait(5).seq for _ in range(2)] == [2, 3]
    assert bell.wait(0) is None


# -- the caller's transaction -----------------------------------------------------------------------------------------


def test_a_post_in_a_transaction_exists_when_that_commits(bus: Any) -> None:
    bus.subscribe("worker", "events")
    with bus.transaction() as conn:
        conn.execute("create table own (x integer)")
        message = bus.post("events", "one", sender="ci", conn=conn)
        batch = bus.post_many("events", ["two", "three"], sender="ci", conn=conn)
        assert [message.seq, *(m.seq for m in batch)] == [1, 2, 3]
        assert bus.store.head("events") == 0
    assert bus.store.head("events") == 3
    assert bus.catch_up("worker") == [message, *batch]


def test_a_transaction_that_raises_leaves_nothing(bus: Any) -> None:

    def change_my_mind() -> None:
        with bus.transaction() as conn:
            bus.post("events", "one", sender="ci", conn=conn, idempotency_key="k")
            raise LookupError("changed my mind")

    with pytest.raises(LookupError, match="changed my mind"):
        change_my_mind()
    assert bus.store.channels() == []
    assert bus.post("events", "two", sender="ci", idempotency_key="k").seq == 1


def test_a_post_in_a_transaction_is_announced_by_its_commit(
    api: Api, bus: Any, open_bus: OpenBus, sql: Sql, announced: Announced
) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(open_bus(), "worker", poll_interval=20)
    ring = background(bell.wait, 30)
    bell_is_waiting(sql)
    with bus.transaction() as conn:
        bus.post("events", "one", sender="ci", conn=conn)
        bus.post_many("events", ["two", "three"], sender="ci", conn=conn)
        assert announced(within=0.1) == []
        assert not ring.done()
    assert len(announced()) == 1
    assert ring.result(10).seq == 1


def test_a_post_in_a_transaction_that_rolls_back_is_not_announced(
    api: Api, bus: Any, connect: Connect, sql: Sql, announced: Announced
) -> None:
    bus.subscribe("worker", "events")
    ring = background(api.Doorbell(bus, "worker", poll_interval=20).wait, 30)
    bell_is_waiting(sql)
    own = connect()
    bus.post("events", "never", sender="ci", conn=own)
    own.rollback()
    assert announced(within=0.2) == []
    assert not ring.done()


def test_conn_neither_commits_nor_rolls_back_what_is_the_callers(bus: Any, connect: Connect) -> None:
    own = connect()
    own.execute("create table own (x integer)")
    bus.post("events", "never", sender="ci", conn=own)
    assert own.info.transaction_status is psycopg.pq.TransactionStatus.INTRANS
    own.rollback()
    assert bus.store.channels() == []
    bus.post("events", "one", sender="ci", conn=own)
    assert bus.store.head("events") == 0
    own.commit()
    assert bus.store.head("events") == 1
    assert own.info.transaction_status is psycopg.pq.TransactionStatus.IDLE


def test_conn_leaves_the_callers_savepoint_to_the_caller(bus: Any, connect: Connect) -> None:
    own = connect()
    bus.post("events", "one", sender="ci", conn=own)
    with contextlib.suppress(psycopg.errors.DivisionByZero), own.transaction():
        bus.post("events", "never", sender="ci", conn=own)
        own.execute("select 1/0")
    assert bus.post("events", "two", sender="ci", conn=own).seq == 2
    own.commit()
    assert [m.body for m in bus.store.messages_after("events", 0)] == ["one", "two"]


def test_conn_may_have_rows_and_settings_of_its_own(bus: Any, connect: Connect) -> None:
    settings: list[dict[str, Any]] = [{"row_factory": dict_row}, {"autocommit": True}, {"prepare_threshold": None}]
    settings += [{"cursor_factory": psycopg.ClientCursor}, {"cursor_factory": psycopg.RawCursor}]
    for parameters in settings:
        own = connect(**parameters)
        message = bus.post("events", "one", sender="ci", headers={"a": "b"}, conn=own)
        (batch,) = bus.post_many("events", [Draft("two", headers={"a": "b"})], sender="ci", conn=own)
        own.commit()
        assert bus.store.messages_after("events", message.seq - 1) == [message, batch]


def test_conn_in_another_isolation_level_is_told_so(bus: Any, connect: Connect) -> None:
    for level in (psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE):
        own = connect()
        own.isolation_level = level
        with pytest.raises(InvalidInput, match="READ COMMITTED"):
            bus.post("events", "one", sender="ci", conn=own)
        own.rollback()
    assert bus.store.channels() == []


def test_conn_that_is_no_connection_is_refused(bus: Any, dsn: str) -> None:
    for thing in (dsn, 5, bus):
        with pytest.raises(InvalidInput, match="conn"):
            bus.post("events", "one", sender="ci", conn=thing)
    assert bus.store.channels() == []


def test_a_post_fails_in_time_where_another_transaction_holds_the_channel(open_bus: OpenBus, connect: Connect) -> None:
    bus = open_bus(lock_timeout=0.2)
    holder = connect()
    holder.execute("select doorbell.post('events', 'held', 'holder')")
    for post in (
        lambda: bus.post("events", "x", sender="ci"),
        lambda: bus.post("events", "x", sender="ci", idempotency_key="k"),
        lambda: bus.post_many("events", ["x"], sender="ci"),
        lambda: bus.store.post("events", "ci", "x"),
    ):
        with pytest.raises(ChannelBusy, match="events") as busy:
            post()
        assert isinstance(busy.value, TimeoutError)
    assert bus.post("others", "x", sender="ci").seq == 1
    holder.rollback()
    assert bus.post("events", "x", sender="ci", idempotency_key="k").seq == 1


def test_a_transaction_gives_its_connection_back(open_bus: OpenBus) -> None:
    bus = open_bus(max_size=1)
    for n in range(3):
        with bus.transaction() as conn:
            bus.post("events", str(n), sender="ci", conn=conn)
        with pytest.raises(ZeroDivisionError):
            with bus.transaction():
                raise ZeroDivisionError
        assert bus.store.head("events") == n + 1


# -- reading a long backlog -------------------------------------------------------------------------------------------


def test_unacked_holds_one_page_in_memory(bus: Any) -> None:
    bus.subscribe("worker", "events")
    for n in range(48):
        bus.post("events", f"{n:02}" + "x" * 1_000_000, sender="ci")
    gc.collect()
    tracemalloc.start()
    try:
        seen = [int(m.body[:2]) for m in bus.unacked("worker", max_bytes=4_000_000)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == list(range(48))
    assert peak < 20_000_000  # two pages of four, and what reading them takes; all of it is 48


def test_unacked_gives_a_body_larger_than_a_page(bus: Any) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", ["x" * 1000, "y" * 100, "z" * 1000], sender="ci")
    for max_bytes in (1, 999, 1000, 1001, 1100, 1101):
        assert [m.seq for m in bus.unacked("worker", max_bytes=max_bytes)] == [1, 2, 3]


def test_unacked_is_lazy_and_goes_on_to_the_true_head(bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", ["1", "2"], sender="ci")
    reading = bus.unacked("worker", page_size=1)
    assert iter(reading) is reading
    assert next(reading).seq == 1
    assert not backends(sql, "state like 'idle in transaction%%' or state = 'active'")
    bus.ack("worker", "events", 1)  # acking on the way skips nothing and repeats nothing
    bus.post("events", "3", sender="ci")
    assert [m.seq for m in reading] == [2, 3]
    assert list(bus.unacked("nobody")) == []


# -- subscriptions and backlog ----------------------------------------------------------------------------------------


def test_unsubscribing_removes_the_cursor_and_no_message(bus: Any) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "one", sender="ci")
    assert bus.unsubscribe("worker", "events") is True
    assert bus.unsubscribe("worker", "events") is False
    assert bus.store.subscriptions("worker") == bus.catch_up("worker") == []
    assert bus.store.head("events") == 1
    with pytest.raises(UnknownChannel):
        bus.unsubscribe("worker", "typo")
    bus.subscribe("worker", "events")
    assert bus.catch_up("worker") == []  # a new subscription, at the head


def test_backlog_says_who_is_behind_and_since_when(bus: Any) -> None:
    bus.subscribe("worker", "events")
    bus.subscribe("reviewer", "events")
    bus.subscribe("worker", "empty")
    messages = bus.post_many("events", ["a", "b", "c"], sender="ci")
    bus.ack("worker", "events", 2)
    rows = bus.backlog()
    assert all(isinstance(row, Backlog) for row in rows)
    assert [(r.handle, r.channel, r.head, r.acked_seq, r.unacked) for r in rows] == [
        ("reviewer", "events", 3, 0, 3),
        ("worker", "empty", 0, 0, 0),
        ("worker", "events", 3, 2, 1),
    ]
    assert [r.oldest_unacked_at and r.oldest_unacked_at.timestamp() for r in rows] == [
        messages[0].created_at,
        None,
        messages[2].created_at,
    ]
    assert rows[0].last_acked_at is rows[1].last_acked_at is None
    assert rows[2].last_acked_at.timestamp() >= messages[2].created_at
    assert rows[2].oldest_unacked_at.tzinfo is not None
    assert bus.backlog("worker") == rows[1:]
    assert bus.backlog("nobody") == []


def test_wait_until_quiet_waits_for_acked_to_equal_posted(bus: Any) -> None:
    assert bus.wait_until_quiet(timeout=0) is True
    bus.subscribe("worker", "events")
    bus.subscribe("reviewer", "events")
    bus.post("events", "one", sender="ci")
    assert bus.wait_until_quiet(timeout=0.05) is False
    bus.ack("worker", "events", 1)
    assert bus.wait_until_quiet(handle="worker", timeout=0) is True
    assert bus.wait_until_quiet(channel="others", timeout=0) is True
    assert bus.wait_until_quiet(channel="events", timeout=0) is False
    assert bus.wait_until_quiet(channel="events", handle="reviewer", timeout=0) is False
    quiet = background(bus.wait_until_quiet, timeout=30)
    bus.ack("reviewer", "events", 1)
    assert quiet.result(10) is True


# -- activity ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def notified(bus: Any) -> Iterator[Callable[[], bool]]:
    """Whether `bus.activity` has been notified since the last question; it must be within ten seconds."""
    news: queue.SimpleQueue[bool] = queue.SimpleQueue()
    ready, done = threading.Event(), threading.Event()

    def wait() -> None:
        with bus.activity:
            ready.set()
            while not done.is_set():
                if bus.activity.wait(0.1):
                    news.put(True)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    ready.wait(10)

    def heard() -> bool:
        try:
            return news.get(timeout=10)
        except queue.Empty:
            return False

    yield heard
    done.set()
    thread.join(10)


def test_activity_is_notified_of_every_post_of_this_process(bus: Any, notified: Callable[[], bool]) -> None:
    assert isinstance(bus.activity, threading.Condition)
    bus.post("events", "one", sender="ci")
    assert notified()
    bus.post_many("events", ["two"], sender="ci")
    assert notified()
    bus.store.post("events", "ci", "three")
    assert notified()


def test_activity_is_notified_of_remote_posts_while_a_bell_waits(
    api: Api, bus: Any, open_bus: OpenBus, sql: Sql, notified: Callable[[], bool]
) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=0.2)
    waiting = background(bell.wait, 30)
    bell_is_waiting(sql)
    open_bus().post("events", "from elsewhere", sender="ci")
    assert notified()
    assert waiting.result(10).seq == 1


def test_activity_is_notified_when_a_bell_and_when_the_bus_closes(api: Api, bus: Any, notified: Callable[[], bool]) -> None:
    bus.subscribe("worker", "events")
    api.Doorbell(bus, "worker").close()
    assert notified()
    bus.close()
    assert notified()


# -- bells ------------------------------------------------------------------------------------------------------------


def test_a_wake_line_is_that_of_the_message(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker")
    for body in ("plain", "x" * 10_000, "\x1b[31mred\x1b[0m", " " * 500 + "late", "\x1b[31m" * 500 + "late", "é" * 159, ""):
        message = bus.post("events", body, sender="ci")
        assert bell.wait(5).wake_line == doorbell_postgres.wake_line(message)


def test_a_bell_scans_channels_by_name_and_then_by_number(api: Api, bus: Any) -> None:
    for channel in ("b", "B", "ä", "a"):
        bus.subscribe("worker", channel)
        bus.post_many(channel, ["1", "2"], sender="ci")
    bell = api.Doorbell(bus, "worker")
    heard = [(e.channel, e.seq) for e in iter(lambda: bell.wait(0), None)]
    assert heard == [(c, n) for c in sorted("bBäa") for n in (1, 2)]


def test_a_bell_that_skips_what_does_not_match_does_not_come_back_to_it(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", [f"{n} {'yes' if n % 250 == 0 else 'no'}" for n in range(1, 1001)], sender="ci")
    seen = []
    bell = api.Doorbell(bus, "worker", match=lambda m: seen.append(m.seq) or "yes" in m.body)
    assert [bell.wait(10).seq for _ in range(4)] == [250, 500, 750, 1000]
    assert bell.wait(0) is None
    assert seen == list(range(1, 1001))


def test_one_look_passes_over_what_does_not_match_on_every_channel(api: Api, bus: Any) -> None:
    for channel in ("a", "b", "c"):
        bus.subscribe("worker", channel)
        bus.post_many(channel, ["no", "no", "yes" if channel == "c" else "no"], sender="ci")
    bell = api.Doorbell(bus, "worker", match=lambda m: m.body == "yes")
    event = bell.wait(0)
    assert event is not None
    assert (event.channel, event.seq) == ("c", 3)
    assert bell.wait(0) is None


def test_match_sees_the_whole_message(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    posted = bus.post("events", "x" * 100_000, sender="ci", headers={"a": "b"}, idempotency_key="k")
    seen = []
    assert api.Doorbell(bus, "worker", match=lambda m: seen.append(m) or True).wait(5).seq == 1
    assert seen == [posted]
    assert (dict(seen[0].headers), seen[0].idempotency_key) == ({"a": "b"}, "k")


def test_many_bells_on_one_bus_each_hear_what_is_theirs(api: Api, bus: Any, sql: Sql) -> None:
    for n in range(12):
        bus.subscribe(f"worker {n}", f"channel {n % 3}")
    bells = [api.Doorbell(bus, f"worker {n}", poll_interval=20) for n in range(12)]
    rings = [background(bell.wait, 60) for bell in bells]
    bell_is_waiting(sql)
    bus.post("channel 1", "hello", sender="ci")
    for n in (1, 4, 7, 10):
        assert rings[n].result(10).channel == "channel 1"
    assert sum(ring.done() for ring in rings) == 4
    for bell in bells:
        bell.close()
    assert [ring.result(10) for n, ring in enumerate(rings) if n % 3 != 1] == [None] * 8
    assert len(backends(sql)) <= 5  # one listener, and the pool


def test_two_threads_on_one_bell_hear_two_messages(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker")
    rings = [background(bell.wait, 30) for _ in range(2)]
    bus.post_many("events", ["1", "2"], sender="ci")
    assert sorted(ring.result(10).seq for ring in rings) == [1, 2]


def test_a_bell_that_is_dropped_without_close_leaves_nothing(api: Api, bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    for _ in range(20):
        api.Doorbell(bus, "worker").wait(0)
    gc.collect()
    eventually(
        lambda: (
            not backends(sql, "exists (select from pg_locks as l where l.pid = pg_stat_activity.pid and locktype = 'advisory')")
        ),
        what="no key held",
    )
    assert len(backends(sql)) <= 5


@pytest.mark.timing
@pytest.mark.parametrize("timeout", [0, 0.05, 0.3])
def test_a_wait_ends_at_its_deadline(api: Api, bus: Any, timeout: float) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=60)
    bell.wait(0)  # whatever the first one has to open
    begun = time.monotonic()
    assert bell.wait(timeout) is None
    assert timeout <= time.monotonic() - begun < timeout + 1


def test_the_idle_timeout_ends_a_wait_that_names_none(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    assert api.Doorbell(bus, "worker", idle_timeout=0.1).wait() is None
    assert api.Doorbell(bus, "worker", idle_timeout=0).wait() is None


# -- closing ----------------------------------------------------------------------------------------------------------

AFTER_CLOSE: dict[str, Callable[[Any], Any]] = {
    "post": lambda b: b.post("events", "x", sender="ci"),
    "post_many": lambda b: b.post_many("events", ["x"], sender="ci"),
    "subscribe": lambda b: b.subscribe("worker", "events"),
    "unsubscribe": lambda b: b.unsubscribe("worker", "events"),
    "catch_up": lambda b: b.catch_up("worker"),
    "unacked": lambda b: list(b.unacked("worker")),
    "ack": lambda b: b.ack("worker", "events", 1),
    "backlog": lambda b: b.backlog(),
    "wait_until_quiet": lambda b: b.wait_until_quiet(timeout=0),
    "transaction": lambda b: b.transaction().__enter__(),
    "channels": lambda b: b.store.channels(),
    "head": lambda b: b.store.head("events"),
    "store.post": lambda b: b.store.post("events", "ci", "x"),
    "messages_after": lambda b: b.store.messages_after("events", 0),
    "store.subscribe": lambda b: b.store.subscribe("worker", "events"),
    "subscriptions": lambda b: b.store.subscriptions("worker"),
    "acked_seq": lambda b: b.store.acked_seq("worker", "events"),
    "store.ack": lambda b: b.store.ack("worker", "events", 1),
}


@pytest.mark.parametrize("name", AFTER_CLOSE)
def test_after_close_every_call_says_so(bus: Any, name: str) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "one", sender="ci")
    assert bus.closed is False
    bus.close()
    bus.close()
    assert bus.closed is True
    with pytest.raises(BusClosed, match="closed") as closed:
        AFTER_CLOSE[name](bus)
    assert isinstance(closed.value, RuntimeError)


def test_after_close_a_bell_is_silent_and_a_new_one_refused(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "one", sender="ci")
    bell = api.Doorbell(bus, "worker")
    bus.close()
    assert bell.wait(10) is None
    bell.close()
    with pytest.raises(BusClosed):
        api.Doorbell(bus, "worker")


def test_an_iterator_under_way_is_told_that_the_bus_was_closed(bus: Any) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", ["1", "2"], sender="ci")
    reading = bus.unacked("worker", page_size=1)
    next(reading)
    bus.close()
    with pytest.raises(BusClosed):
        list(reading)


@pytest.mark.timing
def test_closing_wakes_every_waiter_at_once(api: Api, bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    bells = [api.Doorbell(bus, "worker", poll_interval=60) for _ in range(3)]
    rings = [background(bell.wait, 60) for bell in bells]
    bell_is_waiting(sql)
    begun = time.monotonic()
    bells[0].close()
    assert rings[0].result(2) is None
    assert not rings[1].done()
    bus.close()
    assert [ring.result(2) for ring in rings] == [None] * 3
    assert time.monotonic() - begun < 3


def test_bus_store_and_bell_are_context_managers(api: Api, dsn: str, sql: Sql) -> None:
    with api.MessageBus(dsn) as bus:
        bus.subscribe("worker", "events")
        with api.Doorbell(bus, "worker") as bell:
            assert bell.wait(0) is None
        assert bell.wait(10) is None
    assert bus.closed
    with api.Store(dsn) as store:
        assert store.channels() == ["events"]
    with pytest.raises(BusClosed):
        store.channels()
    eventually(lambda: not backends(sql), what="all sessions gone")


def test_an_exception_leaves_the_with_block_of_a_bus(api: Api, dsn: str) -> None:
    with pytest.raises(LookupError):
        with api.MessageBus(dsn) as bus:
            raise LookupError
    assert bus.closed


def test_what_was_posted_is_announced_before_close_returns(
    api: Api, bus: Any, open_bus: OpenBus, sql: Sql, announced: Announced
) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=50)
    ring = background(bell.wait, 60)
    bell_is_waiting(sql)
    with open_bus() as passing:
        for n in range(20):  # more than one, so that some are gathered
            passing.post("events", f"and gone {n}", sender="ci")
    assert announced(within=0)
    assert ring.result(10).seq == 1


def test_calls_from_many_threads_share_one_bus(open_bus: OpenBus) -> None:
    bus = open_bus(max_size=2)
    bus.subscribe("worker", "events")

    def session(name: str) -> list[int]:
        return [bus.post("events", name, sender=name).seq for _ in range(25)]

    results = [background(session, f"t{n}") for n in range(6)]
    numbers = [n for result in results for n in result.result(60)]
    assert sorted(numbers) == list(range(1, 151))
    assert len(bus.catch_up("worker")) == 150


def test_a_call_waits_while_every_connection_of_the_bus_is_busy(open_bus: OpenBus, connect: Connect, sql: Sql) -> None:
    bus = open_bus(max_size=1)
    holder = connect()
    holder.execute("select doorbell.post('events', 'held', 'holder')")
    posting = background(bus.post, "events", "x", sender="ci")
    waiting_in_database(sql)
    reading = background(bus.store.head, "events")
    holder.rollback()
    assert posting.result(10).seq == 1
    assert reading.result(10) in (0, 1)


# -- processes --------------------------------------------------------------------------------------------------------

NEVER_CLOSES = """
import sys
from doorbell_postgres import Doorbell, MessageBus
bus = MessageBus(*sys.argv[1:])
bus.subscribe("worker", "events")
bell = Doorbell(bus, "worker")
bus.post("events", "hello", sender="ci")
print(bell.wait(10).wake_line, bell.wait(0))
"""


def test_a_script_that_never_closes_its_bus_exits_by_itself(dsn: str, sql: Sql) -> None:
    done = run_script(NEVER_CLOSES, dsn, within=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "'events'#1 from 'ci': [untrusted] 'hello' None\n"
    eventually(lambda: not backends(sql), what="all sessions gone")


def test_a_script_in_memory_that_never_closes_its_bus_exits_by_itself() -> None:
    done = run_script(NEVER_CLOSES, ":memory:", within=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "'events'#1 from 'ci': [untrusted] 'hello' None\n"


def test_a_script_that_ends_in_an_exception_still_exits(dsn: str) -> None:
    done = run_script(NEVER_CLOSES + "raise LookupError('the end')", dsn, within=30)
    assert done.returncode == 1
    assert done.stderr.endswith("LookupError: the end\n")


def test_a_script_that_posts_last_has_announced_it(api: Api, bus: Any, dsn: str, sql: Sql, announced: Announced) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=50)
    ring = background(bell.wait, 60)
    bell_is_waiting(sql)
    script = "import sys\nfrom doorbell_postgres import MessageBus\n"
    script += "MessageBus(sys.argv[1]).post('events', 'last words', sender='script')"
    done = run_script(script, dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert announced(within=0)
    assert ring.result(10).seq == 1


FORKS = """
import os, sys
from doorbell_postgres import Doorbell, ForkedBus, MessageBus
bus = MessageBus(sys.argv[1])
bus.subscribe("worker", "events")
bus.post("events", "before", sender="parent")
bell = Doorbell(bus, "worker")
bell.wait(5)
pid = os.fork()
if pid == 0:
    said = []
    for call in (lambda: bus.post("events", "x", sender="child"), lambda: bus.catch_up("worker"), bus.store.channels,
                 lambda: bell.wait(5), lambda: Doorbell(bus, "worker"), lambda: bus.transaction().__enter__(),
                 lambda: bus.ack("worker", "events", 1), lambda: list(bus.unacked("worker"))):
        try:
            said.append(repr(call()))
        except ForkedBus as error:
            assert isinstance(error, RuntimeError) and "child" in str(error), error
            said.append("ForkedBus")
    bus.close()
    with MessageBus(sys.argv[1]) as own:
        said.append(own.post("events", "from the child", sender="child").seq)
    print(*said, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(bell.wait(5).seq, bus.post("events", "after", sender="parent").seq, len(bus.catch_up("worker")))
bus.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_so_and_the_parent_is_unharmed(dsn: str) -> None:
    done = run_script(FORKS, dsn, within=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ForkedBus " * 8 + "2\n2 3 3\n"


FORKED_CHILD_EXITS = """
import os, sys
from doorbell_postgres import Doorbell, MessageBus
bus = MessageBus(sys.argv[1])
bus.subscribe("worker", "events")
Doorbell(bus, "worker").wait(0)
bus.post("events", "before", sender="parent")
pid = os.fork()
if pid == 0:
    sys.exit(0)  # atexit handlers and finalizers run
assert os.waitpid(pid, 0)[1] == 0
print(bus.post("events", "after", sender="parent").seq, Doorbell(bus, "worker").wait(5).seq)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_that_ends_cleans_up_nothing_of_its_parent(dsn: str) -> None:
    done = run_script(FORKED_CHILD_EXITS, dsn, within=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 1\n"


# -- which database ---------------------------------------------------------------------------------------------------


def test_memory_is_private_migrated_and_says_that_nobody_else_sees_it(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOORBELL_DSN", "host=127.0.0.1 port=1 dbname=never_read")
    with caplog.at_level(logging.WARNING, "doorbell_postgres"):
        one, two = api.MessageBus(":memory:"), api.MessageBus(":memory:")
    warnings = [r for r in caplog.records if r.name == "doorbell_postgres" and r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "host" in warnings[0].getMessage()
    assert ":memory:" in warnings[0].getMessage()
    with one, two:
        one.post("events", "one", sender="ci")
        assert one.store.channels() == ["events"]
        assert two.store.channels() == []
        with api.Store(":memory:") as three:
            assert three.channels() == []


def test_no_dsn_means_the_environment_and_else_memory(api: Api, bus: Any, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bus.post("events", "one", sender="ci")
    with api.MessageBus() as unnamed, api.Store() as store:
        assert unnamed.store.channels() == store.channels() == []
    monkeypatch.setenv("DOORBELL_DSN", dsn)
    with api.MessageBus() as unnamed, api.MessageBus(None) as none, api.Store() as store:
        assert unnamed.store.channels() == none.store.channels() == store.channels() == ["events"]


def test_an_explicit_dsn_wins_over_the_environment(api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOORBELL_DSN", "host=127.0.0.1 port=1 dbname=never_read")
    with api.MessageBus(dsn) as bus:
        assert bus.store.channels() == []


def test_nonsense_in_the_environment_is_refused_as_if_it_were_given(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOORBELL_DSN", "team.sqlite3")
    with pytest.raises(InvalidInput, match="postgresql://"):
        api.MessageBus()


def test_an_empty_dsn_is_refused_and_not_passed_over(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOORBELL_DSN", "")
    with pytest.raises(InvalidInput, match="DOORBELL_DSN is set and empty"):
        api.MessageBus()
    monkeypatch.setenv("DOORBELL_DSN", "host=127.0.0.1 port=1 dbname=never_read")
    with pytest.raises(InvalidInput, match="'' is not a DSN"):
        api.MessageBus("")


@pytest.mark.parametrize("port", ["abc", "0", "65536", "5432,x"])
def test_a_port_that_is_none_is_refused_by_name(api: Api, port: str) -> None:
    with pytest.raises(InvalidInput, match="port is no number from 1 to 65535"):
        api.MessageBus(f"host=127.0.0.1,127.0.0.1 port={port}")


def test_a_bell_of_a_handle_without_subscriptions_says_once_that_it_never_rings(
    api: Api, bus: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bell = api.Doorbell(bus, "ghost\n")
    assert bell.wait(0) is bell.wait(0) is None
    assert [record.getMessage() for record in caplog.records if "never rings" in record.getMessage()] == [
        "'ghost' is subscribed to nothing: its bell never rings"
    ]


def test_sessions_bear_the_name_that_they_were_given(api: Api, dsn: str, sql: Sql) -> None:
    with api.MessageBus(dsn, application_name="reviewer-7") as bus:
        bus.subscribe("worker", "events")
        api.Doorbell(bus, "worker").wait(0)
        assert {name for _, name, *_ in backends(sql)} == {"reviewer-7"}
    with api.MessageBus(dsn) as bus:
        bus.store.channels()
        assert eventually(lambda: {name for _, name, *_ in backends(sql)} == {"doorbell"})


def test_no_body_is_ever_logged(api: Api, bus: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bus.subscribe("worker", "events")
    bus.post("events", "a secret body", sender="ci", headers={"h": "a secret header"})
    api.Doorbell(bus, "worker", match=lambda m: True).wait(5)
    bus.catch_up("worker")
    bus.ack("worker", "events", 1)
    bus.close()
    assert "a secret" not in caplog.text
    assert not logging.getLogger("doorbell_postgres").handlers


def test_a_bell_starts_over_once_when_an_operator_has_renewed_the_epoch(api: Api, bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker")
    assert bell.wait(0) is None
    sql("select doorbell.new_epoch()")
    with pytest.raises(LogRewound):
        bell.wait(5)
    assert bell.wait(0) is None
    bus.post("events", "after", sender="ci")
    assert bell.wait(5).seq == 1


def test_a_call_that_cannot_be_prepared_was_not_sent(dsn: str, sql: Sql) -> None:
    """A statement is prepared before its second use, not after: else a post that is in the log would be told as failed."""
    with MessageBus(dsn, max_size=1) as bus:
        bus.post("events", "first", sender="ci")
        bus.post("events", "second", sender="ci")
        after = next(direct._numbers)
        with bus.transaction() as connection:
            for number in range(after + 1, after + 4):
                connection.execute(f"prepare doorbell_{number} as select 1".encode())
        with pytest.raises(psycopg.errors.DuplicatePreparedStatement):
            bus.post("events", "third", sender="ci")
        assert sql("select body from doorbell.message") == [("first",), ("second",)]


@pytest.mark.parametrize("keep", [60, 0], ids=["kept", "through the pool"])
def test_a_post_that_is_interrupted_loses_no_connection(dsn: str, keep: int) -> None:
    """Ctrl-C comes between any two steps. With one connection, the next post would find none."""
    done = run_script(
        """
import random, signal, sys
from doorbell_postgres import MessageBus, wire

wire.POOL_KEEP = int(sys.argv[2])

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

armed, interrupts, random = False, 0, random.Random(3)
signal.signal(signal.SIGALRM, interrupt)
with MessageBus(sys.argv[1], max_size=1, retry_for=1) as bus:
    bus.post("events", "first", sender="ci")  # who waits for a dial is psycopg's
    while interrupts < 600:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, random.random() * 0.0012 + 1e-5)
            for _ in range(3):
                bus.post("events", "x", sender="ci")
            armed = False
        except KeyboardInterrupt:
            armed = False
            interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        bus.post("events", "probe", sender="ci")
""",
        dsn,
        str(keep),
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_ctrl_c_while_waiting_for_a_connection_loses_none(dsn: str) -> None:
    """The one that comes back must not go to the call that was interrupted."""
    done = run_script(
        """
import signal, sys, threading
from doorbell_postgres import MessageBus

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
with MessageBus(sys.argv[1], max_size=1, retry_for=5) as bus:
    lent, over = threading.Event(), threading.Event()

    def hold():
        with bus.transaction():
            lent.set()
            over.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    lent.wait(20)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        bus.store.head("events")
    except KeyboardInterrupt:
        pass
    else:
        sys.exit("not interrupted")
    heads = []
    others = [threading.Thread(target=lambda: heads.append(bus.store.head("events"))) for _ in range(2)]
    for other in others:
        other.start()
    over.set()
    for thread in (holder, *others):
        thread.join()
    assert heads == [0, 0], heads
    assert bus.store.head("events") == 0
""",
        dsn,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_connection_that_comes_back_goes_to_whoever_has_just_found_none(dsn: str) -> None:
    """Between its look and its wait the only one comes back: kept for the next call, it would be waited for in vain."""
    with MessageBus(dsn, max_size=1, retry_for=1) as bus:
        bus.post("events", "first", sender="ci")
        pool = bus.store._pool
        lent = pool.borrow(1)

        class Lock:
            """Gives back what is lent as soon as somebody has looked."""

            def __init__(self, real: Any) -> None:
                self.real = real

            def __enter__(self) -> None:
                self.real.__enter__()

            def __exit__(self, *exc: Any) -> None:
                self.real.__exit__(*exc)
                if lent.lending is not None:
                    pool._lock = self.real
                    pool.give_back(lent)

        pool._lock = Lock(pool._lock)  # type: ignore[assignment]
        found = pool.borrow(1)
        assert found is lent
        pool.give_back(found)
