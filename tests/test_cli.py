"""The command `doorbell`: what it prints, how it ends, what it holds while it waits.

Where a process is the point (signals, pipes, memory, being killed) it is a real one; the rest calls the command in here.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from doorbell_postgres import MessageBus, cli, throwaway
from doorbell_postgres.cli import bell, command, output
from support import backends, bell_is_waiting, eventually, run_script
from support.processes import plain_environment
from support.proxy import Proxy

Sql = Callable[..., list[tuple[Any, ...]]]
COMMAND = [sys.executable, "-m", "doorbell_postgres"]
COMMANDS = sorted(cli.main.commands)
# With arguments that are fine but for what a test makes wrong.
ON_A_DATABASE = {
    "ack": ["ack", "worker", "events", "1"],
    "catch-up": ["catch-up", "worker"],
    "migrate": ["migrate", "--check"],
    "post": ["post", "events", "hello", "--sender", "ci"],
    "subscribe": ["subscribe", "worker", "events"],
    "tail": ["tail", "events"],
    "wait": ["wait", "worker"],
}
on_a_database = pytest.mark.parametrize("args", ON_A_DATABASE.values(), ids=ON_A_DATABASE)

ESCAPES = "\x1b[31mred\x1b]0;title\x07 \x9b31m \r\n\t\u202ertl\u2028next\x7f"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


class Ended:
    """How a command ended: its code, what it printed, and what it said on stderr."""

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code, self.stdout, self.stderr = code, stdout.decode(), stderr.decode()
        for line in [*self.stdout.split("\n"), *self.stderr.split("\n")]:
            assert line.isprintable(), f"not printable: {line!r}"

    @property
    def lines(self) -> list[str]:
        return self.stdout.split("\n")[:-1]

    @property
    def why(self) -> str:
        """The one line on stderr."""
        assert self.stdout == ""
        assert re.fullmatch(r"doorbell: [^\n]+\n", self.stderr), self.stderr
        return self.stderr


Doorbell = Callable[..., Ended]


@pytest.fixture
def doorbell(dsn: str) -> Doorbell:
    """`doorbell("wait", "worker")` runs the command in this process, on this test's database."""

    def run(*args: str, stdin: bytes = b"", dsn: str | None = dsn) -> Ended:
        env = {} if dsn is None else {"DOORBELL_DSN": dsn}
        done = CliRunner(env=env).invoke(cli.main, args, prog_name="doorbell", input=io.BytesIO(stdin))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Ended(done.exit_code, done.stdout_bytes, done.stderr_bytes)

    return run


class Started:
    """A real process of the command."""

    def __init__(self, args: tuple[str, ...], dsn: str, **more: Any) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a test run in the background of a shell would hand that down
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            env=plain_environment(DOORBELL_DSN=dsn),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            **{"stdout": subprocess.PIPE} | more,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self, *, within: float = 30.0) -> Ended:
        stdout, stderr = self.process.communicate(timeout=within)
        return Ended(self.process.returncode, stdout or b"", stderr)

    def line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline(), "utf-8")


@pytest.fixture
def start(dsn: str) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def run(*args: str, dsn: str = dsn, **more: Any) -> Started:
        started.append(Started(args, dsn, **more))
        return started[-1]

    yield run
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def bus(dsn: str) -> Iterator[MessageBus]:
    with MessageBus(dsn) as opened:
        yield opened


def once_armed(sql: Sql, then: Callable[[], Any]) -> threading.Thread:
    """Do something, from another thread, as soon as a wait is armed."""

    def run() -> None:
        bell_is_waiting(sql)
        then()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


# -- help and usage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(doorbell: Doorbell, name: str) -> None:
    done = doorbell(name, "--help", dsn=None)
    assert done.code == command.DONE
    assert f"Example: doorbell {name}" in done.stdout


