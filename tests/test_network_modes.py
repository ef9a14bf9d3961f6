"""What networks, restarts and poolers do to a doorbell elsewhere, each done here with real parts: a proxy that freezes and
cuts, sessions that are terminated, a server that is stopped and started.

The first paragraph of a docstring is what goes wrong elsewhere, the rest is why it cannot here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from doorbell_postgres import DatabaseUnavailable, LogRewound, OutcomeUnknown, migrate, watch
from doorbell_postgres.contract import Draft
from support import Api, Processes, backends, background, bell_is_waiting, eventually, open_api, scanned
from support.cluster import Cluster, Node
from support.proxy import Proxy

pytestmark = pytest.mark.failure_mode

Sql = Callable[..., list[tuple[Any, ...]]]
OpenBus = Callable[..., Any]

POLL = 0.5
# What is promised on top of the poll where the connection is dead or frozen and a new one can be made.
REPAIR = 2.0
# So long that a ring within a test's patience cannot have come from the poll.
NEVER = 60.0


@pytest.fixture
def node() -> Iterator[Node]:
    """A server of this test's own, with a migrated database `doorbell`, to be stopped and started."""
    with Cluster() as cluster:
        cluster.primary.sql("create database doorbell")
        migrate.upgrade(cluster.primary.dsn("doorbell"))
        yield cluster.primary


def took(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """How many seconds the call took, and what it returned."""
    began = time.monotonic()
    result = function(*args)
    return time.monotonic() - began, result


def announcements_arrive(api: Api, bus: Any, poster: Any, handle: str, channel: str) -> bool:
    """Whether bells of this bus ring by notification: in the median, much faster than any poll explains.

    A post is made 0.7 s after arming. By polls alone, which come at 0.63 and 1.27 s, it would ring about 0.5 s later.
    """
    bell = api.Doorbell(bus, handle, poll_interval=NEVER)
    while bell.wait(0) is not None:
        pass
    times = []
    for _ in range(5):
        ring = background(bell.wait, 10)
        time.sleep(0.7)
        began = time.monotonic()
        poster.post(channel, "fast?", sender="ci")
        assert ring.result(15) is not None
        times.append(time.monotonic() - began)
    return sorted(times)[2] < 0.3


# ---------------------------------------------------------------------------------------------------------------------
# Connections that are frozen
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_half_open_listener_is_replaced(api: Api, open_bus: OpenBus, proxy: Proxy, sql: Sql) -> None:
    """The listener's socket is half-open: a NAT box has forgotten it, or the host at the other end is gone. It looks
    healthy, nothing arrives any more, and the waiter sleeps until somebody restarts it.

    The poll is the heartbeat: one whose answer is late means that the connection is dropped and a new one made. The bell
    rings within `poll_interval` plus 2 s, and by notification again from then on.
    """
    bus, poster = open_bus(dsn=proxy.dsn), open_bus()
    poster.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=POLL)
    ring = background(bell.wait, 30)
    bell_is_waiting(sql)
    for seq in range(1, 4):  # and again: what was learnt from one dead connection must not slow down the next
        proxy.freeze()
        began = time.monotonic()
        poster.post("events", "nobody hears this", sender="ci")
        event = ring.result(30)
        assert event is not None
        assert event.seq == seq
        assert time.monotonic() - began < POLL + REPAIR
        ring = background(bell.wait, 30)
        bell_is_waiting(sql)
    proxy.thaw()
    back = time.monotonic()
    bell.close()
    assert ring.result(5) is None
    eventually(lambda: bus.listener.kind == "listening", within=10)
    assert announcements_arrive(api, bus, poster, "worker", "events")
    assert time.monotonic() - back < 10


