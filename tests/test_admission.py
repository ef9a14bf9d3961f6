"""What a turn promises to the program that works on it."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from doorbell_postgres import admission
from doorbell_postgres.contract import Message
from doorbell_postgres.errors import (
    ChannelBusy,
    DatabaseUnavailable,
    InvalidInput,
    LogRewound,
    TurnLost,
    UnknownChannel,
)
from support import Api, background, eventually

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]
OpenBus = Callable[..., Any]


@pytest.fixture
def message(bus: Any) -> Message:
    """The first message of the channel events; worker is subscribed."""
    bus.subscribe("worker", "events")
    return bus.post("events", "mention", sender="ci")


def cursor(bus: Any) -> int:
    return bus.store.acked_seq("worker", "events")


# ---------------------------------------------------------------------------------------------------------------------
# Admitting
# ---------------------------------------------------------------------------------------------------------------------


def test_a_first_admission_is_new_and_moves_nothing(bus: Any, message: Message) -> None:
    turn = bus.admit("worker", message)
    assert (turn.state, turn.should_run, turn.failed, turn.error, turn.attempt, turn.posts) == ("new", True, False, None, 1, 0)
    assert (turn.handle, turn.message) == ("worker", message)
    assert cursor(bus) == 0
    assert "worker" in repr(turn)
    assert "mention" not in repr(turn), "no body"


def test_the_session_is_asked_for_its_token_once_and_not_by_every_admission(bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    messages = [bus.post("events", body, sender="ci") for body in ("one", "two", "three", "four")]
    asked = "select pid, query_start from pg_stat_activity where datname = current_database() and query like '%hold_session%'"
    asked += " and pid <> pg_backend_pid()"
    for message in messages[:2]:  # the first one connects, which is a change that the second asks about
        bus.admit("worker", message).finish()
    before = sql(asked)
    for message in messages[2:]:
        bus.admit("worker", message).finish()
    assert len(before) == 1
    assert sql(asked) == before


def test_two_handles_are_two_turns(bus: Any, message: Message) -> None:
    assert [bus.admit(handle, message).state for handle in ("worker", "reviewer")] == ["new", "new"]


def test_a_duplicate_is_skipped_unless_told_to_run(bus: Any, message: Message) -> None:
    with bus.turn("worker", message) as turn:
        turn.post("answers", "first", correlation_id="answer")
    turn = bus.admit("worker", message)
    assert (turn.state, turn.should_run, turn.failed, turn.posts) == ("duplicate", False, False, 1)
    for call in (lambda: turn.post("answers", "x", correlation_id="y"), lambda: turn.reserve("y"), lambda: turn.fail("x")):
        with pytest.raises(TurnLost, match="should_run"):
            call()
    with bus.turn("worker", message, on_duplicate="run") as turn:
        assert (turn.state, turn.should_run, turn.attempt) == ("duplicate", True, 2)
        assert bus.admit("worker", message, on_duplicate="run").state == "running", "not by two at once"
        assert bus.admit("worker", message).state == "duplicate"
        assert turn.post("answers", "second", correlation_id="answer").body == "first"
        assert turn.post("answers", "third", correlation_id="another").body == "third"
    assert bus.admit("worker", message).state == "duplicate"


def test_a_passed_id_wins_over_the_header_and_the_header_over_the_key(bus: Any) -> None:
    message = bus.post("events", "b", sender="ci", idempotency_key="key", headers={"event-id": "header"})
    assert bus.admit("worker", message, event_id="passed").state == "new"
    assert bus.admit("worker", message).state == "new"
    assert bus.admit("worker", bus.post("other", "b", sender="ci"), event_id="header").state == "running"
    assert bus.admit("worker", bus.post("other", "b", sender="ci"), event_id="passed").state == "running"
    assert bus.admit("worker", bus.post("other", "b", sender="ci"), event_id="key").state == "new"


def test_the_log_says_what_the_event_is_and_not_the_message_passed(bus: Any) -> None:
    real = bus.post("events", "b", sender="ci", idempotency_key="key")
    forged = Message("events", 1, "ci", "b", real.created_at, {"event-id": "forged"}, "other key")
    assert bus.admit("worker", forged).state == "new"
    assert bus.admit("worker", real).state == "running"


def test_a_long_header_is_known_by_its_hash_and_blocks_nobody(bus: Any) -> None:
    long = "x" * 60_000
    messages = [bus.post("events", "b", sender="ci", headers={"event-id": value}) for value in (long, long + "y", long)]
    assert [bus.admit("worker", m).state for m in messages] == ["new", "new", "running"]


def test_what_is_not_in_the_log_is_refused(bus: Any, message: Message) -> None:
    def other(**changes: Any) -> Message:
        fields = {"channel": "events", "seq": 1, "sender": "ci", "body": "b", "created_at": message.created_at} | changes
        return Message(**fields)

    with pytest.raises(InvalidInput, match=r"Message 2 of 'events' is not in the log\. The head is 1"):
        bus.admit("worker", other(seq=2))
    with pytest.raises(UnknownChannel, match="'nowhere'"):
        bus.admit("worker", other(channel="nowhere"))
    with pytest.raises(LogRewound, match="Nothing was admitted"):
        bus.admit("worker", other(created_at=message.created_at - 1))
    assert not bus.unfinished_turns("worker")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"msg": "events"}, "msg is of type str; it must be a Message"),
        ({"handle": ""}, "handle is empty"),
        ({"handle": "a\0b"}, "NUL"),
        ({"event_id": "x" * 1025}, "event_id has 1,025 bytes"),
        ({"on_duplicate": "maybe"}, "on_duplicate is 'maybe'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(bus: Any, message: Message, change: Any, said: str) -> None:
    arguments = {"handle": "worker", "msg": message} | change
    for call in (bus.admit, lambda **kw: bus.turn(**kw).__enter__()):
        with pytest.raises(InvalidInput, match=said):
            call(**arguments)
    assert not bus.unfinished_turns("worker")


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_max_attempts_is_a_whole_number_of_at_least_one(bus: Any, message: Message, value: Any) -> None:
    with pytest.raises(InvalidInput, match="max_attempts"), bus.turn("worker", message, max_attempts=value):
        pass


def test_an_admission_whose_answer_was_lost_is_told_again_what_it_was_told(bus: Any, message: Message, sql: Sql) -> None:
    """The call is sent twice, as a retry does: its own first attempt must not read as somebody else's."""
    sql("select doorbell.hold_session(7)")
    call = admission.admit("worker", message, event_id=None, on_duplicate="skip", holder=7, nonce=1)
    first, again = bus.store._run(call), bus.store._run(call)
    assert again == first
    assert first.state == "new"
    bus.store._run(admission.release(first.claim, None))
    call = admission.admit("worker", message, event_id=None, on_duplicate="skip", holder=7, nonce=2)
    assert [bus.store._run(call).state for _ in range(2)] == ["resumed", "resumed"]
    other = admission.admit("worker", message, event_id=None, on_duplicate="skip", holder=7, nonce=3)
    assert bus.store._run(other).state == "running"


