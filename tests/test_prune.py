"""Retention: what goes, what stays, who is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors

from doorbell_postgres import HistoryPruned, InvalidInput, NotSubscribed, UnknownChannel, operations
from doorbell_postgres.admin import Admin
from support import Api, background, eventually, waiting_in_database

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]
OpenBus = Callable[..., Any]

# Everything old enough, keys included.
NOW = "interval '0', keep_keys => interval '0'"


def posted(sql: Sql, channel: str, count: int, *, days_old: float = 0) -> None:
    """`count` more messages, that many days old."""
    sql("select doorbell.post_many(%s, 'ci', array(select 'm' || n from generate_series(1, %s) as n))", channel, count)
    if days_old:
        sql(
            "update doorbell.message as m set created_at = clock_timestamp() - make_interval(hours => (%s * 24)::integer)"
            " from doorbell.channel as c where c.id = m.channel_id and c.name = %s",
            days_old,
            channel,
        )


def prune(sql: Sql, arguments: str = NOW, columns: str = "channel, removed, more, held_because, held_by, held_at") -> Any:
    return sql(f"select {columns} from doorbell.prune({arguments})")[0]


def kept(sql: Sql, channel: str = "events") -> list[int]:
    return [seq for (seq,) in sql("select seq from doorbell.messages_after(%s, 0, 1000000)", channel)]


# ---------------------------------------------------------------------------------------------------------------------
# What goes, and what stays
# ---------------------------------------------------------------------------------------------------------------------


def test_prune_removes_what_every_subscriber_acked_and_never_the_newest(sql: Sql) -> None:
    for handle in ("fast", "slow"):
        sql("select doorbell.subscribe(%s, 'events')", handle)
    posted(sql, "events", 10)
    sql("select doorbell.ack('fast', 'events', 10)")
    sql("select doorbell.ack('slow', 'events', 4)")
    assert prune(sql) == ("events", 4, False, "cursor", "slow", 5)
    assert kept(sql) == [5, 6, 7, 8, 9, 10]
    assert prune(sql) == ("events", 0, False, "cursor", "slow", 5)
    sql("select doorbell.ack('slow', 'events', 10)")
    assert prune(sql) == ("events", 5, False, None, None, None)
    assert kept(sql) == [10]
    assert prune(sql) == (None, 0, False, None, None, None)
    assert sql("select seq, posted from doorbell.post('events', 'next', 'ci')") == [(11, True)]
    assert not sql("select * from doorbell.violations")


def test_prune_keeps_what_is_younger_than_keep_and_counts_in_its_order(sql: Sql) -> None:
    posted(sql, "events", 6)
    sql("update doorbell.message set created_at = clock_timestamp() - interval '40 days' where seq in (1, 2, 4, 5)")
    # 3 is young: 4 and 5, though old, lie behind it, and a log has no gap.
    assert prune(sql, "'30 days'") == ("events", 2, False, None, None, None)
    assert kept(sql) == [3, 4, 5, 6]


def test_prune_keeps_a_key_for_its_window_and_what_lies_behind_it(sql: Sql) -> None:
    posted(sql, "events", 1)
    sql("select doorbell.post('events', 'keyed', 'ci', 'key-1')")
    posted(sql, "events", 2)
    sql("update doorbell.message set created_at = clock_timestamp() - interval '3 days'")
    assert prune(sql, "'1 day'") == ("events", 1, False, "key", None, 2)
    assert sql("select seq, posted from doorbell.post('events', 'again', 'ci', 'key-1')") == [(2, False)]
    assert prune(sql, "'1 day', keep_keys => '2 days'") == ("events", 2, False, None, None, None)
    assert sql("select seq, posted from doorbell.post('events', 'again', 'ci', 'key-1')") == [(5, True)], "it is new, then"


def test_a_key_window_that_is_shorter_than_keep_shortens_nothing(sql: Sql) -> None:
    sql("select doorbell.post('events', 'keyed', 'ci', 'key-1')")
    posted(sql, "events", 1)
    assert prune(sql, "'1 day', keep_keys => '0'") == (None, 0, False, None, None, None)


def test_a_channel_without_subscribers_is_pruned_by_age_alone(sql: Sql) -> None:
    posted(sql, "events", 5, days_old=31)
    assert prune(sql, "'30 days'")[:2] == ("events", 4)


def test_a_batch_is_bounded_and_more_says_that_there_is_more(sql: Sql) -> None:
    posted(sql, "a", 25)
    posted(sql, "b", 12)
    seen = []
    while True:
        channel, removed, more = prune(sql, NOW + ", batch => 10", "channel, removed, more")
        seen.append((channel, removed))
        if not more:
            break
    assert seen == [("a", 10), ("a", 10), ("a", 4), ("b", 10), ("b", 1)]
    assert (kept(sql, "a"), kept(sql, "b")) == ([25], [12])


def test_an_unfinished_turn_holds_prune_also_when_it_is_forced(sql: Sql, open_bus: OpenBus) -> None:
    bus = open_bus()
    bus.subscribe("worker", "events")
    posted(sql, "events", 5)
    sql("select doorbell.admit('worker', 'events', 3, holder => 0)")
    sql("select doorbell.ack('worker', 'events', 5)")
    assert prune(sql) == ("events", 2, False, "turn", "worker", 3)
    assert prune(sql, NOW + ", force => true")[:6] == ("events", 0, False, "turn", "worker", 3)
    sql("select doorbell.finish_turn(t.channel_id, t.id, t.attempt, 0) from doorbell.turn as t")
    assert prune(sql)[:2] == ("events", 2)
    assert not sql("select * from doorbell.violations")


def test_a_key_that_is_pruned_while_it_is_looked_up_is_a_new_one(sql: Sql, connect: Connect) -> None:
    """The original is found by its key, and is gone before it is read."""
    sql("""
        create or replace function doorbell._seq_of(channel_id bigint, idempotency_key text) returns bigint language plpgsql as $$
        declare v_seq constant bigint := (
          select m.seq from doorbell.message as m where (m.channel_id, m.idempotency_key) = ($1, $2));
        begin
          perform pg_advisory_xact_lock_shared(1);
          return v_seq;
        end $$
    """)
    sql("select doorbell.post('events', 'old', 'ci', 'key'), doorbell.post('events', 'newest', 'ci')")
    gate = connect()
    gate.execute("select pg_advisory_xact_lock(1)")
    again = "select seq, posted, created_at is not null, original_body from doorbell.post('events', 'new', 'ci', 'key')"
    post = background(connect(autocommit=True).execute, again)
    waiting_in_database(sql)
    assert prune(sql)[:2] == ("events", 1)
    gate.rollback()
    assert post.result(10).fetchall() == [(3, True, True, None)]


def test_turns_that_ended_are_pruned_after_the_key_window_with_what_belongs_to_them(sql: Sql) -> None:
    sql("select doorbell.subscribe('worker', 'events')")
    posted(sql, "events", 4)
    for seq in (1, 2, 3, 4):
        sql("select doorbell.admit('worker', 'events', %s)", seq)
    turns = "from doorbell.turn as t where t.origin_seq = %s"
    for seq in (1, 2, 4):
        sql(f"select doorbell.turn_post(t.channel_id, t.id, t.attempt, 'out', 'x', 'c') {turns}", seq)
        sql(f"select doorbell.record_step(t.channel_id, t.id, t.attempt, 's') {turns}", seq)
        sql(f"select doorbell.finish_turn(t.channel_id, t.id, t.attempt) {turns}", seq)
    old = "update doorbell.turn set admitted_at = now() - interval '8 days', ended_at = ended_at - interval '8 days'"
    old += " where origin_seq <> 2"
    sql(old)
    # 1 goes. 2 is young. 3 is unfinished. 4 has ended, and the cursor still waits behind 3 to pass it.
    assert sql("select removed, more from doorbell.prune_turns()") == [(1, False)]
    assert sql("select origin_seq from doorbell.turn order by 1") == [(2,), (3,), (4,)]
    assert sql("select count(*) from doorbell.turn_step") == sql("select count(*) from doorbell.reservation") == [(2,)]
    sql(f"select doorbell.finish_turn(t.channel_id, t.id, t.attempt) {turns}", 3)
    assert sql("select doorbell.acked_seq('worker', 'events')") == [(4,)]
    sql(old)
    assert sql("select removed, more from doorbell.prune_turns(batch => 1)") == [(1, True)]
    assert sql("select removed, more from doorbell.prune_turns(batch => 5)") == [(1, False)]
    assert sql("select count(*) from doorbell.delivery") == [(0,)]
    assert not sql("select * from doorbell.violations")


def test_a_turn_that_a_duplicate_is_being_admitted_to_is_left(sql: Sql, connect: Connect) -> None:
    sql("select doorbell.subscribe('worker', 'events')")
    posted(sql, "events", 2)
    end = "select doorbell.finish_turn(t.channel_id, t.id, t.attempt) from doorbell.turn as t"
    sql("select doorbell.admit('worker', 'events', 1, event_id => 'e')")
    sql(end)
    sql("update doorbell.turn set admitted_at = now() - interval '8 days', ended_at = now() - interval '8 days'")
    with connect() as twin:
        assert twin.execute("select state from doorbell.admit('worker', 'events', 2, event_id => 'e')").fetchall() == [
            ("duplicate",)
        ]
        assert sql("select removed from doorbell.prune_turns()") == [(0,)]
    assert not sql("select * from doorbell.violations")
    # Acked instead of settled, the delivery goes, and the turn with it.
    sql("select doorbell.ack('worker', 'events', 2)")
    assert sql("select removed from doorbell.prune_turns()") == [(1,)]
    assert sql("select count(*) from doorbell.delivery") == [(0,)]


def test_a_turn_whose_second_run_was_killed_is_pruned_all_the_same(sql: Sql, connect: Connect) -> None:
    sql("select doorbell.subscribe('worker', 'events')")
    posted(sql, "events", 1)
    sql("select doorbell.admit('worker', 'events', 1)")
    sql("select doorbell.finish_turn(t.channel_id, t.id, t.attempt) from doorbell.turn as t")
    with connect(autocommit=True) as killed:
        killed.execute("select doorbell.hold_session(4711)")
        killed.execute("select doorbell.admit('worker', 'events', 1, on_duplicate => 'run', holder => 4711)")
    eventually(lambda: sql("select doorbell._alive(4711)") == [(False,)])
    sql("update doorbell.turn set admitted_at = now() - interval '8 days', ended_at = now() - interval '8 days'")
    assert sql("select removed from doorbell.prune_turns()") == [(1,)]


def test_prune_all_prunes_every_channel_and_commits_between(sql: Sql, connect: Connect) -> None:
    for channel in ("a", "b", "c"):
        posted(sql, channel, 30, days_old=31)
    sql("select doorbell.subscribe('worker', 'b', 'start')")
    assert sql("call doorbell.prune_all('30 days', batch => 7)") == [(58,)]
    assert [len(kept(sql, channel)) for channel in ("a", "b", "c")] == [1, 30, 1]
    # Commits between: a row version from each batch, so more than one transaction wrote.
    assert sql("select count(distinct xmin::text) from doorbell.pruned") == [(2,)]
    with connect() as connection, pytest.raises(errors.InvalidTransactionTermination):
        connection.execute("call doorbell.prune_all('1 day')")


def test_prune_all_leaves_a_channel_that_is_held_for_the_next_run(sql: Sql, connect: Connect) -> None:
    posted(sql, "a", 3)
    posted(sql, "b", 3)
    holder, pruner = connect(), connect(autocommit=True)
    holder.execute("select doorbell.post('a', 'held', 's')")
    notices: list[str] = []
    pruner.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    assert pruner.execute("call doorbell.prune_all('0', keep_keys => '0')").fetchall() == [(2,)]
    assert notices == ["channel 'a' was held by another transaction; it is left for the next run"]
    assert (kept(sql, "a"), kept(sql, "b")) == ([1, 2, 3], [3])


@pytest.mark.parametrize(
    ("arguments", "state", "said"),
    [
        ("null", "RB001", "keep is null."),
        ("'-1 day'", "RB001", "keep is -1 days; it is a length of time, 0 or more."),
        ("'1 day', keep_keys => '-1 s'", "RB001", "keep_keys is -00:00:01; it is a length of time, 0 or more."),
        ("'1 day', batch => 0", "RB001", "batch is 0; it is 1 to 100,000."),
        ("'1 day', batch => null", "RB001", "batch is null; it is 1 to 100,000."),
        ("'1 day', force => null", "RB001", "force is null."),
        ("'1 day', 'nowhere'", "RB002", "channel 'nowhere' does not exist."),
    ],
)
def test_prune_refuses_what_makes_no_sense(sql: Sql, arguments: str, state: str, said: str) -> None:
    posted(sql, "events", 2)
    with pytest.raises(psycopg.Error) as caught:
        sql(f"select doorbell.prune({arguments})")
    assert (caught.value.sqlstate, caught.value.diag.message_primary) == (state, said)
    assert kept(sql) == [1, 2]


def test_prune_needs_read_committed(connect: Connect) -> None:
    connection = connect()
    connection.execute("set transaction isolation level repeatable read")
    with pytest.raises(psycopg.Error, match="repeatable read") as caught:
        connection.execute("select doorbell.prune('1 day')")
    assert caught.value.sqlstate == "RB001"


# ---------------------------------------------------------------------------------------------------------------------
# Races
# ---------------------------------------------------------------------------------------------------------------------


def test_a_reader_that_joins_at_the_start_keeps_what_it_joined_for(sql: Sql, connect: Connect) -> None:
    """Whichever gets the channel's lock first: the cursor stands before the first kept message."""
    posted(sql, "events", 10)
    subscriber, pruner = connect(), connect(autocommit=True)
    subscriber.execute("select doorbell.subscribe('late', 'events', 'start')")
    running = background(lambda: pruner.execute(f"select removed, held_by from doorbell.prune({NOW})").fetchall())
    waiting_in_database(sql)
    subscriber.commit()
    assert running.result(20) == [(0, "late")]
    assert [seq for (seq,) in sql("select seq from doorbell.unacked('late')")] == list(range(1, 11))

    sql("select doorbell.ack('late', 'events', 6)")
    with connect() as first:
        assert first.execute(f"select removed from doorbell.prune({NOW})").fetchone() == (6,)
        other = connect(autocommit=True)
        joining = background(lambda: other.execute("select doorbell.subscribe('later', 'events', 'start')").fetchall())
        waiting_in_database(sql)
    assert joining.result(20) == [(6,)]
    assert [seq for (seq,) in sql("select seq from doorbell.unacked('later')")] == [7, 8, 9, 10]


