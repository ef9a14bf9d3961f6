"""What goes wrong with message logs on Postgres and on networks, and cannot go wrong here: one test a failure mode.

The first paragraph of a docstring is what goes wrong elsewhere, the rest is why it cannot here;
docs/failure-modes.md is made of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from doorbell_postgres import calls, migrate, watch
from doorbell_postgres.contract import Draft
from doorbell_postgres.errors import (
    AckBeyondHead,
    ChannelBusy,
    DatabaseUnavailable,
    DoorbellError,
    InvalidInput,
    NotSubscribed,
    SchemaMismatch,
    UnknownChannel,
)
from support import (
    Api,
    Processes,
    TestServer,
    backends,
    bell_is_waiting,
    eventually,
    open_api,
    run_script,
    waiting_in_database,
)
from support.processes import plain_environment

pytestmark = pytest.mark.failure_mode

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]
OpenBus = Callable[..., Any]

# So long that a ring within a test's patience cannot have come from the poll.
NEVER = 60.0


@contextlib.contextmanager
def a_bus(shell: str, dsn: str, **parameters: Any) -> Iterator[Any]:
    """For worker functions: the bus of the shell called `shell`."""
    bus = open_api(shell).MessageBus(dsn, **parameters)
    try:
        yield bus
    finally:
        bus.close()


# ---------------------------------------------------------------------------------------------------------------------
# The log
# ---------------------------------------------------------------------------------------------------------------------


class RolledBack(Exception):
    """Raised by the workers in one transaction of five."""


def post_in_transactions(pipe: Any, shell: str, dsn: str, worker: int, rounds: int) -> list[tuple[str, int, str]]:
    """(channel, seq, body) of every message whose transaction has committed."""
    chance = random.Random(worker)
    committed: list[tuple[str, int, str]] = []
    with a_bus(shell, dsn) as bus:
        for n in range(rounds):
            channel = chance.choice(("alpha", "beta", "gamma"))
            written: list[tuple[str, int, str]] = []
            with contextlib.suppress(RolledBack):
                with bus.transaction() as conn:
                    time.sleep(chance.random() * 0.003)
                    for part in range(chance.randint(1, 2)):
                        message = bus.post(channel, f"{worker}.{n}.{part}", sender=f"poster-{worker}", conn=conn)
                        written.append((channel, message.seq, message.body))
                    time.sleep(chance.random() * 0.003)
                    if chance.random() < 0.2:
                        raise RolledBack
                committed += written
    return committed


def test_lower_number_never_commits_after_a_higher_one(api: Api, bus: Any, dsn: str, processes: Processes) -> None:
    """A poster takes number 7, another takes 8 and commits first; the reader's cursor passes 7 before it is visible, and
    that message is never seen. SERIAL columns and sequences do this, and so does taking the number before the lock.

    The number is `max(seq) + 1`, taken under the lock on the channel's row that its transaction keeps until it ends:
    numbers are given, and become visible, in one order.
    """
    channels = ("alpha", "beta", "gamma")
    for channel in channels:
        bus.subscribe("reader", channel, at="start")
    workers = [processes.start(post_in_transactions, api.name, dsn, n, 60) for n in range(8)]
    seen: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def read() -> None:
        for message in bus.catch_up("reader", page_size=7):
            assert message.seq == len(seen[message.channel]) + 1, f"{message.channel} skips to {message.seq}"
            seen[message.channel].append((message.seq, message.body))
        for channel, messages in seen.items():
            bus.ack("reader", channel, len(messages))

    while any(worker.alive for worker in workers):
        read()
    committed = [message for worker in workers for message in worker.result()]
    read()
    assert sorted(committed) == sorted((c, seq, body) for c in channels for seq, body in seen[c])
    assert len(committed) > 8 * 60 / 2
    assert bus.wait_until_quiet(handle="reader", timeout=0)


def test_rolled_back_post_leaves_no_gap(bus: Any) -> None:
    """A rolled-back transaction has used up a number; the reader waits for a message that never comes, or learns to accept
    gaps and then accepts real losses too.

    A number exists only with its row: what rolls back gives it back, and the next post gets the same one.
    """
    bus.post("events", "before", sender="ci")
    for n in range(100):
        with contextlib.suppress(RolledBack), bus.transaction() as conn:
            assert bus.post("events", f"rolled back {n}", sender="ci", conn=conn).seq == 2
            raise RolledBack
        assert bus.store.head("events") == 1
    assert bus.post("events", "after", sender="ci").seq == 2


def post_when_told(pipe: Any, shell: str, dsn: str, worker: int, count: int) -> list[int]:
    """Post `count` messages to each channel that is told, until None is; the numbers they got."""
    numbers = []
    with a_bus(shell, dsn) as bus:
        pipe.send("ready")
        while (channel := pipe.recv()) is not None:
            numbers += [bus.post(channel, f"{worker}.{n}", sender=f"poster-{worker}").seq for n in range(count)]
            pipe.send("done")
    return numbers


def test_first_post_to_a_new_channel_does_not_collide(api: Api, bus: Any, dsn: str, processes: Processes, sql: Sql) -> None:
    """Several processes find that the channel is not there and create it; all but one get a unique violation, or two of
    them post number 1.

    Creating it is `on conflict do nothing` followed by a new look for the row, in a loop. The loser waits for the winner
    and then posts behind it; where the winner rolls back, the loser creates the channel.
    """
    workers = [processes.start(post_when_told, api.name, dsn, n, 3) for n in range(8)]
    for worker in workers:
        assert worker.hear() == "ready"
    for turn in range(10):
        channel = f"new {turn}"
        for worker in workers:
            worker.tell(channel)
        for worker in workers:
            worker.hear()
        assert [m.seq for m in bus.store.messages_after(channel, 0)] == list(range(1, 25))

    # And in the instant that counts: while the creation itself is uncommitted.
    for ends, expected in ((RolledBack, 1), (None, 2)):
        channel = f"created by one that ends with {ends}"
        with contextlib.suppress(RolledBack), bus.transaction() as conn:
            assert bus.post(channel, "first", sender="test", conn=conn).seq == 1
            workers[0].tell(channel)
            waiting_in_database(sql, 1)
            if ends is not None:
                raise ends
        workers[0].hear()
        assert bus.store.messages_after(channel, 0)[expected - 1].body == "0.0"
    for worker in workers:
        worker.tell(None)
        worker.result()


def test_long_transaction_stalls_no_other_poster(open_bus: OpenBus) -> None:
    """One session posts and then leaves its transaction open, waiting for a model or a human; every other poster, and
    soon every connection of the pool, waits behind it without an end.

    The lock is the channel's own, waited for no longer than `lock_timeout`, and the error names the channel and the cause.
    Other channels, readers and acks never touch it.
    """
    holder, other = open_bus(), open_bus(lock_timeout=0.5)
    other.subscribe("reader", "X", at="start")
    other.subscribe("reader", "Y", at="start")
    first = other.post("X", "committed", sender="ci")
    with holder.transaction() as conn:
        holder.post("X", "held", sender="ci", conn=conn)

        for call in (
            lambda: other.post("X", "b", sender="ci"),
            lambda: other.post("X", "b", sender="ci", idempotency_key="k"),
            lambda: other.post_many("X", ["b"], sender="ci"),
        ):
            began = time.monotonic()
            with pytest.raises(ChannelBusy, match=r"'X' was held by another transaction.*Nothing was written") as caught:
                call()
            assert 0.4 < time.monotonic() - began < 10
            assert isinstance(caught.value, TimeoutError)

        assert other.post("Y", "free", sender="ci").seq == 1
        assert [m.body for m in other.catch_up("reader")] == ["committed", "free"]
        assert other.ack("reader", "X", first.seq) == 1
        assert other.store.head("X") == 1
        assert other.store.channels() == ["X", "Y"]
        assert [b.unacked for b in other.backlog("reader")] == [0, 1]
        other.subscribe("reader", "X")  # has a cursor already: takes no lock

    assert other.post("X", "after", sender="ci").seq == 3


def post_keyed(pipe: Any, shell: str, dsn: str, body: str) -> tuple[int, str, str, float]:
    with a_bus(shell, dsn, lock_timeout=30) as bus:
        pipe.send("ready")
        pipe.recv()
        message = bus.post("events", body, sender=f"sender of {body}", idempotency_key="deploy-42")
        return message.seq, message.sender, message.body, message.created_at


@pytest.mark.parametrize("channel_exists", [True, False], ids=["old channel", "new channel"])
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_retry_while_the_first_post_is_uncommitted_gets_the_original(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes, ends: str, channel_exists: bool
) -> None:
    """The retry of a keyed post runs while the first one is still uncommitted elsewhere: it finds nothing and posts again,
    or waits and then gets a unique violation, or gets nothing at all.

    The key is looked up again under the channel's lock, in a statement of its own and so with a snapshot from after the
    wait. Whoever comes then finds the original; where that one rolled back, exactly one of the waiting becomes it.
    """
    if channel_exists:
        bus.post("events", "zero", sender="ci")
    workers = [processes.start(post_keyed, api.name, dsn, f"retry {n}") for n in range(6)]
    for worker in workers:
        assert worker.hear() == "ready"
    with contextlib.suppress(RolledBack), bus.transaction() as conn:
        first = bus.post("events", "first", sender="ci", idempotency_key="deploy-42", conn=conn)
        for worker in workers:
            worker.tell("go")
        waiting_in_database(sql, len(workers))
        if ends == "rollback":
            raise RolledBack
    answers = {worker.result() for worker in workers}

    log = [m for m in bus.store.messages_after("events", 0) if m.idempotency_key == "deploy-42"]
    assert len(log) == 1
    assert answers == {(log[0].seq, log[0].sender, log[0].body, log[0].created_at)}
    assert log[0].body == "first" if ends == "commit" else log[0].body.startswith("retry ")
    if ends == "commit":
        assert log == [first]


PREFIX = "the same two hundred bytes, " * 7  # 196, far beyond the 63 at which Postgres cuts an identifier
SIMILAR = [PREFIX + end for end in ("end", "END", "End", "e'd", 'e"d', "e\nd", "e\\d", "🔔", "e;d", "e%s")]


def test_large_body_and_similar_long_names_ring_their_own_bell(api: Api, open_bus: OpenBus, sql: Sql) -> None:
    """The message travels in the notification, and one of more than 8,000 bytes is an error; or the channel name becomes an
    identifier, is cut at 63 bytes, and two channels are one.

    A notification holds a channel's number and nothing else. Names are values, never identifiers.
    """
    listening, posting = open_bus(), open_bus()
    for n, channel in enumerate(SIMILAR):
        listening.subscribe(f"handle {n}", channel)
    bells = [api.Doorbell(listening, f"handle {n}", poll_interval=NEVER) for n in range(len(SIMILAR))]
    with ThreadPoolExecutor(len(bells)) as threads:
        waits = [threads.submit(bell.wait, 120) for bell in bells]
        bell_is_waiting(sql)
        order = list(range(len(SIMILAR)))
        random.Random(0).shuffle(order)
        for done, n in enumerate(order, start=1):
            body = f"{n}:" + "x" * 8_000_000
            posting.post(SIMILAR[n], body, sender="ci")
            event = waits[n].result(timeout=20)
            assert event is not None
            assert (event.seq, event.sender) == (1, "ci")
            assert len(event.wake_line) < 500
            assert [w.done() for w in waits].count(True) == done, "another bell rang too"
            (message,) = listening.catch_up(f"handle {n}")
            assert (message.channel, message.body) == (SIMILAR[n], body)
            listening.ack(f"handle {n}", SIMILAR[n], 1)
    assert posting.store.channels() == sorted(SIMILAR)


EXACT = {
    "0xFFFF": "\uffff",
    "noncharacter": "\ufdd0",
    "last code point": "\U0010ffff",
    "CRLF": "one\r\ntwo\rthree\n",
    "backslash-u0000": "a\\u0000b",
    "backslashes": "\\ \\\\ \\x00 \\",
    "JSON": '{"a": "\\ud800"}',
    "quotes": "' \" ` $$ $1 ''",
    "placeholders": "%s %% %(x)s {} {0} :name ?",
    "control": "\x01\x08\x1b[31m\x7f\x85\x9f",
    "line separators": "\u2028\u2029",
    "bidi": "\u202eabc\u2066",
    "combining": "e\u0301 é",
    "emoji": "👩‍👩‍👧🔔",
    "spaces": "  \t around \u3000 ",
    "byte order mark": "\ufeffa",
}
REFUSED = {
    "NUL": "\x00",
    "NUL inside": "a\x00b",
    "high surrogate": "\ud800",
    "low surrogate": "a\udfffb",
    "reversed pair": "\udc00\ud800",
}


@pytest.mark.parametrize("text", EXACT.values(), ids=EXACT)
def test_awkward_text_comes_back_exactly(open_bus: OpenBus, text: str) -> None:
    """Text is changed on its way: quoted twice, cut at a NUL, normalised, trimmed, its line ends translated, its `\\u0000`
    taken for an escape by JSON.

    Text is bound as parameters in UTF-8, compared by bytes, and headers go through one JSON encoder. What the log cannot
    hold is refused (next row).
    """
    one, other = open_bus(), open_bus()
    one.subscribe(text, text)
    posted = one.post(text, text, sender=text, idempotency_key=text, headers={text: text})
    many = one.post_many(text, [Draft(text, text + "2", {text: text}), text], sender=text)
    for message in (posted, *many):
        assert (message.channel, message.sender, message.body) == (text, text, text)
    found = other.catch_up(text)
    assert found == [posted, *many]
    assert [m.idempotency_key for m in found] == [text, text + "2", None]
    assert [dict(m.headers) for m in found] == [{text: text}, {text: text}, {}]
    assert other.post(text, "again", sender="x", idempotency_key=text) == posted
    assert other.store.channels() == other.store.subscriptions(text) == [text]
    assert other.ack(text, text, 3) == other.store.acked_seq(text, text) == 3
    assert [(b.handle, b.channel) for b in other.backlog(text)] == [(text, text)]


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_text_that_the_log_cannot_hold_is_refused_before_any_sql(bus: Any, sql: Sql, connect: Connect, text: str) -> None:
    """A NUL or a lone surrogate fails somewhere between client and server: in the middle of a batch, with half of it
    written, or with an error that names no field.

    Every argument is checked before the first byte is sent, and the error names it. A batch is one statement: all or
    nothing.
    """
    conn = connect()
    refused: dict[str, Callable[[], Any]] = {
        "channel": lambda: bus.post(text, "b", sender="s", conn=conn),
        "body": lambda: bus.post("c", text, sender="s", conn=conn),
        "sender": lambda: bus.post("c", "b", sender=text, conn=conn),
        "idempotency_key": lambda: bus.post("c", "b", sender="s", idempotency_key=text, conn=conn),
        "headers": lambda: bus.post("c", "b", sender="s", headers={"name": text}, conn=conn),
        "header": lambda: bus.post("c", "b", sender="s", headers={text: "value"}, conn=conn),
        "handle": lambda: bus.subscribe(text, "c", conn=conn),
    }
    refused |= {
        f"channel {what}": call
        for what, call in {
            "of subscribe": lambda: bus.subscribe("h", text, conn=conn),
            "of unsubscribe": lambda: bus.unsubscribe("h", text, conn=conn),
            "of ack": lambda: bus.ack("h", text, 0, conn=conn),
            "of post_many": lambda: bus.post_many(text, ["b"], sender="s", conn=conn),
            "of head": lambda: bus.store.head(text),
            "of messages_after": lambda: bus.store.messages_after(text, 0),
        }.items()
    }
    refused |= {
        f"handle {what}": call
        for what, call in {
            "of ack": lambda: bus.ack(text, "c", 0, conn=conn),
            "of catch_up": lambda: bus.catch_up(text),
            "of unacked": lambda: bus.unacked(text),
            "of subscriptions": lambda: bus.store.subscriptions(text),
            "of backlog": lambda: bus.backlog(text),
        }.items()
    }
    batches: list[list[Any]] = [
        ["good", text],
        ["good", Draft("b", idempotency_key=text), "good"],
        [Draft("good", "key"), Draft("b", headers={"n": text})],
    ]
    for batch in batches:
        refused[f"draft in {batch!a}"] = lambda batch=batch: bus.post_many("c", batch, sender="s", conn=conn)
    for what, call in refused.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert isinstance(caught.value, InvalidInput), what
        assert "draft" in what or what.split()[0] in str(caught.value), f"{what}: {caught.value}"
        assert str(caught.value).isprintable(), what
        assert conn.info.transaction_status == TransactionStatus.IDLE, f"{what}: something was sent"
    assert sql("select count(*) from doorbell.channel") == [(0,)]


def test_order_of_text_does_not_depend_on_the_locale(api: Api, server: TestServer) -> None:
    """The order of text keys comes from the operating system's locale library; after an upgrade of that, or on a replica
    with another, an index finds rows no more and accepts duplicates.

    Every text key is COLLATE "C": the order of bytes, which no library defines and which is also Python's `sorted()`.
    """
    names = ["a", "A", "b", "B", "ab", "a b", "a-b", "a_b", "ä", "z", "Z", "é", "e\u0301", "ß", "ss", "1", "10", "2"]
    names += ["_", "~", "🔔", "\uffff", "ﬁ", "İ", "i", "ı", "I"]
    made = server.create_database()
    # Where the server has them, a database whose own default is a natural language's order.
    for locale in ("locale_provider icu icu_locale 'en-US' locale 'C'", "locale 'en_US.utf8'", "locale 'C.UTF-8'"):
        server.drop_database(made)
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin, contextlib.suppress(psycopg.Error):
            admin.execute(f"create database {made} template template0 encoding 'UTF8' {locale}".encode())
            break
    dsn = server.dsn(made)
    try:
        bus = api.MessageBus(dsn, migrate=True)
        for name in random.Random(1).sample(names, len(names)):
            bus.subscribe("reader", name)
            bus.subscribe(name, "events")
            bus.post(name, "b", sender="s")
        try:
            assert bus.store.channels() == sorted([*names, "events"])
            assert bus.store.subscriptions("reader") == sorted(names)
            assert [m.channel for m in bus.catch_up("reader", page_size=3)] == sorted(names)
            assert [b.channel for b in bus.backlog("reader")] == sorted(names)
            assert [b.handle for b in bus.backlog() if b.channel == "events"] == sorted(names)
        finally:
            bus.close()
        with psycopg.connect(dsn) as connection:
            keys = connection.execute(
                "select distinct c.relname, a.attname, l.collname"
                " from pg_index as i"
                " join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)"
                " join pg_collation as l on l.oid = a.attcollation"
                " join pg_class as c on c.oid = i.indrelid"
                " where c.relnamespace = 'doorbell'::regnamespace and c.relname <> 'schema_version'"
            ).fetchall()
            others = connection.execute(
                "select a.attname, l.collname from pg_attribute as a join pg_collation as l on l.oid = a.attcollation"
                " where a.attrelid = 'doorbell.message'::regclass and a.attname = 'sender'"
            ).fetchall()
    finally:
        server.drop_database(made)
    assert {(table, column) for table, column, _ in keys} >= {
        ("channel", "name"),
        ("message", "idempotency_key"),
        ("cursor", "handle"),
    }
    assert {collation for *_, collation in keys + others} == {"C"}


def test_clocks_of_clients_do_not_matter(open_bus: OpenBus, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are stamped by the hosts that post them and ordered by that stamp; a host whose clock is a minute behind
    posts into the past, and readers have already gone by.

    `created_at` is the server's clock, and nothing is ordered by it: order is `seq`.
    """
    bus = open_bus()
    bus.subscribe("reader", "events")
    real = time.time
    for shift in (-86_400.0, 86_400.0 * 365):
        with monkeypatch.context() as shifted:
            shifted.setattr(time, "time", lambda shift=shift: real() + shift)
            ((before,),) = sql("select extract(epoch from clock_timestamp())::float8")
            posted = bus.post("events", f"shifted by {shift}", sender="ci")
            ((after,),) = sql("select extract(epoch from clock_timestamp())::float8")
        assert before <= posted.created_at <= after
    # Even when the server's own clock was set back between two posts.
    sql("update doorbell.message set created_at = created_at - interval '1 year' where seq = 2")
    assert [m.seq for m in open_bus().catch_up("reader")] == [1, 2]


