"""A primary that dies and a standby that takes over, both real: what was posted, what is lost, and who notices."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from doorbell_postgres import LogRewound, OutcomeUnknown, migrate
from support import Api, Processes, background, eventually, open_api
from support.cluster import Cluster, Node

POLL = 0.3


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A primary with a migrated database `doorbell`."""
    with Cluster() as running:
        running.primary.sql("create database doorbell")
        migrate.upgrade(running.primary.dsn("doorbell"))
        yield running


def lose_the_tail(cluster: Cluster, standby: Node) -> None:
    """From here on nothing reaches the standby. What had reached the primary before has reached it too."""
    behind = "select 1 from pg_stat_replication where replay_lsn < pg_current_wal_lsn()"
    eventually(lambda: cluster.primary.sql(behind) == [])
    standby.configure(primary_conninfo="")
    standby.sql("select pg_reload_conf()")
    eventually(lambda: cluster.primary.sql("select 1 from pg_stat_replication") == [])


def fail_over(cluster: Cluster, standby: Node) -> None:
    cluster.primary.kill()
    standby.promote()


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is lost with a synchronous standby
# ---------------------------------------------------------------------------------------------------------------------


def post_until_told(pipe: Any, shell: str, dsn: str, sender: str, keyed: bool) -> dict[str, Any]:
    """Post to one of three channels and wait for what comes, until told to stop; what was promised and what was not."""
    api = open_api(shell)
    posted: list[tuple[str, int, str]] = []
    unknown: list[str] = []
    slowest = 0.0
    stop = threading.Event()
    background(lambda: (pipe.recv(), stop.set()))
    with api.MessageBus(dsn, retry_for=60) as bus:
        bell = api.Doorbell(bus, sender, poll_interval=POLL)
        rung = [0]

        def listen() -> None:
            while not stop.is_set():
                if bell.wait(0.5) is not None:
                    rung[0] += 1

        listening = background(listen)
        pipe.send("posting")
        n = after = 0
        failed_over = False
        while not stop.is_set():
            n += 1
            body, channel = f"{sender} {n}", f"channel {n % 3}"
            began = time.monotonic()
            try:
                message = bus.post(channel, body, sender=sender, idempotency_key=body if keyed else None)
            except OutcomeUnknown:
                unknown.append(body)
            else:
                posted.append((channel, message.seq, body))
                after += failed_over
            spent = time.monotonic() - began
            if spent > 0.5 and not failed_over:
                failed_over = True
            slowest = max(slowest, spent)
        listening.result(10)
    return {"posted": posted, "unknown": unknown, "slowest": slowest, "rung": rung[0]}


