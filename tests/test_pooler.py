"""Behind a pooler in transaction mode: a real PgBouncer in front of the test server."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from doorbell_postgres import migrate, watch
from doorbell_postgres.errors import TurnLost
from support import Api, TestServer, background, eventually, scanned
from support.cluster import Cluster
from support.pooler import Pooler, find
from support.processes import plain_environment

pytestmark = pytest.mark.skipif(find() is None, reason="PgBouncer is not installed")

Sql = Callable[..., list[tuple[Any, ...]]]
POLL = 0.3
TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def pooler(server: TestServer) -> Iterator[Pooler]:
    """Three server connections to each database."""
    with Pooler(server.dsn("postgres")) as running:
        yield running


@pytest.fixture
def pooled(pooler: Pooler, direct_dsn: str) -> str:
    """This test's database through the pooler."""
    return pooler.dsn(direct_dsn)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "doorbell_postgres" and r.levelno >= logging.WARNING]


def on_each_server_session(pooled: str, size: int, query: str) -> dict[int, list[tuple[Any, ...]]]:
    """The rows of `query` by the pid of the pooler's server session: all of them, each in a transaction at once."""
    clients = [psycopg.connect(pooled, prepare_threshold=None) for _ in range(size)]
    try:
        found = {}
        for client in clients:
            (pid,) = client.execute("select pg_backend_pid()").fetchone() or (0,)
            found[pid] = client.execute(query).fetchall()  # type: ignore[arg-type]
        return found
    finally:
        for client in clients:
            client.close()


def what_is_left(pooled: str, size: int, sql: Sql) -> dict[str, Any]:
    """Everything of a session that would outlive its transaction and surprise whoever is given it next."""
    settings = (
        "default_transaction_read_only", "tcp_keepalives_idle", "lock_timeout", "statement_timeout",
        "default_transaction_isolation", "idle_in_transaction_session_timeout", "search_path",
    )  # fmt: skip
    wanted = ", ".join(f"'{name}'" for name in settings)
    changed = on_each_server_session(
        pooled, size, f"select name, setting from pg_settings where name in ({wanted}) and source = 'session'"
    )
    assert len(changed) == size  # they were seen all
    return {
        "settings": [row for rows in changed.values() for row in rows],
        "channels": [r for rows in on_each_server_session(pooled, size, "select pg_listening_channels()").values() for r in rows],
        "statements": [
            r for rows in on_each_server_session(pooled, size, "select name from pg_prepared_statements").values() for r in rows
        ],
        "locks": sql(
            "select l.pid, l.classid, l.objid from pg_locks as l join pg_database as d on d.oid = l.database"
            " where l.locktype = 'advisory' and d.datname = current_database()"
        ),
    }


