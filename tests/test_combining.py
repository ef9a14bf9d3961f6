"""Posts that meet: across processes they share a commit (combining.sql), inside one process they share a call (sharing.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from doorbell_postgres import (
    ChannelBusy,
    DatabaseUnavailable,
    MessageBus,
    OutcomeUnknown,
    aio,
    batches,
    calls,
    sharing,
    throwaway,
)
from support import Api, Processes, background, eventually, waiting_in_database, workers

Sql = Callable[..., list[tuple[Any, ...]]]
OpenBus = Callable[..., Any]
Connect = Callable[..., "psycopg.Connection[Any]"]

CALL = "call doorbell.post_combined(%s::text, %s::text, %s::text, %s::text)"


def combined(connect: Connect, body: str, key: str | None = None) -> Any:
    """One post in a thread, on a session of its own; its future gives (seq, µs), or None where the key was known."""
    connection = connect(autocommit=True)

    def post() -> tuple[int, int] | None:
        ((answer,),) = connection.execute(CALL, ("events", body, "ci", key)).fetchall()
        return answer and (answer[1], answer[2])

    future: Any = background(post)
    future.connection = connection
    return future


@pytest.fixture
def connect(direct_dsn: str) -> Iterator[Connect]:
    opened: list[Any] = []

    def run(**parameters: Any) -> Any:
        opened.append(psycopg.connect(direct_dsn, **parameters))
        return opened[-1]

    yield run
    for connection in opened:
        connection.close()


@pytest.fixture
def holder(connect: Connect) -> Callable[[], psycopg.Connection[Any]]:
    """Begin a transaction that holds the row of the channel `events`, as a post in a caller's transaction does."""

    def hold() -> psycopg.Connection[Any]:
        connection = connect()
        connection.execute("select from doorbell.channel where name = 'events' for no key update")
        return connection

    return hold


