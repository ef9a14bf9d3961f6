"""The log and its cursors, asynchronously: the names and promises of the sync Store, with `await`."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.generators import execute
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from doorbell_postgres import calls, throwaway, wire
from doorbell_postgres import migrate as migration
from doorbell_postgres.aio.listener import Listener, Wire, drive
from doorbell_postgres.aio.notifier import Notifier
from doorbell_postgres.aio.sharing import Sharing
from doorbell_postgres.calls import Call, Outgoing, Posted, ReadTimes, Traffic, Unposted
from doorbell_postgres.contract import Backlog, Draft, Message, Notify, Start
from doorbell_postgres.watch import ListenerState

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]
log = logging.getLogger("doorbell_postgres")

# How long the server is given to end the query of a call that was cancelled; after that its connection is given up.
SETTLE = 1.0


class Session(psycopg.AsyncConnection[Any]):
    """A connection for calls: a call that is cancelled ends its query on the server, in bounded time, or closes it."""

    @cached_property
    def readable(self) -> wire.Readable:
        return wire.readable(self.fileno())

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        try:
            return await drive(gen, self.pgconn.socket)
        except asyncio.CancelledError:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                await self._end(gen)
            raise

    async def _end(self, gen: PQGen[Any]) -> None:
        try:
            async with asyncio.timeout(SETTLE):
                for again in itertools.count():
                    await self.cancel_safe(timeout=SETTLE)
                    try:
                        await drive(gen, self.pgconn.socket, wire.CANCEL_AGAIN)
                    except wire.Late:
                        continue
                    except psycopg.errors.QueryCanceled:
                        if not again:
                            return
                    except psycopg.Error as exc:
                        log.debug("a cancelled call was refused anyway (%s)", type(exc).__name__)
                    break
                # A cancel may still be on its way. It shall hit nothing but this empty query.
                self.pgconn.send_query(b"")
                await drive(execute(self.pgconn), self.pgconn.socket)
                return
        except BaseException as exc:  # whatever it was, a second cancellation included: this connection is not to be trusted
            log.debug("a cancelled call gives its connection up (%s)", type(exc).__name__)
            self.pgconn.finish()


class _Dialer:
    """Stands where the pool expects a connection class: keeps why the last dial failed, and which it has made."""

    def __init__(self) -> None:
        self.refusal: psycopg.Error | None = None
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._dials: set[asyncio.Task[Session]] = set()
        self._stopped = False

    async def connect(self, conninfo: str, **options: Any) -> Session:
        dial = asyncio.create_task(self._connect(conninfo, options), name="doorbell-dial")
        self._dials.add(dial)
        try:
            session = await dial
        except psycopg.Error as exc:
            self.refusal = exc
            raise
        except asyncio.CancelledError:
            if self._stopped:
                raise psycopg.OperationalError("closed while dialling") from None
            raise
        finally:
            dial.cancel()
            self._dials.discard(dial)
        self.refusal = None
        self.sessions.add(session)
        return session

    async def _connect(self, conninfo: str, options: dict[str, Any]) -> Session:
        session = await Session.connect(conninfo, **options)
        try:
            cursor = await session.execute(*wire.on_connect(session, read_only=False))
            wire.set_up(session, await cursor.fetchone())
        except BaseException:
            await session.close()
            raise
        return session

    def stop(self) -> None:
        self._stopped = True
        for dial in self._dials:
            dial.cancel()


class Link:
    """What a bus holds once it is open: the pool, the listener and the notifier, all of one event loop."""

    def __init__(self, settings: wire.Settings, activity: Activity) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self._dialer = _Dialer()
        self._pool: AsyncConnectionPool[Session] = AsyncConnectionPool(
            **wire.pool_options(settings),
            connection_class=self._dialer,  # type: ignore[arg-type]
            open=False,
            check=_check,
        )
        self.listener = Listener(settings.dsn, settings.options, listen=settings.announces, on_news=activity.tell)
        self.notifier = Notifier(self._announce)
        # The connection that was used last, and how many tasks are asking the pool for one.
        self._kept: Session | None = None
        self._asking = 0
        self._keeps_until = time.monotonic() + wire.POOL_KEEP
        self._closing = False
        # Connections on their way from and to the pool: nobody's cancellation may stop these.
        self._moving: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        for link in [each for each in _OPEN if each.loop.is_closed()]:
            link.hang_up()
        await self._pool.open()
        _OPEN.add(self)

    @asynccontextmanager
    async def connection(self, timeout: float) -> AsyncIterator[Session]:
        """A connection of the pool. Cancelled at any point, it gets back there."""
        connection, self._kept = self._kept, None
        if connection is not None and connection.readable(0):
            await connection.close()
            self._move(self._pool.putconn(connection))
            connection = None
        if connection is None:
            connection = await self._borrow(timeout)
        try:
            yield connection
        except BaseException as exc:
            if wire.spoils_connection(exc):
                await connection.close()
            raise
        finally:
            if not self._keeps(connection):
                await asyncio.shield(self._move(self._pool.putconn(connection)))

    def _keeps(self, connection: Session) -> bool:
        """Where nobody waits for it, keep it for the next call: the pool's way there and back costs as much as a call.

        About once a minute it goes back all the same, so that the pool sees to its age.
        """
        if connection.pgconn.transaction_status != TransactionStatus.IDLE or self._asking or self._kept or self._closing:
            return False
        now = time.monotonic()
        if now >= self._keeps_until:
            self._keeps_until = now + wire.POOL_KEEP
            return False
        self._kept = connection
        return True

    async def _borrow(self, timeout: float) -> Session:
        self._asking += 1
        try:
            return await self._ask(timeout)
        finally:
            self._asking -= 1

    async def _ask(self, timeout: float) -> Session:
        asking = self._move(self._pool.getconn(timeout=wire.pool_patience(timeout)))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._unwanted)
            raise
        except PoolClosed:
            raise wire.closed_meanwhile() from None
        except PoolTimeout as exc:
            raise self._dialer.refusal or exc from None

    def _unwanted(self, asking: asyncio.Task[Session]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._move(self._pool.putconn(asking.result()))

    def _move(self, moving: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(moving, name="doorbell-pool")
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)
        return task

    async def _announce(self, take: Callable[[], list[int]]) -> None:
        async with self.connection(timeout=wire.POOL_PATIENCE) as connection:
            await _send(connection, calls.announce(take()))

    async def close(self) -> None:
        """Announce what is pending, end every wait, let the connections go: within 2.5 s."""
        _OPEN.discard(self)
        await asyncio.gather(self.notifier.close(), self.listener.close())
        self._closing = True
        if self._kept is not None:
            self._move(self._pool.putconn(self._kept))
            self._kept = None
        self._dialer.stop()
        await self._pool.close(timeout=0.5)
        if self._moving:
            await asyncio.wait(self._moving, timeout=0.3)
        for task in self._moving:
            task.cancel()
        if self._moving:
            await asyncio.wait(self._moving, timeout=0.3)

    def close_soon(self) -> None:
        """Nobody holds the bus any more."""
        self._last = self.loop.create_task(self.close(), name="doorbell-close")

    def hang_up(self) -> None:
        """For a loop that is closed: nothing can be awaited any more."""
        _OPEN.discard(self)
        for session in list(self._dialer.sessions):
            session.pgconn.finish()


_OPEN: set[Link] = set()


@atexit.register
def _close_all() -> None:
    """For buses that nobody closed: pending announcements go out, and no task is destroyed in the middle of its life."""
    for link in [each for each in _OPEN if each.pid == os.getpid()]:
        with suppress(Exception):
            if link.loop.is_closed():
                link.hang_up()
            elif link.loop.is_running():
                asyncio.run_coroutine_threadsafe(link.close(), link.loop).result(timeout=1.5)
            else:
                link.loop.run_until_complete(asyncio.wait_for(link.close(), timeout=1.5))


def _dropped(link: Link) -> None:
    if link.pid == os.getpid() and not link.loop.is_closed():
        with suppress(RuntimeError):  # closed in this very moment
            link.loop.call_soon_threadsafe(link.close_soon)


class Activity:
    """The condition that waiting tasks of this process look at, told from places that cannot wait for its lock."""

    def __init__(self) -> None:
        self.condition = asyncio.Condition()
        self._telling: asyncio.Task[None] | None = None

    def tell(self) -> None:
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell(), name="doorbell-activity")

    async def _tell(self) -> None:
        try:
            async with self.condition:
                self.condition.notify_all()
        finally:
            self._telling = None

    async def told(self, timeout: float) -> None:
        if self._telling is not None:
            await asyncio.wait({self._telling}, timeout=timeout)


class AsyncStore:
    """Channels, messages and cursors on one database, for the tasks of one event loop; not for use after fork().

    The parameters are those of Store. Making one does no I/O: `async with` or the first call opens it, and raises
    DatabaseUnavailable or SchemaMismatch when it cannot be opened. InvalidInput comes at once.

    Cancelling a call at any point loses no connection. Whether a post that was cancelled is in the log is not known; with
    a key it can be sent again.
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
        self._settings = wire.settings(
            dsn,
            migrate=migrate,
            notify=notify,
            max_size=max_size,
            application_name=application_name,
            connect_timeout=connect_timeout,
            retry_for=retry_for,
            lock_timeout=lock_timeout,
        )
        self._retry_for, self._lock_timeout = self._settings.retry_for, self._settings.lock_timeout
        self._announces = self._settings.announces
        self._connect_timeout = connect_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._shutting: asyncio.Task[None] | None = None
        self._activity = Activity()
        self._sharing = Sharing()
        self._traffic = Traffic()
        self.read_times = ReadTimes()
        self._made = time.monotonic()

    @property
    def activity(self) -> asyncio.Condition:
        return self._activity.condition

    # -- the log ------------------------------------------------------------------------------------------------------

    async def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        return await self._run(calls.channels())

    async def head(self, channel: str) -> int:
        """The seq of the newest message; 0 for a channel that is empty or absent."""
        return await self._run(calls.head(channel))

    async def post(
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
            return (await self._run(call, conn)).message
        await self.opened()
        return (await self._sharing.post(message, self._post_alone, self._post_together)).message

    async def post_many(
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
        posted = await self._run(call, conn)
        if conn is None and posted:
            self._posted(posted[0])
        return [each.message for each in posted]

    async def messages_after(self, channel: str, after_seq: int, *, limit: int = 100) -> list[Message]:
        """At most `limit` messages behind `after_seq`, in order; [] for a channel that is absent."""
        return await self._run(calls.messages_after(channel, after_seq, limit=limit))

    # -- cursors ------------------------------------------------------------------------------------------------------

    async def subscribe(self, handle: str, channel: str, *, at: Start = "head", conn: Connection | None = None) -> None:
        """Give the handle a cursor on the channel, unless it has one; see MessageBus.subscribe."""
        await self._run(calls.subscribe(handle, channel, at=at, lock_timeout=self._lock_timeout), conn)

    async def unsubscribe(self, handle: str, channel: str, *, conn: Connection | None = None) -> bool:
        """Remove the handle's cursor; False when there was none. Raises UnknownChannel."""
        return await self._run(calls.unsubscribe(handle, channel), conn)

    async def skip_pruned(self, handle: str, channel: str, *, conn: Connection | None = None) -> int:
        """Give up what retention has removed unread; see MessageBus.skip_pruned."""
        return await self._run(calls.skip_pruned(handle, channel), conn)

    async def subscriptions(self, handle: str) -> list[str]:
        """The names of the channels that the handle is subscribed to, sorted; [] for an unknown handle."""
        return await self._run(calls.subscriptions(handle))

    async def acked_seq(self, handle: str, channel: str) -> int:
        """Where the cursor stands. Raises UnknownChannel, NotSubscribed."""
        return await self._run(calls.acked_seq(handle, channel))

    async def ack(self, handle: str, channel: str, up_to: int, *, conn: Connection | None = None) -> int:
        """Move the cursor forward to `up_to` and return where it stands; see MessageBus.ack."""
        return await self._run(calls.ack(handle, channel, up_to, self.read_times.time_of), conn)

    async def page(
        self, handle: str, after: tuple[str, int] | None, *, page_size: int, max_bytes: int | None = None
    ) -> list[Message]:
        """One page of what the handle has not acked, behind the position `after`; [] is the head of all channels."""
        return await self._run(calls.unacked(handle, after, page_size=page_size, max_bytes=max_bytes))

    async def backlog(self, handle: str | None = None) -> list[Backlog]:
        """How far each handle, or this one, is behind on each channel, by handle and channel."""
        return await self._run(calls.backlog(handle))

    async def unacked_count(self, channel: str | None, handle: str | None) -> int:
        """How many messages wait behind cursors, of one channel, one handle, both, or all."""
        return await self._run(calls.unacked_count(channel, handle))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A connection in a transaction (READ COMMITTED) that commits when the block ends, and rolls back when it raises.

        Pass it as `conn=`. Nothing in it is retried, and its posts hold their channels until it ends: keep it short.
        """
        link = await self.opened()
        async with link.connection(self._retry_for) as connection, connection.transaction():
            yield connection

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """Announce what is pending, wake every bell, let the connections go. Returns within 3 s; again is a no-op."""
        if self._pid != os.getpid():
            return
        if not self._closed:
            if self._loop is not None and self._loop.is_closed():
                self._closed = True
                if (link := self._link()) is not None:
                    link.hang_up()
                return
            self._check_loop()
            self._closed = True
            self._shutting = asyncio.create_task(self._shut(), name="doorbell-close")
        if self._shutting is not None and self._shutting.get_loop() is asyncio.get_running_loop():
            await asyncio.shield(self._shutting)

    async def _shut(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening}, timeout=0.5)
        if (link := self._link()) is not None:
            await link.close()
        self._activity.tell()
        await self._activity.told(timeout=0.1)

    async def __aenter__(self) -> AsyncStore:
        await self.opened()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _run(self, call: Call[T], conn: Connection | None = None) -> T:
        """Send the call: on the caller's connection once and as it is, else on one of ours, again where that is safe."""
        if conn is not None:
            wire.refuse_foreign(conn, psycopg.AsyncConnection)
        link = await self.opened()
        if conn is not None:
            try:
                return await _send(conn, call)
            except psycopg.Error as exc:
                raise wire.translate(exc, call) from None
        attempts = wire.Attempts(call, time.monotonic() + self._retry_for)
        while True:
            sent = False
            try:
                async with link.connection(attempts.remaining()) as connection:
                    sent = True
                    return await _send(connection, call)
            except psycopg.Error as exc:
                pause = attempts.after(exc, sent=sent)
            await asyncio.sleep(pause)

    async def _post_alone(self, message: Outgoing) -> Posted:
        announced = False
        posted: Posted | Unposted = calls.BUSY
        if self._traffic.is_quiet(message.channel):
            posted = await self._run(calls.try_post(message))
        if posted is calls.BUSY:
            announced = self._announces and (await self.opened()).notifier.is_free()
            busy = self._traffic.is_busy(message.channel)
            call = calls.post_combined(message, announce=announced, lock_timeout=self._lock_timeout, busy=busy)
            posted = await self._run(call)
        if isinstance(posted, Unposted):
            announced = False
            posted = await self._run(calls.post(message, notify=False, lock_timeout=self._lock_timeout))
        self._traffic.note(posted)
        self._posted(posted, announced=announced)
        return posted

    async def _post_together(self, messages: list[Outgoing]) -> list[Posted]:
        if len(messages) == 1:
            return [await self._post_alone(messages[0])]
        posted = await self._run(calls.post_together(messages, lock_timeout=self._lock_timeout))
        self._posted(posted[0])
        return posted

    async def peek(self, call: Call[T]) -> T:
        """Run a read on the listener's connection, where the database itself refuses writes."""
        return await (await self.opened()).listener.run(call, max(wire.POOL_LEAST, self._retry_for))

    def check_fork(self) -> None:
        if self._pid != os.getpid():
            raise wire.forked()

    def check_usable(self) -> None:
        self.check_fork()
        if self._closed:
            raise wire.closed()

    def _posted(self, posted: Posted, *, announced: bool = False) -> None:
        """After a commit: tell the bells of this process directly and, where one may wait elsewhere, the notifier."""
        link = self._link()
        if link is None:
            return
        link.listener.announced(posted.channel_id)
        if posted.armed and self._announces:
            if announced:
                link.notifier.rest()
            else:
                link.notifier.announce([posted.channel_id])
        self._activity.tell()

    def tell_activity(self) -> None:
        self._activity.tell()

    @property
    def state(self) -> ListenerState:
        """What the connection that bells wait on is doing; idle before this store was opened."""
        link = self._link()
        return link.listener.state if link else ListenerState("closed" if self._closed else "idle", None, self._made)

    # -- opening ------------------------------------------------------------------------------------------------------

    async def opened(self) -> Link:
        """What this store holds open, opened now if need be: once, however many ask, and whoever of them is cancelled."""
        self.check_usable()
        self._check_loop()
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="doorbell-open")
            self._opening.add_done_callback(self._opening_done)
        elif self._opening.done():
            return self._opening.result()
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and not (task and task.cancelling()):
                raise wire.closed_meanwhile() from None
            raise

    def _opening_done(self, opening: asyncio.Task[Link]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None  # the next call tries again
        else:
            weakref.finalize(self, _dropped, opening.result()).atexit = False

    def _link(self) -> Link | None:
        opening = self._opening
        return opening.result() if opening and opening.done() and not opening.cancelled() and not opening.exception() else None

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            if isinstance(loop, getattr(asyncio, "ProactorEventLoop", ())):
                raise wire.proactor_loop()
            self._loop = loop
        elif self._loop is not loop:
            raise wire.wrong_loop()

    async def _open(self) -> Link:
        settings = self._settings
        if settings.dsn == wire.MEMORY:
            log.warning(wire.MEMORY_WARNING)
            settings = self._settings = settings.on(await asyncio.to_thread(lambda: throwaway.shared().create_database()))
        try:
            if settings.migrate:
                await asyncio.to_thread(migration.upgrade, settings.dsn)
            hello = await self._hello(settings)
        except psycopg.OperationalError as exc:
            raise wire.unreachable(exc) from None
        wire.check_hello(hello)
        link = Link(settings, self._activity)
        await link.open()
        return link

    async def _hello(self, settings: wire.Settings) -> calls.Hello:
        connection = await Wire.connect(settings.dsn, autocommit=True, **settings.options)
        try:
            connection.patience = self._connect_timeout
            connection.prepare_threshold = None
            call = calls.hello()
            return await _send(connection, call)
        except psycopg.Error as exc:
            raise wire.translate(exc, call) from None
        finally:
            await connection.close()


async def _send(connection: Connection, call: Call[T]) -> T:
    # A cursor of our own kind: the caller's connection may have been given another row factory.
    cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
    await cursor.execute(call.sql, call.params)
    return call.read(await cursor.fetchall())


async def _check(connection: Session) -> None:
    if connection.readable(0):
        await connection.close()
        raise psycopg.OperationalError("the server has ended this connection")
