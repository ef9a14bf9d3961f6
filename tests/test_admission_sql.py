"""Admission straight from SQL: what somebody at psql gets, how it is made, and that it stays fast. No bus in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import errors

from support import eventually

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]

ADMIT = "select state, should_run, attempt, failed from doorbell.admit('worker', 'events', %s)"


@pytest.fixture(autouse=True)
def _filled(sql: Sql) -> None:
    """Channel events with the messages one, two, three; worker is subscribed before them."""
    sql("select doorbell.subscribe('worker', 'events')")
    sql("select doorbell.post_many('events', 'ci', array['one', 'two', 'three'])")


def turn(sql: Sql, seq: int, extra: str = "") -> str:
    """The first three arguments of the other functions for an admitted turn."""
    ((channel_id, turn_id, attempt),) = sql(
        f"select turn_channel_id, turn_id, attempt from doorbell.admit('worker', 'events', {seq}{extra})"
    )
    return f"{channel_id}, {turn_id}, {attempt}"


def acked(sql: Sql) -> int:
    return sql("select doorbell.acked_seq('worker', 'events')")[0][0]


def test_the_whole_way_of_a_turn(sql: Sql) -> None:
    owned = turn(sql, 1)
    assert sql(f"select doorbell.step_pending({owned}, 'dispatch')") == [(True,)]
    assert sql(f"select doorbell.record_step({owned}, 'dispatch')") == [(True,)]
    assert sql(f"select doorbell.step_pending({owned}, 'dispatch')") == [(False,)]
    assert sql(f"select doorbell.reserve({owned}, 'mail')") == sql(f"select doorbell.reserve({owned}, 'mail')")
    post = f"select posted_channel, seq, posted, posts, original_body from doorbell.turn_post({owned}, 'answers', %s, 'answer')"
    assert sql(post, "yes") == [("answers", 1, True, 1, None)]
    assert sql(post, "no") == [("answers", 1, False, 1, "yes")]
    assert sql(f"select doorbell.finish_turn({owned})") == [("finished",)]
    assert sql(f"select doorbell.finish_turn({owned})") == [("finished",)]
    assert acked(sql) == 1
    assert sql(ADMIT, 1) == [("duplicate", False, 1, False)]


def test_without_a_token_an_unfinished_turn_reads_as_resumed_and_with_one_as_running(sql: Sql, connect: Connect) -> None:
    assert sql(ADMIT, 1) == [("new", True, 1, False)]
    assert sql(ADMIT, 1) == [("resumed", True, 2, False)]
    session = connect(autocommit=True)
    assert session.execute("select doorbell.hold_session(42)").fetchone() == (True,)
    own = "select state, attempt from doorbell.admit('worker', 'events', 1, holder => 42)"
    assert session.execute(own).fetchone() == ("resumed", 3)
    assert session.execute(own).fetchone() == ("running", 3), "oneself is somebody alive"
    assert sql(ADMIT, 1) == [("running", False, 3, False)]
    assert sql("select held, attempts from doorbell.turns") == [(True, 3)]
    session.close()
    eventually(lambda: sql("select held from doorbell.turns") == [(False,)])
    assert sql(ADMIT, 1) == [("resumed", True, 4, False)]


def test_asking_whether_a_session_lives_leaves_no_lock_and_does_not_disturb_it(sql: Sql, connect: Connect) -> None:
    session = connect(autocommit=True)
    session.execute("select doorbell.hold_session(42)")
    sql("select doorbell.admit('worker', 'events', 1, holder => 42)")
    with connect(autocommit=True) as gone:  # nobody holds 43 any more
        gone.execute("select doorbell.hold_session(43)")
        gone.execute("select doorbell.admit('worker', 'events', 2, holder => 43)")
    locks = "select pid from pg_locks where locktype = 'advisory' and classid::bigint >> 24 = 84" \
            " and database = (select oid from pg_database where datname = current_database())"  # fmt: skip
    eventually(lambda: sql(locks) == [(session.info.backend_pid,)])
    before = sql(locks)
    for _ in range(10):
        sql("select doorbell.admit('worker', 'events', 1), doorbell.unfinished_turns('worker')")
        sql("select doorbell.admit('worker', 'events', 2, holder => 43)")
    assert sql(locks) == before == [(session.info.backend_pid,)]
    twice = connect(autocommit=True)
    twice.execute("select doorbell._alive(43)")  # two who ask at once do not take each other for the session
    assert sql("select doorbell._alive(43)") == [(False,)]


def test_a_token_that_nobody_holds_gets_no_turn(sql: Sql, connect: Connect) -> None:
    """Its owner would read as dead while it works. What runs or has ended is told as ever."""
    admit = "select state, should_run, attempt from doorbell.admit('worker', 'events', {}, holder => 42, nonce => {})"
    unheld, written = [("unheld", False, None)], "select count(*) from doorbell.turn, doorbell.delivery"
    assert sql(admit.format(1, 1)) == unheld
    assert sql(written) == [(0,)]
    session = connect(autocommit=True)
    session.execute("select doorbell.hold_session(42)")
    assert sql(admit.format(1, 1)) == [("new", True, 1)]
    session.execute("select doorbell.hold_session(43)")
    sql("select doorbell.admit('worker', 'events', 2, holder => 43)")
    session.close()
    eventually(lambda: sql(admit.format(1, 1)) == unheld)  # its answer was lost and its session ended: sent again
    assert sql(admit.format(1, 2)) == [("running", False, 1)]
    assert sql(admit.format(2, 3)) == unheld
    assert sql("select attempt, holder from doorbell.turn order by id") == [(1, 42), (1, 43)]
    sql("select doorbell.hold_session(42)")
    assert [sql(admit.format(1, 1)), sql(admit.format(2, 3))] == [[("new", True, 1)], [("resumed", True, 2)]]
    sql("select doorbell.finish_turn(t.channel_id, t.id, t.attempt, t.holder) from doorbell.turn as t")
    sql("select pg_advisory_unlock_all()")
    again = "select state from doorbell.admit('worker', 'events', 1, holder => 42, on_duplicate => '{}')"
    assert [sql(again.format("skip")), sql(again.format("run"))] == [[("duplicate",)], [("unheld",)]]


@pytest.mark.parametrize(
    ("call", "state", "said"),
    [
        ("admit('', 'events', 1)", "RB001", "handle is empty"),
        ("admit('worker', 'events', 0)", "RB001", "seq is 0"),
        ("admit('worker', 'events', null)", "RB001", "seq is null"),
        ("admit('worker', 'events', 1, event_id => '')", "RB001", "event_id is empty"),
        ("admit('worker', 'events', 1, on_duplicate => 'maybe')", "RB001", "on_duplicate is 'maybe'"),
        ("admit('worker', 'events', 1, holder => -1)", "RB001", "holder is -1"),
        ("admit('worker', 'events', 1, holder => 72057594037927936)", "RB001", "56 bits"),
        ("admit('worker', 'events', 4)", "RB001", "message 4 of 'events' is not in the log"),
        ("admit('worker', 'nowhere', 1)", "RB002", "channel 'nowhere' does not exist"),
        ("admit('worker', 'events', 1, created_at => now())", "RB005", "the log has rewound"),
        ("settle_delivery('worker', 'nowhere', 1)", "RB002", "channel 'nowhere' does not exist"),
        ("step_pending({turn}, '')", "RB001", "step is empty"),
        ("reserve({turn}, '')", "RB001", "correlation_id is empty"),
        ("turn_post({turn}, '', 'b', 'c')", "RB001", "channel is empty"),
        ("turn_post({turn}, 'answers', null, 'c')", "RB001", "body is null"),
        ("fail_turn({turn}, null)", "RB001", "error is null"),
        ("fail_turn({turn}, 'e', notice => 'n')", "RB001", "notice_to"),
        ("finish_turn(0, 0, 1)", "RB007", "the turn is not there"),
        ("finish_turn({turn} + 1)", "RB007", "another session has taken the turn over"),
        ("finish_turn({turn}, holder => 7)", "RB007", "another session holds the turn"),
        ("record_step({ended}, 's')", "RB007", "the turn has finished"),
        ("reserve({released}, 'c')", "RB007", "the turn was released"),
        ("turn_post({failed}, 'answers', 'b', 'c')", "RB007", "the turn has failed"),
        ("fail_turn({ended}, 'late')", "RB001", "it cannot fail any more"),
    ],
)
def test_a_refusal_says_what_is_true_and_writes_nothing(sql: Sql, call: str, state: str, said: str) -> None:
    owned = {name: turn(sql, 1, f", '{name}'") for name in ("turn", "ended", "released", "failed")}
    sql(f"select doorbell.finish_turn({owned['ended']})")
    sql(f"select doorbell.release_turn({owned['released']})")
    sql(f"select doorbell.fail_turn({owned['failed']}, 'x')")
    tables = ("channel", "message", "cursor", "turn", "delivery", "turn_step", "reservation")
    everything = " union all ".join(f"select to_jsonb(t)::text from doorbell.{table} as t" for table in tables) + " order by 1"
    before = sql(everything)
    with pytest.raises(psycopg.Error) as caught:
        sql(f"select doorbell.{call.format(**owned)}")
    diag = caught.value.diag
    assert diag.sqlstate == state
    assert said in diag.message_primary
    assert diag.message_detail
    assert diag.message_hint
    assert sql(everything) == before


@pytest.mark.parametrize(
    "call", ["admit('worker', 'events', 1)", "finish_turn(0, 0, 1)", "settle_delivery('worker', 'events', 1)",
             "turn_post(0, 0, 1, 'a', 'b', 'c')", "fail_turn(0, 0, 1, 'e')", "record_step(0, 0, 1, 's')"]
)  # fmt: skip
def test_an_old_snapshot_is_refused(connect: Connect, call: str) -> None:
    with connect() as connection:
        connection.execute("set transaction isolation level repeatable read")
        with pytest.raises(psycopg.Error, match="READ COMMITTED") as caught:
            connection.execute(f"select doorbell.{call}".encode())
        assert caught.value.sqlstate == "RB001"
        connection.rollback()


def test_a_twin_waits_for_an_open_admission_no_longer_than_the_lock_timeout(sql: Sql, connect: Connect) -> None:
    winner = connect()
    winner.execute("select doorbell.admit('worker', 'events', 1)")
    began = sql("select clock_timestamp()")[0][0]
    with pytest.raises(errors.LockNotAvailable):
        sql(ADMIT, 1)
    assert 4 < (sql("select clock_timestamp()")[0][0] - began).total_seconds() < 15
    winner.rollback()
    assert sql(ADMIT, 1)[0][0] == "new"


def test_an_error_is_kept_as_one_line_of_500_characters(sql: Sql) -> None:
    owned = turn(sql, 1)
    sql(f"select doorbell.release_turn({owned}, %s)", "a\x1b[31m\n\tb " + "é" * 10_000)
    ((line,),) = sql("select last_error from doorbell.turns")
    assert len(line) == 500
    assert line.startswith("a [31m b é")
    assert line.isprintable()


def test_the_view_of_turns_says_what_an_operator_asks(sql: Sql) -> None:
    sql("select doorbell.post('events', 'by key', 'ci', 'k')")
    sql("select doorbell.post('events', 'by id', 'ci', headers => '{\"event-id\": \"e\"}')")
    for seq in (1, 4, 5):
        turn(sql, seq)
    failed = turn(sql, 2)
    sql(f"select doorbell.fail_turn({failed}, 'broke', 'answers', 'sorry')")
    columns = "handle, event, channel, seq, state, attempts, held, last_error, steps, posts, ended_at is not null"
    assert sql(f"select {columns} from doorbell.turns order by seq") == [
        ("worker", "seq 1", "events", 1, "unfinished", 1, False, None, 0, 0, False),
        ("worker", "seq 2", "events", 2, "failed", 1, False, "broke", 0, 1, True),
        ("worker", "key k", "events", 4, "unfinished", 1, False, None, 0, 0, False),
        ("worker", "id e", "events", 5, "unfinished", 1, False, None, 0, 0, False),
    ]
    assert sql("select channel, seq, attempt, held, steps, posts from doorbell.unfinished_turns('worker')") == [
        ("events", 1, 1, False, [], 0),
        ("events", 4, 1, False, [], 0),
        ("events", 5, 1, False, [], 0),
    ]
    assert sql("select event_id from doorbell.unfinished_turns('worker') where event_id is not null") == [("e",)]


def test_a_long_run_of_settled_messages_is_passed_at_once_and_leaves_no_delivery(sql: Sql) -> None:
    sql("select doorbell.post_many('events', 'ci', array_fill('b'::text, array[300]))")
    sql("select doorbell.finish_turn(t.turn_channel_id, t.turn_id, t.attempt)"
        " from generate_series(2, 303) as n, doorbell.admit('worker', 'events', n) as t")  # fmt: skip
    assert acked(sql) == 0
    assert sql("select count(*) from doorbell.delivery") == [(302,)]
    sql(f"select doorbell.finish_turn({turn(sql, 1)})")
    assert acked(sql) == 303
    assert sql("select count(*) from doorbell.delivery") == [(0,)]


# ---------------------------------------------------------------------------------------------------------------------
# How it is made
# ---------------------------------------------------------------------------------------------------------------------


def test_unique_indexes_lead_with_the_channel_and_nothing_refers_or_fires(sql: Sql) -> None:
    tables = "('turn', 'delivery', 'turn_step', 'reservation')"
    leading = sql(
        "select i.indexrelid::regclass::text, a.attname from pg_index as i"
        " join pg_class as c on c.oid = i.indrelid and c.relnamespace = 'doorbell'::regnamespace"
        " join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]"
        f" where c.relname in {tables} and i.indisunique"
    )
    assert len(leading) == 7
    assert {column for _, column in leading} == {"channel_id"}
    assert not sql("select conname from pg_constraint where contype = 'f' and connamespace = 'doorbell'::regnamespace")
    assert not sql(f"select tgname from pg_trigger as t join pg_class as c on c.oid = t.tgrelid where c.relname in {tables}")


def test_ending_a_turn_rewrites_its_row_in_place_and_touches_no_index(sql: Sql, connect: Connect) -> None:
    sql("select doorbell.post_many('events', 'ci', array_fill('b'::text, array[600]))")
    client = connect(autocommit=True)
    for seq in range(1, 601):
        client.execute(
            "select doorbell.finish_turn(t.turn_channel_id, t.turn_id, t.attempt)"
            " from doorbell.admit('worker', 'events', %s) as t",
            [seq],
        )
    client.execute("select pg_stat_force_next_flush()")
    client.execute("select 1")
    stats = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = %s::regclass"
    for table in ("doorbell.turn", "doorbell.cursor"):
        ((updates, hot),) = sql(stats, table)
        assert updates >= 600, table
        assert hot >= 0.98 * updates, table


PLANNED = {
    "admit": "select * from doorbell.admit('worker', 'events', {n})",
    "admit by key": "select * from doorbell.admit('worker', 'keyed', {n})",
    "admit by id": "select * from doorbell.admit('worker', 'events', {n}, 'id {n}')",
    "a duplicate": "select * from doorbell.admit('worker', 'events', 5)",
    "the way of a turn": "select doorbell.step_pending({turn}, 's'), doorbell.record_step({turn}, 's'),"
    " doorbell.reserve({turn}, 'c'), doorbell.turn_post({turn}, 'answers', 'b', 'd'), doorbell.finish_turn({turn})",
    "fail_turn": "select doorbell.fail_turn({turn}, 'e', 'answers', 'n')",
    "release_turn": "select doorbell.release_turn({turn})",
    "settle_delivery": "select doorbell.settle_delivery('worker', 'events', 5)",
    "abandon_admission": "select doorbell.abandon_admission('worker', 'events', {n} - 1, 1, 0)",
}


@pytest.mark.parametrize("planned", ["while the tables were empty", "while the tables were short", "after an analyze"])
def test_no_call_reads_a_whole_table(sql: Sql, connect: Connect, planned: str) -> None:
    """20,000 turns here and on another channel, 20,000 settled deliveries there; also with plans from when there was nothing,
    or one turn and that was known."""
    client = connect(autocommit=True)
    number = 20

    def run(call: str) -> None:
        nonlocal number
        number += 1
        admit = "select turn_channel_id, turn_id, attempt from doorbell.admit('worker', 'events', %s)"
        owned = ", ".join(str(value) for value in client.execute(admit, [number]).fetchone())
        number += 1
        client.execute(call.format(n=number, turn=owned).encode())

    sql("select doorbell.post_many('events', 'ci', array_fill('b'::text, array[200]))")
    sql("select doorbell.post_many('keyed', 'ci', array_fill('b'::text, array[200]),"
        " (select array_agg('key ' || n) from generate_series(1, 200) as n))")  # fmt: skip
    if planned == "while the tables were short":
        sql("select doorbell.admit('early', 'events', 3, 'id')")
        sql("vacuum analyze")
    if planned != "after an analyze":
        for _ in range(7):  # plpgsql settles on a generic plan after five
            for call in PLANNED.values():
                run(call)
    sql("select doorbell.post_many('events', 'ci', array_fill('b'::text, array[20000]))")
    sql("select doorbell.post_many('many', 'ci', array_fill('b'::text, array[20000]))")
    sql("""
        insert into doorbell.turn (channel_id, handle, event_seq, state, origin_channel_id, origin_seq)
          select c.id, 'worker', n, 'finished', c.id, n
          from doorbell.channel as c, generate_series(2, 20000) as n where c.name = 'many';
        insert into doorbell.turn (channel_id, handle, event_seq, state, origin_channel_id, origin_seq)
          select c.id, 'others', n, 'finished', c.id, n
          from doorbell.channel as c, generate_series(1, 20000) as n where c.name = 'events';
        insert into doorbell.delivery (channel_id, handle, seq, turn_channel_id, turn_id, settled)
          select t.channel_id, 'worker', t.event_seq, t.channel_id, t.id, true
          from doorbell.turn as t join doorbell.channel as c on c.id = t.channel_id and c.name = 'many' where t.event_seq > 1;
        insert into doorbell.turn_step (channel_id, turn_id, step, attempt) select channel_id, id, 'x', 1 from doorbell.turn;
        insert into doorbell.reservation (channel_id, turn_id, correlation_id, reserved_at)
          select channel_id, id, 'x', now() from doorbell.turn;
    """)
    if planned == "after an analyze":
        sql("analyze")

    def read() -> dict[str, int]:
        client.execute("select pg_stat_force_next_flush()")
        sql("select pg_stat_force_next_flush()")
        return dict(sql(
            "select relname, seq_tup_read + idx_tup_fetch from pg_stat_user_tables"
            " where schemaname = 'doorbell' and relname in ('turn', 'delivery', 'turn_step', 'reservation', 'message')"
        ))  # fmt: skip

    def most_read(before: dict[str, int]) -> int:
        return max(rows - before[table] for table, rows in read().items())

    for session in (client, connect(autocommit=True)):  # the new one plans by the statistics of the short tables
        client = session
        for name, call in PLANNED.items():
            before = read()
            run(call)
            assert most_read(before) < 1000, f"{name} reads a whole table, or a whole channel"
    client.execute("select count(error) from doorbell.turn")
    assert most_read(before) >= 20_000, "this test would not notice"