def post_for(pipe: Any, shell: str, dsn: str, channel: str, seconds: float) -> list[int]:
    """Posts in each second of `seconds`."""
    counts = [0] * int(seconds)
    with a_bus(shell, dsn) as bus:
        for n in range(200):
            bus.post(channel, f"warm-up {n}", sender="ci")
        pipe.send("warm")
        pipe.recv()
        began = time.monotonic()
        while (second := int(time.monotonic() - began)) < len(counts):
            bus.post(channel, "x" * 200, sender="ci")
            counts[second] += 1
    return counts


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.alone
def test_old_snapshot_elsewhere_does_not_slow_posts(api: Api, dsn: str, processes: Processes, connect: Connect) -> None:
    """A counter row is updated by every post; while a dump or a report holds an old snapshot, its dead versions cannot be
    removed, each post walks over all of them, and posting gets slower by the second.

    There is no counter: a post locks a row that it does not change, and finds the head by one probe of an index in which
    nothing dies.
    """
    workers = [processes.start(post_for, api.name, dsn, f"channel {n}", 30.0) for n in range(2)]
    for worker in workers:
        assert worker.hear() == "warm"
    snapshot = connect()
    snapshot.execute("begin isolation level repeatable read")
    snapshot.execute("select count(*) from doorbell.message")
    for worker in workers:
        worker.tell("go")
    rates = [sum(second) for second in zip(*(worker.result(within=120) for worker in workers), strict=True)]
    snapshot.rollback()
    start, end = statistics.median(rates[:10]), statistics.median(rates[-10:])
    assert end >= start / 1.3, f"{start} posts/s at the start, {end} at the end: {rates}"