@pytest.mark.failure_mode
def test_pooler_in_transaction_mode(api: Api, pooler: Pooler, pooled: str, sql: Sql, caplog: pytest.LogCaptureFixture) -> None:
    """A pooler in transaction mode swallows LISTEN, breaks prepared statements, and gives session locks and settings to
    whoever uses the server connection next: a waiter never rings, and somebody else's session is read-only.

    Before anything else the backend that answers is compared with the one of the handshake. Where they differ, bells poll,
    in transactions that are read-only each, and say so once; nothing is prepared, set, locked or listened to.
    """
    with caplog.at_level(logging.INFO, "doorbell_postgres"):
        with api.MessageBus(pooled) as bus, api.MessageBus(pooled) as other:
            bus.subscribe("worker", "events")
            bell = api.Doorbell(bus, "worker", poll_interval=POLL)
            # More of everything than a statement needs to be prepared, from more threads than there are server sessions.
            posts = [background(posts_and_acks, each, f"session {n}") for n in range(4) for each in (bus, other)]
            seqs = []
            while len(seqs) < 8 * 12:
                event = bell.wait(20)
                assert event is not None
                seqs.append(event.seq)
            assert [post.result(30) for post in posts] == [12] * 8
            assert seqs == list(range(1, 8 * 12 + 1))
            assert bus.listener.kind == "polling"
            assert "pooler" in str(bus.listener.reason)
            waits = [background(api.Doorbell(bus, "worker", poll_interval=POLL).wait, 0) for _ in range(5)]
            assert all(wait.result(10).seq == 1 for wait in waits)
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)

            # Killed by the database's administrator: it dials again, looks again, and does not warn again.
            others = "datname = current_database() and pid <> pg_backend_pid()"
            sql(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")
            ring = background(bell.wait, 30)
            other.post("events", "after", sender="ci", idempotency_key="after")
            assert ring.result(20).seq == 8 * 12 + 1
            # Bells armed at the moment of looking.
            waiting = background(bell.wait, 30)
            eventually(lambda: not waiting.done())
            assert what_is_left(pooled, pooler.size, sql) == {"settings": [], "channels": [], "statements": [], "locks": []}
            bell.close()
            assert waiting.result(10) is None
    assert len([w for w in warnings_of(caplog) if "poll" in w]) == 1
    assert what_is_left(pooled, pooler.size, sql) == {"settings": [], "channels": [], "statements": [], "locks": []}


def test_admission_behind_a_pooler_reads_resumed_and_strands_no_lock(api: Api, pooler: Pooler, pooled: str, sql: Sql) -> None:
    """No session can be held there: who asks takes over, and who was taken over from learns of it. Nothing is doubled."""
    with api.MessageBus(pooled) as bus, api.MessageBus(pooled) as other:
        bus.subscribe("worker", "events")
        message = bus.post("events", "mention", sender="ci")
        first = bus.admit("worker", message)
        second = other.admit("worker", message)
        assert [first.state, second.state, second.attempt] == ["new", "resumed", 2]
        with pytest.raises(TurnLost, match="taken the turn over"):
            first.post("answers", "first", correlation_id="answer")
        with second.step("dispatch") as step:
            assert step.pending
        second.post("answers", "second", correlation_id="answer")
        second.finish()
        assert [m.body for m in bus.store.messages_after("answers", 0)] == ["second"]
        assert bus.admit("worker", message).state == "duplicate"
        assert bus.wait_until_quiet(handle="worker", timeout=0)
        assert what_is_left(pooled, pooler.size, sql) == {"settings": [], "channels": [], "statements": [], "locks": []}


def posts_and_acks(bus: Any, handle: str) -> int:
    bus.subscribe(handle, "events")
    for n in range(12):
        message = bus.post("events", f"{n}", sender=handle, idempotency_key=f"{handle} {n} {id(bus)}")
        bus.ack(handle, "events", message.seq)
        bus.store.head("events")
    return 12


@pytest.mark.timing
def test_bells_behind_a_pooler_ring_by_poll(api: Api, pooled: str, direct_dsn: str) -> None:
    with api.MessageBus(pooled) as bus, api.MessageBus(direct_dsn) as poster:
        poster.subscribe("worker", "events")
        bell = api.Doorbell(bus, "worker", poll_interval=POLL)
        for _ in range(5):
            ring = background(bell.wait, 20)
            time.sleep(2 * POLL)  # the early polls after arming are over
            began = time.monotonic()
            poster.post("events", "b", sender="ci")
            assert ring.result(20) is not None
            assert time.monotonic() - began < POLL + 0.5


@pytest.mark.timing
def test_wait_and_close_return_while_the_poolers_server_is_gone(api: Api, pooled: str, sql: Sql, dbname: str) -> None:
    """Every server session of the pooler is busy: its clients wait without an answer."""
    bus = api.MessageBus(pooled)
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker", poll_interval=POLL)
    assert bell.wait(0) is None
    hogs = [psycopg.connect(pooled, prepare_threshold=None) for _ in range(3)]
    try:
        for hog in hogs:
            hog.execute("select 1")  # in a transaction that does not end
        began = time.monotonic()
        assert bell.wait(2) is None
        assert 1.9 < time.monotonic() - began < 2.5
        waiting = background(bell.wait, 60)
        began = time.monotonic()
        bell.close()
        assert waiting.result(3) is None
        bus.close()
        assert time.monotonic() - began < 3
    finally:
        for hog in hogs:
            hog.close()


# What cannot hold there, and why. Everything else of these files does.
NOT_BEHIND_A_POOLER = {
    "rings that only a notification explains": [
        "test_a_post_in_a_transaction_is_announced_by_its_commit",
        "test_a_post_in_a_transaction_that_rolls_back_is_not_announced",
        "test_what_was_posted_is_announced_before_close_returns",
        "test_a_script_that_posts_last_has_announced_it",
    ],
    "the pooler keeps its sessions when a client goes": [
        "test_bus_store_and_bell_are_context_managers",
        "test_a_script_that_never_closes_its_bus_exits_by_itself",
        "test_hard_killed_waiter_process_loses_nothing",
        "test_sessions_bear_the_name_that_they_were_given",
    ],
    "nothing is prepared there": ["test_a_call_that_cannot_be_prepared_was_not_sent"],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "at_least"), [("failure_modes", 25), ("model", 2), ("api", 150)])
def test_the_contract_holds_behind_a_pooler(server: TestServer, pooler: Pooler, tmp_path: Path, name: str, at_least: int) -> None:
    """The contract's failure modes, the comparison with the model and the API, all through PgBouncer."""
    deselected = [name for names in NOT_BEHIND_A_POOLER.values() for name in names]
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner"),
            "-k", " and ".join(f"not {name}" for name in deselected),
            f"test_{name}.py",
        ],
        cwd=TESTS,
        env=plain_environment(DOORBELL_TEST_DSN=server.dsn("postgres"), DOORBELL_TEST_POOLER=pooler.address),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    print(done.stdout.splitlines()[-1])
    assert passed is not None
    assert int(passed[1]) >= at_least
    assert os.path.exists(pooler.directory)


@pytest.mark.slow
def test_a_bell_rings_after_a_crash_that_its_connection_outlives(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash loses may come again with another content: a rollback takes a transaction's number, and the next life of the
    server gives it to a post. Then the snapshot reads as before, and must not be taken for the same one."""
    monkeypatch.setattr(watch, "WHOLE", 60.0)
    with Cluster(fsync="on", full_page_writes="on", wal_writer_delay="10s") as cluster:
        node = cluster.primary
        node.sql("create database doorbell")
        dsn = node.dsn("doorbell")
        migrate.upgrade(dsn)
        with Pooler(dsn, size=2) as pooler, api.MessageBus(pooler.dsn(dsn)) as bus:
            bus.subscribe("worker", "events")
            for _crash in range(8):
                node.sql("checkpoint")
                ring = background(api.Doorbell(bus, "worker", poll_interval=3.0).wait, 60)
                scanned(bus, 9)  # it polls so seldom that there is time for a crash in between
                with psycopg.connect(dsn) as other:
                    other.execute("select pg_current_xact_id()")
                    other.rollback()
                ((before,),) = node.sql("select pg_current_snapshot()::text", dbname="doorbell")
                scanned(bus)
                node.kill()
                node.start()
                node.sql("select doorbell.post('events', 'b', 'ci')", dbname="doorbell")
                ((after,),) = node.sql("select pg_current_snapshot()::text", dbname="doorbell")
                event = ring.result(20)
                assert event is not None
                node.sql("select doorbell.ack('worker', 'events', %s)", event.seq, dbname="doorbell")
                if before == after:
                    return
        raise AssertionError("no snapshot came again in 8 crashes")
