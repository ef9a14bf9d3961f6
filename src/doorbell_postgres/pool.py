"""The connections that a sync store sends its calls on."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
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

    lending: object | None = None  # another one each time, while it is lent


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
        kept: Pooled | None = None
        found: list[Pooled | None] = []
        try:
            with self._lock:
                if self._kept is not None:
                    self._kept.lending = object()
                kept, self._kept = self._kept, None
            if kept is not None:
                if not kept.readable(0):  # else the server has ended it, or is about to say so
                    return kept
                kept.close()
                self.give_back(kept)
                kept = None
            _undisturbed(lambda: self._ask(timeout, found))
            connection = found[0]
            assert connection is not None
            return connection
        except PoolClosed:
            raise wire.closed_meanwhile() from None
        except PoolTimeout as exc:
            raise self._dialer.refusal or exc from None
        except BaseException:  # Ctrl-C
            with self._lock:
                found.append(None)  # nobody waits any more
            for each in (kept, found[0]):
                if each is not None:
                    self.give_back(each)
            raise

    def _ask(self, timeout: float, found: list[Pooled | None]) -> None:
        """Add a connection to `found`; or give it back, when a None there says that nobody waits for it any more."""
        # In one step with the look: what is given back from now on goes to whoever asks the pool, not to the next call.
        with self._lock:
            connection, self._kept = self._kept, None
            asks = connection is None
            self._asking += asks
        try:
            connection = connection or self._pool.getconn(timeout=wire.pool_patience(timeout))
        finally:
            with self._lock:
                self._asking -= asks
        connection.lending = object()
        with self._lock:
            is_late = bool(found)
            if not is_late:
                found.append(connection)
        if is_late:
            self.give_back(connection)

    def give_back(self, connection: Pooled, failure: BaseException | None = None) -> None:
        """To whoever asks for one, else kept for the next call. A second time, after Ctrl-C in the first, does nothing."""
        lending = connection.lending
        if lending is None:
            return
        if failure is not None and wire.spoils_connection(failure):
            connection.close()
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            with self._lock:
                if connection.lending is not lending:
                    return
                if self._kept is None and not self._asking and not self._closed and time.monotonic() < self._keep_until:
                    connection.lending = None
                    self._kept = connection
                    return
                self._keep_until = time.monotonic() + wire.POOL_KEEP
        _undisturbed(lambda: self._put(connection, lending))

    def _put(self, connection: Pooled, lending: object) -> None:
        with self._lock:
            if connection.lending is not lending:
                return
            connection.lending = None
        self._pool.putconn(connection)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, None
        if kept is not None:
            self._pool.putconn(kept)
        self._pool.close(timeout=0.5)


def _undisturbed(step: Callable[[], None]) -> None:
    """Run a step of psycopg's pool where no signal interrupts it: amid one, Ctrl-C would lose the connection.

    Signals come to the main thread only. Interrupted there, this one waits no more, and the step goes on to its end.
    """
    if threading.current_thread() is not threading.main_thread():
        step()
        return
    failures: list[BaseException] = []
    running = threading.Lock()  # what threading makes of locks does not stand a Ctrl-C amid a wait
    running.acquire()

    def run() -> None:
        try:
            step()
        except BaseException as exc:
            failures.append(exc)
        finally:
            running.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the interpreter is about to end
        step()
        return
    running.acquire()
    if failures:
        raise failures[0]


def _configure(connection: Connection) -> None:
    wire.set_up(connection, connection.execute(*wire.on_connect(connection, read_only=False)).fetchone())


def _check(connection: Pooled) -> None:
    if connection.readable(0):
        connection.close()
        raise psycopg.OperationalError("the server has ended this connection")
