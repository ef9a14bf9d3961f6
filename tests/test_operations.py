"""What an operator sees: the views, their plans, what each violation looks like, `status`, `doctor` and the lists."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from doorbell_postgres import cli, doctor, operations
from doorbell_postgres.cli import table
from doorbell_postgres.cli.table import Column
from support import TestServer, background, eventually, waiting_in_database

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]

# Whatever a poster may call a channel: escapes, control characters, a bidi override, line and paragraph separators, markup.
HOSTILE = "a\x1b[31m\x1b]0;title\x07b\r\nc\u202ed\u2028e\x9b1mf\x00"[:-1] + "[bold]g[/bold]\ttab"


@pytest.fixture
def filled(sql: Sql) -> None:
    """events holds 1 to 5: worker is at 2, auditor at 5. quiet holds nothing, and unread has no reader."""
    for handle in ("worker", "auditor"):
        sql("select doorbell.subscribe(%s, 'events')", handle)
    sql("select doorbell.subscribe('worker', 'quiet')")
    sql("select doorbell.post_many('events', 'ci', array['1', '2', '3', '4', '5'])")
    sql("select doorbell.post('unread', 'x', 'ci')")
    sql("select doorbell.ack('worker', 'events', 2), doorbell.ack('auditor', 'events', 5)")


@pytest.fixture
def run(dsn: str) -> Callable[..., Result]:
    """`run("status", "--json")` runs that command on this test's database."""

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, [*arguments, "--dsn", dsn])

    return invoke


# ---------------------------------------------------------------------------------------------------------------------
# The views
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("filled")
def test_backlog_says_who_is_behind_and_since_when(sql: Sql) -> None:
    assert sql("select handle, channel, head, acked_seq, unacked, lost from doorbell.backlog order by 1, 2") == [
        ("auditor", "events", 5, 5, 0, 0),
        ("worker", "events", 5, 2, 3, 0),
        ("worker", "quiet", 0, 0, 0, 0),
    ]
    third = sql("select created_at from doorbell.messages_after('events', 2, 1)")
    assert sql("select oldest_unacked_at from doorbell.backlog where handle = 'worker' and channel = 'events'") == third
    assert sql("select count(oldest_unacked_at), count(last_acked_at) from doorbell.backlog") == [(1, 2)]


