"""Admission under twins, kills and replays: one test a failure mode, with real processes and SIGKILL.

The first paragraph of a docstring is what goes wrong elsewhere, the rest is why it cannot here;
docs/failure-modes.md is made of them.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from doorbell_postgres.errors import DoorbellError, TurnLost
from support import Api, Processes, Worker, backends, eventually, open_api, waiting_in_database

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]
OpenBus = Callable[..., Any]

failure_mode = pytest.mark.failure_mode

# What an application keeps beside the log. No constraint: whatever is done twice shows.
APPLICATION = """
create table effect (event text not null, kind text not null, attempt integer);
create table model_call (event text not null);
"""
TOKENS = (
    "select l.pid from pg_locks as l where l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and l.granted"
    " and l.database = (select oid from pg_database where datname = current_database()) and l.classid::bigint >> 24 = 84"
)


def open_session(shell: str, dsn: str) -> Any:
    return open_api(shell).MessageBus(dsn)


def message_of(bus: Any, channel: str, seq: int) -> Any:
    (message,) = bus.store.messages_after(channel, seq - 1, limit=1)
    return message


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(worker: Worker) -> None:
    """Wait until the worker has killed itself."""
    eventually(lambda: not worker.alive, within=60, what="the worker dies")


def nobody_holds(bus: Any, handle: str) -> None:
    """Wait until the database has noticed that the session is gone."""
    eventually(lambda: not any(left.held for left in bus.unfinished_turns(handle)), what="the dead session's token is free")


# ---------------------------------------------------------------------------------------------------------------------
# Twins
# ---------------------------------------------------------------------------------------------------------------------


def admit_when_told(pipe: Any, shell: str, dsn: str, handle: str, channel: str, seq: int) -> None:
    """One admission for each "admit" that it is told; "finish" ends the turn that it owns. Says the state after each."""
    bus = open_session(shell, dsn)
    message = message_of(bus, channel, seq)
    owned = None
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        if command == "admit":
            turn = bus.admit(handle, message)
            owned = turn if turn.should_run else owned
            pipe.send(turn.state)
        else:
            owned.finish()
            pipe.send("finished")
    bus.close()


@failure_mode
def test_twins_in_processes_admit_one_turn(api: Api, bus: Any, dsn: str, processes: Processes) -> None:
    """Two sessions run under one handle, both are delivered the message, and both answer; or the first has died, both find
    that out at the same moment, and both take over.

    The marker is a unique row: of eight who admit at once one is told `new`, the others wait for its commit and read
    `running` while its session lives. When it is killed, taking over is a compare-and-set on (holder, attempt), and exactly
    one reads `resumed`. Whoever comes after the end reads `duplicate`.
    """
    bus.subscribe("worker", "events")
    bus.post("events", "mention", sender="ci")
    twins = [processes.start(admit_when_told, api.name, dsn, "worker", "events", 1) for _ in range(8)]
    for twin in twins:
        assert twin.hear() == "ready"

    def all_admit() -> list[str]:
        for twin in twins:
            twin.tell("admit")
        return [twin.hear() for twin in twins]

    states = all_admit()
    assert sorted(states) == ["new"] + ["running"] * 7
    assert sorted(all_admit()) == ["running"] * 8, "it lives, and asking again changes nothing"
    for remaining in (7, 6):
        twins.pop(next(i for i, state in enumerate(states) if state in ("new", "resumed"))).kill()
        nobody_holds(bus, "worker")
        states = all_admit()
        assert sorted(states) == ["resumed"] + ["running"] * (remaining - 1)
    owner = twins[states.index("resumed")]
    owner.tell("finish")
    assert owner.hear() == "finished"
    assert all_admit() == ["duplicate"] * 6


@failure_mode
def test_twins_in_threads_of_one_bus_admit_one_turn(bus: Any) -> None:
    """A session handles messages in several threads or tasks; the lock that says "this session is working on it" is the
    session's, so its own threads pass it, and the message is handled by two of them.

    The owner is one attempt, not one session: a turn that this very session holds reads `running` to everybody but the
    Turn that owns it. Leaving by an exception releases it, and again exactly one of eight gets it.
    """
    bus.subscribe("worker", "events")
    message = bus.post("events", "mention", sender="ci")
    barrier = threading.Barrier(8)

    def admit(_: int) -> Any:
        barrier.wait(30)
        return bus.admit("worker", message)

    with ThreadPoolExecutor(8) as threads:
        turns = list(threads.map(admit, range(8)))
        assert sorted(turn.state for turn in turns) == ["new"] + ["running"] * 7
        (owner,) = (turn for turn in turns if turn.should_run)
        owner.release(RuntimeError("no"))

        with contextlib.suppress(ZeroDivisionError), bus.turn("worker", message) as turn:
            assert (turn.state, turn.error) == ("resumed", "RuntimeError: no")
            raise ZeroDivisionError("left by an exception")

        turns = list(threads.map(admit, range(8)))
        assert sorted(turn.state for turn in turns) == ["resumed"] + ["running"] * 7
        (owner,) = (turn for turn in turns if turn.should_run)
        assert (owner.attempt, owner.error) == (3, "ZeroDivisionError: left by an exception")
        owner.finish()
        assert [turn.state for turn in threads.map(admit, range(8))] == ["duplicate"] * 8


def hold_admission_open(pipe: Any, shell: str, dsn: str, commit: bool) -> str:
    """Admits in a transaction of its own that it ends when told."""
    bus = open_session(shell, dsn)
    with contextlib.suppress(ZeroDivisionError), bus.transaction() as conn:
        turn = bus.admit("worker", message_of(bus, "events", 1), conn=conn)
        pipe.send(turn.state)
        pipe.recv()
        if not commit:
            raise ZeroDivisionError
    pipe.send("ended")
    pipe.recv()
    return "done"


@failure_mode
@pytest.mark.parametrize("commit", [True, False], ids=["the winner commits", "the winner rolls back"])
def test_twin_of_an_uncommitted_admission_waits_for_its_end(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes, commit: bool
) -> None:
    """The marker is looked up first and written later; a twin that looks in between finds nothing and runs too, or it gets
    a unique violation that looks like a failure.

    The marker is inserted first. The twin's insert waits on the unique index until the winner has committed, and then
    reads the winner's turn; if the winner has rolled back, nothing has happened, and the twin's is the first.
    """
    bus.post("events", "mention", sender="ci")
    winner = processes.start(hold_admission_open, api.name, dsn, commit)
    assert winner.hear() == "new"
    with ThreadPoolExecutor(1) as threads:
        twin = threads.submit(bus.admit, "worker", message_of(bus, "events", 1))
        waiting_in_database(sql, 1)
        winner.tell("end")
        assert winner.hear() == "ended"
        assert twin.result(timeout=30).state == ("running" if commit else "new")


# ---------------------------------------------------------------------------------------------------------------------
# Dying
# ---------------------------------------------------------------------------------------------------------------------


def admit_and_die(pipe: Any, shell: str, dsn: str, where: str, marker_apart: bool) -> None:
    """The application's side of an admission: the marker and a row of its own. Dies before or after the commit."""
    bus = open_session(shell, dsn)
    message = message_of(bus, "events", 1)
    with bus.transaction() as conn:
        turn = bus.admit("worker", message, conn=None if marker_apart else conn)
        assert turn.state == "new"
        conn.execute("insert into effect (event, kind) values (%s, 'admitted')", [message.body])
        if where == "before the commit":
            die()
    die()


