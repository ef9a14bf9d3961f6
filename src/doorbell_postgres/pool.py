"""The connections that a sync store sends its calls on."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.generators import execute
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from doorbell_postgres import wire

Connection = psycopg.Connection[Any]

_numbers = itertools.count()  # of prepared statements


class Pooled(psycopg.Connection[Any]):
    """A connection of the pool, which sends calls by the shortest way."""

    @cached_property
    def is_stale(self) -> wire.Question:
        return wire.staleness(self.fileno())

    def send(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of one statement.

        psycopg's cursor adapts any type, keeps its result and knows row factories. That was half of what a call cost its
        process. So a statement that comes up again is prepared here, and sent with plain parameters as the text they are.
        """
        name = self._statements.get(sql) or self._name_of(sql)
        values = _as_text(params) if name else None
        if name is None or values is None:
            rows = self._cursor.execute(sql, params).fetchall()
            if len(rows) > 1:
                del self._cursor  # its result would stay in memory until the next call
            return rows
        with self.lock:
            self.pgconn.send_query_prepared(name, values)
            result = self._result()
        self._loading.set_pgresult(result)
        loaded: list[tuple[Any, ...]] = self._loading.load_rows(0, result.ntuples, tuple)
        return loaded

    def _name_of(self, sql: str) -> bytes | None:
        """The name of the statement, from its second use on: a process that sends one message never pays for it.

        Before it is sent, not after: what fails here must not be taken for the failure of a call that has succeeded.
        """
        if sql not in self._statements:
            self._statements[sql] = None
        elif self._statements[sql] is None and not wire.is_pooled(self) and "%b" not in sql:
            name = b"doorbell_%d" % next(_numbers)
            places = itertools.count(1)
            with self.lock:
                self.pgconn.send_prepare(name, re.sub("%s", lambda _: f"${next(places)}", sql).encode())
                self._result()
            self._statements[sql] = name
        return self._statements[sql]

    def _result(self) -> PGresult:
        result: PGresult = self.wait(execute(self.pgconn))[-1]
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result, encoding="utf-8")
        return result

    @cached_property
    def _cursor(self) -> psycopg.Cursor[Any]:
        return psycopg.Cursor(self, row_factory=tuple_row)

    @cached_property
    def _loading(self) -> Any:
        return Transformer.from_context(self)

    @cached_property
    def _statements(self) -> dict[str, bytes | None]:
        return {}


_TEXT: dict[type, Callable[[Any], bytes | None]] = {
    type(None): lambda _: None,
    str: str.encode,
    int: lambda value: b"%d" % value,
    bool: lambda value: b"t" if value else b"f",
    float: lambda value: repr(value).encode(),
}


def _as_text(params: Sequence[Any]) -> list[bytes | None] | None:
    """The parameters as Postgres reads them; the casts in the statement say what they are. None: not all are plain."""
    try:
        return [_TEXT[type(each)](each) for each in params]
    except KeyError:
        return None


class _Dialer:
    """Stands where the pool expects a connection class, and keeps why the last dial failed: the pool only logs it."""

    refusal: psycopg.Error | None = None

    def connect(self, conninfo: str, **options: Any) -> Pooled:
        try:
            connection = Pooled.connect(conninfo, **options)
        except psycopg.Error as exc:
            self.refusal = exc
            raise
        self.refusal = None
        return connection


class Pool:
    """psycopg's pool, and in front of it the connection that was used last: the way there and back costs as much as a call."""

    def __init__(self, settings: wire.Settings) -> None:
        self._dialer = _Dialer()
        self._pool: ConnectionPool[Pooled] = ConnectionPool(
            **wire.pool_options(settings),
            connection_class=self._dialer,  # type: ignore[arg-type]
            open=True,
            configure=_configure,
            check=_check,
        )
        self._lock = threading.Lock()
        self._kept: Pooled | None = None
        self._asking = 0
        self._keep_until = time.monotonic() + wire.POOL_KEEP
        self._closed = False

    @contextmanager
    def connection(self, timeout: float) -> Iterator[Pooled]:
        connection = self.borrow(timeout)
        try:
            yield connection
        except BaseException as exc:
            self.give_back(connection, exc)
            raise
        self.give_back(connection)

    def borrow(self, timeout: float) -> Pooled:
        """A connection, within about `timeout`. Raises BusClosed, PoolTimeout or why the last dial failed."""
        with self._lock:
            kept, self._kept = self._kept, None
            self._asking += kept is None
        if kept is not None:
            try:
                stale = kept.is_stale()
            except BaseException:  # Ctrl-C
                self.give_back(kept)
                raise
            if not stale:
                return kept
            kept.close()
            self._pool.putconn(kept)
            with self._lock:
                self._asking += 1
        try:
            return self._pool.getconn(timeout=wire.pool_patience(timeout))
        except PoolClosed:
            raise wire.closed_meanwhile() from None
        except PoolTimeout as exc:
            raise self._dialer.refusal or exc from None
        finally:
            with self._lock:
                self._asking -= 1

    def give_back(self, connection: Pooled, failure: BaseException | None = None) -> None:
        """To whoever asks for one, else kept for the next call."""
        if failure is not None and wire.spoils_connection(failure):
            connection.close()
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            with self._lock:
                if self._kept is None and not self._asking and not self._closed and time.monotonic() < self._keep_until:
                    self._kept = connection
                    return
                self._keep_until = time.monotonic() + wire.POOL_KEEP
        self._pool.putconn(connection)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, None
        if kept is not None:
            self._pool.putconn(kept)
        self._pool.close(timeout=0.5)


def _configure(connection: Connection) -> None:
    wire.set_up(connection, connection.execute(*wire.on_connect(connection, read_only=False)).fetchone())


def _check(connection: Pooled) -> None:
    if connection.is_stale():
        connection.close()
        raise psycopg.OperationalError("the server has ended this connection")