@pytest.mark.timing
@pytest.mark.parametrize("how", ["frozen", "accepted and never answered"])
def test_wait_and_close_return_while_nothing_answers(api: Api, open_bus: OpenBus, proxy: Proxy, sql: Sql, how: str) -> None:
    """A call on a dead connection blocks for as long as the kernel believes in it: a quarter of an hour. The harness that
    asked for two seconds hangs, and so does its shutdown.

    A bell's deadline is its own: the listener's thread does what talks to the network, and nobody waits for it beyond
    that. Closing pulls the same rope that every wait of that thread hangs on.
    """
    bus, poster = open_bus(dsn=proxy.dsn, retry_for=20), open_bus()
    poster.subscribe("worker", "events")
    bell, other = (api.Doorbell(bus, "worker", poll_interval=POLL) for _ in range(2))
    bus.store.head("events")  # one connection in the pool
    waiting = background(other.wait, 60)
    bell_is_waiting(sql)
    proxy.freeze_all()
    if how != "frozen":
        proxy.cut()
        eventually(lambda: bus.listener.kind == "reconnecting")
    stuck = background(bus.post, "events", "b", sender="ci", idempotency_key="k")
    assert stuck is not None

    seconds, event = took(bell.wait, 2)
    assert event is None
    assert 1.9 < seconds < 2.5
    seconds, event = took(bell.wait, 0)
    assert event is None
    assert seconds < 1.0
    seconds, _ = took(other.close)
    assert seconds < 3.0
    assert waiting.result(3) is None
    seconds, _ = took(bell.close)
    assert seconds < 3.0

    third = background(api.Doorbell.wait, bell)
    assert third.result(3) is None  # closed bells do not wait
    seconds, _ = took(bus.close)
    assert seconds < 3.0
    proxy.thaw(resume=False)
    proxy.cut()
    with pytest.raises((RuntimeError, ConnectionError)):
        stuck.result(10)


@pytest.mark.timing
def test_closing_a_bus_ends_waits_while_nothing_answers(api: Api, open_bus: OpenBus, proxy: Proxy, sql: Sql) -> None:
    """Shutting down waits for a listener that waits for the network, and the process has to be killed.

    Closing the bus ends every wait with None at once, and joins its threads for a bounded time only.
    """
    bus, poster = open_bus(dsn=proxy.dsn), open_bus()
    poster.subscribe("worker", "events")
    bells = [api.Doorbell(bus, "worker", poll_interval=POLL) for _ in range(3)]
    waits = [background(bell.wait, 60) for bell in bells]
    bell_is_waiting(sql)
    proxy.freeze_all()
    eventually(lambda: bus.listener.kind == "reconnecting", within=20)
    closing = background(took, bus.close)
    assert [wait.result(1.5) for wait in waits] == [None, None, None]
    seconds, _ = closing.result(5)
    assert seconds < 3.0


@pytest.mark.timing
@pytest.mark.parametrize("old_ones", ["go on", "stay silent"])
def test_ring_soon_after_a_frozen_network_thaws(api: Api, open_bus: OpenBus, proxy: Proxy, sql: Sql, old_ones: str) -> None:
    """After a long outage the client sits in a back-off of a minute, or in a dial that was swallowed, while the network
    works again.

    Dials that hang have others beside them, and the pauses between them stay short: the bell rings within `poll_interval`
    plus 2 s of the moment the network is back, whether the sockets of before come back to life or not.
    """
    bus, poster = open_bus(dsn=proxy.dsn), open_bus()
    poster.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=POLL)
    ring = background(bell.wait, 90)
    bell_is_waiting(sql)
    before = proxy.established
    proxy.freeze_all()
    poster.post("events", "during the outage", sender="ci")
    # Several dials have gone into the void, so that the client is deep in whatever it does about that.
    eventually(lambda: proxy.established >= before + 4, within=40, what="dials that hang")
    assert not ring.done()
    thawed = time.monotonic()
    proxy.thaw(resume=old_ones == "go on")
    event = ring.result(60)
    seconds = time.monotonic() - thawed
    assert event is not None
    assert event.seq == 1
    assert seconds < POLL + REPAIR
    eventually(lambda: bus.listener.kind == "listening", within=10)
    assert announcements_arrive(api, bus, poster, "worker", "events")


