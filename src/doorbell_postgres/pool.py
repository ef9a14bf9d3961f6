"""The connections that a sync store sends its calls on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from doorbell_postgres import wire
from doorbell_postgres.direct import Direct

Connection = psycopg.Connection[Any]


class Pooled(Direct):
    """A connection of the pool."""

    is_lent = False


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
            self.give_back(connection)
        except BaseException as exc:
            self.give_back(connection, exc)
            raise

    def borrow(self, timeout: float) -> Pooled:
        """A connection, within about `timeout`. Raises BusClosed, PoolTimeout or why the last dial failed."""
        kept = None
        asks = False
        try:
            # In one step with the look: what is given back from now on goes to whoever asks the pool, not to the next call.
            with self._lock:
                kept, self._kept = self._kept, None
                asks = kept is None
                self._asking += asks
            if kept is not None:
                kept.is_lent = True
                if not kept.readable(0):  # else the server has ended it, or is about to say so
                    return kept
                kept.close()
                self._pool.putconn(kept)
                kept = None
                with self._lock:
                    asks = True
                    self._asking += 1
            connection = self._pool.getconn(timeout=wire.pool_patience(timeout))
            connection.is_lent = True
            return connection
        except PoolClosed:
            raise wire.closed_meanwhile() from None
        except PoolTimeout as exc:
            raise self._dialer.refusal or exc from None
        except BaseException:  # Ctrl-C
            if kept is not None:
                kept.is_lent = True
                self.give_back(kept)
            raise
        finally:
            if asks:
                with self._lock:
                    self._asking -= 1

    def give_back(self, connection: Pooled, failure: BaseException | None = None) -> None:
        """To whoever asks for one, else kept for the next call. A second time, after Ctrl-C in the first, does nothing."""
        try:
            if not connection.is_lent:
                return
            if failure is not None and wire.spoils_connection(failure):
                connection.close()
            if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                with self._lock:
                    if self._kept is None and not self._asking and not self._closed and time.monotonic() < self._keep_until:
                        connection.is_lent = False
                        self._kept = connection
                        return
                    self._keep_until = time.monotonic() + wire.POOL_KEEP
        except BaseException:  # Ctrl-C
            if connection.is_lent:
                connection.is_lent = False
                self._pool.putconn(connection)
            raise
        connection.is_lent = False
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
    if connection.readable(0):
        connection.close()
        raise psycopg.OperationalError("the server has ended this connection")