def marker_and_effect(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes, *, marker_apart: bool = False) -> None:
    """Whatever the crash left, its successor finds both the marker and the row, or neither."""
    sql(APPLICATION)
    bus.post("events", "mention", sender="ci")
    killed(processes.start(admit_and_die, api.name, dsn, "before the commit", marker_apart))
    nobody_holds(bus, "worker")
    effects = sql("select count(*) from effect")
    with bus.transaction() as conn:
        turn = bus.admit("worker", message_of(bus, "events", 1), conn=conn)
        assert (turn.state, effects) == ("new", [(0,)]), "the marker is there and what belongs to it is not"
        conn.execute("insert into effect (event, kind) values ('mention', 'admitted')")
    turn.release()
    assert bus.admit("worker", message_of(bus, "events", 1)).state == "resumed"
    assert sql("select count(*) from effect") == [(1,)]


@failure_mode
def test_marker_commits_with_what_the_application_writes(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes) -> None:
    """The marker "seen" is written apart from the work that it marks. A crash between the two leaves work without a marker,
    which is done again, or a marker without work: the message is never answered, and nobody notices.

    `admit` takes the caller's transaction: the marker commits with what the application writes there, or not at all. A
    session that is killed before the commit leaves neither, and its successor reads `new`.
    """
    marker_and_effect(api, bus, dsn, sql, processes)