@pytest.mark.timing
def test_ring_soon_after_refused_connections(api: Api, open_bus: OpenBus, proxy: Proxy, sql: Sql) -> None:
    """The host reboots: connections are reset, new ones refused for a while, and the waiter has given up, or spins.

    It dials again with pauses of half a second at most, and looks at once when it is through.
    """
    bus, poster = open_bus(dsn=proxy.dsn), open_bus()
    poster.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=POLL)
    ring = background(bell.wait, 60)
    bell_is_waiting(sql)
    proxy.refuse()
    proxy.cut()
    poster.post("events", "during the outage", sender="ci")
    eventually(lambda: bus.listener.kind == "reconnecting")
    state = bus.listener
    assert state.reason
    time.sleep(2.5)  # an outage of some length, so that the pauses have grown
    assert bus.listener.since == state.since  # since when, not since the last try
    opened = time.monotonic()
    proxy.accept()
    event = ring.result(30)
    assert event is not None
    assert time.monotonic() - opened < POLL + REPAIR


@pytest.mark.slow
@pytest.mark.timing
def test_slow_network_is_not_taken_for_a_dead_one(
    api: Api, open_bus: OpenBus, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A health check with a timeout below the round trip kills every connection that it makes, and nothing ever works.

    Lateness is measured without any answer, not against a target, and patience doubles with each late answer in a row: at
    0.4 s a way, that is 0.8 s a round trip, the listener keeps its connection and bells ring.
    """
    proxy.latency = 0.4
    with caplog.at_level(logging.WARNING, "doorbell_postgres"):
        bus, poster = open_bus(dsn=proxy.dsn), open_bus()
        poster.subscribe("worker", "events")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL)
        for seq in range(1, 4):
            ring = background(bell.wait, 30)
            poster.post("events", "far away", sender="ci")
            event = ring.result(30)
            assert event is not None
            assert event.seq == seq
    assert not [r for r in caplog.records if "lost" in r.getMessage()]


@pytest.mark.slow
@pytest.mark.timing
def test_round_trip_beyond_the_first_patience_still_rings(api: Api, open_bus: OpenBus, proxy: Proxy) -> None:
    """The same at a round trip that is longer than the health check's patience: dial, wait, give up, dial, for ever.

    Patience doubles with each late answer in a row, up to 10 s: at 0.9 s a way the connection is soon kept, and bells ring.
    """
    proxy.latency = 0.9
    bus, poster = open_bus(dsn=proxy.dsn), open_bus()
    poster.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=POLL)
    dials = []
    for seq in range(1, 6):
        ring = background(bell.wait, 60)
        poster.post("events", "very far away", sender="ci")
        event = ring.result(60)
        assert event is not None
        assert event.seq == seq
        dials.append(proxy.established)
    print(f"connections made up to each ring: {dials}")
    assert dials[-1] < 25
    assert dials[-1] == dials[1]  # the connection is kept


# ---------------------------------------------------------------------------------------------------------------------
# Sessions that end
# ---------------------------------------------------------------------------------------------------------------------


class _Count(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def hear_all(pipe: Any, shell: str, dsn: str, handle: str, last: int) -> dict[str, Any]:
    """Wait again and again until message `last` has rung; what rang, what it cost and what was logged."""
    count = _Count()
    logging.getLogger("doorbell_postgres").addHandler(count)
    logging.getLogger("doorbell_postgres").setLevel(logging.INFO)
    api = open_api(shell)
    bus = api.MessageBus(dsn, application_name="victim")
    bell = api.Doorbell(bus, handle, poll_interval=POLL)
    pipe.send("ready")
    began, cpu = time.monotonic(), time.process_time()
    seqs: list[int] = []
    while not seqs or seqs[-1] < last:
        event = bell.wait(60)
        if event is None:
            break
        seqs.append(event.seq)
    result = {
        "seqs": seqs,
        "cpu": (time.process_time() - cpu) / (time.monotonic() - began),
        "lines": count.lines,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0,
    }
    bus.close()
    return result


@pytest.mark.slow
@pytest.mark.timing
def test_listener_killed_again_and_again(api: Api, dsn: str, bus: Any, sql: Sql, processes: Processes) -> None:
    """An administrator, a proxy or an out-of-memory killer ends the listening session again and again. The client spins
    on reconnecting, floods the log, or gives up.

    The first dial follows at once, further ones after growing pauses; after each, LISTEN comes before the look. Changes of
    state are logged, retries are not, and flapping is reported once in ten seconds.
    """
    bus.subscribe("worker", "events")
    posts, killed = 200, 0
    worker = processes.start(hear_all, api.name, dsn, "worker", posts)
    assert worker.hear() == "ready"
    began = time.monotonic()
    for n in range(1, posts + 1):
        time.sleep(max(0.0, began + n * 0.05 - time.monotonic()))
        bus.post("events", f"{n}", sender="ci")
        if n % 4 == 0:
            killed += len(sql("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'victim'"))
    heard = worker.result(within=60)
    print(f"killed {killed} times; cpu {heard['cpu']:.1%}, {len(heard['lines'])} lines: {heard['lines']}")
    assert killed >= 20
    assert heard["seqs"] == list(range(1, posts + 1))
    assert heard["cpu"] < 0.20
    assert len(heard["lines"]) < 20
    assert heard["threads"] < 12
    assert heard["files"] < 40


def test_listen_is_refused_by_a_standby(api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """LISTEN is refused during recovery. A waiter that was pointed at a hot standby fails in a loop, or never rings.

    A bell whose LISTEN is refused polls, says so once, and rings: everything that it does is reading.
    """
    monkeypatch.setattr(watch, "WHOLE", 60.0)
    with Cluster() as cluster:
        cluster.primary.sql("create database doorbell")
        migrate.upgrade(cluster.primary.dsn("doorbell"))
        standby = cluster.add_standby(synchronous=False)
        with api.MessageBus(cluster.primary.dsn("doorbell")) as poster:
            poster.subscribe("worker", "events")
            eventually(lambda: standby.sql("select 1 from doorbell.cursor", dbname="doorbell"))
            with caplog.at_level(logging.WARNING, "doorbell_postgres"), api.MessageBus(standby.dsn("doorbell")) as bus:
                bell = api.Doorbell(bus, "worker", poll_interval=POLL)
                for seq in range(1, 4):
                    ring = background(bell.wait, 30)
                    poster.post("events", "on the primary", sender="ci")
                    event = ring.result(30)
                    assert event is not None
                    assert event.seq == seq
                assert bus.listener.kind == "polling"
                assert "recovery" in str(bus.listener.reason)
                # A standby's snapshot does not name what is under way: between an older and a newer transaction, a commit
                # leaves it as it was.
                with psycopg.connect(cluster.primary.dsn("doorbell")) as older:
                    older.execute("select pg_current_xact_id()")
                    with poster.transaction() as conn:
                        poster.post("events", "in between", sender="ci", conn=conn)
                        poster.subscribe("newer", "elsewhere")
                        eventually(lambda: standby.sql("select 1 from doorbell.cursor where handle = 'newer'", dbname="doorbell"))
                        ring = background(bell.wait, 60)
                        scanned(bus, 8)  # it polls, and has polled since the last commit
                    assert ring.result(10) is not None
                    monkeypatch.setattr(watch, "WHOLE", 0.0)  # what has no new head is found there, too
                    with psycopg.connect(cluster.primary.dsn("doorbell")) as between:
                        between.execute("select doorbell.new_epoch()")
                        poster.subscribe("last", "elsewhere")
                        eventually(lambda: standby.sql("select 1 from doorbell.cursor where handle = 'last'", dbname="doorbell"))
                        ring = background(bell.wait, 60)
                        scanned(bus, 8)
                    with pytest.raises(LogRewound):
                        ring.result(10)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, [r.getMessage() for r in warnings]


# ---------------------------------------------------------------------------------------------------------------------
# A server that is down
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_database_down_when_the_bus_opens(api: Api, node: Node) -> None:
    """The database is down when the agent starts: it hangs, or dies with a stack trace from the depth of a driver.

    Opening tries once and says what is true and what to check.
    """
    node.stop()
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match=r"cannot be reached.* Check host and port") as caught:
        api.MessageBus(node.dsn("doorbell"))
    assert time.monotonic() - began < 6
    assert "\n" not in str(caught.value)
    node.start()
    with api.MessageBus(node.dsn("doorbell")) as bus:
        assert bus.catch_up("worker") == []


@pytest.mark.timing
def test_database_that_accepts_and_never_answers_when_the_bus_opens(api: Api, proxy: Proxy) -> None:
    """What listens on the port is a load balancer without a server behind it, and opening hangs for ever.

    `connect_timeout` covers the whole handshake.
    """
    proxy.freeze_all()
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match="cannot be reached"):
        api.MessageBus(proxy.dsn, connect_timeout=2)
    assert time.monotonic() - began < 4


@pytest.mark.slow
@pytest.mark.timing
def test_database_goes_down_for_five_seconds(api: Api, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The database is restarted for an upgrade: waiters are dead afterwards without having said so, and what was posted
    meanwhile is lost or posted twice.

    Armed bells go on waiting, dial until the server is back, and ring. A post with a key is sent again until it is
    answered, and its key makes it one message.
    """
    dsn = node.dsn("doorbell")
    with caplog.at_level(logging.INFO, "doorbell_postgres"), api.MessageBus(dsn) as bus, api.MessageBus(dsn) as poster:
        bus.subscribe("worker", "events")
        poster.subscribe("worker", "other")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL, match=lambda m: m.channel == "events")
        ring = background(bell.wait, 60)
        eventually(lambda: bus.listener.kind == "listening")
        node.stop()
        posts: list[Future[Any]] = [
            background(poster.post, channel, str(n), sender="ci", idempotency_key=f"k{n}")
            for n, channel in enumerate(["events", "events", "other", "events", "other", "events"])
        ]
        reads = background(poster.catch_up, "worker")
        time.sleep(5)
        assert not any(f.done() for f in (*posts, reads, ring))
        node.start()
        up = time.monotonic()
        messages = [post.result(30) for post in posts]
        answered = time.monotonic() - up
        event = ring.result(30)
        rang = time.monotonic() - up
        print(f"after the start: posts answered after {answered:.2f} s, bell rang after {rang:.2f} s")
        assert event is not None
        assert event.channel == "events"
        assert answered < 10
        assert rang < answered + POLL + REPAIR
        reads.result(30)
        stored = node.sql("select seq, body, idempotency_key from doorbell.message", dbname="doorbell")
        assert sorted(stored) == sorted((m.seq, m.body, m.idempotency_key) for m in messages)
        assert len(stored) == 6
        # A post without a key that goes out now works as well: no connection of before is used.
        assert poster.post("events", "without a key", sender="ci").seq == 5
    said = [r.getMessage() for r in caplog.records if r.name == "doorbell_postgres"]
    assert len(said) < 8, said