def test_acks_rewrite_the_cursor_in_place(bus: Any, sql: Sql) -> None:
    """Each ack leaves a dead row and a dead entry in every index; the cursor table grows by the minute though it holds ten
    rows, and every look at it gets slower.

    No index holds a column that moves, and the table's pages are half empty: an update stays on its page and touches no
    index (HOT), and what it leaves is reused by the next. (While an old snapshot is open nothing can be reused: what acks
    lose then is documented.)
    """
    bus.subscribe("worker", "events")
    for message in bus.post_many("events", ["b"] * 500, sender="ci"):
        bus.ack("worker", "events", message.seq)
    bus.close()  # a session reports its statistics when it ends
    ((updates, hot, pages),) = eventually(
        lambda: sql(
            "select n_tup_upd, n_tup_hot_upd, pg_relation_size(relid) / current_setting('block_size')::int"
            " from pg_stat_user_tables where relid = 'doorbell.cursor'::regclass and n_tup_upd >= 500"
        )
    )
    assert updates == 500
    assert hot >= 495
    assert pages <= 2


# ---------------------------------------------------------------------------------------------------------------------
# The schema
# ---------------------------------------------------------------------------------------------------------------------


def migrate_when_told(pipe: Any, dsn: str) -> bool:
    import alembic.command  # noqa: F401 (so that all of them are as good as there)

    pipe.send("ready")
    pipe.recv()
    return migrate.upgrade(dsn).ready