@pytest.mark.usefixtures("filled")
def test_channels_says_how_long_each_log_is(sql: Sql) -> None:
    assert sql("select channel, head, first_kept, messages from doorbell.channels order by 1") == [
        ("events", 5, 1, 5),
        ("quiet", 0, None, 0),
        ("unread", 1, 1, 1),
    ]
    events, quiet, unread = (size for (size,) in sql("select estimated_bytes from doorbell.channels order by channel"))
    assert (events // 100, quiet) == (5 * unread // 100, 0)
    assert abs(events + unread - sql("select pg_total_relation_size('doorbell.message')")[0][0]) < 10


def test_health_of_a_quiet_server_and_of_one_with_an_open_transaction(sql: Sql, connect: Connect) -> None:
    (row,) = sql(
        "select schema_revision, replica, notification_queue_usage, waiting_sessions, prepared_transactions from doorbell.health"
    )
    assert row[1:] == (False, 0.0, 0, 0)
    with connect() as other:
        (pid,) = other.execute("select pg_backend_pid()").fetchone() or (0,)
        # Other tests run on this server: the oldest is ours or an older one, and it is somebody's.
        assert re.fullmatch(r"pid \d+, .*, open for \d+ s", sql("select oldest_transaction from doorbell.health")[0][0])
        other.execute("select doorbell.post('events', 'held', 's')")
        waiter = connect(autocommit=True)
        running = background(lambda: waiter.execute("select doorbell.post('events', 'waits', 's')").fetchall())
        waiting_in_database(sql)
        assert sql("select blocked_sessions, blocked_session_count from doorbell.health") == [(f"1 waiting for pid {pid}", 1)]
        other.commit()
        running.result(20)
    assert sql("select blocked_sessions, blocked_session_count from doorbell.health") == [("none", 0)]


def test_health_counts_the_sessions_in_which_bells_wait(sql: Sql, connect: Connect) -> None:
    waiting = connect(autocommit=True)
    waiting.execute("select doorbell.arm(array[1, 2], array[]::bigint[])")
    other = connect(autocommit=True)
    other.execute("select doorbell.arm(array[0], array[]::bigint[])")
    other.execute("select pg_advisory_lock_shared(7)")
    assert sql("select waiting_sessions from doorbell.health") == [(2,)]


VIEWS_ON_THE_LOG = ("backlog", "channels", "turns", "health")


@pytest.mark.parametrize("view", VIEWS_ON_THE_LOG)
def test_a_view_probes_the_log_and_never_scans_it(sql: Sql, view: str) -> None:
    """The plan on a log large enough for the planner to mind: one probe of the primary key a channel or a cursor."""
    sql("insert into doorbell.channel (name) select 'c' || n from generate_series(1, 20) as n")
    sql("insert into doorbell.message (channel_id, seq, sender, body, created_at)"
        " select c.id, n, 's', repeat('x', 100), now() from doorbell.channel as c, generate_series(1, 2000) as n")  # fmt: skip
    sql("insert into doorbell.cursor (channel_id, handle, acked_seq) select c.id, 'h' || n, n from doorbell.channel as c,"
        " generate_series(1, 20) as n")  # fmt: skip
    sql("vacuum analyze doorbell.message, doorbell.cursor, doorbell.channel")
    (plan,) = sql(f"explain (analyze, format json, timing off) select * from doorbell.{view}")[0]
    on_log = [node for node in nodes(plan[0]["Plan"]) if node.get("Relation Name") == "message"]
    for node in on_log:
        assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node["Node Type"]
        assert node["Index Name"] == "message_pkey"
        assert node["Actual Rows"] <= 1
    probes = sum(node["Actual Loops"] for node in on_log)
    assert probes <= {"backlog": 20 + 400, "channels": 20, "turns": 0, "health": 0}[view]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


# ---------------------------------------------------------------------------------------------------------------------
# Violations
# ---------------------------------------------------------------------------------------------------------------------

WORK = (
    "select doorbell.admit('worker', 'events', 3)",
    "select doorbell.reserve(t.channel_id, t.id, t.attempt, 'r') from doorbell.turn as t",
    "select doorbell.record_step(t.channel_id, t.id, t.attempt, 's') from doorbell.turn as t",
)
EVENTS = "(select id from doorbell.channel where name = 'events')"

# What is broken by hand, and the rows that must show: violation, channel, handle, seq, detail.
BROKEN: dict[str, tuple[list[str], list[tuple[Any, ...]]]] = {
    "gap": (
        [f"delete from doorbell.message where channel_id = {EVENTS} and seq in (2, 3)"],
        [("gap", "events", None, 4, "messages 2 to 3 are missing")],
    ),
    "beginning": (
        [f"delete from doorbell.message where channel_id = {EVENTS} and seq = 1"],
        [("wrong beginning", "events", None, 2, "the log begins at 2; 0 was removed last, so it must begin at 1")],
    ),
    "newest": (
        [
            f"delete from doorbell.message where channel_id = {EVENTS} and seq = 5",
            "delete from doorbell.cursor where handle = 'auditor'",
            f"insert into doorbell.pruned (channel_id, up_to) values ({EVENTS}, 5)",
        ],
        [
            ("newest message removed", "events", None, 5, "retention has removed 5, and no newer message is there"),
            ("wrong beginning", "events", None, 1, "the log begins at 1; 5 was removed last, so it must begin at 6"),
        ],
    ),
    "number": (
        [f"insert into doorbell.message (channel_id, seq, sender, body, created_at) values ({EVENTS}, 0, 's', 'b', now())"],
        [
            ("number below 1", "events", None, 0, "numbers begin at 1"),
            ("wrong beginning", "events", None, 0, "the log begins at 0; 0 was removed last, so it must begin at 1"),
        ],
    ),
    "orphans": (
        ["delete from doorbell.channel where name = 'events'"],
        [
            ("cursor without channel", None, "auditor", 5, "there is no channel 1"),
            ("cursor without channel", None, "worker", 2, "there is no channel 1"),
            ("messages without channel", None, None, 5, "channel 1 has 5 messages and no row"),
        ],
    ),
    "pruned orphan": (
        ["insert into doorbell.pruned (channel_id, up_to) values (99, 7)"],
        [("retention without channel", None, None, 7, "there is no channel 99")],
    ),
    "beyond head": (
        ["update doorbell.cursor set acked_seq = 9 where handle = 'auditor'"],
        [("cursor beyond head", "events", "auditor", 9, "the head is 5")],
    ),
    "below 0": (
        ["update doorbell.cursor set acked_seq = -1 where handle = 'auditor'"],
        [("cursor below 0", "events", "auditor", -1, "a cursor begins at 0")],
    ),
    "names": (
        [
            "insert into doorbell.channel (name) values ('')",
            "update doorbell.cursor set handle = repeat('h', 256) where handle = 'auditor'",
        ],
        [
            ("name out of bounds", "", None, None, "a channel name of 0 bytes; 1 to 255 are allowed"),
            ("name out of bounds", "events", "h" * 256, None, "a handle of 256 bytes; 1 to 255 are allowed"),
        ],
    ),
    "turn": (
        [WORK[0], "update doorbell.turn set event_key = 'k'"],
        [("turn out of bounds", "events", "worker", 3, "turn 1 is of no event or of two, or in no state")],
    ),
    "delivery without turn": (
        [WORK[0], "delete from doorbell.turn"],
        [("delivery without turn", "events", "worker", 3, "there is no turn 1 of channel 1")],
    ),
    "delivery beyond head": (
        [WORK[0], "update doorbell.delivery set seq = 6"],
        [("delivery beyond head", "events", "worker", 6, "the head is 5")],
    ),
    "settled too soon": (
        [
            WORK[0],
            "update doorbell.delivery set settled = true",
        ],
        [("delivery settled too soon", "events", "worker", 3, "its turn has not ended")],
    ),
    "left behind": (
        [
            WORK[0],
            "update doorbell.delivery set settled = true",
            "update doorbell.turn set state = 'finished', ended_at = clock_timestamp()",
        ],
        [("cursor left behind", "events", "worker", 2, "message 3 is settled")],
    ),
    "unfinished turn without delivery": (
        [WORK[0], "delete from doorbell.delivery"],
        [("unfinished turn without delivery", "events", "worker", 3, "turn 1 of channel 1, which nobody can find")],
    ),
    "turn without end": (
        [WORK[0], "update doorbell.turn set state = 'finished'"],
        [("turn without end", "events", "worker", 3, "state finished, ended_at null")],
    ),
    "step and reservation without turn": (
        [*WORK, "delete from doorbell.delivery", "delete from doorbell.turn"],
        [
            ("reservation without turn", None, None, None, "reservation 'r' of turn 1 of channel 1"),
            ("step without turn", None, None, None, "step 's' of turn 1 of channel 1"),
        ],
    ),
    "reservation beyond head": (
        [*WORK, "update doorbell.reservation set posted_channel_id = 1, posted_seq = 8, posted_at = now()"],
        [("reservation beyond head", "events", None, 8, "posted as 8, and the head is 5")],
    ),
    "two stores": (
        ["delete from doorbell.meta"],
        [("not one store", None, None, None, "doorbell.meta has 0 rows instead of one")],
    ),
    "open function": (
        ["grant execute on function doorbell.head(text) to public"],
        [("open to everybody", None, None, None, "PUBLIC may execute doorbell.head(channel text)")],
    ),
    "open table": (
        ["grant select on doorbell.message to public"],
        [("open to everybody", None, None, None, "PUBLIC has SELECT on doorbell.message")],
    ),
}


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("what", BROKEN)
def test_an_invariant_that_is_broken_by_hand_shows_and_the_doctor_fails(sql: Sql, run: Callable[..., Result], what: str) -> None:
    breaking, expected = BROKEN[what]
    assert not sql("select * from doorbell.violations")
    for statement in breaking:
        sql(statement)
    assert sql("select * from doorbell.violations order by violation, channel nulls first, handle nulls first") == expected
    done = run("doctor")
    assert done.exit_code == 1, done.output
    if what == "two stores":
        return  # hello() itself has nothing to say then
    assert "FAILING" in done.output
    for violation, *_, detail in expected:
        assert (detail if violation == "open to everybody" else violation) in done.output


def test_what_the_contract_does_violates_nothing(sql: Sql, filled: None) -> None:
    """Also in the odd corners: an ack that jumps, a subscription that is made again, a replay, a rerun, retention."""
    for statement in (
        *WORK,
        "select doorbell.ack('worker', 'events', 4)",
        "select doorbell.finish_turn(t.channel_id, t.id, t.attempt) from doorbell.turn as t",
        "select doorbell.admit('worker', 'events', 5)",
        "select doorbell.unsubscribe('worker', 'events')",
        "select doorbell.finish_turn(t.channel_id, t.id, t.attempt) from doorbell.turn as t where t.state = 'unfinished'",
        "select doorbell.subscribe('worker', 'events', 'start')",
        "select doorbell.admit('worker', 'events', 5, on_duplicate => 'run')",
        "select doorbell.ack('worker', 'events', 4)",
        "select doorbell.prune('0', keep_keys => '0')",
        "select doorbell.prune('0', keep_keys => '0', force => true)",
        "select doorbell.prune_turns('0')",
        "select doorbell.skip_pruned('worker', 'events')",
        "select doorbell.unsubscribe('auditor', 'events')",
    ):
        sql(statement)
        assert sql("select * from doorbell.violations") == [], statement


# ---------------------------------------------------------------------------------------------------------------------
# status and the lists
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("filled")
def test_status_in_a_pipe_is_plain_lines(run: Callable[..., Result]) -> None:
    done = run("status")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert "log\t6 messages in 3 channels, about" in done.output
    assert lines[0].startswith("server\t")
    assert "readers\t2 handles with 3 subscriptions; 0 sessions waiting" in lines
    assert re.search(r"^unacked\t3, the oldest for \d+ s$", done.output, re.M)
    assert re.search(r"^worker\tevents\t3\t5\t\d+ s\t\d+ s$", done.output, re.M)
    assert "auditor" not in done.output, "it is not behind"


@pytest.mark.usefixtures("filled")
def test_status_as_json_is_one_object(run: Callable[..., Result]) -> None:
    done = json.loads(run("status", "--json").output)
    assert done["totals"]["unacked"] == 3
    assert done["health"]["replica"] is False
    assert [(b["handle"], b["channel"], b["unacked"]) for b in done["behind"]] == [("worker", "events", 3)]


@pytest.mark.usefixtures("filled")
def test_the_lists(run: Callable[..., Result], sql: Sql) -> None:
    sql("select doorbell.admit('worker', 'events', 3)")
    sql(
        "select doorbell.fail_turn(t.turn_channel_id, t.turn_id, t.attempt, E'no\\nway')"
        " from doorbell.admit('worker', 'events', 4) as t"
    )
    rows = [line.split("\t") for line in run("channels").output.splitlines()]
    assert [row[:4] + row[5:6] for row in rows] == [
        ["channel", "head", "first kept", "messages", "readers"],
        ["events", "5", "1", "5", "2"],
        ["quiet", "0", "", "0", "1"],
        ["unread", "1", "1", "1", "0"],
    ]
    rows = [line.split("\t") for line in run("handles").output.splitlines()]
    assert [row[:4] for row in rows] == [
        ["handle", "channels", "unacked", "lost"],
        ["auditor", "1", "0", "0"],
        ["worker", "2", "3", "0"],
    ]
    rows = [line.split("\t") for line in run("turns").output.splitlines()]
    assert [row[:5] + row[6:] for row in rows] == [
        ["handle", "event", "state", "held", "tries", "last error"],
        ["worker", "seq 3", "unfinished", "no", "1", ""],
        ["worker", "seq 4", "failed", "no", "1", "no way"],
    ]
    assert len(run("turns", "--state", "finished").output.splitlines()) == 1
    for command in ("channels", "handles", "turns"):
        assert all(isinstance(json.loads(line), dict) for line in run(command, "--json").output.splitlines())


def test_unsubscribe_and_skip_as_commands(run: Callable[..., Result], sql: Sql, filled: None) -> None:
    done = run("unsubscribe", "auditor", "events")
    assert (done.exit_code, done.output) == (0, "'auditor' is not subscribed to 'events' any more\n")
    again = run("unsubscribe", "auditor", "events")
    assert (again.exit_code, again.stderr) == (1, "doorbell: 'auditor' is not subscribed to 'events'.\n")
    assert run("skip", "worker", "events").output == "'worker' has given up 0 messages of 'events'; its cursor stands at 2\n"
    sql("select doorbell.prune('0', force => true)")
    refused = run("catch-up", "worker")
    assert (refused.exit_code, "(doorbell skip 'worker' 'events')" in refused.stderr) == (1, True)
    assert run("skip", "worker", "events").output == "'worker' has given up 2 messages of 'events'; its cursor stands at 4\n"
    assert run("catch-up", "worker").exit_code == 0


def test_prune_as_a_command_shows_first_and_does_it_with_yes(run: Callable[..., Result], sql: Sql, filled: None) -> None:
    dry = run("prune", "--keep", "0s")
    assert dry.exit_code == 0
    assert [line.split("\t") for line in dry.stdout.splitlines()] == [
        ["channel", "from", "would go", "held, lost"],
        ["events", "1", "2", "'worker' has not acked 3"],
    ]
    assert "2 messages would go. Nothing was removed; add --yes to do it." in dry.stderr
    assert sql("select count(*) from doorbell.message") == [(6,)]
    assert "lost by 'worker'" in run("prune", "--keep", "0s", "--force").stdout
    done = run("prune", "--keep", "0s", "--yes", "--batch", "1")
    assert (done.exit_code, done.stdout.splitlines()[1]) == (0, "events\t2\t2\t'worker' has not acked 3")
    assert json.loads(run("prune", "--keep", "0s", "--force", "--yes", "--json").stdout.splitlines()[0])["lost_by"] == ["worker"]
    assert sql("select seq from doorbell.messages_after('events', 0)") == [(5,)]


@pytest.mark.parametrize("keep", ["", "30", "d", "1y", "-1d", "1d 2h", "99999999999999d", "999999999w"])
def test_a_length_of_time_that_is_none_is_a_usage_error(run: Callable[..., Result], keep: str) -> None:
    assert run("prune", "--keep", keep).exit_code == 2


def test_prune_without_keep_is_a_usage_error(run: Callable[..., Result]) -> None:
    assert run("prune").exit_code == 2


def test_status_watches_until_it_is_ended(dsn: str, sql: Sql, filled: None) -> None:
    import subprocess
    import sys

    from support.processes import plain_environment

    with subprocess.Popen(
        [sys.executable, "-m", "doorbell_postgres", "status", "--json", "--watch", "0.2", "--dsn", dsn],
        env=plain_environment(), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        sql("select doorbell.ack('worker', 'events', 5)")
        eventually(lambda: json.loads(process.stdout.readline())["totals"]["unacked"] == 0)
        process.terminate()
    assert first["totals"]["unacked"] == 3
    assert process.returncode == 143


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def clean(text: str) -> bool:
    return not [c for c in text if unicodedata.category(c)[0] == "C" and c not in "\n\t"]


@pytest.mark.failure_mode
def test_tables_and_lists_carry_no_control_character(run: Callable[..., Result], sql: Sql) -> None:
    """Escapes, bidi and control characters in names reach an operator's terminal through its tables.

    Every cell is sanitised, in a pipe and on a terminal; JSON is exact, and escapes them.
    """
    every = "".join(chr(c) for c in range(1, 0x3000) if not 0xD800 <= c < 0xE000)
    for n in range(0, len(every), 60):
        sql("select doorbell.subscribe(%s, %s, 'start')", every[n : n + 60], every[n : n + 60])
    sql("select doorbell.subscribe(%s, %s, 'start')", HOSTILE, HOSTILE)
    sql("select doorbell.post(c, 'x', %s) from doorbell.channel_names() as c", HOSTILE)
    sql("select doorbell.admit(b.handle, b.channel, 1, b.channel) from doorbell.backlog as b")
    sql("select doorbell.fail_turn(t.channel_id, t.id, t.attempt, %s) from doorbell.turn as t where t.id %% 2 = 0", HOSTILE)
    commands = "status --limit 500; channels; handles; turns --limit 500; doctor --idle 1; prune --keep 0s; metrics"
    for command in commands.split("; "):
        done = run(*command.split())
        assert done.exit_code == 0, (command, done.output)
        assert clean(done.output), command
        assert not re.search(r"[\x80-\x9f\u2028\u2029\u202a-\u202e]", done.output)
    exact = [json.loads(line)["channel"] for line in run("channels", "--json").output.splitlines()]
    assert HOSTILE in exact
    assert clean(run("channels", "--json").output)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_fits_the_terminal(width: int) -> None:
    columns = (Column("handle", ratio=1), Column("channel", ratio=1), Column("unacked", "number"), Column("waiting for"))
    rows = [
        ("worker", "events", 3, "1 d 2 h"),
        (HOSTILE, "x" * 255, 123_456_789, "12 min"),
        ("名前" * 40, "[bold]not markup[/bold]", 0, ""),
    ]
    lines = table.lines(columns, rows, title=None, width=width)
    from rich.cells import cell_len

    assert max(cell_len(line) for line in lines) <= width
    assert clean("\n".join(lines))
    text = "\n".join(lines)
    assert "123,456,789" in text
    assert "worker" in text or width == 40
    assert len(lines) == 5, "one line a row"
    if width == 200:
        assert "[bold]not markup[/bold]" in text


def test_a_table_in_a_pipe_is_complete_and_has_no_thousands_separators() -> None:
    lines = table.lines((Column("a"), Column("b", "number")), [("x" * 255, 1_234_567)], width=None)
    assert lines == ["a\tb", "x" * 255 + "\t1234567"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, ""),
        (0, "0 s"),
        (-5, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (90_061, "1 d 1 h"),
        (86_400, "1 d"),
    ],
)
def test_an_age_in_words(seconds: float | None, said: str) -> None:
    assert doctor.human_age(seconds) == said


# ---------------------------------------------------------------------------------------------------------------------
# doctor
# ---------------------------------------------------------------------------------------------------------------------


def verdicts(dsn: str, **options: Any) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine(dsn, **options)}


