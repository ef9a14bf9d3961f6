"""The harnesses of docs/harness.md, a loop and examples/harness.py, as real processes, ended in every way that sessions end.

A turn is a program that the harness runs for each message. The one in here writes down what it was given, and hangs or
fails on demand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from doorbell_postgres import MessageBus
from support import backends, bell_is_waiting, eventually
from support.processes import plain_environment

Sql = Callable[..., list[tuple[Any, ...]]]
ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT / "examples" / "harness.py"
LOOP = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / "harness.md").read_text(encoding="utf-8"), re.M | re.S)

# argv: the file to write to. A body "hang" is written down and then never finished; "fail once" fails the first time.
TURN = """
import json, os, sys, time
message = json.load(sys.stdin)
seen = open(sys.argv[1]).read()
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([message["channel"], message["seq"], message["body"]]) + "\\n")
if message["body"] == "hang" and "hang" not in seen:
    time.sleep(600)
sys.exit(message["body"] == "fail once" and "fail once" not in seen)
"""


class Session:
    """One run of a harness as `worker`, with everything that it started in one process group."""

    def __init__(self, dsn: str, seen: Path, command: Sequence[str] = (), **env: str) -> None:
        self._process = subprocess.Popen(
            command or [sys.executable, str(HARNESS), "worker", sys.executable, "-c", TURN, str(seen)],
            env=plain_environment(DOORBELL_DSN=dsn, **env),
            cwd=seen.parent,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kill_alone(self) -> None:
        """SIGKILL for the harness; what it has started lives on, as it does when a session is reaped."""
        self._process.kill()
        self._process.wait(10)

    def kill(self) -> None:
        """SIGKILL for all of it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def ended(self) -> tuple[int, str]:
        return self._process.wait(20), self._process.stderr.read() if self._process.stderr else ""

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        if self._process.stderr is not None:
            self._process.stderr.close()


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    path = tmp_path / "seen"
    path.touch()
    return path


@pytest.fixture
def session(dsn: str, seen: Path) -> Iterator[Callable[[], Session]]:
    started: list[Session] = []

    def run() -> Session:
        started.append(Session(dsn, seen))
        return started[-1]

    yield run
    for each in started:
        each.close()


@pytest.fixture
def bus(dsn: str) -> Iterator[MessageBus]:
    with MessageBus(dsn) as opened:
        opened.subscribe("worker", "jobs")
        opened.subscribe("worker", "--other 'jobs'\n")
        yield opened


def bodies(seen: Path) -> list[str]:
    return [json.loads(line)[2] for line in seen.read_text().splitlines()]


def test_wait_wake_catch_up_handle_ack_and_wait_again(
    session: Callable[[], Session], bus: MessageBus, seen: Path, sql: Sql
) -> None:
    bus.post("jobs", "was there before", sender="boss")
    session()
    assert bus.wait_until_quiet(handle="worker", timeout=30)
    bell_is_waiting(sql)
    bus.post_many("jobs", ["one", "two\n\x1b[31m"], sender="boss")
    bus.post("--other 'jobs'\n", "three", sender="boss")
    assert bus.wait_until_quiet(handle="worker", timeout=30)
    bell_is_waiting(sql)
    bus.post("jobs", "four", sender="boss")
    assert bus.wait_until_quiet(handle="worker", timeout=30)
    assert bodies(seen)[0] == "was there before"
    assert sorted(bodies(seen)[1:4]) == ["one", "three", "two\n\x1b[31m"]
    assert bodies(seen)[4:] == ["four"]


def test_killed_in_the_middle_of_a_message_and_resumed_by_another_process(
    session: Callable[[], Session], bus: MessageBus, seen: Path
) -> None:
    bus.post_many("jobs", ["one", "hang", "three"], sender="boss")
    first = session()
    eventually(lambda: bodies(seen) == ["one", "hang"], within=30, what="the first session to hang in its second message")
    first.kill()
    assert [m.body for m in bus.catch_up("worker")] == ["hang", "three"], "handled and acked is one, begun is nothing"
    session()
    assert bus.wait_until_quiet(handle="worker", timeout=30)
    assert bodies(seen) == ["one", "hang", "hang", "three"], "what was begun comes again, what was acked does not"


def test_killed_while_it_waits_its_orphaned_wait_takes_nothing(
    session: Callable[[], Session], bus: MessageBus, seen: Path, sql: Sql
) -> None:
    first = session()
    (orphan,) = bell_is_waiting(sql)
    first.kill_alone()
    assert backends(sql, "pid = %s", orphan), "the wait outlives its session"
    bus.post("jobs", "for the next one", sender="boss")
    eventually(lambda: not backends(sql, "pid = %s", orphan), within=20, what="the orphan to ring, unheard, and end")
    assert bodies(seen) == []
    session()
    assert bus.wait_until_quiet(handle="worker", timeout=30)
    assert bodies(seen) == ["for the next one"]


def test_a_message_that_failed_comes_again_and_nothing_behind_it_is_acked(
    session: Callable[[], Session], bus: MessageBus, seen: Path
) -> None:
    bus.post_many("jobs", ["one", "fail once", "three"], sender="boss")
    session()
    assert bus.wait_until_quiet(handle="worker", timeout=30)
    assert bodies(seen) == ["one", "fail once", "fail once", "three"]


def test_a_harness_that_is_called_wrongly_stops(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HARNESS), "worker", "true"], env=plain_environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "DOORBELL_DSN" in done.stderr


def test_a_program_that_is_not_there_is_said_in_one_line(dsn: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HARNESS), "worker", "./nonexist"],
        env=plain_environment(DOORBELL_DSN=dsn),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (2, "harness: './nonexist' is no program that can be run\n")


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("jq")), reason="needs bash and jq")
def test_the_loop_of_the_page_acks_each_message_on_its_own_channel(dsn: str, seen: Path, bus: MessageBus) -> None:
    """As pasted, but for how long it sleeps; its handler is killed once."""
    (loop,) = LOOP
    programs = {
        "doorbell": f'exec {sys.executable} -m doorbell_postgres "$@"',
        "sleep": f"exec {shutil.which('sleep')} 0.1",
        "handle-one": f"exec {sys.executable} turn.py {seen}",
    }
    for name, text in programs.items():
        path = seen.parent / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (seen.parent / "turn.py").write_text(TURN.replace("time.sleep(600)", "os.kill(os.getpid(), 9)"))
    bus.unsubscribe("worker", "--other 'jobs'\n")  # a shell's $(...) drops the newline at its end
    bus.subscribe("worker", "--other 'jobs'")
    bus.post_many("--other 'jobs'", ["a", "b", "c"], sender="boss")
    bus.post_many("jobs", ["one", "hang"], sender="boss")
    session = Session(dsn, seen, ["bash", "-c", loop], PATH=f"{seen.parent}{os.pathsep}{os.environ['PATH']}")
    try:
        assert bus.wait_until_quiet(handle="worker", timeout=30), bodies(seen)
        bus.post("--other 'jobs'", "d", sender="boss")
        bus.post("jobs", "three", sender="boss")
        assert bus.wait_until_quiet(handle="worker", timeout=30), bodies(seen)
    finally:
        session.close()
    found = bodies(seen)
    assert found[:6] == ["a", "b", "c", "one", "hang", "hang"], "killed, it was not acked, so it came again"
    assert sorted(found[6:]) == ["d", "three"]
