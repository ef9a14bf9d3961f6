"""The Postgres that the tests run on: what DOORBELL_TEST_DSN names, a throwaway container, or the embedded one."""

from __future__ import annotations

import gc
import os
import secrets
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo


class TestServer:
    """One server for the whole session. `kind` says which of the three it is; `stop` ends what was started here."""

    __test__ = False  # no test class, whatever pytest thinks of its name

    def __init__(self, kind: str, admin_dsn: str, stop: Callable[[], None] = lambda: None) -> None:
        self.kind = kind
        self._stop = stop
        self._admin_dsn = admin_dsn
        self._discarded: deque[str] = deque()
        self._admin = psycopg.connect(admin_dsn, autocommit=True)
        self.version = str(self._admin.execute("show server_version").fetchone()[0])
        self.version_num = self._admin.info.server_version
        # file_copy is two checkpoints, which cost nothing where nothing is flushed. On Postgres 18, in ms: 14 against 26 with
        # fsync off and files in memory, 80 against 50 with fsync on.
        self._strategy = "wal_log" if self._admin.execute("show fsync").fetchone() == ("on",) else "file_copy"

    def dsn(self, dbname: str, **parameters: Any) -> str:
        """The admin DSN with another database, and with whatever else of it is to be different."""
        return make_conninfo(self._admin_dsn, dbname=dbname, **parameters)

    def create_database(self, template: str | None = None) -> str:
        """Create a database, empty or cloned from the database named `template`, and return its name."""
        name = f"doorbell_test_{secrets.token_hex(6)}"
        statement = sql.SQL("create database {} template {} strategy {}").format(
            sql.Identifier(name), sql.Identifier(template or "template0"), sql.SQL(self._strategy)
        )
        self._admin.execute(statement)
        return name

    def drop_database(self, name: str) -> None:
        self._admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def discard(self, name: str) -> None:
        """Drop that database, now or some time before the end.

        Not at once: where a session has not quite ended yet, DROP DATABASE sleeps for 0.1 s before it looks again.
        """
        self._discarded.append(name)
        if len(self._discarded) > 3:
            self.drop_database(self._discarded.popleft())

    def stop(self) -> None:
        try:
            for name in self._discarded:
                self.drop_database(name)
        finally:
            self._admin.close()
            self._stop()


def choose() -> TestServer:
    """The first of the three that is there."""
    dsn = os.environ.get("DOORBELL_TEST_DSN")
    if dsn:
        return TestServer("DOORBELL_TEST_DSN", dsn)
    return _container() or _embedded()


def _container() -> TestServer | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other people's packages
        try:
            return _start_container(os.environ.get("DOORBELL_TEST_IMAGE", "postgres:18"))
        finally:
            gc.collect()  # here, where nobody hears it: a client that found no engine leaves its socket open


def _start_container(image: str) -> TestServer | None:
    try:
        from docker.errors import DockerException
    except ImportError:
        return None
    try:
        from testcontainers.community.postgres import PostgresContainer
    except ImportError:
        try:
            from testcontainers.postgres import PostgresContainer
        except ImportError:
            return None
    try:  # the constructor asks the engine, start pulls the image
        container = PostgresContainer(image, username="doorbell", password="doorbell", dbname="doorbell", driver=None)
        container.with_command("-c fsync=off -c max_connections=200")
        container.start()
    except DockerException:
        return None  # no engine answers, or the image cannot be had
    dsn = make_conninfo(
        host=container.get_container_host_ip(),
        port=container.get_exposed_port(5432),
        user="doorbell",
        password="doorbell",
        dbname="doorbell",
    )

    def stop() -> None:
        container.stop()
        container.get_docker_client().client.close()

    return TestServer(f"container {image}", dsn, stop)


def _embedded() -> TestServer:
    from doorbell_postgres import throwaway

    return TestServer("embedded", throwaway.shared().dsn())