@pytest.mark.timing
def test_database_stays_down(api: Api, node: Node) -> None:
    """A call goes on retrying for ever, and nobody ever learns that the database is away.

    Retries end `retry_for` seconds after the first try, with an error that says why. A bell waits to its own deadline.
    """
    with api.MessageBus(node.dsn("doorbell"), retry_for=2) as bus:
        bus.subscribe("worker", "events")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL)
        node.stop()
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="cannot be reached"):
            bus.post("events", "b", sender="ci", idempotency_key="k")
        assert time.monotonic() - began < 3.5
        seconds, event = took(bell.wait, 1.5)
        assert event is None
        assert 1.4 < seconds < 2.0
        seconds, _ = took(bus.close)
        assert seconds < 3


# ---------------------------------------------------------------------------------------------------------------------
# Answers that are lost
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 5], ids=["first use", "prepared"])
def test_retry_after_the_connection_broke_in_mid_commit(open_bus: OpenBus, proxy: Proxy, sql: Sql, before: int) -> None:
    """The post has committed, and the connection breaks before the answer comes. The client sends it again, and the message
    is in the log twice; or it does not, and the message may be in the log not at all.

    With an idempotency key the same post is sent again, and the original comes back.
    """
    bus = open_bus(dsn=proxy.dsn)
    bus.subscribe("worker", "events")
    for n in range(before):
        bus.post("events", f"before {n}", sender="ci", idempotency_key=f"b{n}")
    lost = proxy.lose_answer_to(b"the body of it")
    message = bus.post("events", "the body of it", sender="ci", idempotency_key="once")
    assert lost.is_set()
    assert (message.seq, message.body, message.idempotency_key) == (before + 1, "the body of it", "once")
    assert sql("select count(*) from doorbell.message") == [(before + 1,)]
    assert bus.catch_up("worker")[-1] == message

    lost = proxy.lose_answer_to(b"one of many")
    many = bus.post_many("events", [Draft("one of many", "m1"), Draft("two of many", "m2")], sender="ci")
    assert lost.is_set()
    assert [m.seq for m in many] == [before + 2, before + 3]
    lost = proxy.lose_answer_to(b"doorbell.ack")
    assert bus.ack("worker", "events", before + 3) == before + 3
    assert bus.catch_up("worker") == []