def test_a_marker_that_is_written_apart_fails_the_test_above(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes
) -> None:
    with pytest.raises(AssertionError, match="the marker is there and what belongs to it is not"):
        marker_and_effect(api, bus, dsn, sql, processes, marker_apart=True)


def work_and_die(pipe: Any, shell: str, dsn: str, handle: str, where: str) -> None:
    """A turn of two steps and an answer, killed at one point of it; where is "nowhere" for one that lives."""
    bus = open_session(shell, dsn)
    for message in bus.catch_up(handle):
        with bus.turn(handle, message) as turn:
            pipe.send((turn.state, turn.attempt))
            for name in ("record", "dispatch"):
                with turn.step(name) as step:
                    if step.pending:
                        step.conn.execute("insert into effect values (%s, %s, %s)", [message.body, name, turn.attempt])
                        if where == f"inside {name}":
                            die()
                if where == f"after {name}":
                    die()
            reserved = turn.reserve("elsewhere")
            pipe.send(f"{message.body} at {reserved.isoformat()}".encode())
            answer = turn.post("answers", f"attempt {turn.attempt}", correlation_id="answer", headers={"re": message.body})
            if where == "after the answer":
                die()
            pipe.send(answer.body)
    bus.close()


@failure_mode
def test_death_between_admission_and_finish_is_resumed_at_once(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes
) -> None:
    """The marker is there, the process is not: the message counts as seen, and nobody ever answers. Or a lease has to run
    out first; and then what the dead session had posted is posted again.

    A turn ends with finish or fail, not with its admission. Its owner's session holds a lock that goes with the process, so
    the next session resumes at once. What was posted and reserved stands under its correlation id: the retry gets the
    original message and the original time, so that what it builds for elsewhere has the same bytes.
    """
    sql(APPLICATION)
    bus.subscribe("worker", "events")
    bus.post("events", "mention", sender="ci")
    first = processes.start(work_and_die, api.name, dsn, "worker", "after the answer")
    assert first.hear() == ("new", 1)
    bytes_of_first = first.hear()
    killed(first)
    nobody_holds(bus, "worker")
    (left,) = bus.unfinished_turns("worker")
    assert (left.channel, left.seq, left.attempt, left.held, left.posts) == ("events", 1, 1, False, 1)
    assert left.steps == ("record", "dispatch")
    assert bus.store.acked_seq("worker", "events") == 0

    second = processes.start(work_and_die, api.name, dsn, "worker", "nowhere")
    assert second.hear() == ("resumed", 2)
    assert second.hear() == bytes_of_first
    assert second.hear() == "attempt 1", "the original stands, and the caller sees it"
    second.result()
    assert [m.body for m in bus.store.messages_after("answers", 0)] == ["attempt 1"]
    assert bus.wait_until_quiet(handle="worker", timeout=0)
    assert not bus.unfinished_turns("worker")


