"""PgBouncer in transaction mode in front of a test server; it ends with the test process."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.cluster import popen, unprivileged

_RUN = r"""
exec 3<&0 </dev/null
"$1" "$2/pgbouncer.ini" >"$2/output" 2>&1 3<&- &
while read -r _ <&3; do :; done
kill -TERM $!
wait $!
rm -rf "$2"
"""

PORT = 6432


def find() -> str | None:
    """The program, where it is installed."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin")


class Pooler:
    """Forwards to every database of the server that `dsn` leads to, over at most `size` server connections each."""

    def __init__(self, dsn: str, *, size: int = 3) -> None:
        program = find()
        if program is None:
            raise RuntimeError("PgBouncer is not installed")
        self.size = size
        self._to = conninfo_to_dict(dsn)
        host = str(self._to.get("host") or self._to.get("hostaddr") or "localhost")
        user = unprivileged()
        if user is not None and host.startswith("/") and (owner := os.stat(host).st_uid):
            user = pwd.getpwuid(owner).pw_name  # that directory may be closed to everybody else
        self.directory = Path(tempfile.mkdtemp(prefix="doorbell-"))
        self.directory.chmod(0o755)
        leads_to = f"host={host} port={self._to.get('port') or 5432} user={self._to['user']}"
        if password := self._to.get("password"):
            leads_to += f" password='{password}'"
        (self.directory / "pgbouncer.ini").write_text(
            f"[databases]\n* = {leads_to}\n[pgbouncer]\nunix_socket_dir = {self.directory}\nlisten_port = {PORT}\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {size}\nmax_client_conn = 400\n"
            # Short, so that a database that tests drop is asked for by nobody.
            f"server_login_retry = 1\nlogfile = {self.directory}/log\n"
        )
        if user is not None:
            os.chown(self.directory, pwd.getpwnam(user).pw_uid, -1)
        self._shell = popen(["/bin/sh", "-c", _RUN, "pooler", program, str(self.directory)], user=user, stdin=subprocess.PIPE)
        try:
            self._until_ready(str(self._to["dbname"]))
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The host and port to put into a DSN, as conninfo."""
        return f"host={self.directory} port={PORT}"

    def dsn(self, dsn: str) -> str:
        """The same database through the pooler."""
        return through(self.address, dsn)

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def _until_ready(self, dbname: str) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(self.dsn(make_conninfo(**self._to | {"dbname": dbname}))).close()
            except psycopg.OperationalError:
                if self._shell.poll() is not None or time.monotonic() > deadline:
                    said = (self.directory / "output").read_text(errors="replace")
                    raise RuntimeError(f"PgBouncer did not start: {said[-2000:]}") from None
                time.sleep(0.02)
            else:
                return

    def close(self) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(20)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Pooler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def through(address: str, dsn: str) -> str:
    """`dsn` with the host and port of `address`."""
    to = conninfo_to_dict(dsn)
    to.pop("hostaddr", None)
    return make_conninfo(**to | conninfo_to_dict(address))