def test_without_a_session_an_unfinished_turn_reads_as_resumed(bus: Any, message: Message, open_bus: OpenBus) -> None:
    """Behind a pooler in transaction mode nothing can be held: who asks takes over, and the first learns of it."""
    first, second = (
        bus.store._run(admission.admit("worker", message, event_id=None, on_duplicate="skip", holder=0, nonce=nonce))
        for nonce in (1, 2)
    )
    assert [first.state, second.state] == ["new", "resumed"]
    with pytest.raises(TurnLost, match="taken the turn over"):
        bus.store._run(admission.finish(first.claim))
    assert bus.store._run(admission.finish(second.claim)) == "finished"


# ---------------------------------------------------------------------------------------------------------------------
# In the caller's transaction
# ---------------------------------------------------------------------------------------------------------------------


class Oops(Exception):
    pass


def test_what_rolls_back_has_not_happened(bus: Any, message: Message) -> None:
    with contextlib.suppress(Oops), bus.transaction() as conn:
        turn = bus.admit("worker", message, conn=conn)
        assert turn.state == "new"
        raise Oops
    for call in (turn.finish, lambda: turn.post("answers", "x", correlation_id="y")):
        with pytest.raises(TurnLost, match="rolled back"):
            call()
    with bus.turn("worker", message) as turn:
        assert turn.state == "new"
        with contextlib.suppress(Oops), bus.transaction() as conn:
            turn.post("answers", "rolled back", correlation_id="answer", conn=conn)
            turn.reserve("elsewhere", conn=conn)
            turn.finish(conn=conn)
            raise Oops
        assert bus.store.head("answers") == 0
        assert cursor(bus) == 0
        assert turn.post("answers", "committed", correlation_id="answer").seq == 1
    assert cursor(bus) == 1