@failure_mode
@pytest.mark.parametrize("where", ["inside record", "after record", "inside dispatch", "after dispatch"])
def test_death_between_two_steps_leaves_only_the_missing_ones(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes, where: str
) -> None:
    """A duplicate is reported as success because its marker is there, though the steps behind the marker never ran; or all
    of them run again, and the first ones twice.

    Each step's record commits with what the step wrote. A duplicate of a half-finished admission resumes: steps that are
    recorded are not pending, the others are.
    """
    sql(APPLICATION)
    bus.subscribe("worker", "events")
    bus.post("events", "mention", sender="ci")
    killed(processes.start(work_and_die, api.name, dsn, "worker", where))
    nobody_holds(bus, "worker")
    processes.start(work_and_die, api.name, dsn, "worker", "nowhere").result()
    by_the_first = {"inside record": 0, "after record": 1, "inside dispatch": 1, "after dispatch": 2}[where]
    effects = sql("select kind, attempt from effect")
    assert sorted(effects, reverse=True) == [("record", 2 - (by_the_first > 0)), ("dispatch", 2 - (by_the_first > 1))]


def own_and_go_on(pipe: Any, shell: str, dsn: str) -> list[str]:
    """Owns a turn, is stopped, and goes on as if nothing had happened; the errors it gets."""
    bus = open_session(shell, dsn)
    message = message_of(bus, "events", 1)
    turn = bus.admit("worker", message)
    pipe.send(turn.state)
    pipe.recv()
    errors = []

    def step() -> None:
        with turn.step("late") as step:
            step.conn.execute("insert into effect values ('late', 'step', 1)")

    for call in (
        step,
        lambda: turn.reserve("late"),
        lambda: turn.post("answers", "late", correlation_id="late"),
        turn.finish,
        lambda: turn.fail("late", notice_to="answers"),
    ):
        try:
            call()
        except DoorbellError as error:
            errors.append(type(error).__name__)
        else:
            errors.append("no error")
    turn.release("late")
    return errors


@failure_mode
def test_owner_that_was_taken_over_from_learns_of_it(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes) -> None:
    """A session is cut off, or stopped for a minute; another takes its work over, and the first comes back and goes on
    working: both answer.

    Whoever takes over raises the attempt. Every step, reservation, post and end compares (holder, attempt) under the
    turn's lock: the first gets `TurnLost`, and what it wrote in that step rolls back.
    """
    sql(APPLICATION)
    bus.subscribe("worker", "events")
    bus.post("events", "mention", sender="ci")
    first = processes.start(own_and_go_on, api.name, dsn)
    assert first.hear() == "new"
    first.signal(signal.SIGSTOP)
    sql(f"select pg_terminate_backend(pid) from ({TOKENS}) as t")
    nobody_holds(bus, "worker")
    turn = bus.admit("worker", message_of(bus, "events", 1))
    assert (turn.state, turn.attempt) == ("resumed", 2)
    first.signal(signal.SIGCONT)
    first.tell("go on")
    assert first.result() == ["TurnLost"] * 5
    turn.post("answers", "mine", correlation_id="late")
    turn.finish()
    assert sql("select count(*) from effect") == [(0,)]
    assert [m.body for m in bus.store.messages_after("answers", 0)] == ["mine"]
    assert bus.store.acked_seq("worker", "events") == 1


def keep_owning(pipe: Any, shell: str, dsn: str) -> str:
    bus = open_session(shell, dsn)
    turn = bus.admit("worker", message_of(bus, "events", 1))
    pipe.send(turn.state)
    pipe.recv()
    turn.post("answers", "still mine", correlation_id="answer")
    turn.finish()
    return "finished"


@failure_mode
def test_owner_whose_connection_breaks_keeps_its_turn(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes) -> None:
    """The connection whose lock says "alive" is lost in the network for a second; the session lives and works, and its
    turn is given to somebody else.

    The listener dials again at once and takes the same token. Who asks after that reads `running`, and the owner finishes.
    """
    bus.subscribe("worker", "events")
    bus.post("events", "mention", sender="ci")
    owner = processes.start(keep_owning, api.name, dsn)
    assert owner.hear() == "new"
    ((pid,),) = sql(TOKENS)
    sql("select pg_terminate_backend(%s)", pid)
    eventually(lambda: [row for row in sql(TOKENS) if row != (pid,)], what="the listener has taken its token again")
    assert bus.admit("worker", message_of(bus, "events", 1)).state == "running"
    owner.tell("go on")
    assert owner.result() == "finished"
    assert bus.wait_until_quiet(handle="worker", timeout=0)