def test_without_a_command_it_explains_itself_and_counts_as_usage(doorbell: Doorbell) -> None:
    done = doorbell(dsn=None)
    assert (done.code, done.stdout) == (command.USAGE, "")
    assert all(name in done.stderr for name in COMMANDS)


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["--nonsense"],
        ["wait"],
        ["wait", "worker", "--timeout", "soon"],
        ["wait", "worker", "--timeout", "-1"],
        ["wait", "worker", "--timeout", "5x"],
        ["wait", "worker", "--timeout", "9999999d"],
        ["wait", "worker", "--timeout", "nan"],
        ["wait", "worker", "--timeout", "inf"],
        ["wait", "worker", "--poll-interval", "0"],
        ["wait", "worker", "--grep", "("],
        ["wait", "worker", f"--{ESCAPES}"],
        ["subscribe", "worker"],
        ["subscribe", "worker", "events", "--at", "middle"],
        ["post", "events", "hello"],
        ["post", "events", "hello", "--sender", "ci", "--header", "novalue"],
        ["post", "events", "hello", "--sender", "ci", "--header", "=x"],
        ["post", "events", "hello", "--sender", "ci", "--header", "a=1", "--header", "a=2"],
        ["post", "events", "hello", "--sender", "ci", "--header", ESCAPES],
        ["catch-up", "worker", "--limit", "0"],
        ["catch-up", "worker", "--max-bytes", "0"],
        ["ack", "worker", "events", "first"],
        ["ack", "worker", "events"],
        ["tail", "events", "--from", "0"],
        ["tail", "events", "--from", "²"],
        ["tail", "events", "--from", "99999999999999999999"],
        ["migrate", "--sql", "--check"],
    ],
    ids=lambda args: ascii(" ".join(args))[:60],
)
def test_a_wrong_call_is_usage_and_says_so(doorbell: Doorbell, sql: Sql, args: list[str]) -> None:
    done = doorbell(*args)
    assert (done.code, done.stdout) == (command.USAGE, "")
    assert re.fullmatch(r"Usage: doorbell[^\n]+\ndoorbell: [^\n]+ Help: doorbell[^\n]* --help\n", done.stderr), done.stderr
    assert sql("select count(*) from doorbell.channel") == [(0,)]


def test_what_looks_like_an_option_goes_behind_two_dashes(doorbell: Doorbell) -> None:
    assert "goes behind --." in doorbell("ack", "worker", "events", "-1").stderr


@pytest.mark.parametrize(("given", "seconds"), [("5m", 300), ("1h30m", 5400), ("90", 90), ("0.5", 0.5)])
def test_a_timeout_is_seconds_or_has_units(given: str, seconds: float) -> None:
    with bell.wait.make_context("wait", ["worker", "--timeout", given]) as context:
        assert context.params["timeout"] == seconds


# -- the database -----------------------------------------------------------------------------------------------------


@on_a_database
@pytest.mark.parametrize("dsn_given", [None, "", ":memory:"], ids=["none", "empty", "memory"])
def test_without_a_dsn_nothing_is_started(
    doorbell: Doorbell, monkeypatch: pytest.MonkeyPatch, args: list[str], dsn_given: str | None
) -> None:
    monkeypatch.setattr(throwaway, "shared", lambda: pytest.fail("a throwaway server was started"))
    done = doorbell(*args, dsn=dsn_given)
    assert done.code == command.USAGE
    assert "--dsn" in done.stderr
    assert "DOORBELL_DSN" in done.stderr
    assert {None: "no database given", "": "set and empty", ":memory:": "private to one process"}[dsn_given] in done.stderr


def test_an_empty_option_is_no_reason_to_use_the_environment(doorbell: Doorbell) -> None:
    done = doorbell("subscribe", "worker", "events", "--dsn", "")
    assert (done.code, "--dsn is empty" in done.stderr) == (command.USAGE, True)


@pytest.mark.parametrize("args", [["status"], ["migrate"], ["wait", "worker"]], ids=lambda args: args[0])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("mysql://u:s3cret@b/c", "'mysql://…@b/c' is not a DSN"),
        ("team.sqlite3", "is not a DSN"),
        ("oops", "is not a DSN"),
        ("postgresql://localhost:abc/x", "port is no number from 1 to 65535"),
        ("postgresql://u:s3/cret@localhost/x", "port is no number from 1 to 65535"),
    ],
)
def test_what_is_no_dsn_is_refused_by_every_command(doorbell: Doorbell, args: list[str], given: str, says: str) -> None:
    done = doorbell(*args, dsn=given)
    assert done.code == command.REFUSED
    assert says in done.why
    assert "s3" not in done.why


def test_the_option_goes_before_the_environment(doorbell: Doorbell, dsn: str) -> None:
    assert doorbell("subscribe", "worker", "events", "--dsn", dsn, dsn="host=/nowhere").code == command.DONE


@on_a_database
def test_a_database_that_is_not_there_is_unreachable_at_once(doorbell: Doorbell, args: list[str]) -> None:
    began = time.monotonic()
    done = doorbell(*args, dsn="host=127.0.0.1 port=1 dbname=team")
    assert done.code == command.UNREACHABLE
    assert "cannot be reached" in done.why
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("args", [a for a in ON_A_DATABASE.values() if a[0] != "migrate"], ids=lambda args: args[0])
def test_a_database_without_the_schema_is_refused_with_what_to_run(doorbell: Doorbell, empty_dsn: str, args: list[str]) -> None:
    done = doorbell(*args, dsn=empty_dsn)
    assert done.code == command.REFUSED
    assert "Run: doorbell migrate" in done.why