def on(dsn: str) -> tuple[psycopg.Connection[Any], Sql]:
    """A connection to another database than the test's own, and a `sql` on it."""
    connection = psycopg.connect(dsn, autocommit=True)

    def run(query: str, *params: Any) -> list[tuple[Any, ...]]:
        cursor = connection.execute(query.encode(), params or None)
        return cursor.fetchall() if cursor.description else []

    return connection, run


def test_ten_hosts_migrate_an_empty_database_at_once(empty_dsn: str, processes: Processes) -> None:
    """Ten hosts start at once and each of them migrates: two create the same table, one fails half-way, the version table
    says something else than the schema.

    All of it, CREATE SCHEMA and the version table included, is one transaction under one advisory lock that ends with it.
    Whoever waited looks again and finds nothing to do.
    """
    connection, sql = on(empty_dsn)
    with connection:
        for _ in range(2):
            workers = [processes.start(migrate_when_told, empty_dsn) for _ in range(10)]
            for worker in workers:
                assert worker.hear(within=60) == "ready"
            sql("select pg_advisory_lock(%s)", migrate.GUARD)
            for worker in workers:
                worker.tell("go")
            waiting_in_database(sql, 10)
            sql("select pg_advisory_unlock(%s)", migrate.GUARD)
            assert [worker.result() for worker in workers] == [True] * 10
            # The second time is a no-op: not even the functions are declared again.
            declared = sql("select oid, xmin::text from pg_proc where pronamespace = 'doorbell'::regnamespace order by 1")
            assert len({xmin for _, xmin in declared}) <= 2  # those of one transaction
            first = locals().setdefault("first", declared)
            assert declared == first