# ---------------------------------------------------------------------------------------------------------------------
# Order of ending
# ---------------------------------------------------------------------------------------------------------------------


def finish_and_die(pipe: Any, shell: str, dsn: str) -> None:
    """B finishes 3; A, the same session, was about to admit 2."""
    bus = open_session(shell, dsn)
    with bus.turn("worker", message_of(bus, "events", 3)) as turn:
        assert turn.state == "new"
    die()


@failure_mode
def test_turns_that_end_out_of_order_neither_skip_nor_strand_the_cursor(
    api: Api, bus: Any, dsn: str, processes: Processes
) -> None:
    """A later turn finishes first and acks its number: an earlier message, unhandled, is behind the cursor and never comes
    again. Or each waits for the other, and the cursor is stranded though all is done.

    Finishing settles the turn's own message; the cursor then moves over the longest unbroken run of settled messages and
    stops at the first that nobody has admitted. It is locked before the deliveries are looked at.
    """
    bus.subscribe("worker", "events")
    one, two, three = (bus.post("events", body, sender="ci") for body in ("one", "two", "three"))
    with bus.turn("worker", one):
        pass
    killed(processes.start(finish_and_die, api.name, dsn))
    assert bus.store.acked_seq("worker", "events") == 1, "2 was not admitted"
    assert [m.seq for m in bus.catch_up("worker")] == [2, 3], "2 is delivered again, and 3 comes along"
    with bus.turn("worker", three) as turn:
        assert (turn.state, turn.should_run) == ("duplicate", False)
    assert bus.store.acked_seq("worker", "events") == 1
    with bus.turn("worker", two) as turn:
        assert turn.state == "new"
    assert bus.store.acked_seq("worker", "events") == 3


@failure_mode
def test_two_turns_that_end_at_the_same_instant_do_not_strand_the_cursor(
    bus: Any, sql: Sql, connect: Connect, open_bus: OpenBus
) -> None:
    """Two finish at once. Each looks, does not see the other's uncommitted end, and leaves the cursor before the gap: all
    is done, and the cursor stands still for ever.

    Each locks the cursor first and looks at the deliveries in a statement of its own afterwards. The second waits for the
    first, and then sees what it has settled.
    """
    bus.subscribe("worker", "events")
    twin = open_bus()
    blocker = connect()
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        for round_ in range(20):
            first, second = (bus.post("events", "b", sender="ci") for _ in range(2))
            turns = bus.admit("worker", first), twin.admit("worker", second)
            if round_ < 2:  # once in each order, for certain: both are inside when the cursor is let go
                blocker.execute("select from doorbell.cursor for no key update")
                ends = []
                for place in (round_, 1 - round_):
                    ends.append(threads.submit(turns[place].finish))
                    waiting_in_database(sql, len(ends))
                blocker.commit()
            else:
                ends = [threads.submit(lambda t: (barrier.wait(30), t.finish()), turn) for turn in turns]
            for end in ends:
                end.result(timeout=30)
            assert bus.store.acked_seq("worker", "events") == second.seq
    assert sql("select count(*) from doorbell.delivery") == [(0,)]


# ---------------------------------------------------------------------------------------------------------------------
# Identity
# ---------------------------------------------------------------------------------------------------------------------