@pytest.fixture
def stranger(dsn: str, sql: Sql) -> Iterator[str]:
    """A DSN of a role that may do nothing."""
    role = f"doorbell_test_{secrets.token_hex(4)}"
    sql(f"create role {role}")
    sql(f"grant connect on database {psycopg.conninfo.conninfo_to_dict(dsn)['dbname']} to {role}")
    yield make_conninfo(dsn, options=f"-c role={role}")
    sql(f"drop owned by {role}")
    sql(f"drop role {role}")


@on_a_database
def test_a_role_without_rights_is_refused_in_one_line(doorbell: Doorbell, stranger: str, args: list[str]) -> None:
    done = doorbell(*args, dsn=stranger)
    assert done.code == command.REFUSED
    assert "permission denied" in done.why


def test_migrate_migrates_checks_and_prints(doorbell: Doorbell, empty_dsn: str) -> None:
    before = doorbell("migrate", "--check", dsn=empty_dsn)
    assert (before.code, "no doorbell schema" in before.stdout) == (command.REFUSED, True)
    done = [doorbell("migrate", dsn=empty_dsn) for _ in range(2)]
    assert [(each.code, each.stdout.partition(". ")[0]) for each in done] == [
        (command.DONE, "Migrated"),
        (command.DONE, "Nothing to do"),
    ]
    assert doorbell("migrate", "--check", dsn=empty_dsn).code == command.DONE
    assert "create function doorbell.post(" in doorbell("migrate", "--sql", dsn=None).stdout


# -- subscribe, post, ack ---------------------------------------------------------------------------------------------


def test_a_message_goes_all_the_way(doorbell: Doorbell) -> None:
    assert doorbell("subscribe", "worker", "events").stdout == "'worker' is subscribed to 'events'; its cursor stands at 0\n"
    assert doorbell("post", "events", "deploy finished", "--sender", "ci").stdout == "'events'#1\n"
    rang = doorbell("wait", "worker")
    assert (rang.code, rang.stdout, rang.stderr) == (0, "'events'#1 from 'ci': [untrusted] 'deploy finished'\n", "")
    assert doorbell("catch-up", "worker").stdout == rang.stdout
    assert doorbell("ack", "worker", "events", "1").stdout == "1\n"
    assert doorbell("catch-up", "worker").stdout == ""
    assert doorbell("wait", "worker", "--timeout", "0").code == command.IDLE


def test_subscribe_joins_at_the_head_or_the_start_and_never_moves_a_cursor(doorbell: Doorbell, bus: MessageBus) -> None:
    bus.post_many("events", ["a", "b"], sender="ci")
    assert "cursor stands at 2" in doorbell("subscribe", "late", "events").stdout
    assert "cursor stands at 0" in doorbell("subscribe", "early", "events", "--at", "start").stdout
    assert "cursor stands at 2" in doorbell("subscribe", "late", "events", "--at", "start").stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ack", "worker", "events", "2"], "its head is 1"),
        (["ack", "worker", "nowhere", "1"], "does not exist"),
        (["ack", "stranger", "events", "1"], "not subscribed"),
        (["ack", "worker", "events", "--", "-1"], "between 0 and"),
        (["ack", "worker", "events", str(2**63)], "between 0 and"),
        (["ack", "worker", ESCAPES, "1"], "does not exist"),
        (["subscribe", "", "events"], "handle is empty"),
        (["subscribe", "worker", "x" * 256], "channel has 256 bytes"),
        (["post", "events", "x", "--sender", ""], "sender is empty"),
        (["post", "events", "x", "--sender", "ci", "--key", ""], "idempotency_key is empty"),
        (["post", "events", "\udcff", "--sender", "ci"], "lone surrogate"),
        (["wait", ""], "handle is empty"),
        (["wait", "stranger"], "subscribed to nothing"),
        (["wait", ESCAPES], "subscribed to nothing"),
        (["wait", "worker", "--channel", "other"], "not subscribed to 'other'"),
        (["wait", "worker", "--channel", ESCAPES], "not subscribed to"),
        (["catch-up", ""], "handle is empty"),
        (["tail", ""], "channel is empty"),
        (["wait", "worker", "--dsn", "team.sqlite3"], "is not a DSN"),
        (["wait", "worker", "--dsn", f"postgresql://{ESCAPES}"], ""),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_what_is_refused_exits_1_with_one_line(doorbell: Doorbell, bus: MessageBus, args: list[str], says: str) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "one", sender="ci")
    done = doorbell(*args)
    assert done.code in (command.REFUSED, command.UNREACHABLE if not says else command.REFUSED)
    assert says in done.why
    assert bus.store.head("events") == 1
    assert bus.store.acked_seq("worker", "events") == 0