def test_post_without_a_key_whose_answer_is_lost(open_bus: OpenBus, proxy: Proxy, sql: Sql) -> None:
    """The connection breaks under a post that must not be made twice, and the client sends it again all the same.

    Nothing is sent again without a key once it may have gone out: OutcomeUnknown says so, and that a key makes it safe. A
    post that never went out is no such case.
    """
    bus = open_bus(dsn=proxy.dsn)
    bus.post("events", "before", sender="ci")
    lost = proxy.lose_answer_to(b"the body of it")
    with pytest.raises(OutcomeUnknown, match="idempotency_key") as caught:
        bus.post("events", "the body of it", sender="ci")
    assert lost.is_set()
    assert "\n" not in str(caught.value)
    assert "the body of it" not in str(caught.value)
    assert sql("select count(*) from doorbell.message where body = 'the body of it'") == [(1,)]

    assert bus.store.head("events") == 2
    proxy.cut()  # what lies in the pool is dead now, and that is found out before anything is sent
    assert bus.post("events", "after", sender="ci").seq == 3
    lost = proxy.lose_answer_to(b"one of two")
    with pytest.raises(OutcomeUnknown):
        bus.post_many("events", [Draft("one of two", "k"), "two of two"], sender="ci")

    def in_a_transaction() -> None:
        with bus.transaction() as conn:
            proxy.lose_answer_to(b"in a transaction")
            bus.post("events", "in a transaction", sender="ci", idempotency_key="tx", conn=conn)

    with pytest.raises(psycopg.OperationalError):  # the caller's transaction, and the caller's error: nothing is retried
        in_a_transaction()
    assert sql("select count(*) from doorbell.message where body = 'in a transaction'") == [(0,)]