def test_admitting_working_and_finishing_in_one_commit(bus: Any, message: Message, sql: Sql) -> None:
    sql("create table job (event bigint)")
    with bus.transaction() as conn:
        turn = bus.admit("worker", message, conn=conn)
        conn.execute("insert into job values (1)")
        turn.post("answers", "yes", correlation_id="answer", conn=conn)
        turn.finish(conn=conn)
        assert cursor(bus) == 0
    assert cursor(bus) == 1
    assert sql("select * from job") == [(1,)]
    assert [m.body for m in bus.store.messages_after("answers", 0)] == ["yes"]


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_an_older_snapshot_is_refused(bus: Any, message: Message, connect: Connect, level: Any) -> None:
    conn = connect()
    conn.isolation_level = level
    turn = bus.admit("worker", message)
    for call in (
        lambda: bus.admit("worker", message, conn=conn),
        lambda: turn.finish(conn=conn),
        lambda: turn.post("answers", "x", correlation_id="y", conn=conn),
        lambda: turn.fail("x", conn=conn),
    ):
        with pytest.raises(InvalidInput, match="READ COMMITTED"):
            call()
        conn.rollback()


# ---------------------------------------------------------------------------------------------------------------------
# Steps, reservations, posts
# ---------------------------------------------------------------------------------------------------------------------


def test_a_step_is_pending_until_its_block_has_ended_well(bus: Any, message: Message, sql: Sql) -> None:
    sql("create table done (step text)")
    turn = bus.admit("worker", message)
    with contextlib.suppress(Oops), turn.step("dispatch") as step:
        step.conn.execute("insert into done values ('dispatch')")
        raise Oops
    assert sql("select * from done") == []
    for pending in (True, False):
        with turn.step("dispatch") as step:
            assert (step.name, step.pending) == ("dispatch", pending)
            if step.pending:
                step.conn.execute("insert into done values ('dispatch')")
    assert sql("select * from done") == [("dispatch",)]
    with turn.step("another") as step:
        assert step.pending


def test_a_step_in_the_callers_transaction_commits_with_it(bus: Any, message: Message) -> None:
    turn = bus.admit("worker", message)
    with contextlib.suppress(Oops), bus.transaction() as conn:
        with turn.step("dispatch", conn=conn) as step:
            assert step.conn is conn
        raise Oops
    with bus.transaction() as conn:
        with contextlib.suppress(Oops), turn.step("dispatch", conn=conn) as step:
            assert step.pending
            raise Oops  # caught inside: the transaction commits, and the step is pending all the same
        conn.execute("select 1")
    with turn.step("dispatch") as step:
        assert step.pending


def test_a_turn_may_post_on_its_own_while_a_step_is_open(bus: Any, message: Message) -> None:
    turn = bus.admit("worker", message)
    with turn.step("dispatch") as step:
        turn.post("answers", "apart", correlation_id="apart")
        turn.post("answers", "together", correlation_id="together", conn=step.conn)
    assert [m.body for m in bus.store.messages_after("answers", 0)] == ["apart", "together"]


def test_two_threads_in_one_step_write_once(bus: Any, message: Message, sql: Sql) -> None:
    sql("create table done (step text)")
    turn = bus.admit("worker", message)
    inside = threading.Barrier(2)

    def run() -> bool:
        with turn.step("dispatch") as step:
            inside.wait(30)
            step.conn.execute("insert into done values ('dispatch')")
        return True

    outcomes = []
    for future in [background(run), background(run)]:
        with contextlib.suppress(TurnLost):
            outcomes.append(future.result(30))
    assert outcomes == [True]
    assert sql("select * from done") == [("dispatch",)]


def test_a_reservation_is_one_time_for_ever_and_in_utc(bus: Any, message: Message, connect: Connect, sql: Sql) -> None:
    turn = bus.admit("worker", message)
    reserved = turn.reserve("elsewhere")
    assert reserved.tzinfo is datetime.UTC
    assert abs((datetime.datetime.now(datetime.UTC) - reserved).total_seconds()) < 3600
    conn = connect()
    conn.execute("set timezone = 'Asia/Tokyo'")
    assert turn.reserve("elsewhere", conn=conn).isoformat() == reserved.isoformat()
    conn.commit()
    assert turn.reserve("another") > reserved
    turn.release()
    assert bus.admit("worker", message).reserve("elsewhere") == reserved
    assert bus.admit("reviewer", message).reserve("elsewhere") != reserved, "scoped to the turn"