@pytest.mark.parametrize("body", ["plain", "\n", "line\n", ESCAPES, "\\u0000", "naïve 🎉 \uffff", "-"], ids=ascii)
@pytest.mark.parametrize("dash", [[], ["-"]], ids=["nothing", "dash"])
def test_a_body_on_stdin_is_kept_to_the_byte(doorbell: Doorbell, bus: MessageBus, body: str, dash: list[str]) -> None:
    done = doorbell("post", "events", *dash, "--sender", "ci", stdin=body.encode())
    assert done.stdout == "'events'#1\n"
    assert bus.store.messages_after("events", 0)[0].body == body


def test_a_body_as_argument_with_key_and_headers(doorbell: Doorbell, bus: MessageBus) -> None:
    args = ["post", "--sender", "ci", "--key", "k", "--header", "a=1=2", "--header", "b=", "events", "--", "--not an option"]
    first, again = doorbell(*args), doorbell(*args)
    assert (first.stdout, first.stderr) == ("'events'#1\n", "")
    assert (again.code, again.stdout, again.stderr) == (0, "'events'#1\n", "doorbell: (already posted)\n")
    (posted,) = bus.store.messages_after("events", 0)
    assert (posted.body, posted.sender, posted.idempotency_key) == ("--not an option", "ci", "k")
    assert posted.headers == {"a": "1=2", "b": ""}


def test_an_empty_body_is_posted_where_it_is_meant(doorbell: Doorbell, bus: MessageBus) -> None:
    assert doorbell("post", "events", "", "--sender", "ci").code == command.DONE
    assert bus.store.messages_after("events", 0)[0].body == ""


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"", "is empty"),
        (b"caf\xe9", "not UTF-8: byte 3 is 0xe9"),
        (b"a\0b", "NUL"),
        (b"x" * (16 * 1024 * 1024 + 1), "more than 16,777,216 bytes"),
    ],
    ids=["empty", "latin-1", "nul", "too big"],
)
def test_a_body_on_stdin_that_cannot_be_kept_is_refused(doorbell: Doorbell, sql: Sql, stdin: bytes, says: str) -> None:
    done = doorbell("post", "events", "--sender", "ci", stdin=stdin)
    assert done.code == command.REFUSED
    assert says in done.why
    assert sql("select count(*) from doorbell.channel") == [(0,)]


def test_a_post_that_finds_its_channel_held_is_refused(doorbell: Doorbell, bus: MessageBus) -> None:
    with bus.transaction() as conn:
        bus.post("events", "held", sender="ci", conn=conn)
        done = doorbell("post", "events", "x", "--sender", "ci")
    assert done.code == command.REFUSED
    assert "held by another transaction" in done.why


# -- catch-up and tail ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_json_is_exact_and_lines_are_printable_whatever_came(doorbell: Doorbell, bus: MessageBus, data: st.DataObject) -> None:
    handle, channel, sender = (data.draw(NAMES) for _ in range(3))
    try:
        bus.subscribe(handle, channel)
        headers = data.draw(st.dictionaries(NAMES, TEXT, max_size=2))
        posted = [bus.post(channel, body, sender=sender, headers=headers) for body in data.draw(st.lists(TEXT, max_size=5))]
        exact = doorbell("catch-up", "--json", "--", handle)
        assert [json.loads(line) for line in exact.lines] == [dict(output.message(m)) for m in posted]
        assert [json.loads(line) for line in exact.stdout.splitlines()] == [json.loads(line) for line in exact.lines]
        shown = doorbell("catch-up", "--", handle)
        assert len(shown.stdout.splitlines()) == len(posted)
        rang = doorbell("wait", "--json", "--timeout", "0", "--", handle)
        assert (rang.code == command.DONE) == (posted != [] and sender != handle)
        if rang.code == command.DONE:
            event = json.loads(rang.stdout)
            assert set(event) == {"channel", "seq", "sender", "reason", "wake_line"}
            assert all(value.isprintable() for value in event.values() if isinstance(value, str))
    finally:
        bus.unsubscribe(handle, channel)


@given(st.text())
def test_json_on_one_line_means_what_it_meant(text: str) -> None:
    line = output.one_line(json.dumps({text: [text]}, ensure_ascii=False))
    assert line.isprintable()
    assert json.loads(line) == {text: [text]}