def test_acks_and_prunes_side_by_side_never_refuse_a_reader(sql: Sql, connect: Connect) -> None:
    """A cursor that moves while prune removes behind it must not be taken for one that was passed."""
    sql("select doorbell.subscribe('worker', 'events')")
    posted(sql, "events", 3_000)
    acker, reader, pruner = (connect(autocommit=True) for _ in range(3))
    over = threading.Event()

    def read() -> int:
        pages = 0
        while not over.is_set():
            reader.execute("select count(*) from doorbell.unacked('worker', page_size => 50)")
            for floor, floor_at in (("0::bigint", "null::timestamptz"), ("f.floor", "f.floor_at")):
                found = reader.execute(
                    "select lost_to from doorbell.bell_floors('worker') as f,"
                    f" doorbell.peek(array['worker'], array[f.channel_id], array[{floor}], array[{floor_at}], 10)".encode()
                ).fetchall()
                assert all(row == (None,) for row in found)
            pages += 1
        return pages

    def cut() -> None:
        while not over.is_set():
            pruner.execute(f"select doorbell.prune({NOW}, batch => 20)")

    running = [background(read), background(cut)]
    for seq in range(1, 3_001, 5):
        acker.execute("select doorbell.ack('worker', 'events', %s)", (seq,))
    over.set()
    assert running[0].result(30) > 0
    running[1].result(30)
    assert not sql("select * from doorbell.violations")