@pytest.mark.timing
def test_connections_that_turned_read_only_are_dropped(open_bus: OpenBus, dsn: str, dbname: str, sql: Sql) -> None:
    """After a failover the pool's connections lead to a server that is read-only: it answers every ping, every write fails,
    and stays so until the process is restarted.

    25006 says that the connection leads to the wrong server: it is dropped and the call sent again, also a post without a
    key, since a refusal leaves nothing open.
    """
    bus = open_bus(max_size=4)
    bus.subscribe("worker", "events")
    sql(f"alter database {dbname} set default_transaction_read_only = on")
    sql("select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()")
    eventually(lambda: backends(sql) == [])  # else a post without a key may go out to one that is about to end
    posts = [background(bus.post, "events", f"{n}", sender="ci", idempotency_key=f"k{n}" if n % 2 else None) for n in range(8)]
    began = time.monotonic()
    seen: set[int] = set()
    while time.monotonic() - began < 3:
        seen |= {pid for pid, *_ in backends(sql, "application_name <> 'test'")}
        time.sleep(0.01)
    assert not any(post.done() for post in posts)
    assert len(seen) >= 6  # dropped, and made anew
    sql(f"alter database {dbname} reset default_transaction_read_only")
    back = time.monotonic()
    assert sorted(post.result(20).seq for post in posts) == list(range(1, 9))
    assert time.monotonic() - back < 5
    assert sql("select count(*), count(distinct body) from doorbell.message") == [(8, 8)]


