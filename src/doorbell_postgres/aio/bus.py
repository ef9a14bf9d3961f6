"""The async bus: what an agent session uses in an event loop. A thin shell over the async store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager

from doorbell_postgres import calls
from doorbell_postgres.aio.store import AsyncStore, Connection
from doorbell_postgres.aio.turns import AsyncTurn, AsyncTurns
from doorbell_postgres.contract import Backlog, Draft, Message, Notify, OnDuplicate, Start, UnfinishedTurn
from doorbell_postgres.watch import ListenerState


class AsyncMessageBus:
    """Durable pub/sub for sessions that die; the promises are those of MessageBus.

    Making one does no I/O, in or outside a loop: `async with` or the first awaited call opens it, and binds it to its event
    loop. It is for the tasks of that loop; in another every call raises WrongLoop. Cancelling a call at any point loses no
    connection. `activity` is an asyncio.Condition.

    >>> async with AsyncMessageBus("postgresql://localhost/team") as bus:     # doctest: +SKIP
    ...     await bus.subscribe("worker", "events")
    ...     await bus.post("events", "deploy finished", sender="ci")
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
        self.store = AsyncStore(
            dsn,
            migrate=migrate,
            notify=notify,
            max_size=max_size,
            application_name=application_name,
            connect_timeout=connect_timeout,
            retry_for=retry_for,
            lock_timeout=lock_timeout,
        )
        self.activity = self.store.activity
        self._turns = AsyncTurns(self.store)

    async def post(
        self,
        channel: str,
        body: str,
        *,
        sender: str,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        conn: Connection | None = None,
    ) -> Message:
        """Append one message and return it. When this returns, it is durable and has the channel's next number.

        With an `idempotency_key` that the channel has seen, the original comes back unchanged and nothing is posted.
        With `conn`, the post is part of that transaction: it exists when that commits, and is never retried.

        Raises InvalidInput before anything is sent; ChannelBusy when another transaction held the channel for longer than
        `lock_timeout`; OutcomeUnknown when the connection broke under a post without a key, or under one
        with a key whose repetition was refused.
        """
        return await self.store.post(channel, sender, body, idempotency_key=idempotency_key, headers=headers, conn=conn)

    async def post_many(
        self, channel: str, messages: Iterable[str | Draft], *, sender: str, conn: Connection | None = None
    ) -> list[Message]:
        """Append many messages to one channel: one contiguous run of numbers in the order given, all or nothing.

        Items are bodies or Drafts. A draft with a known key, or with the key of an earlier one, comes back as its original.
        """
        return await self.store.post_many(channel, messages, sender=sender, conn=conn)

    async def subscribe(self, handle: str, channel: str, *, at: Start = "head", conn: Connection | None = None) -> None:
        """Subscribe the handle. A post that commits after this returned is delivered. Again: the cursor stays where it is.

        "head" joins behind the newest message, "start" before the oldest kept one. Creates the channel if need be.
        """
        await self.store.subscribe(handle, channel, at=at, conn=conn)

    async def unsubscribe(self, handle: str, channel: str, *, conn: Connection | None = None) -> bool:
        """Remove the handle's cursor; False when there was none. Messages stay. Raises UnknownChannel."""
        return await self.store.unsubscribe(handle, channel, conn=conn)

    async def skip_pruned(self, handle: str, channel: str, *, conn: Connection | None = None) -> int:
        """Give up the messages that retention was forced past before the handle had acked them; how many those were.

        What answers HistoryPruned: the cursor then stands before the first kept message. 0 when nothing was lost.

        Raises UnknownChannel, NotSubscribed.
        """
        return await self.store.skip_pruned(handle, channel, conn=conn)

    async def catch_up(self, handle: str, *, page_size: int = 100) -> list[Message]:
        """Everything the handle has not acked, to the true head: channels in name order, then seq. Consumes nothing.

        The whole backlog is held in memory; `unacked` holds one page. [] for an unknown handle.
        """
        messages: list[Message] = []
        async for page in self._pages(handle, page_size, calls.UNACKED_BYTES):
            messages += page
        self.store.read_times.remember(messages)
        return messages

    def unacked(self, handle: str, *, page_size: int = 100, max_bytes: int = calls.UNACKED_BYTES) -> AsyncIterator[Message]:
        """As `catch_up`, in bounded memory: a page holds about `max_bytes` of bodies at most, and 1,000 messages.

        It begins with pages of `page_size` messages, and they grow to 1,000; a larger `page_size` stays as it is. A page may
        exceed `max_bytes` by its last body. Messages posted meanwhile to channels not passed yet are included.
        """
        calls.unacked(handle, None, page_size=page_size, max_bytes=max_bytes)  # refused now, not at the first message
        return self._messages(handle, page_size, max_bytes)

    async def _messages(self, handle: str, page_size: int, max_bytes: int) -> AsyncIterator[Message]:
        async for page in self._pages(handle, page_size, max_bytes):
            self.store.read_times.remember(page)
            for message in page:
                yield message

    async def _pages(self, handle: str, page_size: int, max_bytes: int) -> AsyncIterator[list[Message]]:
        after: tuple[str, int] | None = None
        # An empty page is the head of every channel; a short one is only the end of a page.
        while page := await self.store.page(handle, after, page_size=page_size, max_bytes=max_bytes):
            yield page
            after = page[-1].channel, page[-1].seq
            page_size = max(page_size, min(10 * page_size, calls.GROWN_PAGE))

    async def ack(self, handle: str, channel: str, up_to: int, *, conn: Connection | None = None) -> int:
        """Say that everything up to `up_to` was handled; returns where the cursor stands. It never moves back.

        Call it after handling: a crash in between means the message comes again, never that it is lost.

        Raises UnknownChannel, NotSubscribed, AckBeyondHead; LogRewound when the message that this bus returned under that
        number is no longer the one in the log.
        """
        return await self.store.ack(handle, channel, up_to, conn=conn)

    async def backlog(self, handle: str | None = None) -> list[Backlog]:
        """How far each handle, or this one, is behind on each channel, by handle and channel."""
        return await self.store.backlog(handle)

    async def wait_until_quiet(self, *, channel: str | None = None, handle: str | None = None, timeout: float) -> bool:
        """Wait until acked equals posted, for one channel, one handle, both, or all. False when `timeout` seconds passed.

        Evidence for a test that nothing more is coming; it says nothing about what is posted afterwards.
        """
        ends = time.monotonic() + calls.seconds("timeout", timeout, zero=True)
        pause = 0.01
        while await self.store.unacked_count(channel, handle):
            left = ends - time.monotonic()
            if left <= 0:
                return False
            await asyncio.sleep(min(pause, left))
            pause = min(0.25, pause * 1.5)
        return True

    async def admit(
        self,
        handle: str,
        msg: Message,
        *,
        event_id: str | None = None,
        on_duplicate: OnDuplicate = "skip",
        conn: Connection | None = None,
    ) -> AsyncTurn:
        """Take on the event that `msg` carries as a turn of the handle, once, however often and wherever it is delivered.

        The event is known by `event_id`, else by the message's header `event-id`, else by its key in its channel, else by
        its number there. See Turn for what comes back. With `conn`, the marker commits with what you write there, or not
        at all; a twin that asks meanwhile waits for that commit. End it with `finish`, `fail` or `release`.

        What is replayed after the key window is a new event. Raises UnknownChannel, InvalidInput for a message that is not
        in the log, LogRewound when another message carries its number.
        """
        return await self._turns.admit(handle, msg, event_id=event_id, on_duplicate=on_duplicate, conn=conn)

    def turn(
        self,
        handle: str,
        msg: Message,
        *,
        event_id: str | None = None,
        on_duplicate: OnDuplicate = "skip",
        max_attempts: int | None = None,
    ) -> AbstractAsyncContextManager[AsyncTurn]:
        """Admit, and end the turn with the block: work in it only `if turn.should_run:`.

        A clean exit finishes a turn that ran, settles the delivery of a duplicate, and changes nothing for one that runs
        elsewhere. An exception leaves it unfinished and released, with the error recorded and the cursor where it was, and
        propagates. From attempt `max_attempts` on it fails the turn instead, as does beginning one attempt more.
        """
        return self._turns.turn(handle, msg, event_id=event_id, on_duplicate=on_duplicate, max_attempts=max_attempts)

    async def unfinished_turns(self, handle: str) -> list[UnfinishedTurn]:
        """What the handle has taken on and not ended, the oldest first: what a predecessor left, and what lives (`held`)."""
        return await self._turns.unfinished(handle)

    def transaction(self) -> AbstractAsyncContextManager[Connection]:
        """A connection in a transaction, to pass as `conn=` beside your own statements; commits when the block ends.

        READ COMMITTED. Its posts hold their channels until it ends, so keep it short; several channels in name order.
        """
        return self.store.transaction()

    @property
    def listener(self) -> ListenerState:
        """What the connection that bells wait on is doing: idle, listening, polling only (and why), or reconnecting."""
        return self.store.state

    @property
    def closed(self) -> bool:
        return self.store.closed

    async def close(self) -> None:
        """Wake every bell with None and let the connections go. Returns within 3 s; a second call does nothing."""
        await self.store.close()

    async def __aenter__(self) -> AsyncMessageBus:
        await self.store.opened()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