def test_a_reserved_id_is_posted_once_and_keeps_its_time(bus: Any, message: Message) -> None:
    turn = bus.admit("worker", message)
    reserved = turn.reserve("answer")
    first = turn.post("answers", "one", correlation_id="answer", headers={"a": "b"}, idempotency_key="k")
    assert (first.sender, dict(first.headers), first.idempotency_key, turn.posts) == ("worker", {"a": "b"}, "k", 1)
    again = turn.post("elsewhere", "two", correlation_id="answer")
    assert (again, dict(again.headers), again.idempotency_key) == (first, {"a": "b"}, "k")
    assert turn.reserve("answer") == reserved
    assert bus.store.messages_after("answers", 0) == [first]
    assert bus.store.head("elsewhere") == 0
    assert turn.posts == 1


def test_an_original_that_retention_has_removed_is_not_posted_again(bus: Any, message: Message, sql: Sql) -> None:
    turn = bus.admit("worker", message)
    first = turn.post("answers", "one", correlation_id="answer")
    bus.post("answers", "newer", sender="ci")
    sql("delete from doorbell.message where seq = 1 and sender = 'worker'")
    again = turn.post("answers", "two", correlation_id="answer")
    assert (again.channel, again.seq, again.created_at) == ("answers", first.seq, first.created_at)
    assert bus.store.head("answers") == 2


def test_a_turns_post_rings_a_bell_of_another_bus(api: Api, bus: Any, message: Message, open_bus: OpenBus) -> None:
    other = open_bus()
    other.subscribe("listener", "answers")
    bell = api.Doorbell(other, "listener", poll_interval=60)
    ring = background(bell.wait, 30)
    bus.admit("worker", message).post("answers", "yes", correlation_id="answer")
    assert ring.result(30).seq == 1


def test_a_held_channel_is_said_to_be_busy(open_bus: OpenBus, bus: Any, message: Message) -> None:
    hasty = open_bus(lock_timeout=0.2)
    turn = hasty.admit("worker", message)
    with bus.transaction() as conn:
        bus.post("answers", "held", sender="ci", conn=conn)
        with pytest.raises(ChannelBusy, match="answers"):
            turn.post("answers", "yes", correlation_id="answer")
        with pytest.raises(ChannelBusy, match="answers"):
            turn.fail("no", notice_to="answers")


@pytest.mark.parametrize("bad", ["", "x" * 1025, "a\0b", None])
def test_a_correlation_id_is_refused_as_a_key_is(bus: Any, message: Message, bad: Any) -> None:
    turn = bus.admit("worker", message)
    for call in (lambda: turn.reserve(bad), lambda: turn.post("answers", "b", correlation_id=bad)):
        with pytest.raises(InvalidInput, match="correlation_id"):
            call()
    assert not bus.store.channels() or bus.store.channels() == ["events"]


# ---------------------------------------------------------------------------------------------------------------------
# Ending
# ---------------------------------------------------------------------------------------------------------------------


def test_a_clean_exit_finishes_and_acks(bus: Any, message: Message) -> None:
    with bus.turn("worker", message) as turn:
        assert turn.should_run
    assert cursor(bus) == 1
    assert bus.catch_up("worker") == []
    with pytest.raises(TurnLost):
        turn.reserve("late")


def test_an_exception_leaves_it_unfinished_and_released(bus: Any, open_bus: OpenBus, message: Message) -> None:
    with pytest.raises(Oops, match="no luck"), bus.turn("worker", message):
        raise Oops("no luck\x1b[31m\nat all")
    (left,) = bus.unfinished_turns("worker")
    assert (left.message, left.attempt, left.held, left.error) == (message, 1, False, "Oops: no luck at all")
    assert cursor(bus) == 0
    with open_bus().turn("worker", left.message, event_id=left.event_id) as turn:
        assert (turn.state, turn.attempt, turn.error) == ("resumed", 2, "Oops: no luck at all")
    assert cursor(bus) == 1


def test_leaving_what_runs_elsewhere_changes_nothing(bus: Any, open_bus: OpenBus, message: Message) -> None:
    owner = bus.admit("worker", message)
    twin = open_bus()
    for ends in (Oops, None):
        with contextlib.suppress(Oops), twin.turn("worker", message) as turn:
            assert (turn.state, turn.should_run) == ("running", False)
            if ends:
                raise ends
    with pytest.raises(TurnLost, match="alive works on this turn"):
        turn.finish()
    owner.finish()
    assert cursor(bus) == 1


