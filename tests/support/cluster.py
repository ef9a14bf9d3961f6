"""Postgres servers that a test may stop, kill and promote: a single one, or a primary with hot standbys.

Everything belongs to the test process: each server runs under a shell whose standard input is a pipe from here, and an
end of file on it ends the server. A second such shell removes the directory. Reached over unix sockets only.
"""

from __future__ import annotations

import atexit
import io
import os
import pwd
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import psycopg

from doorbell_postgres import throwaway

_RUN = r"""
exec 3<&0 </dev/null
"$1/postgres" -D "$2" >>"$2/../log" 2>&1 3<&- &
pid=$!
echo "$pid"
exec >/dev/null 2>&1
read -r how <&3 || how=QUIT
kill -"$how" "$pid"
wait "$pid"
"""

# Waits for the end of file, then until the servers have let go of the directory.
_SWEEP = r"""
while read -r _; do :; done
tries=0
until rm -rf "$1" 2>/dev/null || [ $tries -ge 200 ]; do sleep 0.05; tries=$((tries + 1)); done
sleep 0.2
rm -rf "$1"
"""

_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_directories": "..",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "150",
    "max_wal_senders": "4",
    "wal_keep_size": "256MB",
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "100ms",
    "hot_standby": "on",
}


def unprivileged() -> str | None:
    """Whom a program runs as that refuses root: None for ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "_postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise RuntimeError("these tests run as root and find no user postgres or nobody")


def popen(args: list[str], *, user: str | None, **more: Any) -> subprocess.Popen[bytes]:
    """Run a program as `user`, in a session of its own, with an environment that does not steer Postgres."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_")) and k != "LANGUAGE"}
    if user is not None:
        more |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    return subprocess.Popen(args, cwd="/", env=env | {"LANG": "C", "TZ": "UTC"}, start_new_session=True, **more)