# ---------------------------------------------------------------------------------------------------------------------
# Forced
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.failure_mode
def test_retention_never_skips_a_reader_silently(bus: Any, api: Api, sql: Sql) -> None:
    """Retention overtakes a slow reader, and the messages it had not read are skipped in silence.

    Prune keeps what a cursor has not passed and names its handle. Forced, it passes, and the reader's catch_up, bell and ack
    are refused with the range that is gone, until it skips that range itself.
    """
    bus.subscribe("slow", "events")
    bus.subscribe("fast", "events")
    posted(sql, "events", 10)
    bus.ack("slow", "events", 3)
    bus.ack("fast", "events", 10)
    bell = api.Doorbell(bus, "slow", poll_interval=0.05)
    assert bell.wait(10).seq == 4

    assert prune(sql) == ("events", 3, False, "cursor", "slow", 4)
    assert [m.seq for m in bus.catch_up("slow")] == [4, 5, 6, 7, 8, 9, 10]
    assert prune(sql, NOW + ", force => true, batch => 4", "removed, more, lost_by") == (4, True, ["slow"])

    said = "Messages 4 to 7 of 'events' were removed before 'slow' had acked them."
    for refused in (
        lambda: bus.catch_up("slow"),
        lambda: list(bus.unacked("slow")),
        lambda: bus.ack("slow", "events", 10),
        lambda: bell.wait(10),  # had rung for 4, and looks on from there
        lambda: api.Doorbell(bus, "slow").wait(10),
        lambda: bus.ack("slow", "events", 3),
    ):
        with pytest.raises(HistoryPruned) as caught:
            refused()
        assert str(caught.value).startswith(said)
        assert str(caught.value).endswith("and go on with message 8.")
    assert bus.store.acked_seq("slow", "events") == 3
    assert [(b.unacked, b.lost) for b in bus.backlog("slow")] == [(7, 4)]
    assert [(b.unacked, b.lost) for b in bus.backlog("fast")] == [(0, 0)], "nobody else is concerned"

    assert bus.skip_pruned("slow", "events") == 4
    assert [m.seq for m in bus.catch_up("slow")] == [8, 9, 10]
    assert bell.wait(10).seq == 8
    assert bus.ack("slow", "events", 10) == 10
    assert bus.skip_pruned("slow", "events") == 0
    assert bus.store.acked_seq("slow", "events") == 10