def test_the_doctor_finds_nothing_on_a_healthy_store(dsn: str, sql: Sql, run: Callable[..., Result]) -> None:
    sql("select doorbell.subscribe('worker', 'events')")
    found = verdicts(dsn)
    assert list(found) == [
        "server version", "schema", "pooler", "read-only", "notifications", "notification queue", "oldest transaction",
        "blocked sessions", "prepared transactions", "rights of PUBLIC", "violations", "channels without a reader",
        "idle handles", "readers passed by retention", "turns left unfinished",
    ]  # fmt: skip
    assert {name for name, check in found.items() if check.verdict == "failing"} == set()
    assert run("doctor").exit_code == 0
    for check in found.values():
        assert check.said
        assert check.verdict == "ok" or check.fix, "whatever is not well comes with what to do"


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (150_015, "warning"), (150_016, "ok"), (160_011, "warning"), (160_012, "ok"), (170_007, "warning"), (170_008, "ok"),
        (180_001, "warning"), (180_002, "ok"), (190_000, "ok"), (140_022, "failing"),
    ],
)  # fmt: skip
def test_minors_with_known_faults_of_notify(number: int, verdict: str) -> None:
    assert doctor._version(number).verdict == verdict


@pytest.mark.usefixtures("filled")
def test_the_doctor_names_who_is_idle_and_what_nobody_reads(dsn: str, sql: Sql) -> None:
    sql("update doorbell.message set created_at = created_at - interval '3 days'")
    sql("update doorbell.cursor set acked_at = acked_at - interval '2 days'")
    sql("select doorbell.admit('worker', 'events', 3)")
    sql("update doorbell.turn set admitted_at = admitted_at - interval '2 days'")
    found = verdicts(dsn)
    assert found["idle handles"].verdict == "warning"
    assert "'worker' on 'events': 3 since 3 d" in found["idle handles"].said
    assert found["channels without a reader"].verdict == "ok", "the newest message stays whatever anybody does"
    sql("select doorbell.post('unread', 'ci', 'one more')")
    assert "'unread' with 2 messages" in verdicts(dsn)["channels without a reader"].said
    assert "'worker': 'seq 3', 1 attempt, 2 d" in found["turns left unfinished"].said
    assert verdicts(dsn, idle=10 * 86_400)["idle handles"].verdict == "ok"
    sql("update doorbell.turn set state = 'failed', ended_at = now()")
    sql("delete from doorbell.delivery")
    sql("select doorbell.prune('0', force => true)")
    assert "'worker' on 'events': 2 messages" in verdicts(dsn)["readers passed by retention"].said