@failure_mode
def test_keys_of_two_channels_and_keys_like_numbers_are_other_events(bus: Any) -> None:
    """The marker is one text. Two channels use the same key, or a poster chooses a key that spells the number of another
    message or somebody's event id: one event swallows the other, and a message is never answered.

    An id, a key and a number are three columns, and a key and a number belong to their channel: they never equal each
    other. Only an id that is passed, or the header `event-id`, spans channels.
    """
    messages = [
        bus.post("alpha", "by key", sender="ci", idempotency_key="k"),
        bus.post("beta", "by key", sender="ci", idempotency_key="k"),
        bus.post("alpha", "by number", sender="ci"),
        bus.post("alpha", "by a key that spells that number", sender="ci", idempotency_key="2"),
        bus.post("beta", "by that number there", sender="ci"),
        bus.post("alpha", "by an id that spells the key", sender="ci", headers={"event-id": "k"}),
        bus.post("alpha", "by an id that spells the number", sender="ci", headers={"event-id": "2"}),
        bus.post("alpha", "by a hostile key", sender="ci", idempotency_key="alpha\n2"),
        bus.post("alpha", "an empty id is none", sender="ci", headers={"event-id": ""}),
        bus.post("alpha", "an empty id is none", sender="ci", headers={"event-id": ""}),
    ]
    assert [bus.admit("worker", m).state for m in messages] == ["new"] * len(messages)
    assert [bus.admit("reviewer", m).state for m in messages] == ["new"] * len(messages)
    again = bus.post("beta", "the id spans channels", sender="ci", headers={"event-id": "k"})
    assert bus.admit("worker", again).state == "running"
    assert bus.admit("worker", messages[2], event_id="k").state == "running"


# ---------------------------------------------------------------------------------------------------------------------
# Speaking once
# ---------------------------------------------------------------------------------------------------------------------


@failure_mode
def test_turn_that_fails_after_posting_speaks_only_once(bus: Any) -> None:
    """A turn posts its answer and then fails; the handler of failures posts an error under it: one turn, two messages that
    disagree on how it went. A retry of the failure posts a third.

    The turn's reservations are what it has said. `fail` posts its notice only where there is none, in the commit that ends
    the turn, so a second call finds both.
    """
    spoke, silent = (bus.post("events", body, sender="ci") for body in ("one", "two"))

    def said() -> list[str]:
        return [m.body for m in bus.store.messages_after("room", 0)]

    turn = bus.admit("persona", spoke)
    turn.post("room", "a haiku", correlation_id="answer")
    assert turn.posts == 1
    for _ in range(2):
        assert turn.fail("broke afterwards", notice_to="room", notice="sorry") is None
    assert said() == ["a haiku"]

    turn = bus.admit("persona", silent)
    notices = [turn.fail("broke before", notice_to="room", notice="sorry"), turn.fail("again", notice_to="room", notice="sorry!")]
    assert said() == ["a haiku", "sorry"]
    assert [notice.seq for notice in notices] == [2, 2]
    for message, error in ((spoke, "broke afterwards"), (silent, "broke before")):
        turn = bus.admit("persona", message)
        assert (turn.state, turn.failed, turn.error) == ("duplicate", True, error)
    rerun = bus.admit("persona", silent, on_duplicate="run")
    assert rerun.fail("a third time", notice_to="room", notice="sorry!!").seq == 2
    assert said() == ["a haiku", "sorry"]


# ---------------------------------------------------------------------------------------------------------------------
# Replays
# ---------------------------------------------------------------------------------------------------------------------


def persona(pipe: Any, shell: str, dsn: str, handle: str) -> None:
    """Answers each mention of it in the room, with one call of its model. Runs until it is killed."""
    api = open_api(shell)
    bus = api.MessageBus(dsn)
    model = psycopg.connect(dsn, autocommit=True)
    bell = api.Doorbell(bus, handle)
    pipe.send("ready")
    while True:
        for message in bus.catch_up(handle):
            with bus.turn(handle, message) as turn:
                if turn.should_run and f"@{handle}" in message.body:
                    model.execute("insert into model_call values (%s)", [handle])
                    answer = f"{handle} answers #{message.seq}"
                    turn.post("room", answer, correlation_id="answer", headers={"in-reply-to": message.headers["event-id"]})
        bell.wait(0.1)


