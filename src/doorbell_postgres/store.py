"""The log and its cursors, synchronously: what `Store` promises is what the functions in the database promise."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import psycopg
from psycopg.rows import tuple_row

from doorbell_postgres import calls, throwaway, wire
from doorbell_postgres import migrate as migration
from doorbell_postgres.calls import Call, Outgoing, Posted, ReadTimes, Traffic, Unposted
from doorbell_postgres.contract import Backlog, Draft, Message, Notify, Start
from doorbell_postgres.listener import Listener
from doorbell_postgres.notifier import Notifier
from doorbell_postgres.pool import Connection, Pool
from doorbell_postgres.sharing import Sharing

T = TypeVar("T")
log = logging.getLogger("doorbell_postgres")


class Activity(threading.Condition):
    """A condition that knows whether anybody waits: nobody does at most posts, and notify_all is the dearest part of telling."""

    def __init__(self) -> None:
        self._own_lock = threading.RLock()
        self._count = 0
        super().__init__(self._own_lock)

    def wait(self, timeout: float | None = None) -> bool:
        self._count += 1
        try:
            return super().wait(timeout)
        finally:
            self._count -= 1

    def tell(self) -> None:
        with self._own_lock:
            if self._count:
                self.notify_all()


class Store:
    """Channels, messages and cursors on one database. Thread-safe; not for use after fork().

    `dsn` goes to libpq as it is. None means DOORBELL_DSN, else ":memory:": a private throwaway server of this process.
    `migrate=True` brings the schema to this package's revision first.

    Calls that may be repeated (reads, acks, subscriptions, posts with a key) are retried on transient errors for at most
    `retry_for` seconds. A post waits for its channel at most `lock_timeout` seconds, then raises ChannelBusy.

    Raises DatabaseUnavailable, SchemaMismatch or InvalidInput when it cannot be opened.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        migrate: bool = False,
        notify: Notify = "coalesced",
        max_size: int = 4,
        application_name: str | None = None,
        connect_timeout: float = 5,
        retry_for: float = 30,
        lock_timeout: float = 5,
    ) -> None:
        self._pid = os.getpid()
        self._closed = False
        settings = wire.settings(
            dsn,
            migrate=migrate,
            notify=notify,
            max_size=max_size,
            application_name=application_name,
            connect_timeout=connect_timeout,
            retry_for=retry_for,
            lock_timeout=lock_timeout,
        )
        self._retry_for, self._lock_timeout = settings.retry_for, settings.lock_timeout
        self._announces = settings.announces
        if settings.dsn == wire.MEMORY:
            log.warning(wire.MEMORY_WARNING)
            settings = settings.on(throwaway.shared().create_database())
        self._check_opening(settings)

        self._pool = Pool(settings)
        self.activity = Activity()
        # The threads of these two know nothing of this store, so that one which is dropped unclosed is collected.
        self.listener = Listener(settings.dsn, settings.options, listen=self._announces, on_news=self.activity.tell)
        self._notifier = Notifier(partial(_announce, self._pool))
        self._sharing = Sharing()
        self._traffic = Traffic()
        self.read_times = ReadTimes()
        self._finalizer = weakref.finalize(self, _shut, self._pid, self._notifier, self.listener, self._pool)

    # -- the log ------------------------------------------------------------------------------------------------------

    def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        return self._run(calls.channels())

    def head(self, channel: str) -> int:
        """The seq of the newest message; 0 for a channel that is empty or absent."""
        return self._run(calls.head(channel))

    def post(
        self,
        channel: str,
        sender: str,
        body: str,
        *,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        conn: Connection | None = None,
    ) -> Message:
        """Append one message; see MessageBus.post. Sender comes before body here, as in the reference."""
        message = calls.outgoing(channel, body, sender=sender, idempotency_key=idempotency_key, headers=headers)
        if conn is not None:
            call = calls.post(message, notify=self._announces, lock_timeout=self._lock_timeout)
            return (self._run(call, conn)).message
        self.check_usable()  # before its lock, which a fork may have copied as taken
        return self._sharing.post(message, self._post_alone, self._post_together).message

    def post_many(
        self, channel: str, messages: Iterable[str | Draft], *, sender: str, conn: Connection | None = None
    ) -> list[Message]:
        """Append many messages to one channel; see MessageBus.post_many."""
        call = calls.post_many(
            channel,
            messages,
            sender=sender,
            notify=conn is not None and self._announces,
            lock_timeout=self._lock_timeout,
        )
        posted = self._run(call, conn)
        if conn is None and posted:
            self._posted(posted[0])
        return [each.message for each in posted]

    def messages_after(self, channel: str, after_seq: int, *, limit: int = 100) -> list[Message]:
        """At most `limit` messages behind `after_seq`, in order; [] for a channel that is absent."""
        return self._run(calls.messages_after(channel, after_seq, limit=limit))

    # -- cursors ------------------------------------------------------------------------------------------------------

    def subscribe(self, handle: str, channel: str, *, at: Start = "head", conn: Connection | None = None) -> None:
        """Give the handle a cursor on the channel, unless it has one; see MessageBus.subscribe."""
        self._run(calls.subscribe(handle, channel, at=at, lock_timeout=self._lock_timeout), conn)

    def unsubscribe(self, handle: str, channel: str, *, conn: Connection | None = None) -> bool:
        """Remove the handle's cursor; False when there was none. Raises UnknownChannel."""
        return self._run(calls.unsubscribe(handle, channel), conn)

    def subscriptions(self, handle: str) -> list[str]:
        """The names of the channels that the handle is subscribed to, sorted; [] for an unknown handle."""
        return self._run(calls.subscriptions(handle))

    def acked_seq(self, handle: str, channel: str) -> int:
        """Where the cursor stands. Raises UnknownChannel, NotSubscribed."""
        return self._run(calls.acked_seq(handle, channel))

    def ack(self, handle: str, channel: str, up_to: int, *, conn: Connection | None = None) -> int:
        """Move the cursor forward to `up_to` and return where it stands; see MessageBus.ack."""
        return self._run(calls.ack(handle, channel, up_to, self.read_times.time_of), conn)

    def skip_pruned(self, handle: str, channel: str, *, conn: Connection | None = None) -> int:
        """Give up what retention has removed unread; see MessageBus.skip_pruned."""
        return self._run(calls.skip_pruned(handle, channel), conn)

    def page(self, handle: str, after: tuple[str, int] | None, *, page_size: int, max_bytes: int | None = None) -> list[Message]:
        """One page of what the handle has not acked, behind the position `after`; [] is the head of all channels."""
        return self._run(calls.unacked(handle, after, page_size=page_size, max_bytes=max_bytes))

    def backlog(self, handle: str | None = None) -> list[Backlog]:
        """How far each handle, or this one, is behind on each channel, by handle and channel."""
        return self._run(calls.backlog(handle))

    def unacked_count(self, channel: str | None, handle: str | None) -> int:
        """How many messages wait behind cursors, of one channel, one handle, both, or all."""
        return self._run(calls.unacked_count(channel, handle))

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection in a transaction (READ COMMITTED) that commits when the block ends, and rolls back when it raises.

        Pass it as `conn=`. Nothing in it is retried, and its posts hold their channels until it ends: keep it short.
        """
        self.check_usable()
        with self._pool.connection(self._retry_for) as connection, connection.transaction():
            yield connection

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Announce what is pending, wake every bell, let the connections go. Returns within 3 s; again is a no-op."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._finalizer()
        self.activity.tell()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _run(self, call: Call[T], conn: Connection | None = None) -> T:
        """Send the call: on the caller's connection once and as it is, else on one of ours, again where that is safe."""
        self.check_usable()
        if conn is not None:
            wire.refuse_foreign(conn, psycopg.Connection)
            try:
                return _send(conn, call)
            except psycopg.Error as exc:
                raise wire.translate(exc, call) from None
        began = time.monotonic()
        attempts: wire.Attempts | None = None
        while True:
            sent = False
            try:
                connection = self._pool.borrow(attempts.remaining() if attempts else self._retry_for)
                try:
                    sent = True
                    result = call.read(connection.send(call.sql, call.params))
                    self._pool.give_back(connection)
                except BaseException as exc:
                    self._pool.give_back(connection, exc)
                    raise
                return result
            except psycopg.Error as exc:
                attempts = attempts or wire.Attempts(call, began + self._retry_for)
                time.sleep(attempts.after(exc, sent=sent))

    def _post_alone(self, message: Outgoing) -> Posted:
        announced = False
        posted: Posted | Unposted = calls.BUSY
        if self._traffic.is_quiet(message.channel):
            posted = self._run(calls.try_post(message))
        if posted is calls.BUSY:
            announced = self._announces and self._notifier.is_free()
            busy = self._traffic.is_busy(message.channel)
            call = calls.post_combined(message, announce=announced, lock_timeout=self._lock_timeout, busy=busy)
            posted = self._run(call)
        if isinstance(posted, Unposted):
            announced = False
            posted = self._run(calls.post(message, notify=False, lock_timeout=self._lock_timeout))
        self._traffic.note(posted)
        self._posted(posted, announced=announced)
        return posted

    def _post_together(self, messages: list[Outgoing]) -> list[Posted]:
        if len(messages) == 1:
            return [self._post_alone(messages[0])]
        posted = self._run(calls.post_together(messages, lock_timeout=self._lock_timeout))
        self._posted(posted[0])
        return posted

    def peek(self, call: Call[T]) -> T:
        """Run a read on the listener's connection, where the database itself refuses writes."""
        self.check_usable()
        return self.listener.run(call, max(wire.POOL_LEAST, self._retry_for))

    def check_fork(self) -> None:
        if self._pid != os.getpid():
            raise wire.forked()

    def check_usable(self) -> None:
        if self._pid != os.getpid():
            raise wire.forked()
        if self._closed:
            raise wire.closed()

    def _posted(self, posted: Posted, *, announced: bool = False) -> None:
        """After a commit: tell the bells of this process directly and, where one may wait elsewhere, the notifier.

        What one call has posted together is in one channel, and one of them stands for all.
        """
        self.listener.announced(posted.channel_id)
        if posted.armed and self._announces:
            if announced:
                self._notifier.rest()
            else:
                self._notifier.announce([posted.channel_id])
        self.activity.tell()

    @staticmethod
    def _check_opening(settings: wire.Settings) -> None:
        try:
            if settings.migrate:
                migration.upgrade(settings.dsn)
            with psycopg.connect(settings.dsn, autocommit=True, **settings.options) as connection:
                connection.prepare_threshold = None
                call = calls.hello()
                try:
                    hello = _send(connection, call)
                except psycopg.Error as exc:
                    raise wire.translate(exc, call) from None
        except psycopg.OperationalError as exc:
            raise wire.unreachable(exc) from None
        wire.check_hello(hello)


def _announce(pool: Pool, take: Callable[[], list[int]]) -> None:
    with pool.connection(timeout=wire.POOL_PATIENCE) as connection:
        call = calls.announce(take())
        connection.send(call.sql, call.params)


def _send(connection: Connection, call: Call[T]) -> T:
    """On a connection of the caller's, which may have been given another row factory."""
    return call.read(psycopg.Cursor(connection, row_factory=tuple_row).execute(call.sql, call.params).fetchall())


def _shut(pid: int, notifier: Notifier, listener: Listener, pool: Pool) -> None:
    """Also at exit, for a bus that nobody closed: pending announcements go out, and no thread outlives the script."""
    if pid != os.getpid():
        return
    notifier.close()
    listener.close()
    pool.close()