@pytest.mark.failure_mode
@pytest.mark.slow
def test_primary_killed_under_load(api: Api, cluster: Cluster, processes: Processes) -> None:
    """The primary is killed under load: what had been answered is missing on its successor, what was retried is there
    twice, and clients hang on dead connections until they are restarted.

    A post that returned has been on the synchronous standby; one with a key is sent again until it is answered, and is
    there once. Clients find the successor by their DSN of several hosts and go on.
    """
    standby = cluster.add_standby(synchronous=True)
    dsn = cluster.dsn("doorbell")
    with api.MessageBus(dsn) as bus:
        for n in range(8):
            bus.subscribe(f"poster {n}", f"channel {n % 3}", at="start")
    workers = [processes.start(post_until_told, api.name, dsn, f"poster {n}", n % 4 != 3) for n in range(8)]
    for worker in workers:
        assert worker.hear() == "posting"
    count = "select count(*) from doorbell.message"
    eventually(lambda: cluster.primary.sql(count, dbname="doorbell")[0][0] > 500, within=60)

    began = time.monotonic()
    fail_over(cluster, standby)
    promoted = time.monotonic() - began
    (at_promotion,) = standby.sql(count, dbname="doorbell")[0]
    eventually(lambda: standby.sql(count, dbname="doorbell")[0][0] > at_promotion, within=60)
    first = time.monotonic() - began
    senders = (
        "select count(distinct sender) from doorbell.message as m"
        " where m.created_at > (select max(l.created_at) from doorbell.message as l) - interval '1 s'"
    )
    eventually(lambda: standby.sql(senders, dbname="doorbell") == [(8,)], within=60, what="all clients post again")
    every = time.monotonic() - began
    for worker in workers:
        worker.tell("stop")
    results = [worker.result() for worker in workers]

    stored = standby.sql(
        "select c.name, m.seq, m.body from doorbell.message as m join doorbell.channel as c on c.id = m.channel_id",
        dbname="doorbell",
    )
    posted = [row for result in results for row in result["posted"]]
    unknown = [body for result in results for body in result["unknown"]]
    print(
        f"kill to promoted {promoted:.2f} s, to the first post {first:.2f} s, to all clients posting {every:.2f} s; slowest post "
        f"{max(r['slowest'] for r in results):.2f} s; {len(stored)} messages, {len(unknown)} of unknown outcome, "
        f"{sum(r['rung'] for r in results)} rings"
    )
    assert len(posted) > at_promotion
    assert set(posted) <= set(stored)
    assert max(Counter(body for _, _, body in stored).values()) == 1
    assert {body for _, _, body in stored} <= {body for _, _, body in posted} | set(unknown)
    assert not [body for body in unknown if not body.startswith(("poster 3", "poster 7"))]  # they have no keys
    for channel in ("channel 0", "channel 1", "channel 2"):
        seqs = sorted(seq for name, seq, _ in stored if name == channel)
        assert seqs == list(range(1, len(seqs) + 1))
    assert every < 20
    assert all(r["rung"] for r in results)


# ---------------------------------------------------------------------------------------------------------------------
# The end of the log is lost with an asynchronous one
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.failure_mode
@pytest.mark.parametrize("reissued", [3, 5, 8], ids=["fewer", "as many", "more"])
def test_log_rewinds_under_a_live_client(api: Api, cluster: Cluster, caplog: pytest.LogCaptureFixture, reissued: int) -> None:
    """An asynchronous standby takes over without the end of the log, and gives its numbers to other messages. A client that
    has read the lost ones acks somebody else's messages, and its waiter passes them over.

    The ack says when the message was written that it means, and a waiter checks the one that its floor stands on: both
    raise LogRewound, once, and begin again from the cursor. Every new message is then delivered.
    """
    standby = cluster.add_standby(synchronous=False)
    dsn = cluster.dsn("doorbell")
    with api.MessageBus(dsn) as bus, api.MessageBus(dsn) as poster:
        bus.subscribe("worker", "events")
        bus.subscribe("other", "events")
        for n in range(1, 4):
            poster.post("events", f"kept {n}", sender="ci")
        assert [m.seq for m in bus.catch_up("worker")] == [1, 2, 3]
        bus.ack("worker", "events", 2)
        lose_the_tail(cluster, standby)
        for n in range(4, 9):
            poster.post("events", f"lost {n}", sender="ci")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL)
        handled = bus.catch_up("worker")
        assert [m.body for m in handled][-1] == "lost 8"
        assert [bell.wait(5).seq for _ in range(6)] == [3, 4, 5, 6, 7, 8]
        waiting = background(bell.wait, 60)
        eventually(lambda: bus.listener.kind == "listening")

        fail_over(cluster, standby)
        for n in range(reissued):
            poster.post("events", f"new {n}", sender="ci", idempotency_key=f"new {n}")
        with pytest.raises(LogRewound) as noticed:
            waiting.result(30)
        assert "Catch up again" in str(noticed.value)
        # The ack of a lost message is refused, whether its number is beyond the head or another message's.
        with pytest.raises(LogRewound):
            bus.ack("worker", "events", handled[-1].seq)
        with pytest.raises(LogRewound):
            bus.ack("worker", "events", 6)
        assert bus.store.acked_seq("worker", "events") == 2

        # Told once. Then everything behind the cursor rings, and is read.
        rung = [bell.wait(10).seq for _ in range(1 + reissued)]
        assert rung == list(range(3, 4 + reissued))
        assert bell.wait(0) is None
        bodies = ["kept 3", *(f"new {n}" for n in range(reissued))]
        again = bus.catch_up("worker")
        assert [m.body for m in again] == bodies
        assert bus.ack("worker", "events", again[-1].seq) == 3 + reissued
        next_one = background(bell.wait, 20)
        poster.post("events", "and on", sender="ci")
        assert next_one.result(15).seq == 4 + reissued