@pytest.mark.parametrize("tag", ["CREATE TABLE", "CREATE FUNCTION", "CREATE VIEW", "REVOKE"])
def test_migration_killed_half_way_finishes_when_run_again(empty_dsn: str, processes: Processes, tag: str) -> None:
    """A deployment is killed in the middle of its migration; the schema is half there, the next run fails on what exists
    already, and a lock that nobody holds keeps everybody out.

    One transaction: killed at any statement, nothing of it has happened, and the lock is gone with its session.
    """
    connection, sql = on(empty_dsn)
    with connection:
        sql(
            "create function public.stop_here() returns event_trigger language plpgsql"
            " as $$ begin perform pg_advisory_xact_lock(4711); end $$"
        )
        sql(f"create event trigger stop_here on ddl_command_end when tag in ('{tag}') execute function public.stop_here()")
        sql("select pg_advisory_lock(4711)")
        worker = processes.start(migrate_when_told, empty_dsn)
        worker.hear()
        worker.tell("go")
        waiting_in_database(sql, 1)
        worker.kill()
        sql("select pg_advisory_unlock(4711)")
        eventually(lambda: not backends(sql), what="the killed one's session is gone")
        assert sql("select count(*) from pg_namespace where nspname = 'doorbell'") == [(0,)]
        sql("drop event trigger stop_here")
    assert migrate.upgrade(empty_dsn).ready


