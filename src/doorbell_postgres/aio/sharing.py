"""Posts of one event loop to one channel share calls; see the sync module."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from doorbell_postgres.batches import PATIENCE, after, take
from doorbell_postgres.calls import Outgoing, Posted

Together: TypeAlias = Callable[[list[Outgoing]], Awaitable[list[Posted]]]


class _Waiting:
    """A post that found its channel in use. The future's result says what came of the call that carried it; None: go alone."""

    def __init__(self, message: Outgoing) -> None:
        self.message = message
        self.answer: asyncio.Future[Posted | BaseException | None] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Posted | BaseException | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class _Queue:
    """Who waits for the call that is under way on a channel, and how long still."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None

    def join(self, waiting: _Waiting) -> None:
        self.waiting.append(waiting)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._late)

    def _late(self) -> None:
        self._timer = None
        for each in self.waiting:
            each.settle(None)
        self.waiting.clear()

    def take(self) -> list[_Waiting]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.waiting = [each for each in self.waiting if not each.answer.done()]  # others were cancelled
        return take(self.waiting)


class Sharing:
    """Who is posting to which channel, and who waits for that."""

    def __init__(self) -> None:
        self._in_use: dict[str, _Queue] = {}
        self._carrying: set[asyncio.Task[None]] = set()

    async def post(
        self,
        message: Outgoing,
        alone: Callable[[Outgoing], Awaitable[Posted]],
        together: Together,
    ) -> Posted:
        """`alone` posts one message, `together` several of one channel in one commit. Returns when this one is posted."""
        queue = self._in_use.get(message.channel)
        if queue is None:
            self._in_use[message.channel] = _Queue()
            try:
                return await alone(message)
            finally:
                self._pass_on(message.channel, together)
        mine = _Waiting(message)
        queue.join(mine)
        answer = await mine.answer
        if isinstance(answer, Posted):
            return answer
        if answer is None:
            return await alone(message)
        with after(answer, message):
            return await alone(message)

    async def _carry(self, batch: list[_Waiting], together: Together) -> None:
        # A task of its own: whoever of them is cancelled, the others' posts go on.
        try:
            posted = await together([each.message for each in batch])
            for each, result in zip(batch, posted, strict=True):
                each.settle(result)
        except BaseException as exc:
            for each in batch:
                each.settle(exc)
            if not isinstance(exc, Exception):
                raise
        finally:
            self._pass_on(batch[0].message.channel, together)

    def _pass_on(self, channel: str, together: Together) -> None:
        batch = self._in_use[channel].take()
        if not batch:
            del self._in_use[channel]
            return
        task = asyncio.create_task(self._carry(batch, together), name="doorbell-posts")
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