# ---------------------------------------------------------------------------------------------------------------------
# NOTIFY
# ---------------------------------------------------------------------------------------------------------------------


def test_notify_does_not_serialise_commits(api: Api) -> None:
    """A transaction with a notification takes one lock for the whole cluster and keeps it until its commit is flushed and
    replicated: all notifying commits of all databases queue behind each other.

    Posts carry no notification; it follows in a transaction of its own, which writes nothing and waits for no flush.
    Here commits are held up where that lock is held, by a standby that never answers: posts of this client hold and want
    no such lock, while `notify => true` from SQL takes it, and the next one waits for it.
    """
    held = (
        "select pid, granted from pg_locks where locktype = 'object' and database = 0"
        " and classid = 'pg_database'::regclass and objid = 0 and mode = 'AccessExclusiveLock'"
    )
    with Cluster() as cluster:
        node = cluster.primary
        node.sql("create database doorbell")
        dsn = node.dsn("doorbell")
        migrate.upgrade(dsn)
        with api.MessageBus(dsn) as listening, api.MessageBus(dsn, application_name="poster") as bus:
            for channel in ("alpha", "beta", "gamma", "delta"):
                listening.subscribe("worker", channel)
            bell = api.Doorbell(listening, "worker", match=lambda m: False)
            waiting = background(bell.wait, 60)
            eventually(lambda: len(node.sql("select 1 from pg_locks where locktype = 'advisory'")) == 4)
            node.configure(synchronous_standby_names="nobody")
            node.sql("select pg_reload_conf()")

            def stuck(count: int, event: str = "SyncRep", app: str = "poster") -> None:
                query = "select count(*) from pg_stat_activity where wait_event = %s and application_name = %s"
                eventually(lambda: node.sql(query, event, app) == [(count,)], what=f"{count} waiting for {event}")

            first = background(bus.post, "alpha", "b", sender="ci")
            stuck(1)
            assert node.sql(held) == []

            def from_sql(channel: str) -> None:
                with psycopg.connect(make_conninfo(dsn, application_name="sql"), autocommit=True) as conn:
                    conn.execute("select doorbell.post(%s, 'b', 'ci', notify => true)", (channel,))

            second = background(from_sql, "beta")
            stuck(1, "SyncRep", "sql")
            assert [granted for _, granted in node.sql(held)] == [True]
            third = background(from_sql, "gamma")
            stuck(1, "object", "sql")
            assert sorted(granted for _, granted in node.sql(held)) == [False, True]
            fourth = background(bus.post, "delta", "b", sender="ci")
            stuck(2)  # it got as far as the first: past where the lock would have been taken

            node.configure(synchronous_standby_names="")
            node.sql("select pg_reload_conf()")
            for each in (first, second, third, fourth):
                each.result(10)
            assert [listening.store.head(c) for c in ("alpha", "beta", "gamma", "delta")] == [1, 1, 1, 1]
            bell.close()
            assert waiting.result(10) is None