@pytest.mark.parametrize(
    ("revision", "rest"),
    [
        ("0000", "Its functions are older than what would be called. Run: doorbell migrate."),
        ("9999", "A newer version has migrated it. Upgrade doorbell-postgres on this host."),
    ],
    ids=["new package on an old schema", "old package on a new schema"],
)
def test_package_and_schema_of_different_versions_refuse_at_opening(
    api: Api, dsn: str, sql: Sql, revision: str, rest: str
) -> None:
    """A host runs last month's package on this month's schema. Most calls work; one, on Tuesday, writes what the new code
    takes for something else.

    Opening asks for the schema's revision first. Any other than the package's own is refused, with which is which and what
    to run.
    """
    sql("update doorbell.schema_version set version_num = %s", revision)
    for opener in (api.MessageBus, api.Store):
        with pytest.raises(SchemaMismatch) as caught:
            opener(dsn)
        assert str(caught.value) == (
            f"The database's schema is at revision {revision}; this doorbell-postgres speaks {calls.SCHEMA_REVISION}. {rest}"
        )
    sql("update doorbell.schema_version set version_num = %s", calls.SCHEMA_REVISION)
    api.MessageBus(dsn).close()


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------

FORKED = """
import json, os, sys, traceback
from doorbell_postgres import Doorbell, MessageBus
from doorbell_postgres.errors import ForkedBus

bus = MessageBus(sys.argv[1])
bus.subscribe("worker", "events")
first = bus.post("events", "from the parent", sender="ci")
bell = Doorbell(bus, "worker")
assert bell.wait(10).seq == 1
read, write = os.pipe()
child = os.fork()
if child == 0:
    said = {}
    for name, call in {
        "post": lambda: bus.post("events", "from the child", sender="ci"),
        "catch_up": lambda: bus.catch_up("worker"),
        "ack": lambda: bus.ack("worker", "events", 1),
        "subscribe": lambda: bus.subscribe("other", "events"),
        "head": lambda: bus.store.head("events"),
        "transaction": lambda: bus.transaction().__enter__(),
        "wait": lambda: bell.wait(5),
        "bell": lambda: Doorbell(bus, "worker"),
    }.items():
        try:
            said[name] = "returned " + repr(call())
        except ForkedBus as error:
            said[name] = str(error)
        except BaseException as error:
            said[name] = traceback.format_exc()
    bus.close()
    with MessageBus(sys.argv[1]) as own:
        said["own"] = own.post("events", "from the child's own bus", sender="child").seq
    os.write(write, json.dumps(said).encode())
    sys.exit(0)  # the way out that runs every finaliser
os.close(write)
said = json.loads(os.fdopen(read, "rb").read())
_, status = os.waitpid(child, 0)
after = bus.post("events", "from the parent again", sender="ci")
event = bell.wait(10)
print(json.dumps({
    "child": said, "status": status, "seq": after.seq, "event": event.seq,
    "log": [m.body for m in bus.catch_up("worker")], "acked": bus.ack("worker", "events", 3),
}))
bus.close()
"""


def test_forked_child_does_not_use_its_parents_connections(dsn: str) -> None:
    """A program forks, as worker pools do; parent and child write into the same connection, each reads the other's answers,
    and the child's exit says goodbye to the server in the parent's name.

    A bus knows the process it was made in. In another every call raises ForkedBus with what to do, nothing is closed, and
    the parent never notices.
    """
    done = run_script(FORKED, dsn)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    own = told["child"].pop("own")
    assert own == 2
    for name, said in told["child"].items():
        assert "fork" in said, f"{name}: {said}"
        assert "new bus in the child" in said, f"{name}: {said}"
        assert said.isprintable(), f"{name}: {said}"
    assert told["status"] == 0
    assert (told["seq"], told["event"]) == (3, 2)
    assert told["log"] == ["from the parent", "from the child's own bus", "from the parent again"]
    assert told["acked"] == 3


FORKED_HOLDER = """
import os, sys
from doorbell_postgres import MessageBus

bus = MessageBus(":memory:")
bus.post("events", "b", sender="ci")
with bus.transaction() as conn:
    print(conn.execute("show data_directory").fetchone()[0], flush=True)
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.buffer.raw.read(1)  # lives until the test lets go
    os._exit(0)
sys.stdin.buffer.raw.read(1)
"""