@pytest.fixture
def busy(sql: Sql, connect: Connect, holder: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
    """Hold the channel, and a post, `first`, that waits for it with the queue lock: it will number whatever is posted now."""

    def begin() -> tuple[Any, Any]:
        holding = holder()
        first = combined(connect, "first")
        waiting_in_database(sql)
        return holding, first

    return begin


def staged(sql: Sql, count: int) -> None:
    """Wait until so many posts wait for their number behind the first."""
    eventually(
        lambda: sql("select count(*) from doorbell.staged where seq is null") == [(count + 1,)], what=f"{count} staged posts"
    )
    waiting_in_database(sql, count + 1)


def log(sql: Sql) -> list[tuple[int, str]]:
    return sql("select seq, body from doorbell.message order by seq")


# -- across processes -------------------------------------------------------------------------------------------------


def test_posts_that_meet_are_numbered_in_one_commit(bus: MessageBus, sql: Sql, connect: Connect, busy: Any) -> None:
    bus.post("events", "zero", sender="ci")
    holding, first = busy()
    others = []
    for n in range(4):
        others.append(combined(connect, f"other {n}"))
        staged(sql, n + 1)
    holding.rollback()
    results = [post.result(10) for post in (first, *others)]
    assert [seq for seq, _ in results] == [2, 3, 4, 5, 6]  # in the order of their arrival
    assert len({at for _, at in results}) == 1
    assert log(sql) == [(1, "zero"), (2, "first"), (3, "other 0"), (4, "other 1"), (5, "other 2"), (6, "other 3")]
    assert sql("select count(*) from doorbell.staged") == [(0,)]


def test_keys_in_one_commit(bus: MessageBus, sql: Sql, connect: Connect, busy: Any) -> None:
    """A key that the log knows, one that two of them share, and one that nobody has."""
    bus.post("events", "zero", sender="ci", idempotency_key="known")
    holding, first = busy()
    others = []
    for n, key in enumerate(["shared", "known too", "shared", "own", None]):
        others.append(combined(connect, f"other {n}", key))
        staged(sql, n + 1)
    holding.execute("select doorbell.post('events', 'meanwhile', 'ci', 'known too')")
    holding.commit()
    answers = [post.result(10) for post in (first, *others)]
    assert [answer and answer[0] for answer in answers] == [3, 4, None, None, 5, 6]
    assert [bus.post("events", "", sender="ci", idempotency_key=key).seq for key in ("known", "known too", "shared")] == [1, 2, 4]
    assert log(sql) == [(1, "zero"), (2, "meanwhile"), (3, "first"), (4, "other 0"), (5, "other 3"), (6, "other 4")]


def test_a_staged_retry_returns_the_original(
    api: Api, dsn: str, bus: Any, sql: Sql, busy: Any, connect: Connect, processes: Processes
) -> None:
    bus.post("events", "zero", sender="ci")
    holding, _ = busy()
    retry = processes.start(workers.post_once, api.name, dsn, "events", "retry", "ci", "key")
    staged(sql, 1)
    holding.execute("select doorbell.post('events', 'original', 'other', 'key', '{\"a\": \"b\"}')")
    holding.commit()
    assert retry.result() == (2, "original")


def test_posts_that_wait_too_long_are_not_posted(api: Api, bus: Any, open_bus: OpenBus, sql: Sql, holder: Any) -> None:
    """ChannelBusy says that nothing was posted: it stays true when the channel is free again, and others post."""
    bus.post("events", "zero", sender="ci")
    holding = holder()
    waiting = [background(open_bus(lock_timeout=1).post, "events", f"late {n}", sender="ci") for n in range(4)]
    for future in waiting:
        with pytest.raises(ChannelBusy, match="Nothing was written"):
            future.result(20)
    assert sql("select count(*) from doorbell.staged") == [(0,)]
    holding.rollback()
    assert bus.post("events", "one", sender="ci").seq == 2
    assert log(sql) == [(1, "zero"), (2, "one")]


def test_what_a_dead_session_has_staged(bus: MessageBus, sql: Sql, connect: Connect, busy: Any) -> None:
    """It expires with its time limit, blocks nobody, and prune removes it."""
    bus.post("events", "zero", sender="ci")
    holding, first = busy()
    dies = combined(connect, "dies", "key")
    staged(sql, 1)
    lives = combined(connect, "lives")
    staged(sql, 2)
    sql("update doorbell.staged set expires_at = clock_timestamp() - interval '1 s' where body = 'dies'")
    sql("select pg_terminate_backend(%s)", dies.connection.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        dies.result(10)
    holding.rollback()
    assert first.result(10)[0] == 2
    assert lives.result(10)[0] == 3
    assert sql("select body, seq from doorbell.staged") == [("dies", None)]
    again = bus.post("events", "dies", sender="ci", idempotency_key="key")
    assert again.seq == 4
    sql("update doorbell.staged set expires_at = clock_timestamp() - interval '2 minutes'")
    sql("select doorbell.prune('1 hour')")
    assert sql("select count(*) from doorbell.staged") == [(0,)]
    assert log(sql) == [(1, "zero"), (2, "first"), (3, "lives"), (4, "dies")]


def test_a_staged_post_that_is_cancelled(bus: MessageBus, sql: Sql, connect: Connect, busy: Any) -> None:
    """It takes its row back before it says so."""
    bus.post("events", "zero", sender="ci")
    holding, first = busy()
    cancelled = combined(connect, "cancelled")
    staged(sql, 1)
    sql("select pg_cancel_backend(%s)", cancelled.connection.info.backend_pid)
    with pytest.raises(psycopg.errors.QueryCanceled):
        cancelled.result(10)
    assert sql("select body from doorbell.staged") == [("first",)]
    holding.rollback()
    first.result(10)
    assert log(sql) == [(1, "zero"), (2, "first")]


def test_a_bus_says_of_a_cancelled_post_what_it_knows(api: Api, bus: Any, open_bus: OpenBus, sql: Sql, holder: Any) -> None:
    bus.post("events", "zero", sender="ci")
    holding = holder()
    for key, error in ((None, OutcomeUnknown), ("key", psycopg.errors.QueryCanceled)):
        cancelled = background(open_bus().post, "events", "cancelled", sender="ci", idempotency_key=key)
        (pid,) = waiting_in_database(sql)
        sql("select pg_cancel_backend(%s)", pid)
        with pytest.raises(error):
            cancelled.result(10)
    holding.rollback()


def test_a_post_that_was_repeated_is_not_said_to_be_absent(api: Api, bus: Any, open_bus: OpenBus, sql: Sql, holder: Any) -> None:
    """What its first attempt has staged outlives the session, and is numbered by whoever comes next."""
    bus.post("events", "zero", sender="ci")
    holding = holder()
    first = background(bus.post, "events", "first", sender="ci")
    (leader,) = waiting_in_database(sql)
    post = background(open_bus().post, "events", "mine", sender="ci", idempotency_key="key")
    staged(sql, 1)
    (lost,) = set(waiting_in_database(sql, 2)) - {leader}
    sql("select pg_terminate_backend(%s)", lost)
    eventually(lambda: sql("select count(*) from doorbell.staged where idempotency_key is not null") == [(2,)])
    eventually(lambda: set(waiting_in_database(sql, 2)).isdisjoint({lost}))
    (repeated,) = set(waiting_in_database(sql, 2)) - {leader}
    sql("select pg_cancel_backend(%s)", repeated)
    with pytest.raises(OutcomeUnknown):
        post.result(20)
    assert log(sql) == [(1, "zero")]
    holding.rollback()
    first.result(10)
    assert log(sql) == [(1, "zero"), (2, "first"), (3, "mine")]


@pytest.mark.parametrize("released", [True, False])
def test_a_staged_post_whose_row_is_held(bus: MessageBus, sql: Sql, connect: Connect, busy: Any, released: bool) -> None:
    """Who numbers the others passes it over, since its number cannot be written back; it is numbered once it is free."""
    bus.post("events", "zero", sender="ci")
    holding, first = busy()
    held = combined(connect, "held")
    staged(sql, 1)
    vandal = connect()
    vandal.execute("select from doorbell.staged where body = 'held' for update")
    holding.rollback()
    first.result(10)
    pid = held.connection.info.backend_pid
    waits = "select wait_event from pg_stat_activity where pid = %s"
    eventually(lambda: sql(waits, pid) == [("transactionid",)])  # it has left the queue, and wants its row back
    if released:
        vandal.rollback()
        assert held.result(10)[0] == 3
        assert log(sql) == [(1, "zero"), (2, "first"), (3, "held")]
    else:
        with pytest.raises(psycopg.Error) as caught:
            held.result(20)
        assert caught.value.sqlstate == "RB008"  # whoever holds it may be numbering it
        assert log(sql) == [(1, "zero"), (2, "first")]


def test_each_is_told_of_a_bell(api: Api, bus: Any, sql: Sql, connect: Connect, holder: Any) -> None:
    """Who numbers for others may not announce, or may not live to do it."""
    bus.subscribe("worker", "events")
    bus.post("events", "zero", sender="ci")
    bell = api.Doorbell(bus, "worker", poll_interval=60)
    waiting = background(bell.wait, 60)
    assert waiting.result(10).seq == 1
    waiting = background(bell.wait, 60)
    eventually(lambda: sql("select count(*) > 0 from pg_locks where locktype = 'advisory' and mode = 'ShareLock'")[0][0])
    holding = holder()
    quiet = [connect(autocommit=True) for _ in range(3)]
    posts = []
    for n, connection in enumerate(quiet):
        call = "call doorbell.post_combined('events', 'body', 'ci', announce => false)"
        posts.append(background(lambda c=connection, call=call: c.execute(call).fetchone()))
        waiting_in_database(sql, n + 1)
    holding.rollback()
    answers = [post.result(10)[0] for post in posts]
    assert [flags & 1 for *_, flags in answers] == [1, 1, 1]
    sql("select doorbell.announce(%s)", [answers[1][0]])
    assert waiting.result(10).seq == 2


@pytest.mark.parametrize("setting", ["transaction_timeout", "idle_in_transaction_session_timeout", "statement_timeout"])
def test_a_time_limit_of_the_role_while_a_post_is_staged(
    api: Api, dsn: str, bus: Any, open_bus: OpenBus, sql: Sql, holder: Any, setting: str
) -> None:
    """Whatever the client is told, its post is in the log at most once."""
    if not sql("select name from pg_settings where name = %s", setting):
        pytest.skip(f"this server has no {setting}")
    bus.post("events", "zero", sender="ci")
    limited = open_bus(dsn=make_conninfo(dsn, options=f"-c {setting}=700"), retry_for=5)
    holding = holder()
    first = background(bus.post, "events", "first", sender="ci")
    waiting_in_database(sql)
    post = background(limited.post, "events", "limited", sender="ci")
    staged(sql, 1)
    if setting == "idle_in_transaction_session_timeout":  # it is not idle
        holding.rollback()
        assert post.result(10).seq == 3
    else:
        with pytest.raises(OutcomeUnknown):
            post.result(20)
        holding.rollback()
    first.result(10)
    bus.post("events", "last", sender="ci")
    assert [body for _, body in log(sql)].count("limited") <= 1


def test_a_row_that_cannot_be_written_fails_alone(bus: MessageBus, sql: Sql, connect: Connect, busy: Any) -> None:
    bus.post("events", "zero", sender="ci")
    sql("alter table doorbell.message add constraint test check (body <> 'bad')")
    holding, first = busy()
    posts = {}
    for n, body in enumerate(["good", "bad", "better"]):
        posts[body] = combined(connect, body)
        staged(sql, n + 1)
    holding.rollback()
    first.result(10)
    assert [posts[body].result(10)[0] for body in ("good", "better")] == [3, 4]
    with pytest.raises(psycopg.errors.CheckViolation):
        posts["bad"].result(10)
    assert log(sql) == [(1, "zero"), (2, "first"), (3, "good"), (4, "better")]
    assert sql("select count(*) from doorbell.staged") == [(0,)]


def test_who_numbers_for_others_flushes(bus: MessageBus, sql: Sql, connect: Connect, busy: Any) -> None:
    """Also where its own session has asked for synchronous_commit = off: theirs hang on its commit."""
    bus.post("events", "zero", sender="ci")
    for _ in range(5):
        holding, _ = busy()
        careless = combined(lambda **_: connect(autocommit=True, options="-c synchronous_commit=off"), "careless")
        staged(sql, 1)
        careful = combined(connect, "careful")
        staged(sql, 2)
        written = sql("select pg_current_wal_insert_lsn()")[0][0]
        holding.rollback()
        assert careful.result(10)[1] == careless.result(10)[1], "one commit"
        assert sql("select pg_current_wal_flush_lsn() > %s::pg_lsn", written) == [(True,)]


def test_numbering_probes_the_log(bus: MessageBus, sql: Sql, connect: Connect, holder: Any) -> None:
    """Also in a session that has planned it while the log was empty: it reads as many rows as it numbers, not the log."""
    bus.post("events", "zero", sender="ci")
    posters = [connect(autocommit=True) for _ in range(3)]

    def meet(series: str) -> None:
        holding = holder()
        posts = []
        for n, poster in enumerate(posters):
            posts.append(background(poster.execute, CALL, ("events", series, "ci", f"{series}-{n}")))
            waiting_in_database(sql, n + 1)
        holding.rollback()
        for post in posts:
            post.result(10)

    def read() -> int:
        for poster in posters:
            poster.execute("select pg_stat_force_next_flush()")
        sql("select pg_stat_clear_snapshot()")
        indexes = "select sum(idx_tup_read)::bigint from pg_stat_user_indexes where relid = 'doorbell.message'::regclass"
        scans = "select seq_tup_read from pg_stat_user_tables where relid = 'doorbell.message'::regclass"
        return int(sql(indexes)[0][0]) + int(sql(scans)[0][0])

    for n in range(8):  # plpgsql settles on a generic plan after five
        meet(f"early {n}")
    sql(
        "select count(*) from doorbell.post_many('events', 'ci', array_fill('body'::text, array[20000]),"
        " (select array_agg('key-' || n) from generate_series(1, 20000) as n))"
    )
    before = read()
    meet("late")
    assert read() - before < 100


def test_a_crash_of_the_server_posts_nothing_that_was_staged() -> None:
    """SIGKILL of one backend: Postgres restarts itself, and what was staged is gone, as its clients must assume."""
    with throwaway.Server.start(settings={"restart_after_crash": "on"}) as server:
        dsn = server.create_database()
        with MessageBus(dsn, migrate=True) as bus:
            bus.post("events", "zero", sender="ci")
        sessions = [psycopg.connect(dsn, autocommit=True) for _ in range(4)]
        watching, holding, first, other = sessions

        def sql(query: str, *params: Any) -> list[tuple[Any, ...]]:
            return watching.execute(query, params or None).fetchall()

        with holding.transaction(force_rollback=True):
            holding.execute("select from doorbell.channel where name = 'events' for no key update")
            posts = [background(first.execute, CALL, ("events", "first", "ci", None))]
            waiting_in_database(sql)
            posts.append(background(other.execute, CALL, ("events", "other", "ci", None)))
            staged(sql, 1)
            os.kill(first.info.backend_pid, signal.SIGKILL)
            for post in posts:
                with pytest.raises(psycopg.OperationalError):
                    post.result(20)
            holding.close()
        for session in sessions:
            session.close()

        def reopened() -> MessageBus | None:
            try:
                return MessageBus(dsn)
            except DatabaseUnavailable:  # it recovers
                return None

        with eventually(reopened) as bus:
            assert bus.post("events", "one", sender="ci").seq == 2
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select body from doorbell.message order by seq").fetchall() == [("zero",), ("one",)]
            assert connection.execute("select count(*) from doorbell.staged").fetchone() == (0,)


def test_what_another_session_has_staged_is_not_collected(bus: MessageBus, sql: Sql, connect: Connect) -> None:
    """Nor posted when its time is over, nor in a snapshot from before the wait; and a limit below zero stages nothing."""
    bus.post("events", "zero", sender="ci")
    one, other = connect(autocommit=True), connect(autocommit=True)
    ((ticket,),) = one.execute("select doorbell.stage('events', 'expired', 'ci', for_ms => 0)").fetchall()
    assert other.execute("select doorbell.collect('events', %s, 5000)", [ticket]).fetchall() == [([],)]
    outcome = "select answer, failure, failure_message from doorbell.number_or_give_up('events', %s, 5000)"
    assert other.execute(outcome, [ticket]).fetchall() == [(None, "RB008", "the staged post is gone.")]
    one.execute("begin isolation level repeatable read")
    assert one.execute(outcome, [ticket]).fetchall() == [(None, "RB001", "the transaction runs at repeatable read.")]
    one.execute("rollback")
    with pytest.raises(psycopg.Error, match="the lock timeout is -1 ms"):
        other.execute("call doorbell.post_combined('events', 'body', 'ci', lock_timeout_ms => -1, busy => true)")
    assert sql("select body from doorbell.staged") == [("expired",)]
    assert log(sql) == [(1, "zero")]


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("key", [None, "key"])
def test_who_cannot_read_the_answer_does_not_know(
    bus: MessageBus, open_bus: OpenBus, sql: Sql, connect: Connect, busy: Any, key: str | None, cancel: bool
) -> None:
    """As while an operator runs VACUUM FULL: no error says "not posted" of what is in the log. With a key it is sent again,
    unless somebody has cancelled it.
    """
    bus.post("events", "zero", sender="ci")
    holding, first = busy()
    between = connect()
    turn = background(between.execute, "select pg_advisory_xact_lock(doorbell._queue_key('events'))")
    waiting_in_database(sql, 2)
    post = background(open_bus(lock_timeout=2).post, "events", "unlucky", sender="ci", idempotency_key=key)
    waiting_in_database(sql, 3)
    holding.rollback()
    turn.result(10)  # both are numbered, and the unlucky one has not looked yet
    vandal = connect()
    vandal.execute("lock table doorbell.staged")
    between.rollback()
    if cancel:
        (pid,) = eventually(
            lambda: [pid for (pid,) in sql("select pid from pg_locks where locktype = 'relation' and not granted")]
        )
        sql("select pg_cancel_backend(%s)", pid)
        with pytest.raises(OutcomeUnknown if key is None else psycopg.errors.QueryCanceled, match="user request"):
            post.result(20)
    elif key is None:
        with pytest.raises(OutcomeUnknown, match="lock timeout"):
            post.result(20)
    else:
        assert post.result(20).seq == 3
    vandal.rollback()
    assert log(sql) == [(1, "zero"), (first.result(10)[0], "first"), (3, "unlucky")]


def test_a_post_waits_for_no_table_without_an_end(bus: MessageBus, open_bus: OpenBus, connect: Connect) -> None:
    bus.post("events", "zero", sender="ci")
    limited, fresh = open_bus(lock_timeout=1), open_bus(lock_timeout=1)
    limited.post("events", "one", sender="ci")
    vandal, plain = connect(), connect(autocommit=True)
    vandal.execute("lock table doorbell.channel")
    for each, key in ((limited, None), (fresh, "key"), (fresh, None)):
        with pytest.raises(ChannelBusy, match="Nothing was written"):
            each.post("events", "two", sender="ci", idempotency_key=key)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        plain.execute("call doorbell.post_combined('events', 'two', 'ci', busy => true)")
    vandal.rollback()
    assert limited.post("events", "two", sender="ci").seq == 3


def test_many_processes_on_one_channel(api: Api, dsn: str, bus: Any, sql: Sql, processes: Processes) -> None:
    """Each gets the number under which its message is in the log, keys are posted once, and no number is missing."""
    posters = [
        processes.start(workers.post_many_one_by_one, api.name, dsn, "events", f"sender {n}", 60, "shared" if n % 2 else None)
        for n in range(6)
    ]
    for poster in posters:
        poster.hear()
    for poster in posters:
        poster.tell("go")
    answers = [answer for poster in posters for answer in poster.result()]
    rows = sql("select seq, sender, body from doorbell.message order by seq")
    assert [seq for seq, *_ in rows] == list(range(1, 3 * 60 + 60 + 1))
    assert set(answers) == set(rows)
    assert sql("select count(*) from doorbell.staged") == [(0,)]


# -- inside one process -----------------------------------------------------------------------------------------------


def test_what_a_lost_call_carried_is_not_said_to_be_absent() -> None:
    """The call may have posted it. With a key it goes again by itself, and if that waits in vain, it says only so much."""
    message = calls.outgoing("events", "body", sender="ci", idempotency_key="key")
    with pytest.raises(OutcomeUnknown), batches.after(OutcomeUnknown("lost"), message):
        raise ChannelBusy("held")
    with pytest.raises(ChannelBusy), batches.after(ValueError("another one's fault"), message):
        raise ChannelBusy("held")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes alone because this machine is slow."""
    for module in (sharing, aio.sharing):
        monkeypatch.setattr(module, "PATIENCE", 60.0)


def in_use(bus: Any, sql: Sql, holder: Any, posts: list[dict[str, Any]]) -> tuple[Any, Any, list[Any]]:
    """A post that holds up the channel's others in this bus, and those; the transaction that holds up the first."""
    holding = holder()
    first = background(bus.post, "events", "first", sender="ci")
    waiting_in_database(sql)
    queue = getattr(bus.store, "_real", bus.store)._sharing._in_use["events"]
    waiting = getattr(queue, "waiting", queue)
    others = []
    for n, post in enumerate(posts):
        others.append(background(bus.post, "events", sender="ci", **post))
        eventually(lambda n=n: len(getattr(queue, "waiting", waiting)) == n + 1)
    return holding, first, others


def test_the_main_thread_waits_for_no_other_post(dsn: str, sql: Sql, holder: Any) -> None:
    """What a signal handler raises there, at any point, can leave nobody waiting. (An event loop has no such threads.)"""
    with MessageBus(dsn) as bus:
        bus.post("events", "zero", sender="ci")
        holding, first, others = in_use(bus, sql, holder, [{"body": "other"}])

        def let_go() -> None:
            # Staged in the database, while the other still waits in the bus, or after it has gone by itself.
            eventually(lambda: sql("select count(*) from doorbell.staged where body = 'main'") == [(1,)])
            holding.rollback()

        released = background(let_go)
        assert bus.post("events", "main", sender="ci").seq in (3, 4)
        released.result(10)
        assert {first.result(10).seq, others[0].result(10).seq} <= {2, 3, 4}


@pytest.mark.usefixtures("patient")
def test_posts_of_one_process_share_a_call(api: Api, bus: Any, sql: Sql, holder: Any) -> None:
    bus.post("events", "zero", sender="ci", idempotency_key="known")
    posts = [{"body": str(n), "headers": {"n": str(n)} if n % 2 else None} for n in range(5)]
    posts += [
        {"body": "again", "idempotency_key": "known"},
        {"body": "a", "idempotency_key": "k"},
        {"body": "b", "idempotency_key": "k"},
    ]
    holding, first, others = in_use(bus, sql, holder, posts)
    holding.rollback()
    assert first.result(10).seq == 2
    messages = [other.result(10) for other in others]
    assert [(m.seq, m.body) for m in messages] == [(n + 3, str(n)) for n in range(5)] + [(1, "zero"), (8, "a"), (8, "a")]
    assert [m.headers for m in messages[:2]] == [{}, {"n": "1"}]
    assert len(sql("select distinct created_at from doorbell.message where seq > 2")) == 1
    assert len(sql("select distinct xmin::text from doorbell.message where seq > 2")) == 1


@pytest.mark.usefixtures("patient")
def test_many_that_wait_make_a_second_call(dsn: str, sql: Sql, holder: Any) -> None:
    """Beside the one that is under way, of threads only: tasks are at work in one thread, whatever is under way."""
    with MessageBus(dsn) as bus:
        bus.post("events", "zero", sender="ci")
        holding = holder()
        first = background(bus.post, "events", "first", sender="ci")
        waiting_in_database(sql)
        others = [background(bus.post, "events", str(n), sender="ci") for n in range(sharing.MANY)]
        waiting_in_database(sql, 2)
        late = background(bus.post, "events", "late", sender="ci")
        eventually(lambda: bus.store._sharing._in_use["events"].waiting)
        holding.rollback()
        assert sorted(post.result(10).seq for post in (first, *others, late)) == list(range(2, sharing.MANY + 4))
        assert not bus.store._sharing._in_use
    assert len(sql("select distinct xmin::text from doorbell.message where seq > 1")) == 3


@pytest.mark.usefixtures("patient")
def test_a_post_that_is_refused_fails_alone(api: Api, bus: Any, sql: Sql, holder: Any) -> None:
    bus.post("events", "zero", sender="ci")
    sql("alter table doorbell.message add constraint test check (body <> 'bad')")
    holding, first, others = in_use(bus, sql, holder, [{"body": body} for body in ("good", "bad", "better")])
    holding.rollback()
    first.result(10)
    with pytest.raises(psycopg.errors.CheckViolation):
        others[1].result(10)
    assert {others[n].result(10).body for n in (0, 2)} == {"good", "better"}
    assert [seq for seq, _ in log(sql)] == [1, 2, 3, 4]


@pytest.mark.usefixtures("patient")
def test_the_call_that_carried_them_is_lost(api: Api, bus: Any, sql: Sql, holder: Any, connect: Connect) -> None:
    """Who has a key is posted once all the same; who has none is told that nobody knows."""
    bus.post("events", "zero", sender="ci")
    holding, first, others = in_use(bus, sql, holder, [{"body": "keyed", "idempotency_key": "k"}, {"body": "plain"}])
    sql("""
        create function public.hold() returns trigger language plpgsql as $$
          begin perform pg_advisory_xact_lock(1); return new; end $$;
        create trigger hold before insert on doorbell.message for each row when (new.body = 'plain') execute function hold();
    """)
    connect(autocommit=True).execute("select pg_advisory_lock(1)")
    holding.rollback()
    first.result(10)
    (pid,) = waiting_in_database(sql)
    sql("select pg_terminate_backend(%s)", pid)
    with pytest.raises(OutcomeUnknown):
        others[1].result(10)
    assert others[0].result(10).body == "keyed"
    assert [body for _, body in log(sql)] == ["zero", "first", "keyed"]


def test_who_waits_for_long_goes_alone(api: Api, bus: Any, sql: Sql, holder: Any) -> None:
    """A post that is held up holds up the others of its process for a second, no more."""
    bus.post("events", "zero", sender="ci")
    holding, first, others = in_use(bus, sql, holder, [{"body": "one"}, {"body": "two"}])
    waiting_in_database(sql, 3)
    holding.rollback()
    assert sorted(post.result(10).seq for post in (first, *others)) == [2, 3, 4]
