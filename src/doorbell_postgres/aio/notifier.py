"""Tells other processes' bells of new posts, after the posts and apart from them; see the sync notifier for why.

One task, and only while there is something to announce: the first at once, those that follow gathered for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from psycopg_pool import PoolTimeout

from doorbell_postgres.watch import GATHER, rest_after

log = logging.getLogger("doorbell_postgres")


class Notifier:
    """Announces channels through `send`, which calls what it is given for the channels; see the sync notifier."""

    def __init__(self, send: Callable[[Callable[[], list[int]]], Awaitable[None]]) -> None:
        self._send = send
        self._pending: set[int] = set()
        self._taken: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._rests_until = 0.0
        self._began: float | None = None

    def is_free(self) -> bool:
        """Whether a post may announce itself, in its own call."""
        return not self._pending and time.monotonic() >= self._rests_until

    def rest(self) -> None:
        """A post has announced itself."""
        self._rests_until = time.monotonic() + GATHER

    def announce(self, channel_ids: list[int]) -> None:
        if self._closing.is_set():
            return
        self._pending.update(channel_ids)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="doorbell-notifier")

    async def close(self, timeout: float = 1.0) -> None:
        """Announce what is pending, then end; gives up after `timeout`."""
        self._closing.set()
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=timeout)
            self._task.cancel()

    async def _run(self) -> None:
        while self._pending:
            self._began = None
            try:
                if (rest := self._rests_until - time.monotonic()) > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(rest):
                            await self._closing.wait()
                await self._send(self._take)
            except asyncio.CancelledError:
                await self._last_words()
                raise
            except PoolTimeout:  # all are busy
                if self._closing.is_set():
                    return
            except Exception as exc:
                if self._began is None:
                    self._take()
                log.debug("announcement dropped (%s); bells find the posts by polling", type(exc).__name__)
            self._taken.clear()
            self._rests_until = rest_after(self._began, time.monotonic())

    def _take(self) -> list[int]:
        self._taken, self._pending = self._pending, set()
        self._began = time.monotonic()
        return sorted(self._taken)

    async def _last_words(self) -> None:
        """The loop ends and nobody has closed the bus: a script that posts last has announced it all the same."""
        if not self._closing.is_set():
            self._pending |= self._taken
            with suppress(Exception):
                async with asyncio.timeout(0.5):
                    await self._send(self._take)