def test_catch_up_stops_at_its_limits(doorbell: Doorbell, bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", [str(n) * 100 for n in range(10)], sender="ci")

    def numbers(*args: str) -> list[int]:
        return [json.loads(line)["seq"] for line in doorbell("catch-up", "worker", "--json", *args).lines]

    assert numbers() == list(range(1, 11))
    assert numbers("--limit", "3") == [1, 2, 3]
    assert numbers("--limit", "99") == list(range(1, 11))
    assert numbers("--max-bytes", "250") == [1, 2]
    assert numbers("--max-bytes", "300") == [1, 2, 3]
    assert numbers("--max-bytes", "1") == [1], "the first always comes, or nothing ever would"
    assert numbers("--max-bytes", "350", "--limit", "2") == [1, 2]


def test_catch_up_of_a_handle_that_is_subscribed_to_nothing_says_so(doorbell: Doorbell) -> None:
    done = doorbell("catch-up", "nobody")
    assert done.code == command.DONE
    assert "'nobody' is subscribed to nothing" in done.why
    doorbell("subscribe", "nobody", "events")
    done = doorbell("catch-up", "nobody")
    assert (done.code, done.stdout, done.stderr) == (0, "", "")


def test_catch_up_streams_in_bounded_memory(start: Callable[..., Started], bus: MessageBus) -> None:
    """96 MB of backlog; a page holds 8 MiB."""
    bus.subscribe("worker", "events")
    for n in range(24):
        bus.post("events", chr(ord("a") + n) * 4_000_000, sender="ci")
    small, big = (start("catch-up", *args, stdout=subprocess.PIPE) for args in (["nobody"], ["worker", "--json"]))
    peaks, counts = [], []
    for each in (small, big):
        assert each.process.stdout is not None
        counts.append(sum(1 for _ in each.process.stdout))
        _, status, usage = os.wait4(each.pid, 0)
        each.process.returncode = os.waitstatus_to_exitcode(status)
        peaks.append(usage.ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024))
    print(f"peak memory: {peaks[0]:.0f} MB for nothing, {peaks[1]:.0f} MB for 96 MB")
    assert counts == [0, 24]
    assert peaks[1] - peaks[0] < 64


