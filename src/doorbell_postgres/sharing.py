"""Posts of one process to one channel share calls: those that come while one is under way go together in the next.

A post that finds its channel free goes at once, by itself, and waits for nobody. So do those of the main thread. Where many
wait, they do not wait for the end of the call: a second one is made beside it, so that the threads of one are at work here
while the server is at work on the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from doorbell_postgres.batches import PATIENCE, after, take
from doorbell_postgres.calls import Outgoing, Posted

# So many posts that wait are worth a call of their own, beside the one that is under way.
MANY = 14


class _Waiting:
    """A post that found its channel in use."""

    def __init__(self, message: Outgoing) -> None:
        self.message = message
        self.turn = threading.Lock()
        self.turn.acquire()
        # Before the turn comes one of these is set: what to carry, or what came of the call that carried this one.
        self.carries: list[_Waiting] = []
        self.posted: Posted | None = None
        self.failure: BaseException | None = None


class _Queue:
    """One channel, while it is in use: how many calls are under way, one or two, and who waits."""

    def __init__(self) -> None:
        self.calls = 1
        self.waiting: list[_Waiting] = []

    def next_call(self) -> _Waiting:
        """Whoever is to carry those that wait."""
        batch = take(self.waiting)
        batch[0].carries = batch
        return batch[0]


class Sharing:
    """Who is posting to which channel, and who waits for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_use: dict[str, _Queue] = {}
        self._main = threading.main_thread().ident

    def post(
        self, message: Outgoing, alone: Callable[[Outgoing], Posted], together: Callable[[list[Outgoing]], list[Posted]]
    ) -> Posted:
        """`alone` posts one message, `together` several of one channel in one commit. Returns when this one is posted."""
        if threading.get_ident() == self._main:
            # Signal handlers run here, and what they raise (Ctrl-C) comes at any point: nobody may depend on this thread.
            return alone(message)
        with self._lock:
            queue = self._in_use.get(message.channel)
            carrier = None
            if queue is None:
                self._in_use[message.channel] = _Queue()
            else:
                mine = _Waiting(message)
                queue.waiting.append(mine)
                if queue.calls == 1 and len(queue.waiting) >= MANY:
                    queue.calls = 2
                    carrier = queue.next_call()
        if queue is None:
            try:
                return alone(message)
            finally:
                self._pass_on(message.channel)
        if carrier is not None:
            carrier.turn.release()
        if not mine.turn.acquire(timeout=PATIENCE):
            with self._lock:
                late = mine in queue.waiting
                if late:
                    queue.waiting.remove(mine)
            if late:
                return alone(message)
            mine.turn.acquire()
        if mine.carries:
            self._carry(mine.carries, together)
        if mine.posted is None:
            assert mine.failure is not None
            with after(mine.failure, message):
                return alone(message)
        return mine.posted

    def _carry(self, batch: list[_Waiting], together: Callable[[list[Outgoing]], list[Posted]]) -> None:
        try:
            posted = together([each.message for each in batch])
            for each, result in zip(batch, posted, strict=True):
                each.posted = result
        except BaseException as exc:
            for each in batch:
                each.failure = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            self._pass_on(batch[0].message.channel)
            for each in batch[1:]:
                each.turn.release()

    def _pass_on(self, channel: str) -> None:
        with self._lock:
            queue = self._in_use[channel]
            if len(queue.waiting) < (MANY if queue.calls == 2 else 1):
                queue.calls -= 1
                if queue.calls == 0:
                    del self._in_use[channel]
                return
            carrier = queue.next_call()
        carrier.turn.release()