def test_log_rewinds_to_exactly_where_a_bell_stands(api: Api, cluster: Cluster) -> None:
    """What was lost is behind the bell's floor: it has seen nothing of it, and there is nothing to raise."""
    standby = cluster.add_standby(synchronous=False)
    dsn = cluster.dsn("doorbell")
    with api.MessageBus(dsn) as bus, api.MessageBus(dsn) as poster:
        bus.subscribe("worker", "events")
        poster.post("events", "kept 1", sender="ci")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL)
        assert bell.wait(5).seq == 1
        lose_the_tail(cluster, standby)
        poster.post("events", "lost 2", sender="ci")
        fail_over(cluster, standby)
        waiting = background(bell.wait, 60)
        poster.post("events", "new 2", sender="ci", idempotency_key="new 2")
        event = waiting.result(30)
        assert event.seq == 2
        assert "new 2" in event.wake_line
        assert [m.body for m in bus.catch_up("worker")] == ["kept 1", "new 2"]


def test_a_bell_that_comes_to_rest_before_the_rewind_notices_at_its_next_wait(api: Api, cluster: Cluster) -> None:
    """Nobody waits during the failover, and as many new messages are there as were lost: same numbers, same head."""
    standby = cluster.add_standby(synchronous=False)
    dsn = cluster.dsn("doorbell")
    with api.MessageBus(dsn) as bus, api.MessageBus(dsn) as poster:
        bus.subscribe("worker", "events")
        bus.subscribe("worker", "quiet")
        poster.post("events", "kept 1", sender="ci")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL)
        lose_the_tail(cluster, standby)
        poster.post_many("events", ["lost 2", "lost 3"], sender="worker")  # its own: passed without a ring
        assert bell.wait(5).seq == 1
        assert bell.wait(0) is None
        fail_over(cluster, standby)
        for n in (2, 3):
            poster.post("events", f"new {n}", sender="ci", idempotency_key=f"new {n}")
        poster.post("quiet", "a ring elsewhere", sender="ci", idempotency_key="q")
        with pytest.raises(LogRewound):
            bell.wait(30)
        rung = [(e.channel, e.seq) for e in (bell.wait(10) for _ in range(4))]
        assert rung == [("events", 1), ("events", 2), ("events", 3), ("quiet", 1)]


def test_a_keyed_post_that_was_lost_is_posted_again_by_its_retry(api: Api, cluster: Cluster) -> None:
    """The key went with the message: the retry is a new message, and not taken for one that is there."""
    standby = cluster.add_standby(synchronous=False)
    dsn = cluster.dsn("doorbell")
    with api.MessageBus(dsn) as bus:
        bus.subscribe("worker", "events")
        lose_the_tail(cluster, standby)
        lost = bus.post("events", "b", sender="ci", idempotency_key="k")
        fail_over(cluster, standby)
        again = bus.post("events", "b", sender="ci", idempotency_key="k")
        assert again.seq == 1
        assert again.created_at != lost.created_at
        assert len(bus.catch_up("worker")) == 1


def test_a_bus_opens_on_whichever_host_takes_writes(api: Api, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The DSN goes to libpq as it is: several hosts, of which the first is dead or a standby."""
    standby = cluster.add_standby(synchronous=False)
    hosts = f"host={standby.directory},{cluster.primary.directory} port=5432,5432 user=doorbell dbname=doorbell"
    dsn = f"{hosts} target_session_attrs=read-write"
    with caplog.at_level(logging.WARNING, "doorbell_postgres"), api.MessageBus(dsn) as bus:
        bus.subscribe("worker", "events")
        bell = api.Doorbell(bus, "worker", poll_interval=60)
        ring = background(bell.wait, 30)
        eventually(lambda: bus.listener.kind == "listening")
        assert bus.post("events", "b", sender="ci").seq == 1
        assert ring.result(10).seq == 1
    assert caplog.records == []