def test_forked_child_does_not_keep_the_throwaway_server_alive(tmp_path: Path) -> None:
    """A throwaway server ends when its starter does, which it sees by a pipe; a forked child inherits the pipe's end, and
    server and directory stay for as long as that child lives.

    A child closes its end of that pipe as it is forked. Killed with SIGKILL, the starter takes the server along.
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", FORKED_HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=plain_environment(TMPDIR=str(tmp_path) if len(str(tmp_path)) < 60 else "/tmp"),
        text=True,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        data = Path(holder.stdout.readline().strip())
        server = int((data / "postmaster.pid").read_text().split()[0])
        assert holder.stdout.readline() == "child\n"
        os.kill(holder.pid, signal.SIGKILL)

        def gone() -> bool:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, 0)
                return False
            return not data.parent.exists()

        try:
            eventually(gone, within=10, what="server and directory are gone while the child lives")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)


def call_for(pipe: Any, shell: str, dsn: str, worker: int, seconds: float) -> int:
    """Subscribe, post and ack in random order on three channels, each in a transaction of its own; how often."""
    chance = random.Random(worker)
    count = 0
    with a_bus(shell, dsn, retry_for=0, lock_timeout=30) as bus:
        pipe.send("ready")
        pipe.recv()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            channel = chance.choice(("alpha", "beta", "gamma"))
            handle = f"handle {chance.randint(0, 2)}"
            what = chance.randrange(8)
            if what == 0:
                bus.subscribe(handle, channel, at=chance.choice(("head", "start")))
            elif what == 1:
                bus.unsubscribe(handle, channel)
            elif what == 2:
                bus.post_many(channel, ["a", Draft("b", f"key {chance.randint(0, 99)}")], sender=handle)
            elif what == 3:
                bus.post(channel, "b", sender=handle, idempotency_key=f"key {chance.randint(0, 99)}")
            elif what in (4, 5):
                bus.post(channel, "b", sender=handle)
            else:
                with contextlib.suppress(NotSubscribed):
                    bus.ack(handle, channel, bus.store.head(channel))
            count += 1
    return count


@pytest.mark.slow
def test_calls_of_many_processes_never_deadlock(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes) -> None:
    """One function locks the cursor and then the channel, another the channel and then the cursor; under load Postgres ends
    one of two at random, and the caller sees an error that has nothing to do with it.

    Every function locks in one order: channel row, then cursor row. No call locks two channels.
    """
    for channel in ("alpha", "beta", "gamma"):
        bus.post(channel, "b", sender="ci")
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    before = sql(deadlocks)
    workers = [processes.start(call_for, api.name, dsn, n, 10.0) for n in range(8)]
    for worker in workers:
        assert worker.hear() == "ready"
    for worker in workers:
        worker.tell("go")
    assert min(worker.result(within=90) for worker in workers) > 10
    eventually(lambda: len(backends(sql, "application_name <> 'test'")) <= 2, what="sessions end, and report")
    assert sql(deadlocks) == before


# ---------------------------------------------------------------------------------------------------------------------
# Notifications
# ---------------------------------------------------------------------------------------------------------------------


def only_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what makes a lost notification good: the early polls, and giving up a look that takes long."""
    for name in ("EARLY", "PATIENCE", "MOST_PATIENCE"):
        assert isinstance(getattr(watch, name), float)
        monkeypatch.setattr(watch, name, NEVER)