@cache
def reachable_programs() -> Path:
    """The server's programs where the user that runs them can reach them: a copy, when they lie in a private place."""
    bindir, user = throwaway.find_binaries(), unprivileged()
    if throwaway._As(user).version(bindir) is not None:
        return bindir
    copy = tempfile.mkdtemp(prefix="doorbell-programs-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    os.chmod(copy, 0o755)
    stream, place = throwaway._tar(bindir)
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        tar.extractall(copy, filter="tar")
    return Path(copy) / place


class Node:
    """One server of a cluster. `dsn()` leads to it alone."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.directory = cluster.directory / name
        self.pid = 0
        self._cluster = cluster
        self._shell: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def dsn(self, dbname: str = "postgres") -> str:
        return f"host={self.directory} port=5432 user=doorbell dbname={dbname}"

    def configure(self, **settings: str) -> None:
        """Append to postgresql.conf: for a server that is not running, or before `sql("select pg_reload_conf()")`."""
        lines = "".join(f"{name} = '{value}'\n" for name, value in settings.items())
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(lines)

    def start(self) -> None:
        """Run the server; returns when it takes connections."""
        assert self._shell is None, "it runs already"
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        self._shell = popen(
            ["/bin/sh", "-c", _RUN, "node", str(self._cluster.bindir), str(self.data)],
            user=self._cluster.user,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._shell.stdout is not None
        self.pid = int(self._shell.stdout.readline())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and Path(f"/proc/{self.pid}").exists() == Path("/proc").exists():
            try:
                status = (self.data / "postmaster.pid").read_text().split("\n")
            except OSError:
                status = []
            if len(status) > 7 and status[7].strip() in ("ready", "standby") and status[0] == str(self.pid):
                # "standby" is also said before it is consistent: only a connection tells.
                try:
                    psycopg.connect(self.dsn(), connect_timeout=5).close()
                except psycopg.OperationalError:
                    pass
                else:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} did not start:\n{self.log()}")

    def log(self) -> str:
        """The end of what the server has logged."""
        return "\n".join((self.directory / "log").read_text(errors="replace").splitlines()[-15:])

    def stop(self, how: str = "INT") -> None:
        """INT: a fast shutdown. QUIT: an immediate one, after which it recovers."""
        if self._shell is None:
            return
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{how}\n".encode())
        self._shell.stdin.close()
        self._shell.wait(60)
        self._shell.stdout.close()
        self._shell = None

    def kill(self) -> None:
        """SIGKILL for the postmaster and every process of it: what a power cut leaves, but for the disk's cache."""
        os.kill(self.pid, signal.SIGSTOP)  # it forks nothing more
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pids = [int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == self.pid]
        for pid in [self.pid, *pids]:
            os.kill(pid, signal.SIGKILL)
        self.stop("KILL")

    def promote(self) -> None:
        """Make a standby the primary; returns when it takes writes."""
        self.sql("select pg_promote(true, 60)")

    def sql(self, query: str, *params: Any, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own."""
        with psycopg.connect(self.dsn(dbname), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(query, params or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []


class Cluster:
    """A directory with servers in it. `primary` runs from the start; `add_standby` makes copies of it."""

    def __init__(self, **settings: str) -> None:
        self.bindir = reachable_programs()
        self.user = unprivileged()
        self.directory = Path(tempfile.mkdtemp(prefix="doorbell-"))
        self._nodes: list[Node] = []
        if self.user is not None:
            os.chown(self.directory, pwd.getpwnam(self.user).pw_uid, -1)
        self._sweeper = popen(["/bin/sh", "-c", _SWEEP, "sweep", str(self.directory)], user=self.user, stdin=subprocess.PIPE)
        try:
            self.primary = self._new_node("primary")
            self._run("mkdir", str(self.primary.directory))
            self._run(
                str(self.bindir / "initdb"), "-D", str(self.primary.data), "-U", "doorbell", "--auth=trust",
                "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions",
            )  # fmt: skip
            self.primary.configure(**_SETTINGS | settings)
            self.primary.start()
        except BaseException:
            self.close()
            raise

    def add_standby(self, *, synchronous: bool) -> Node:
        """A hot standby of the primary, streaming when this returns. The primary is stopped for the copy."""
        standby = self._new_node(f"standby{len(self._nodes)}")
        self.primary.stop()
        self._run("mkdir", str(standby.directory))
        # A data directory at rest is a base backup; no slot and no second program is needed.
        self._run("cp", "-a", str(self.primary.data), str(standby.data))
        self._run("touch", str(standby.data / "standby.signal"))
        standby.configure(primary_conninfo=f"host={self.primary.directory} user=doorbell application_name={standby.name}")
        self.primary.start()
        standby.start()
        deadline = time.monotonic() + 30
        while not self.primary.sql("select 1 from pg_stat_replication where state = 'streaming'"):
            assert time.monotonic() < deadline, "the standby does not stream:\n" + standby.log()
            time.sleep(0.01)
        if synchronous:
            # In the primary's file only: the standby waits for nobody once it is promoted.
            self.primary.configure(synchronous_standby_names=standby.name)
            self.primary.sql("select pg_reload_conf()")
            while not self.primary.sql("select 1 from pg_stat_replication where sync_state = 'sync'"):
                assert time.monotonic() < deadline, "the standby did not become synchronous"
                time.sleep(0.01)
        return standby

    def dsn(self, dbname: str = "postgres") -> str:
        """Leads to whichever server takes writes."""
        hosts = ",".join(str(node.directory) for node in self._nodes)
        ports = ",".join("5432" for _ in self._nodes)
        return f"host={hosts} port={ports} user=doorbell dbname={dbname} target_session_attrs=read-write"

    def _new_node(self, name: str) -> Node:
        self._nodes.append(Node(self, name))
        return self._nodes[-1]

    def _run(self, *args: str) -> None:
        process = popen(list(args), user=self.user, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=60)
        if process.returncode != 0:
            raise RuntimeError(f"{args[0]} failed: {output.decode(errors='replace')[-2000:]}")

    def close(self) -> None:
        for node in self._nodes:
            node.stop("QUIT")
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        self._sweeper.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