@failure_mode
def test_replayed_trigger_under_a_new_number_is_answered_once(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes
) -> None:
    """The trigger is published again, under a new number and without the key that would have caught it; the teammate answers
    twice, and its model is paid for twice. Or a test says that it is not, and only looked before the replay was read.

    The event is its id, whatever its number. The replay is admitted as a `duplicate`, its own delivery is settled, and
    acked equals posted again: that it was read, and changed nothing, is known.
    """
    sql(APPLICATION)
    for handle in ("ada", "bob"):
        bus.subscribe(handle, "room")
    sessions = [processes.start(persona, api.name, dsn, handle) for handle in ("ada", "ada", "bob")]
    for session in sessions:
        assert session.hear() == "ready"

    def counts() -> tuple[Any, ...]:
        assert bus.wait_until_quiet(channel="room", timeout=30)
        answers = [(m.sender, m.body, dict(m.headers)) for m in bus.store.messages_after("room", 0) if m.sender != "human"]
        return sql("select event, count(*) from model_call group by 1 order by 1"), sorted(answers)

    bus.post("room", "@ada a haiku, please", sender="human", idempotency_key="e1", headers={"event-id": "e1"})
    once = counts()
    assert once == ([("ada", 1)], [("ada", "ada answers #1", {"in-reply-to": "e1"})])
    replay = bus.post("room", "@ada a haiku, please", sender="human", headers={"event-id": "e1"})
    assert replay.seq == 3
    assert counts() == once

    # One message, two personas: two turns, two answers, each under its own key.
    bus.post("room", "@ada and @bob, what do you think?", sender="human", headers={"event-id": "e2"})
    both = counts()
    assert both[0] == [("ada", 2), ("bob", 1)]
    assert [(who, headers["in-reply-to"]) for who, _, headers in both[1]] == [("ada", "e1"), ("ada", "e2"), ("bob", "e2")]
    bus.post("room", "@ada and @bob, what do you think?", sender="human", headers={"event-id": "e2"})
    assert counts() == both
    assert sql("select handle, state, count(*) from doorbell.turns where event ~ '^id e' group by 1, 2 order by 1") == [
        ("ada", "finished", 2),
        ("bob", "finished", 2),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# All of it at random
# ---------------------------------------------------------------------------------------------------------------------

POINTS = ("before admit", "inside its transaction", "after admit", "after the model", "inside a step", "between steps",
          "after a post", "before finish")  # fmt: skip


def work_until_quiet(pipe: Any, shell: str, dsn: str, seed: int, deadliness: float) -> str:
    """One session of the worker, in an order of its own; it may be killed at each of the points."""
    chance = random.Random(seed)
    bus = open_session(shell, dsn)
    model = psycopg.connect(dsn, autocommit=True)

    def at(point: str) -> None:
        assert point in POINTS
        if chance.random() < deadliness:
            die()

    while not bus.wait_until_quiet(handle="worker", timeout=0):
        messages = bus.catch_up("worker")[:50]
        chance.shuffle(messages)
        for message in messages:
            at("before admit")
            with bus.transaction() as conn:
                turn = bus.admit("worker", message, conn=conn)
                if turn.state == "new":
                    conn.execute("insert into effect values (%s, 'admitted', 1)", [message.body])
                at("inside its transaction")
            if not turn.should_run:
                if turn.state == "duplicate":
                    turn.finish()
                continue
            at("after admit")
            model.execute("insert into model_call values (%s)", [message.body])
            at("after the model")
            for name in ("one", "two"):
                with turn.step(name) as step:
                    if step.pending:
                        step.conn.execute("insert into effect values (%s, %s, %s)", [message.body, name, turn.attempt])
                        at("inside a step")
                at("between steps")
            turn.post("answers", f"re: {message.body}", correlation_id="answer")
            at("after a post")
            with bus.transaction() as conn:
                conn.execute("insert into effect values (%s, 'finished', %s)", [message.body, turn.attempt])
                turn.finish(conn=conn)
                at("before finish")
    bus.close()
    return "quiet"


def survive(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes, *, turns: int, deadliness: float) -> int:
    """Let three sessions work, and start another for each that dies, until the channel is quiet; the number of kills."""
    sql(APPLICATION)
    bus.subscribe("worker", "events")
    bus.post_many("events", [f"event {n}" for n in range(turns)], sender="ci")
    kills, seed = 0, 0
    running: list[Worker] = []
    deadline = time.monotonic() + 270
    while not bus.wait_until_quiet(handle="worker", timeout=0):
        assert time.monotonic() < deadline, f"not quiet after {kills} kills: {sql('select * from doorbell.backlog')}"
        for worker in [w for w in running if not w.alive]:
            running.remove(worker)
            kills += worker.exit_code == -signal.SIGKILL
        while len(running) < 3:
            seed += 1
            running.append(processes.start(work_until_quiet, api.name, dsn, seed, deadliness))
        time.sleep(0.02)
    for worker in running:
        with contextlib.suppress(AssertionError):
            worker.result()
        kills += worker.exit_code == -signal.SIGKILL

    wanted = {f"event {n}" for n in range(turns)}
    for kind in ("admitted", "one", "two", "finished"):
        assert collections.Counter(e for (e,) in sql("select event from effect where kind = %s", kind)) == dict.fromkeys(
            wanted, 1
        )
    answers = [m.body for m in bus.store.messages_after("answers", 0, limit=10 * turns)]
    assert collections.Counter(answers) == {f"re: {event}": 1 for event in wanted}
    calls = collections.Counter(e for (e,) in sql("select event from model_call"))
    assert calls.keys() == wanted
    assert calls.total() - turns <= kills
    assert not bus.unfinished_turns("worker")
    assert sql("select count(*) from doorbell.delivery") == [(0,)]
    return kills


@failure_mode
@pytest.mark.parametrize(
    ("turns", "deadliness"), [(40, 0.03), pytest.param(500, 0.012, marks=[pytest.mark.slow, pytest.mark.timeout(320)])]
)
def test_sessions_killed_at_random_do_everything_once(
    api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes, turns: int, deadliness: float
) -> None:
    """Sessions die at any moment: before they admit, inside their transaction, between two steps, after a post, before they
    finish. Each kind of crash doubles or loses another kind of effect.

    Every effect commits with its record: admission, step, post, end. Whatever is killed, the rows and the answers are there
    once. The model takes no part in those commits: its calls are repeated, at most once for each kill.
    """
    kills = survive(api, bus, dsn, sql, processes, turns=turns, deadliness=deadliness)
    print(f"{turns} turns, {kills} kills")
    assert kills > turns / 20


def call_for(pipe: Any, shell: str, dsn: str, number: int, seconds: float) -> int:
    """Admission's calls and the contract's at random on three channels, one a transaction; how many."""
    chance = random.Random(number)
    bus = open_session(shell, dsn)
    pipe.send("ready")
    pipe.recv()
    ends, count = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        handle, channel = chance.choice(("ada", "bob")), chance.choice(("alpha", "beta", "gamma"))
        shared = {"event-id": f"{chance.randrange(100)}"} if chance.random() < 0.3 else None
        message = bus.post(channel, "b", sender=chance.choice(("ci", handle)), headers=shared)
        if chance.random() < 0.2:
            with contextlib.suppress(DoorbellError):
                bus.subscribe(handle, channel)
                bus.ack(handle, channel, message.seq - 3 if message.seq > 3 else 0)
        turn = bus.admit(handle, message)
        with contextlib.suppress(TurnLost):
            if turn.should_run:
                turn.reserve("r")
                if chance.random() < 0.5:
                    turn.post(chance.choice(("alpha", "beta", "gamma")), "answer", correlation_id="a")
                end = chance.choice(("finish", "fail", "release"))
                if end == "finish":
                    turn.finish()
                elif end == "fail":
                    turn.fail("no", notice_to=chance.choice(("alpha", "beta", "gamma")), notice="sorry")
                else:
                    turn.release()
            elif turn.state == "duplicate":
                turn.finish()
        count += 1
    bus.close()
    return count


@failure_mode
@pytest.mark.slow
def test_admission_calls_of_many_processes_never_deadlock(api: Api, bus: Any, dsn: str, sql: Sql, processes: Processes) -> None:
    """Finishing locks the turn and then the cursor, failing posts and then locks the turn, and somebody else goes the other
    way round; under load Postgres ends one of two at random.

    Admission keeps the one order: channel row, cursor rows by channel, turn row. `post` and `fail` of a turn lock the
    channel first, also when nothing is posted in the end.
    """
    for channel in ("alpha", "beta", "gamma"):
        for handle in ("ada", "bob"):
            bus.subscribe(handle, channel)
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