def test_a_replays_delivery_is_settled_by_leaving_its_duplicate(bus: Any) -> None:
    bus.subscribe("worker", "events")
    first = bus.post("events", "b", sender="ci", headers={"event-id": "e"})
    with bus.turn("worker", first):
        pass
    replay = bus.post("events", "b", sender="ci", headers={"event-id": "e"})
    with bus.turn("worker", replay) as turn:
        assert turn.state == "duplicate"
    assert cursor(bus) == 2


def test_a_replay_that_was_delivered_meanwhile_is_settled_with_the_turn(bus: Any) -> None:
    for channel in ("events", "mirror"):
        bus.subscribe("worker", channel)
    messages = [bus.post(channel, "b", sender="ci", headers={"event-id": "e"}) for channel in ("events", "events", "mirror")]
    turn = bus.admit("worker", messages[0])
    assert [bus.admit("worker", m).state for m in messages[1:]] == ["running", "running"]
    turn.finish()
    assert bus.wait_until_quiet(handle="worker", timeout=0)


def test_max_attempts_fails_the_last_one_instead_of_releasing_it(bus: Any, message: Message) -> None:
    for attempt in (1, 2):
        with contextlib.suppress(Oops), bus.turn("worker", message, max_attempts=2) as turn:
            assert turn.attempt == attempt
            raise Oops("again")
        assert cursor(bus) == attempt - 1
    turn = bus.admit("worker", message)
    assert (turn.state, turn.failed, turn.error) == ("duplicate", True, "Oops: again")


def test_a_turn_whose_sessions_are_killed_is_given_up_too(bus: Any, message: Message, sql: Sql) -> None:
    for _ in range(2):
        bus.admit("worker", message).release()
    with bus.turn("worker", message, max_attempts=2) as turn:
        assert (turn.state, turn.should_run, turn.failed) == ("duplicate", False, True)
    assert "gave up after 2 attempts" in turn.error
    assert cursor(bus) == 1


def test_an_interruption_is_no_last_attempt(bus: Any, message: Message) -> None:
    with pytest.raises(KeyboardInterrupt), bus.turn("worker", message, max_attempts=1):
        raise KeyboardInterrupt
    (left,) = bus.unfinished_turns("worker")
    assert (left.held, left.error) == (False, "KeyboardInterrupt")


def test_ending_inside_the_block_is_the_end(bus: Any, message: Message) -> None:
    with bus.turn("worker", message) as turn:
        turn.finish()
        turn.finish()
        with pytest.raises(InvalidInput, match="cannot fail any more"):
            turn.fail("late")
    second = bus.post("events", "b", sender="ci")
    with bus.turn("worker", second) as turn:
        turn.fail("no")
        turn.finish()
    assert turn.failed
    assert bus.admit("worker", second).failed
    with bus.turn("worker", bus.post("events", "b", sender="ci")) as turn:
        turn.release("later")
    (left,) = bus.unfinished_turns("worker")
    assert left.error == "later"


def test_own_posts_count_as_settled_and_a_plain_ack_may_jump(bus: Any) -> None:
    bus.subscribe("worker", "events")
    messages = [bus.post("events", "b", sender=sender) for sender in ("worker", "ci", "worker", "worker", "ci", "ci")]
    with bus.turn("worker", messages[1]):
        pass
    assert cursor(bus) == 4
    owner = bus.admit("worker", messages[4])
    bus.ack("worker", "events", 5)
    assert [left.seq for left in bus.unfinished_turns("worker")] == [5], "acked, and still unfinished"
    owner.finish()
    assert cursor(bus) == 5


def test_an_own_post_that_was_admitted_and_runs_stops_the_cursor(bus: Any) -> None:
    bus.subscribe("worker", "events")
    own, other = (bus.post("events", "b", sender=sender) for sender in ("worker", "ci"))
    owner = bus.admit("worker", own)
    with bus.turn("worker", other):
        pass
    assert cursor(bus) == 0
    owner.finish()
    assert cursor(bus) == 2


def test_a_handle_that_is_not_subscribed_settles_without_moving(bus: Any) -> None:
    messages = [bus.post("events", "b", sender="ci") for _ in range(2)]
    with bus.turn("worker", messages[0]):
        pass
    bus.subscribe("worker", "events", at="start")
    assert bus.catch_up("worker") == messages
    for message, state in zip(messages, ("duplicate", "new"), strict=True):
        with bus.turn("worker", message) as turn:
            assert turn.state == state
    assert cursor(bus) == 2