def test_a_bell_of_another_handle_on_the_same_bus_is_not_refused(bus: Any, api: Api, sql: Sql) -> None:
    for handle in ("slow", "fast"):
        bus.subscribe(handle, "events")
    posted(sql, "events", 3)
    bus.ack("fast", "events", 3)
    prune(sql, NOW + ", force => true")
    slow, fast = (api.Doorbell(bus, handle, poll_interval=0.05) for handle in ("slow", "fast"))
    waiting = background(fast.wait, 20)
    with pytest.raises(HistoryPruned):
        slow.wait(10)
    bus.post("events", "for fast", sender="ci")
    assert waiting.result(20).seq == 4


def test_a_cursor_at_the_edge_has_lost_nothing(bus: Any, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    posted(sql, "events", 5)
    bus.ack("worker", "events", 2)
    assert prune(sql, NOW, "removed") == (2,)
    assert [m.seq for m in bus.catch_up("worker")] == [3, 4, 5]
    assert bus.skip_pruned("worker", "events") == 0


def test_subscribing_at_the_start_of_a_pruned_channel_means_the_first_kept_message(bus: Any, sql: Sql) -> None:
    posted(sql, "events", 5)
    prune(sql)
    bus.subscribe("late", "events", at="start")
    assert [m.seq for m in bus.catch_up("late")] == [5]
    assert bus.ack("late", "events", 5) == 5


def test_skip_pruned_refuses_what_is_not_there(bus: Any) -> None:
    with pytest.raises(UnknownChannel):
        bus.skip_pruned("worker", "events")
    bus.subscribe("other", "events")
    with pytest.raises(NotSubscribed):
        bus.skip_pruned("worker", "events")
    with pytest.raises(InvalidInput):
        bus.skip_pruned("", "events")


def test_the_plan_is_what_prune_then_does(sql: Sql, dsn: str) -> None:
    sql("select doorbell.subscribe('slow', 'held')")
    for channel in ("held", "free", "young"):
        posted(sql, channel, 10, days_old=0 if channel == "young" else 40)
    sql("select doorbell.ack('slow', 'held', 4)")
    keep = timedelta(days=30)
    with Admin(dsn) as admin:
        planned = {p.channel: (p.removable, p.held_by, p.loses) for p in admin.run(operations.prune_plan(keep, None))}
        assert planned == {"free": (9, None, ()), "held": (4, "slow", ()), "young": (0, None, ())}
        forced = {p.channel: (p.removable, p.held_by, p.loses) for p in admin.run(operations.prune_plan(keep, None, force=True))}
        assert forced == {"free": (9, None, ()), "held": (9, None, ("slow",)), "young": (0, None, ())}
        assert [kept(sql, channel)[0] for channel in planned] == [1, 1, 1], "a plan removes nothing"
        for channel, (removable, held_by, _) in planned.items():
            result = admin.run(operations.prune(keep, channel))
            assert (result.removed, result.held_by, result.more) == (removable, held_by, False)


def test_first_kept_is_known_without_passing_over_what_was_removed(sql: Sql) -> None:
    posted(sql, "events", 50)
    prune(sql)
    assert sql("select head, first_kept, messages from doorbell.channels") == [(50, 50, 1)]
    for _ in range(2):
        posted(sql, "events", 1)
    assert sql("select head, first_kept, messages from doorbell.channels") == [(52, 50, 3)]


def test_a_new_epoch_is_another_one(sql: Sql) -> None:
    before = sql("select epoch from doorbell.hello()")
    assert sql("select doorbell.new_epoch()") != before
    assert sql("select epoch from doorbell.hello()") == sql("select epoch from doorbell.health") != before