def test_tail_prints_as_they_come_and_touches_no_cursor(start: Callable[..., Started], bus: MessageBus, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", ["one", ESCAPES], sender="ci")
    tailing = start("tail", "events", "--from", "start", "--json", "--poll-interval", "0.05")
    assert [json.loads(tailing.line())["body"] for _ in range(2)] == ["one", ESCAPES]
    bus.post("events", "three", sender="ci")
    assert json.loads(tailing.line())["body"] == "three"
    rows = sql("select query from pg_stat_activity where datname = current_database() and query ~ 'messages_after'")
    assert len(rows) >= 1
    tailing.process.send_signal(signal.SIGINT)
    assert tailing.ended().code == command.INTERRUPTED
    assert sql("select handle, acked_seq from doorbell.cursor") == [("worker", 0)]


@pytest.mark.parametrize(("begin", "bodies"), [("2", ["two", "three", "four"]), ("start", ["one", "two", "three", "four"])])
def test_tail_begins_where_it_is_told(start: Callable[..., Started], bus: MessageBus, begin: str, bodies: list[str]) -> None:
    bus.post_many("events", ["one", "two", "three", "four"], sender="ci")
    tailing = start("tail", "events", "--from", begin)
    lines = [tailing.line() for _ in bodies]
    assert [re.search(r"\[untrusted\] '(.*)'", line)[1] for line in lines] == bodies  # type: ignore[index]


def test_tail_from_the_head_prints_what_comes(start: Callable[..., Started], bus: MessageBus, sql: Sql) -> None:
    bus.post("events", "before", sender="ci")
    tailing = start("tail", "events", "--poll-interval", "0.05")
    eventually(lambda: backends(sql, "query ~ 'messages_after'"), what="tail to look for the first time")
    bus.post("events", "after", sender="ci")
    assert "'after'" in tailing.line()


def test_tail_says_that_it_waits_for_a_channel_without_messages(start: Callable[..., Started], bus: MessageBus) -> None:
    tailing = start("tail", "events", "--poll-interval", "0.05")
    assert tailing.process.stderr is not None
    assert b"'events' has no message yet" in tailing.process.stderr.readline()
    bus.post("events", "first", sender="ci")
    assert "'first'" in tailing.line()


# -- wait -------------------------------------------------------------------------------------------------------------


def test_wait_rings_for_what_is_posted_while_it_waits(doorbell: Doorbell, bus: MessageBus, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    thread = once_armed(sql, lambda: bus.post("events", "now", sender="ci"))
    event = json.loads(doorbell("wait", "worker", "--json", "--timeout", "30").stdout)
    assert event == {
        "channel": "events",
        "seq": 1,
        "sender": "ci",
        "reason": "post",
        "wake_line": "'events'#1 from 'ci': [untrusted] 'now'",
    }
    thread.join()


def test_wait_prints_nothing_of_a_body_but_its_wake_line(doorbell: Doorbell, bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "x" * 150 + " secret tail " + ESCAPES, sender="ci", headers={"token": "hidden"})
    for done in (doorbell("wait", "worker"), doorbell("wait", "worker", "--json")):
        assert "x" * 150 in done.stdout
        assert "secret tail" not in done.stdout
        assert "hidden" not in done.stdout


@pytest.mark.parametrize(
    ("filters", "rings"),
    [
        ([], 1),
        (["--channel", "b"], 3),
        (["--channel", "b", "--channel", "a"], 1),
        (["--channel", "b", "--channel", "elsewhere"], 3),
        (["--sender", "bob"], 2),
        (["--sender", "bob", "--channel", "b"], 4),
        (["--grep", "^gam+a$"], 3),
        (["--grep", "a", "--sender", "bob", "--channel", "a"], 2),
        (["--grep", "nothing like it"], None),
        (["--sender", "worker"], None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wait_rings_for_what_it_was_told_to(doorbell: Doorbell, bus: MessageBus, filters: list[str], rings: int | None) -> None:
    for channel in ("a", "b"):
        bus.subscribe("worker", channel)
    for n, (channel, sender, body) in enumerate(
        [("a", "ann", "alpha"), ("a", "bob", "beta"), ("b", "ann", "gamma"), ("b", "bob", "delta"), ("b", "worker", "own")], 1
    ):
        bus.post(channel, f"{body}", sender=sender, headers={"n": str(n)})
    done = doorbell("wait", "worker", "--timeout", "0.2", *filters)
    if rings is None:
        assert (done.code, done.stdout, done.stderr) == (command.IDLE, "", "")
    else:
        assert done.code == command.DONE
        assert ["alpha", "beta", "gamma", "delta"][rings - 1] in done.stdout
    assert len(bus.catch_up("worker")) == 5, "what does not ring stays"


def test_own_posts_do_not_end_a_wait(doorbell: Doorbell, bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "mine", sender="worker")
    done = doorbell("wait", "worker", "--timeout", "0.3")
    assert (done.code, done.stdout, done.stderr) == (command.IDLE, "", "")


def test_a_body_made_against_the_expression_does_not_hold_a_wait(start: Callable[..., Started], bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "a" * 60 + "!", sender="mallory")
    done = start("wait", "worker", "--grep", "^(a+)+$", "--timeout", "1").ended(within=15)
    assert done.code == command.IDLE
    assert "simpler expression" in done.why


def test_an_outage_is_waited_out(start: Callable[..., Started], bus: MessageBus, proxy: Proxy, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    waiting = start("wait", "worker", "--timeout", "60", dsn=proxy.dsn)
    bell_is_waiting(sql)
    proxy.refuse()
    proxy.cut()
    eventually(lambda: not backends(sql, "query ~ 'peek|heads?_moved'"), what="the session to end")
    bus.post("events", "meanwhile", sender="ci")
    proxy.accept()
    done = waiting.ended()
    assert done.code == command.DONE
    assert "'meanwhile'" in done.stdout
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize(("blind", "code"), [(0.2, command.UNREACHABLE), (30.0, command.IDLE)], ids=["long", "short"])
def test_an_outage_up_to_the_end_is_unreachable_once_it_is_long_enough(
    doorbell: Doorbell, bus: MessageBus, proxy: Proxy, sql: Sql, monkeypatch: pytest.MonkeyPatch, blind: float, code: int
) -> None:
    monkeypatch.setattr(bell, "BLIND", blind)
    bus.subscribe("worker", "events")

    def cut() -> None:
        proxy.refuse()
        proxy.cut()

    thread = once_armed(sql, cut)
    done = doorbell("wait", "worker", "--timeout", "3", "--poll-interval", "0.05", dsn=proxy.dsn)
    thread.join()
    assert done.code == code
    if code == command.UNREACHABLE:
        assert "Nothing is lost" in done.why


@pytest.mark.timing
def test_everything_frozen_ends_by_the_deadline(start: Callable[..., Started], bus: MessageBus, proxy: Proxy, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    waiting = start("wait", "worker", "--timeout", "4", dsn=proxy.dsn)
    bell_is_waiting(sql)
    proxy.freeze_all()
    done = waiting.ended()
    took = time.monotonic() - waiting.began
    print(f"frozen: ended after {took:.2f} s of 4")
    assert done.code == command.IDLE, "30 s have not passed without a look"
    assert took < 4 + 3  # starting, and closing what does not answer


def test_a_server_that_accepts_and_never_answers_is_unreachable(start: Callable[..., Started], proxy: Proxy) -> None:
    proxy.freeze_all()
    done = start("wait", "worker", dsn=proxy.dsn).ended(within=20)
    assert done.code == command.UNREACHABLE
    assert "cannot be reached" in done.why


# -- what a wait holds ------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_wait_is_one_connection_and_little_memory_soon_after_its_start(
    start: Callable[..., Started], bus: MessageBus, dsn: str, sql: Sql
) -> None:
    bus.subscribe("worker", "events")
    times, memory = [], []
    for _ in range(5):
        waiting = start("wait", "worker", dsn=make_conninfo(dsn, application_name="the wait"))
        bell_is_waiting(sql)
        times.append(time.monotonic() - waiting.began)
        # Between two looks, so that nothing is on its way; asked for by its name as an operator would.
        assert sql("select count(*) from pg_stat_activity where application_name = 'the wait'") == [(1,)]
        if Path("/proc/self/status").exists():
            status = Path(f"/proc/{waiting.pid}/status").read_text()
            memory.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)  # type: ignore[index]
        waiting.process.terminate()
        assert waiting.ended().code == command.TERMINATED
        eventually(lambda: not backends(sql, "application_name = 'the wait'"), what="the session to be gone")
    print(f"armed after {min(times):.2f} to {max(times):.2f} s; resident {max(memory, default=0):.0f} MB; connections 1")
    assert min(times) < 5  # the aim is 0.5 s, on a machine that does nothing else
    assert max(memory, default=0) < 60


def test_a_wait_does_not_load_what_it_does_not_need(dsn: str, bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    done = run_script(
        "import sys\n"
        "from doorbell_postgres import cli\n"
        "code = cli.main.main(['wait', 'worker', '--timeout', '0'], standalone_mode=False)\n"
        "print(code, [name for name in ('alembic', 'sqlalchemy', 'rich', 'mako') if name in sys.modules])",
        env={"DOORBELL_DSN": dsn},
    )
    assert (done.stdout, done.stderr) == ("3 []\n", "")


def test_a_waits_session_refuses_writes(start: Callable[..., Started], bus: MessageBus, sql: Sql) -> None:
    bus.subscribe("worker", "events")
    start("wait", "worker")
    (pid,) = bell_is_waiting(sql)
    bus.post("events", "x", sender="ci")
    eventually(lambda: not backends(sql, "pid = %s", pid), what="the session to go with the ring")


# -- signals and pipes ------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("args", [["wait", "worker"], ["tail", "events"]], ids=["wait", "tail"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, command.INTERRUPTED), (signal.SIGTERM, command.TERMINATED)], ids=["int", "term"]
)
def test_a_signal_ends_it_at_once_and_quietly(
    start: Callable[..., Started], bus: MessageBus, sql: Sql, args: list[str], number: signal.Signals, code: int
) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "mine", sender="worker")
    running = start(*args)
    eventually(lambda: backends(sql, "query ~ 'peek|heads?_moved|messages_after'"), within=20, what="the command to be at work")
    sent = time.monotonic()
    running.process.send_signal(number)
    done = running.ended()
    took = time.monotonic() - sent
    assert (done.code, done.stdout, done.stderr) == (code, "", "")
    assert took < 1
    eventually(lambda: not backends(sql, "query ~ 'peek|heads?_moved|messages_after'"), within=5, what="its session to be gone")


def test_a_signal_while_it_starts_ends_it_too(start: Callable[..., Started], bus: MessageBus) -> None:
    """Before our own handlers are there the system's and Python's are: the same for a shell, 143 and 130; and 1 for Ctrl-C in
    the first milliseconds, when Python itself is not up yet. See the next test for what comes then."""
    bus.subscribe("worker", "events")
    for n in range(12):
        number = (signal.SIGTERM, signal.SIGINT)[n % 2]
        running = start("wait", "worker")
        time.sleep(random.uniform(0, 0.4))
        running.process.send_signal(number)
        stderr = running.process.communicate(timeout=10)[1]
        code = running.process.returncode
        too_early = number == signal.SIGINT and code == 1 and b"KeyboardInterrupt" in stderr
        assert too_early or code in (128 + number, -number), stderr
        if number == signal.SIGTERM or code == 128 + number:
            assert stderr == b""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, command.INTERRUPTED), (signal.SIGTERM, command.TERMINATED)], ids=["int", "term"]
)
def test_a_signal_while_it_loads_ends_it_quietly(start: Callable[..., Started], number: signal.Signals, code: int) -> None:
    """As soon as it can be caught at all: by us, which SIGTERM shows, and not by Python, whose Ctrl-C is a traceback."""
    running = start("wait", "worker", dsn="host=/nowhere")
    status = Path(f"/proc/{running.pid}/status")

    def caught() -> bool:
        return bool(int(re.search(r"^SigCgt:\t(\w+)", status.read_text(), re.M)[1], 16) >> signal.SIGTERM - 1 & 1)  # type: ignore[index]

    eventually(caught, within=20, what="the command to catch SIGTERM")
    running.process.send_signal(number)
    done = running.ended()
    assert (done.code, done.stdout, done.stderr) == (code, "", "")


def test_signals_are_caught_before_anything_is_loaded() -> None:
    said = run_script("import doorbell_postgres.__main__, sys; print({'click', 'psycopg', 'logging'} & set(sys.modules))")
    assert said.stdout == "set()\n", said.stderr


def test_a_reader_that_goes_away_ends_it_quietly(start: Callable[..., Started], bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    bus.post_many("events", ["x" * 100_000] * 20, sender="ci")
    running = start("catch-up", "worker", "--json")
    assert running.line()
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert running.process.stderr is not None
    assert running.process.wait(20) == command.UNREAD
    assert running.process.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["wait", "worker"], ["catch-up", "worker"], ["post", "events", "x", "--sender", "ci"]])