def test_notification_before_the_first_look_is_not_lost(
    api: Api, open_bus: OpenBus, sql: Sql, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter looks at the log, finds nothing, and then begins to listen; what was posted in between rang for nobody, and
    the waiter sleeps over it until the next poll.

    First LISTEN is committed, then the log is looked at. Here the look is held up and a post commits meanwhile, unseen by
    it: the notification rings all the same.
    """
    only_notifications(monkeypatch)
    monkeypatch.setattr(watch, "LINGER", 0.0)
    listening = open_bus()
    listening.subscribe("worker", "events")
    bell = api.Doorbell(listening, "worker", poll_interval=NEVER)
    # Its construction has used the listener's connection. Without it, the wait begins with dialling.
    eventually(lambda: listening.listener.kind == "idle")
    blocker = connect()
    blocker.execute("lock table doorbell.message in access exclusive mode")
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(bell.wait, 30)
        waiting_in_database(sql, 1)
        blocker.execute("select doorbell.post('events', 'b', 'ci', notify => true)")
        blocker.commit()
        event = wait.result(timeout=25)
    assert event is not None
    assert event.seq == 1


def test_notification_between_two_waits_is_not_lost(api: Api, open_bus: OpenBus, sql: Sql) -> None:
    """A session handles one message; the next is announced while nobody waits, and the following wait sleeps until the one
    after that.

    Every wait begins by looking at the log from where the bell's floor stands. A notification only says when to look.
    """
    listening, posting = open_bus(), open_bus()
    listening.subscribe("worker", "events")
    bell = api.Doorbell(listening, "worker", poll_interval=NEVER)
    posting.post("events", "before the first wait", sender="ci")
    for seq in range(1, 4):
        began = time.monotonic()
        event = bell.wait(30)
        assert event is not None
        assert (event.seq, event.reason) == (seq, "post")
        assert time.monotonic() - began < 10
        posting.post("events", "between two waits", sender="ci")

    # And while another bell of the process keeps the listener listening, so that the notification does arrive somewhere.
    listening.subscribe("other", "elsewhere")
    with ThreadPoolExecutor(1) as threads:
        other = api.Doorbell(listening, "other", poll_interval=NEVER)
        waiting = threads.submit(other.wait, 60)
        bell_is_waiting(sql)
        for seq in range(4, 7):
            began = time.monotonic()
            event = bell.wait(30)
            assert event is not None
            assert event.seq == seq
            assert time.monotonic() - began < 10
            posting.post("events", "between two waits", sender="ci")
        other.close()
        assert waiting.result(timeout=10) is None


# ---------------------------------------------------------------------------------------------------------------------
# What reaches a terminal, a log or a model
# ---------------------------------------------------------------------------------------------------------------------


def of_every_category() -> dict[str, str]:
    """For each Unicode category its first, middle and last characters, in one text of less than 255 bytes."""
    members: dict[str, list[str]] = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        members[unicodedata.category(chr(code))].append(chr(code))
    texts = {}
    for category, chars in members.items():
        picked = dict.fromkeys((*chars[:8], *chars[len(chars) // 2 :][:4], *chars[-8:]))
        texts[category] = "a" + "-".join(picked) + "z"
    # Each of these turns the reading direction, or hides and recolours text on a terminal.
    texts["bidi"] = "a" + "".join(map(chr, (0x202A, 0x202B, 0x202C, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068, 0x2069, 0x61C))) + "z"
    texts["escapes"] = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\x9b2J\x1bcz"
    texts["lines"] = "a\r\nERROR forged\x85\u2028\u2029\v\fz"
    return texts


def is_one_safe_line(text: str) -> bool:
    return text.isprintable() and "\x1b" not in text


def test_escapes_in_names_do_not_reach_error_texts(api: Api, open_bus: OpenBus, dsn: str, connect: Connect) -> None:
    """A name with escape sequences, bidi controls or line breaks comes back in an error text: it recolours the operator's
    terminal, forges a second log line, or speaks to the model that reads it.

    Every error text is one printable line, whatever the names in it: for each Unicode category, escapes and bidi controls.
    """
    bus, impatient = open_bus(), open_bus(lock_timeout=0.01)
    bus.post("events", "b", sender="ci")
    bus.subscribe("worker", "events")
    holder = connect()
    texts = of_every_category()
    assert len(texts) >= 30 + 3
    for category, text in texts.items():
        assert category in ("Cc", "Cs") or len(text.encode()) <= 255, category

        def held(text: str = text) -> None:
            holder.execute("select doorbell.post(%s, 'held', 's')", [text])
            try:
                impatient.post(text, "b", sender="s")
            finally:
                holder.rollback()

        provoked: list[tuple[type[DoorbellError], Callable[[], Any]]] = [
            (UnknownChannel, lambda text=text: bus.ack("worker", text, 1)),
            (UnknownChannel, lambda text=text: bus.store.acked_seq("worker", text)),
            (UnknownChannel, lambda text=text: bus.unsubscribe("worker", text)),
            (NotSubscribed, lambda text=text: bus.ack(text, "events", 1)),
            (InvalidInput, lambda text=text: bus.subscribe("worker", "events", at=text)),
            (InvalidInput, lambda text=text: bus.post(text * 200, "b", sender="s")),
            (InvalidInput, lambda text=text: bus.post("c", "b", sender="s", headers={text: 1})),
            (InvalidInput, lambda text=text: api.MessageBus(text)),
            (InvalidInput, lambda text=text: api.MessageBus(dsn, notify=text)),
        ]
        if category not in ("Cc", "Cs"):  # NUL and lone surrogates: nobody can send those
            provoked.append((ChannelBusy, held))
            provoked.append((DatabaseUnavailable, lambda text=text: api.MessageBus(make_conninfo(dsn, dbname=text))))
        for kind, call in provoked:
            expected = (kind, InvalidInput) if category in ("Cc", "Cs") else kind
            with pytest.raises(expected) as caught:
                call()
            assert is_one_safe_line(str(caught.value)), f"{category}: {str(caught.value)!a}"
            assert len(str(caught.value)) < 2000, category
    for text in [t for c, t in texts.items() if c not in ("Cc", "Cs")]:
        bus.subscribe(text, text)
        with pytest.raises(AckBeyondHead) as beyond:
            bus.ack(text, text, 1)
        assert is_one_safe_line(str(beyond.value)), f"{str(beyond.value)!a}"


def test_escapes_and_bodies_do_not_reach_the_log(api: Api, open_bus: OpenBus, sql: Sql, caplog: pytest.LogCaptureFixture) -> None:
    """Names and bodies are logged as they come: a line break forges an entry, an escape rewrites the terminal of whoever
    tails the file, and a body that was private is in every log collector.

    Log lines are made of sanitised fields, one printable line each, and no body is ever among them.
    """
    caplog.set_level(logging.DEBUG, logger="doorbell_postgres")
    text = of_every_category()["escapes"] + of_every_category()["bidi"]
    secret = "a body that nobody may log"
    bus = open_bus(application_name="log\x1b[31m test")
    bus.subscribe(text, text)
    bell = api.Doorbell(bus, text, poll_interval=0.2)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(bell.wait, 60)
        for pid in bell_is_waiting(sql):
            sql("select pg_terminate_backend(%s)", pid)
        eventually(lambda: [r for r in caplog.records if r.name == "doorbell_postgres"], what="a change of state is logged")
        open_bus().post(text, secret + text, sender=f"not {text}")
        assert wait.result(timeout=30) is not None
    bus.close()
    records = [r for r in caplog.records if r.name.startswith("doorbell_postgres")]
    assert records
    for record in records:
        line = record.getMessage()
        assert is_one_safe_line(line), f"{line!a}"
        assert secret not in line
        assert record.exc_info is None, "a traceback is many lines"
    assert threading.active_count() < 50
