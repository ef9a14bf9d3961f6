"""Moving in from a file of the SQLite reference."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from doorbell_postgres import Doorbell, MessageBus, cli, reference
from support import Processes

Sql = Callable[..., list[tuple[Any, ...]]]

SCHEMA = """
create table channels (id integer primary key, name text not null unique);
create table messages (channel_id integer not null, seq integer not null, sender text not null, body text not null,
  idempotency_key text, created_at real not null, primary key (channel_id, seq));
create unique index messages_key on messages (channel_id, idempotency_key) where idempotency_key is not null;
create table subscriptions (handle text not null, channel_id integer not null, primary key (handle, channel_id));
create table cursors (handle text not null, channel_id integer not null, acked_seq integer not null,
  primary key (handle, channel_id));
"""
# The same without the constraints that keep the faults below out.
LOOSE = SCHEMA.replace(" not null,", ",").replace(" not null unique", "").replace("create unique index", "create index")
BEGUN = 1_700_000_000.0


def test_the_page_lists_the_tables_that_are_read() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "drop-in.md").read_text(encoding="utf-8")
    shown = {table: set(columns.split("`, `")) for table, columns in re.findall(r"^\| `(\w+)` \| `(.+)` \|$", page, re.M)}
    assert {table: shown.get(table) for table in reference.TABLES} == reference.TABLES


def store(path: Path, *, wal: bool = True, strict: bool = True) -> sqlite3.Connection:
    """A file as the reference leaves it: two channels, three handles; 'events' holds 1 to 5, 'ünïcode' one message."""
    connection = sqlite3.connect(path, isolation_level=None)
    if wal:
        connection.execute("pragma journal_mode = wal")
    connection.executescript(SCHEMA if strict else LOOSE)
    connection.executemany("insert into channels values (?, ?)", [(7, "events"), (9, "ünïcode")])
    for n in range(1, 6):
        connection.execute(
            "insert into messages values (7, ?, ?, ?, ?, ?)",
            (n, "ci", f"body {n}\r\n\\u0000\t", f"key {n}" if n % 2 else None, BEGUN + n + 0.123456),
        )
    connection.execute("insert into messages values (9, 1, 'ci', '', null, ?)", (BEGUN,))
    connection.executemany("insert into subscriptions values (?, ?)", [("worker", 7), ("auditor", 7), ("auditor", 9)])
    connection.executemany("insert into cursors values (?, ?, ?)", [("worker", 7, 2), ("auditor", 7, 5), ("gone", 9, 1)])
    return connection


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "team ?#%41.sqlite3"
    store(path).close()
    return path


def run(dsn: str, file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.main, ["import", str(file), *options, "--dsn", dsn])


def nothing_was_written(sql: Sql) -> bool:
    return sql("select (select count(*) from doorbell.channel), (select count(*) from doorbell.message)") == [(0, 0)]


def test_import_takes_over_everything_and_a_reader_goes_on_where_it_stopped(dsn: str, file: Path) -> None:
    done = run(dsn, file)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("imported: 2 channels, 6 messages (3 with keys), 3 subscriptions, in ")
    with MessageBus(dsn) as bus:
        assert bus.store.channels() == ["events", "ünïcode"]
        assert [(m.seq, m.body, m.created_at, m.idempotency_key) for m in bus.catch_up("worker")] == [
            (3, "body 3\r\n\\u0000\t", BEGUN + 3.123456, "key 3"),
            (4, "body 4\r\n\\u0000\t", BEGUN + 4.123456, None),
            (5, "body 5\r\n\\u0000\t", BEGUN + 5.123456, "key 5"),
        ]
        assert [(m.channel, m.seq) for m in bus.catch_up("auditor")] == [("ünïcode", 1)], "no cursor: nothing was acked"
        assert bus.store.subscriptions("gone") == [], "a cursor without a subscription was given up"
        assert Doorbell(bus, "worker").wait(10).seq == 3
        assert bus.post("events", "again", sender="ci", idempotency_key="key 1").seq == 1
        assert bus.post("events", "next", sender="ci").seq == 6
        assert bus.ack("worker", "events", 6) == 6


def test_import_again_is_refused_and_changes_nothing(dsn: str, file: Path, sql: Sql) -> None:
    run(dsn, file)
    before = sql("select * from doorbell.message order by 1, 2")
    again = run(dsn, file)
    assert again.exit_code == 1
    assert (
        "2 channels of the file are in the database already, with messages or subscriptions: 'events', 'ünïcode'." in again.stderr
    )
    assert sql("select * from doorbell.message order by 1, 2") == before


@pytest.mark.parametrize("used", ["select doorbell.post('ünïcode', 'x', 'ci')", "select doorbell.subscribe('early', 'ünïcode')"])
def test_one_channel_in_use_keeps_all_of_it_out(dsn: str, file: Path, sql: Sql, used: str) -> None:
    sql(used)
    before = sql("select count(*) from doorbell.message")
    refused = run(dsn, file)
    assert refused.exit_code == 1
    assert "1 channel of the file is in the database already, with messages or subscriptions: 'ünïcode'." in refused.stderr
    assert sql("select name from doorbell.channel") == [("ünïcode",)]
    assert sql("select count(*) from doorbell.message") == before


def test_a_channel_that_is_there_and_empty_is_filled(dsn: str, file: Path, sql: Sql) -> None:
    sql("select doorbell.subscribe('x', 'events'), doorbell.unsubscribe('x', 'events')")
    assert run(dsn, file).exit_code == 0


def test_check_writes_nothing_and_needs_no_database(file: Path, sql: Sql) -> None:
    done = CliRunner().invoke(cli.main, ["import", str(file), "--check"])
    assert done.output.startswith("can be imported: 2 channels, 6 messages")
    assert nothing_was_written(sql)


def test_the_file_is_not_changed(dsn: str, file: Path) -> None:
    before = file.read_bytes()
    assert run(dsn, file).exit_code == 0
    assert file.read_bytes() == before


LONG = "x" * 256
FAULTS: dict[str, tuple[str, str]] = {
    "channel name too long": (
        f"update channels set name = '{LONG}' where id = 9",
        "channels row 9: name has 256 bytes of UTF-8; at most 255 are allowed.",
    ),
    "channel name empty": (
        "update channels set name = '' where id = 9",
        "channels row 9: name is empty; it must have 1 to 255 bytes of UTF-8.",
    ),
    "handle too long": (
        f"update subscriptions set handle = '{LONG}' where handle = 'worker'",
        "subscriptions row 1: handle has 256 bytes of UTF-8; at most 255 are allowed.",
    ),
    "sender empty": (
        "update messages set sender = '' where channel_id = 7 and seq = 2",
        "messages, channel 'events' seq 2: sender is empty; it must have 1 to 255 bytes of UTF-8.",
    ),
    "sender missing": (
        "update messages set sender = null where channel_id = 7 and seq = 2",
        "messages, channel 'events' seq 2: sender is of type NoneType; it must be text.",
    ),
    "NUL in a body": (
        "update messages set body = 'a' || char(0) || 'b' where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: body contains a NUL character; Postgres cannot store it."
        " Remove it, or encode the value.",
    ),
    "no UTF-8 in a body": (
        "update messages set body = x'61ff' where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: body is not UTF-8: its byte 1 is 0xff.",
    ),
    "body too long": (
        "update messages set body = replace(hex(zeroblob(8388609)), '0', 'x') where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: body has 16,777,218 bytes of UTF-8; at most 16,777,216 are allowed.",
    ),
    "key too long": (
        "update messages set idempotency_key = replace(hex(zeroblob(513)), '0', 'x') where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: idempotency_key has 1,026 bytes of UTF-8; at most 1,024 are allowed.",
    ),
    "key twice": (
        "update messages set idempotency_key = 'key 1' where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: the idempotency_key 'key 1' is there twice",
    ),
    "gap": (
        "delete from messages where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 4: the number before it is 2; numbers are 1, 2, 3 … without a gap",
    ),
    "time": (
        "update messages set created_at = 9e99 where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: created_at is 9e+99; it must be seconds since the epoch, in the years 1 to 9999",
    ),
    "time that is none": (
        "update messages set created_at = 'yesterday' where channel_id = 7 and seq = 3",
        "messages, channel 'events' seq 3: created_at is b'yesterday'; it must be seconds since the epoch,"
        " in the years 1 to 9999",
    ),
    "message without channel": (
        "insert into messages values (8, 1, 's', 'b', null, 1.0)",
        "messages, channel id 8 seq 1: its channel is not in the file",
    ),
    "subscription without channel": (
        "insert into subscriptions values ('worker', 8)",
        "subscriptions row 4: its channel, id 8, is not in the file",
    ),
    "cursor beyond head": (
        "update cursors set acked_seq = 6 where handle = 'worker'",
        "subscriptions row 1: its cursor is 6, and the head of 'events' is 5",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_our_limits_refuse_is_listed_with_its_place_before_anything_is_written(
    dsn: str, tmp_path: Path, sql: Sql, what: str
) -> None:
    breaking, fault = FAULTS[what]
    path = tmp_path / "team.sqlite3"
    connection = store(path, strict=False)
    connection.execute(breaking)
    connection.close()
    done = run(dsn, path)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [fault]
    assert "1 thing that cannot be taken over" in done.stderr
    assert nothing_was_written(sql)


def test_many_faults_are_counted_and_the_first_are_listed(dsn: str, tmp_path: Path) -> None:
    path = tmp_path / "team.sqlite3"
    connection = store(path, strict=False)
    connection.executemany("insert into messages values (9, ?, '', 'b', null, 1.0)", [(n,) for n in range(2, 102)])
    connection.close()
    done = run(dsn, path)
    assert "100 things that cannot be taken over (the first 20 are listed)" in done.stderr
    assert len(done.stdout.splitlines()) == 20


# ---------------------------------------------------------------------------------------------------------------------
# Files that are none, and files in use
# ---------------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_refused_and_not_created(dsn: str, tmp_path: Path) -> None:
    done = run(dsn, tmp_path / "absent.sqlite3")
    assert done.exit_code == 1
    assert "There is no file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_no_store_is_refused_with_words(dsn: str, tmp_path: Path) -> None:
    text, empty, other, lacking = (tmp_path / name for name in ("notes.txt", "empty", "other.sqlite3", "lacking.sqlite3"))
    text.write_text("SQLite format 4, or so")
    empty.touch()
    with sqlite3.connect(other) as connection:
        connection.execute("create table channels (id integer, title text)")
    connection.close()
    made = store(lacking)
    made.execute("alter table messages drop column created_at")
    made.close()
    for path, said in (
        (tmp_path, "is no file."),
        (text, "is no SQLite database."),
        (empty, "is no SQLite database."),
        (other, "but no store of the reference: it lacks name in its table 'channels'."),
        (lacking, "but no store of the reference: it lacks created_at in its table 'messages'."),
    ):
        done = run(dsn, path)
        assert done.exit_code == 1
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_damaged_file_is_refused_with_words(dsn: str, tmp_path: Path, sql: Sql) -> None:
    path = tmp_path / "team.sqlite3"
    connection = store(path, wal=False)
    connection.executemany("insert into messages values (9, ?, 's', ?, null, 1.0)", [(n, "x" * 500) for n in range(2, 400)])
    connection.close()
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data), 4096):
        data[at : at + 4096] = b"\xff" * len(data[at : at + 4096])
    path.write_bytes(data)
    done = run(dsn, path)
    assert done.exit_code == 1
    assert "cannot be read" in done.stderr
    assert nothing_was_written(sql)


def hold(pipe: Any, path: str, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement).fetchall()
    pipe.send("held")
    pipe.recv()


@pytest.mark.parametrize("wal", [True, False])
@pytest.mark.parametrize("statement", ["begin immediate", "begin exclusive"])
def test_a_file_that_somebody_writes_is_refused(
    dsn: str, tmp_path: Path, processes: Processes, wal: bool, statement: str
) -> None:
    path = tmp_path / "team.sqlite3"
    store(path, wal=wal).close()
    holder = processes.start(hold, str(path), statement)
    assert holder.hear() == "held"
    done = run(dsn, path)
    assert done.exit_code == 1
    assert "is in use" in done.stderr
    holder.kill()
    assert run(dsn, path).exit_code == 0, "a lock goes with its process"


def test_a_file_that_a_program_has_open_is_refused_with_its_pid(dsn: str, file: Path, processes: Processes) -> None:
    """An open reference bus holds no lock that SQLite would report, and would go on posting into the file."""
    holder = processes.start(hold, str(file), "select * from channels")
    assert holder.hear() == "held"
    done = run(dsn, file)
    assert done.exit_code == 1
    assert f"is in use by process {holder.pid}. What it posts from now on would be lost." in done.stderr


def test_a_write_during_the_import_keeps_all_of_it_out(dsn: str, file: Path, sql: Sql) -> None:
    def meddle(what: str, done: int, of: int) -> None:
        if what == "copying" and done == 0:
            with sqlite3.connect(file) as late:
                late.execute("insert into messages values (9, 2, 'ci', 'late', null, 1.0)")
            late.close()

    with pytest.raises(reference.Refused, match="was written to meanwhile"):
        reference.take_over(str(file), dsn, progress=meddle)
    assert nothing_was_written(sql)


def test_what_a_killed_process_has_committed_is_taken_over(dsn: str, file: Path, processes: Processes) -> None:
    """Its write-ahead log is still beside the file."""
    holder = processes.start(hold, str(file), "insert into messages values (9, 2, 'ci', 'last words', null, 1.0)")
    assert holder.hear() == "held"
    holder.kill()
    assert file.with_name(file.name + "-wal").stat().st_size > 0
    assert run(dsn, file).exit_code == 0
    with MessageBus(dsn) as bus:
        assert [m.body for m in bus.catch_up("auditor")] == ["", "last words"]


def test_who_may_not_write_the_tables_is_told(dsn: str, file: Path, sql: Sql) -> None:
    sql("create role importer_test login")
    try:
        sql("select doorbell.grant_role('importer_test')")
        from psycopg.conninfo import make_conninfo

        done = run(make_conninfo(dsn, user="importer_test"), file)
        assert done.exit_code == 1
        assert "permission denied for table message" in done.stderr
    finally:
        sql("drop owned by importer_test; drop role importer_test")


@pytest.mark.slow
def test_import_of_two_hundred_thousand_messages(dsn: str, tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite3"
    connection = store(path)
    channels, per_channel, handles = 20, 10_000, 10
    connection.execute("begin")
    for c in range(100, 100 + channels):
        connection.execute("insert into channels values (?, ?)", (c, f"channel {c}"))
        connection.executemany(
            "insert into messages values (?, ?, ?, ?, ?, ?)",
            (
                (c, n, "ci", f"message {n} of {c}: " + "x" * 200, f"{c}/{n}" if n % 2 else None, BEGUN + n)
                for n in range(1, per_channel + 1)
            ),
        )
        for h in range(handles):
            connection.execute("insert into subscriptions values (?, ?)", (f"handle {h}", c))
            connection.execute("insert into cursors values (?, ?, ?)", (f"handle {h}", c, per_channel - 10 * h))
    connection.execute("commit")
    begun = time.monotonic()
    found = reference.take_over(str(path), dsn)
    print(f"\nimported {found.messages:,} messages, {found.keys:,} keys in {time.monotonic() - begun:.1f} s")
    assert (found.channels, found.messages, found.keys) == (22, 200_006, 100_003)
    with MessageBus(dsn) as bus:
        for handle in ("worker", "auditor", *(f"handle {h}" for h in range(handles))):
            expected = connection.execute(
                "select ch.name, m.seq, m.sender, m.body, m.created_at, m.idempotency_key from subscriptions as s"
                " join channels as ch on ch.id = s.channel_id join messages as m on m.channel_id = s.channel_id"
                " left join cursors as c on c.handle = s.handle and c.channel_id = s.channel_id"
                " where s.handle = ? and m.seq > coalesce(c.acked_seq, 0) order by ch.name, m.seq",
                (handle,),
            ).fetchall()
            got = [(m.channel, m.seq, m.sender, m.body, m.created_at, m.idempotency_key) for m in bus.catch_up(handle)]
            assert got == [
                (name, seq, sender, body, pytest.approx(at, abs=1e-6), key) for name, seq, sender, body, at, key in expected
            ]
    connection.close()