def test_output_that_cannot_be_written_is_not_done(start: Callable[..., Started], bus: MessageBus, args: list[str]) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "x", sender="ci")
    with open("/dev/full", "wb") as full:
        done = start(*args, stdout=full).ended()
    assert done.code == command.REFUSED
    assert "No space left" in done.why


def test_a_terminal_that_lacks_a_character_is_shown_an_escape(dsn: str, bus: MessageBus) -> None:
    bus.subscribe("worker", "events")
    bus.post("events", "caf\xe9 🎉", sender="ci")
    done = subprocess.run(
        [*COMMAND, "wait", "worker"], env=plain_environment(DOORBELL_DSN=dsn, PYTHONIOENCODING="ascii"), capture_output=True
    )
    assert done.returncode == 0
    assert done.stdout == b"'events'#1 from 'ci': [untrusted] 'caf\\xe9 \\U0001f389'\n"


# -- being killed -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_50_waits_killed_at_random_points_lose_nothing_and_leave_nothing(
    start: Callable[..., Started], bus: MessageBus, dsn: str, sql: Sql
) -> None:
    """While others post all the time; a handle catches up and acks, as if nobody had been killed.

    Half of them are killed some time after their start, the others some time after their session has come.
    """
    bus.subscribe("worker", "events")
    over = threading.Event()
    posted = [0, 0]

    def post(which: int) -> None:
        with MessageBus(dsn) as own:
            while not over.wait(0.005):
                own.post("events", str(posted[which]), sender=f"poster {which}")
                posted[which] += 1

    posters = [threading.Thread(target=post, args=(which,)) for which in range(2)]
    for poster in posters:
        poster.start()
    dice = random.Random(3)
    seen: list[int] = []
    connected = 0
    try:
        for batch in range(10):
            names = [f"killed {batch}.{n}" for n in range(5)]
            waits = [start("wait", "worker", "--grep", "none", dsn=make_conninfo(dsn, application_name=name)) for name in names]
            for n, (name, waiting) in enumerate(zip(names, waits, strict=True)):
                if (batch + n) % 2:
                    eventually(lambda name=name: backends(sql, "application_name = %s", name), within=60)
                    connected += 1
                time.sleep(dice.uniform(0, 0.3))
                waiting.process.kill()
                assert waiting.process.wait(10) == -signal.SIGKILL
            for message in bus.catch_up("worker"):
                seen.append(message.seq)
                bus.ack("worker", "events", message.seq)
    finally:
        over.set()
        for poster in posters:
            poster.join()
    killed = time.monotonic()
    for message in bus.catch_up("worker"):
        seen.append(message.seq)
        bus.ack("worker", "events", message.seq)
    assert seen == list(range(1, sum(posted) + 1))
    eventually(lambda: not backends(sql, "application_name ~ '^killed'"), within=5, what="the sessions of the killed to go")
    print(
        f"50 waits killed, {connected} of them connected; {len(seen)} messages; none left {time.monotonic() - killed:.2f} s later"
    )


# -- demo -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the throwaway server needs a POSIX system")
def test_the_demo_tells_its_story_and_leaves_nothing(dsn: str) -> None:
    """On a server of its own, whatever DOORBELL_DSN says."""
    done = subprocess.run([*COMMAND, "demo"], env=plain_environment(DOORBELL_DSN=dsn), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("every job was done once, and nothing is left unacked")
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select count(*) from doorbell.channel").fetchone() == (0,)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_harness_page_lists_every_exit_code() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "harness.md").read_text(encoding="utf-8")
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.M) for code in row.split(", ")}
    names = ("DONE", "REFUSED", "USAGE", "IDLE", "UNREACHABLE", "INTERRUPTED", "TERMINATED", "UNREAD")
    assert listed == {getattr(command, name) for name in names}
