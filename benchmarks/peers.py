"""Others on the same work: one durable message of the same body a call, by one process and by many into one queue.

Each in its own documented way, with its defaults. None is a dependency; whoever wants the comparison installs them:

    .venv/bin/pip install procrastinate pgqueuer redis
    apt-get install redis-server

None of them numbers messages without gaps, keeps a cursor for each reader, or hands one message to many readers, except
Redis Streams for the last; they do other things instead. So the rows say what a durable hand-over costs there, no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.harness import BODY, Bench, Crew, Result, alternate, clock, compared, median_rate, rates, skipped
from benchmarks.posting import Poster


class Procrastinate(Poster):
    def __init__(self, dsn: str, index: int) -> None:
        super().__init__(dsn, index)
        from procrastinate import App, SyncPsycopgConnector

        self._app = App(connector=SyncPsycopgConnector(conninfo=dsn))
        self._app.open()

        @self._app.task(name="work", queue="shared")
        def work(body: str) -> None: ...

        self._defer = work.defer

    def theirs(self) -> None:
        self._defer(body=BODY)


def _install_procrastinate(dsn: str) -> None:
    from procrastinate import App, SyncPsycopgConnector

    with App(connector=SyncPsycopgConnector(conninfo=dsn)).open() as app:
        app.schema_manager.apply_schema()


class PgQueuer(Poster):
    def __init__(self, dsn: str, index: int) -> None:
        super().__init__(dsn, index)
        from pgqueuer.db import SyncPsycopgDriver
        from pgqueuer.queries import SyncQueries

        self._queries = SyncQueries(SyncPsycopgDriver(psycopg.connect(dsn, autocommit=True)))
        self._payload = BODY.encode()

    def theirs(self) -> None:
        self._queries.enqueue("shared", self._payload)


def _install_pgqueuer(dsn: str) -> None:
    from pgqueuer import PsycopgDriver, Queries

    async def install() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await Queries(PsycopgDriver(connection)).install()

    asyncio.run(install())


class RedisStreams(Poster):
    def __init__(self, dsn: str, index: int, socket: str) -> None:
        super().__init__(dsn, index)
        import redis

        self._redis = redis.Redis(unix_socket_path=socket)

    def theirs(self) -> None:
        self._redis.xadd("shared", {"sender": "bench", "body": BODY})


def _compare(bench: Bench, name: str, versions: str, make: Callable[..., Any], dsn: str, **options: Any) -> Iterator[Result]:
    for count in (1, bench.size.processes):
        with Crew(make, dsn, count, **options) as crew:
            samples = alternate(crew, ["floor", "shared", "theirs"], bench.size)
        who = "1 process" if count == 1 else f"{count} processes, 1 queue"
        note = f"{versions}; doorbell-postgres in the same run: {median_rate(samples['shared']):,.0f} posts/s"
        yield compared(f"{name}, {who}", "messages/s", rates(samples["floor"]), rates(samples["theirs"]), None, note)


def procrastinate(bench: Bench) -> Iterator[Result]:
    """procrastinate: defer"""
    if importlib.util.find_spec("procrastinate") is None:
        yield skipped("procrastinate", "it is not installed (pip install procrastinate)")
        return
    dsn = bench.database()
    _install_procrastinate(dsn)
    yield from _compare(bench, "procrastinate: defer", f"procrastinate {version('procrastinate')}", Procrastinate, dsn)


def pgqueuer(bench: Bench) -> Iterator[Result]:
    """PgQueuer: enqueue"""
    if importlib.util.find_spec("pgqueuer") is None:
        yield skipped("PgQueuer", "it is not installed (pip install pgqueuer)")
        return
    dsn = bench.database()
    _install_pgqueuer(dsn)
    yield from _compare(bench, "PgQueuer: enqueue", f"PgQueuer {version('pgqueuer')}", PgQueuer, dsn)


@contextlib.contextmanager
def _redis(program: str) -> Iterator[tuple[str, str]]:
    """A private server that flushes its log before it answers: the path of its socket, and its version."""
    with tempfile.TemporaryDirectory(prefix="doorbell-") as directory:
        socket = str(Path(directory) / "redis.sock")
        process = subprocess.Popen(
            [
                *(program, "--port", "0", "--unixsocket", socket, "--dir", directory, "--daemonize", "no"),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            import redis

            client = redis.Redis(unix_socket_path=socket)
            ends = clock() + 10
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if clock() > ends or process.poll() is not None:
                        raise
            yield socket, client.info("server")["redis_version"]
        finally:
            process.terminate()
            process.wait()


def redis_streams(bench: Bench) -> Iterator[Result]:
    """Redis Streams: xadd, with appendfsync always"""
    program = shutil.which("redis-server")
    if program is None:
        yield skipped("Redis Streams", "there is no redis-server (apt-get install redis-server)")
        return
    if importlib.util.find_spec("redis") is None:
        yield skipped("Redis Streams", "its client is not installed (pip install redis)")
        return
    dsn = bench.database()
    with _redis(program) as (socket, server):
        versions = f"Redis {server}, redis-py {version('redis')}"
        yield from _compare(bench, "Redis Streams: xadd, appendfsync always", versions, RedisStreams, dsn, socket=socket)