def test_what_retention_has_removed_is_never_passed_in_silence(bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    messages = [bus.post("events", "b", sender="ci") for _ in range(4)]
    sql("delete from doorbell.message where seq <= 2")
    with bus.turn("worker", messages[2]):
        pass
    assert cursor(bus) == 0


def test_a_failure_takes_an_exception_and_says_so_by_default(bus: Any, message: Message) -> None:
    turn = bus.admit("worker", message)
    notice = turn.fail(Oops("broke\nhere"), notice_to="answers")
    assert (notice.channel, notice.sender, notice.body) == ("answers", "worker", "Oops: broke here")
    assert (turn.failed, turn.error) == (True, "Oops: broke here")
    other = bus.admit("worker", bus.post("events", "b", sender="ci"))
    with pytest.raises(InvalidInput, match="notice_to"):
        other.fail("x", notice="to nobody")
    with pytest.raises(InvalidInput, match="error"):
        other.fail(7)
    assert other.fail("x" * 10_000) is None
    assert len(other.error) == 500


# ---------------------------------------------------------------------------------------------------------------------
# Sessions
# ---------------------------------------------------------------------------------------------------------------------


def test_closing_the_bus_lets_go_of_its_turns(bus: Any, open_bus: OpenBus, message: Message) -> None:
    other = open_bus()
    assert other.admit("worker", message).state == "new"
    assert bus.admit("worker", message).state == "running"
    other.close()
    eventually(lambda: not bus.unfinished_turns("worker")[0].held)
    assert bus.admit("worker", message).state == "resumed"


def test_a_release_that_could_not_be_sent_is_sent_before_the_next_admission(
    bus: Any, open_bus: OpenBus, message: Message, connect: Connect
) -> None:
    hasty = open_bus(retry_for=0.1)
    error = Oops("first")
    blocker = connect()

    def leave_by_it() -> None:
        with hasty.turn("worker", message):
            blocker.execute("select from doorbell.turn for update")  # for longer than anybody waits for a lock
            raise error

    with pytest.raises(Oops):
        leave_by_it()
    assert error.__notes__[0].startswith("doorbell could not record that this turn was left: The channel was held")
    blocker.rollback()
    turn = hasty.admit("worker", message)
    assert (turn.state, turn.error) == ("resumed", "Oops: first")


def test_an_admission_whose_answer_never_came_is_given_back(
    bus: Any, open_bus: OpenBus, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has committed, and its session lives without knowing: nobody would ever work on it."""
    real = admission.admit

    def lost(rows: Any) -> Any:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(admission, "admit", lambda *a, **kw: real(*a, **kw)._replace(read=lost))
    with pytest.raises(DatabaseUnavailable):
        bus.admit("worker", message)
    monkeypatch.setattr(admission, "admit", real)
    assert bus.admit("worker", message).state == "resumed"
    with pytest.raises(InvalidInput):  # a refusal leaves nothing to give back
        bus.admit("worker", message, event_id="")
    assert open_bus().admit("worker", message).state == "running"


def test_an_end_that_fails_releases_what_was_left(bus: Any, message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise DatabaseUnavailable("away")

    with pytest.raises(DatabaseUnavailable), bus.turn("worker", message):
        monkeypatch.setattr(admission, "finish", away)
    (left,) = bus.unfinished_turns("worker")
    assert (left.held, left.error) == (False, "DatabaseUnavailable: away")


def test_a_session_keeps_one_token_and_leaves_nothing(bus: Any, open_bus: OpenBus, message: Message, sql: Sql) -> None:
    tokens = "select count(*) from pg_locks where locktype = 'advisory' and classid::bigint >> 24 = 84" \
             " and database = (select oid from pg_database where datname = current_database())"  # fmt: skip
    other = open_bus()
    for _ in range(5):
        other.admit("worker", message).release()
        bus.admit("worker", message)
        bus.admit("worker", message)
    assert sql(tokens) == [(2,)]
    other.close()
    eventually(lambda: sql(tokens) == [(1,)])


def test_a_turn_lost_travels_by_pickle(bus: Any, message: Message) -> None:
    bus.admit("worker", message)
    with pytest.raises(TurnLost) as caught:
        bus.admit("worker", message).reserve("x")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_every_public_name_has_a_docstring(api: Api) -> None:
    from doorbell_postgres.turns import Step, Turn

    for kind in (Turn, Step):
        assert kind.__doc__
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                assert member.__doc__, name