def test_the_doctor_on_a_database_without_the_schema(empty_dsn: str) -> None:
    found = verdicts(empty_dsn)
    assert (found["schema"].verdict, found["schema"].fix) == ("failing", "doorbell migrate")
    assert "migrate" not in found["schema"].said
    assert list(found)[-1] == "notifications"
    done = CliRunner().invoke(cli.main, ["doctor", "--dsn", empty_dsn])
    assert done.exit_code == 1


def test_the_doctor_on_read_only_sessions(dsn: str, sql: Sql, dbname: str) -> None:
    sql(f"alter database {dbname} set default_transaction_read_only = on")
    found = verdicts(dsn)
    assert found["read-only"].verdict == "failing"


def test_the_doctor_where_nothing_answers(server: TestServer) -> None:
    done = CliRunner().invoke(cli.main, ["doctor", "--dsn", server.dsn("no_such_database")])
    assert done.exit_code == 4


@pytest.mark.parametrize(("usage", "verdict"), [(0.0, "ok"), (0.2, "warning"), (0.6, "failing")])
def test_a_queue_that_fills(usage: float, verdict: str) -> None:
    health = operations.Health("1", "18", False, usage, 0, "none", None, "none", 0, 0, "")
    assert doctor._queue(health).verdict == verdict


@pytest.mark.parametrize(("age", "verdict"), [(None, "ok"), (10.0, "ok"), (400.0, "warning"), (4_000.0, "failing")])
def test_an_old_transaction(age: float | None, verdict: str) -> None:
    health = operations.Health("1", "18", False, 0, 0, "none" if age is None else "pid 1", age, "none", 0, 2, "")
    assert doctor._oldest_transaction(health).verdict == verdict
    assert doctor._prepared(health).verdict == "warning"
