"""The async doorbell: finite, peek-only, and nothing to clean up when its task dies."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable

from doorbell_postgres import calls
from doorbell_postgres.aio.bus import AsyncMessageBus
from doorbell_postgres.aio.listener import Listener
from doorbell_postgres.contract import Message, WakeEvent
from doorbell_postgres.errors import BusClosed
from doorbell_postgres.watch import GRACE, LONGEST, MATCH_PAGE, PREVIEW, Candidate, Watch, rewound, to_nothing

log = logging.getLogger("doorbell_postgres")

Match = Callable[[Message], bool | Awaitable[bool]]


class AsyncDoorbell:
    """Rings for the next message that the handle has not acked and did not send itself; the promises are those of Doorbell.

    Making one does no I/O: channels, floors and heads are taken by `async with`, by `await bell.arm()`, or by the first
    `wait`. What is posted before that is backlog.

    `match(message)` may be a plain function or one that is awaited. It runs in the waiting task.
    """

    def __init__(
        self,
        bus: AsyncMessageBus,
        handle: str,
        *,
        match: Match | None = None,
        idle_timeout: float = 300.0,
        poll_interval: float = 0.5,
    ) -> None:
        self._bus = bus
        self._handle = handle
        self._match = match
        self._idle_timeout = calls.seconds("idle_timeout", idle_timeout, zero=True)
        self._interval = calls.seconds("poll_interval", poll_interval)
        self._floors = calls.bell_floors(handle)
        self._watch: Watch | None = None
        self._closed = False
        self._waiting = asyncio.Lock()
        self._deadlines: set[asyncio.Timeout] = set()

    @property
    def closed(self) -> bool:
        return self._closed or self._bus.closed

    async def arm(self) -> None:
        """Take channels, floors and heads now, unless that has been done. Raises what opening the bus raises."""
        await self._armed(await self._bus.store.peek(self._floors) if self._watch is None else [])

    async def _armed(self, floors: list[calls.Floor]) -> Watch:
        if self._watch is None:  # another task may have been quicker
            preview = PREVIEW if self._match is None else 0  # match reads the whole message anyway
            self._watch = Watch(self._handle, floors, poll_interval=self._interval, preview=preview)
            if not self._watch.channel_ids:
                log.warning("%s: its bell never rings", to_nothing(self._handle))
        return self._watch

    async def wait(self, timeout: float | None = None) -> WakeEvent | None:
        """The next ring, or None after `timeout` seconds (default: `idle_timeout`), or when bell or bus are closed.

        0 looks once. Returns by its deadline, whatever the network does; during an outage it goes on waiting until then.
        The next `wait` gives the next message, whether this one was acked or not, and also when this one was cancelled.

        Raises what `match` raises; SchemaMismatch or a permission error when a scan is refused; LogRewound, once, when
        the log behind it was replaced by an older one: the bell has then started over from the cursors.
        """
        timeout = self._idle_timeout if timeout is None else calls.seconds("timeout", timeout, zero=True)
        self._bus.store.check_fork()
        if self.closed:
            return None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(timeout, LONGEST)
        try:
            # Everything that follows ends by this clock, or when `close` sets it to now.
            async with asyncio.timeout_at(max(deadline, loop.time() + GRACE)) as ends:
                self._deadlines.add(ends)
                async with self._waiting:
                    return await self._wait(deadline, ends)
        except TimeoutError:
            if not ends.expired():
                raise
        except BusClosed:
            if not self.closed:
                raise
        finally:
            self._deadlines.discard(ends)
        return None

    async def _wait(self, deadline: float, ends: asyncio.Timeout) -> WakeEvent | None:
        listener = (await self._bus.store.opened()).listener
        watch = self._watch or await self._armed(await listener.run(self._floors, LONGEST))
        look_until = asyncio.get_running_loop().time() + GRACE
        with listener.watching(watch) as mailbox:
            while not self.closed:
                outcome = await mailbox.get()
                if isinstance(outcome, Candidate):
                    if self._match is None:
                        watch.passed(outcome)
                        return outcome.event()
                    self._give_grace(ends, deadline)
                    event = await self._first_match(listener, watch, outcome, self._match, deadline)
                    if event is not None:
                        return event
                    listener.again(watch, mailbox)  # what lies behind it, and the other channels
                elif isinstance(outcome, Exception):
                    raise outcome
                elif outcome == "rewound":
                    self._give_grace(ends, deadline)
                    watch.reset(await listener.run(self._floors, LONGEST))
                    raise rewound()
                elif outcome == "closed":
                    return None
                if not ends.expired():
                    looked = outcome == "nothing"
                    ends.reschedule(deadline if looked else max(deadline, look_until))
        return None

    def _give_grace(self, ends: asyncio.Timeout, deadline: float) -> None:
        if not ends.expired() and not self.closed:
            ends.reschedule(max(deadline, asyncio.get_running_loop().time() + GRACE))

    async def _first_match(
        self, listener: Listener, watch: Watch, first: Candidate, match: Match, deadline: float
    ) -> WakeEvent | None:
        """The first message of the channel, from `first` on, that matches; the floor moves past each that was looked at."""
        loop = asyncio.get_running_loop()
        after = first.seq - 1
        while True:
            page = await listener.run(calls.messages_after(first.channel, after, limit=MATCH_PAGE), LONGEST)
            for message in page:
                if message.sender != watch.handle and await self._matches(match, watch, message):
                    return watch.candidate(message).event()
                watch.passed(message)
            if len(page) < MATCH_PAGE or loop.time() >= deadline or self.closed:
                return None
            after = page[-1].seq

    @staticmethod
    async def _matches(match: Match, watch: Watch, message: Message) -> bool:
        """Cancelled in between, the message has not been looked at."""
        try:
            matches = match(message)
            if inspect.isawaitable(matches):
                matches = await matches
        except Exception:
            watch.passed(message)
            raise
        if matches:
            watch.passed(message)
        return bool(matches)

    async def close(self) -> None:
        """End a running `wait` with None, and every later one at once. A second call does nothing."""
        self._closed = True
        for ends in self._deadlines:
            if not ends.expired():
                ends.reschedule(asyncio.get_running_loop().time())
        self._bus.store.tell_activity()

    async def __aenter__(self) -> AsyncDoorbell:
        await self.arm()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
