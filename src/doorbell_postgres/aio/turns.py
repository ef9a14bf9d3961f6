"""Turns, on asyncio: the work that one event causes, admitted once from a log that delivers at least once.

What a turn promises is what the functions of admission.sql promise; this is the thin shell over `admission`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

from doorbell_postgres import admission
from doorbell_postgres.admission import Admitted, Claim
from doorbell_postgres.aio.store import AsyncStore, Connection
from doorbell_postgres.calls import Call
from doorbell_postgres.contract import Message, OnDuplicate, TurnState, UnfinishedTurn

T = TypeVar("T")


class AsyncStep:
    """One step of a turn, inside its block: `pending` says whether it is still to be done; write through `conn`."""

    def __init__(self, name: str, conn: Connection, pending: bool) -> None:
        self.name = name
        self.conn = conn
        """The connection whose transaction the step's record commits with."""
        self.pending = pending
        """False when an earlier attempt has done it."""


class AsyncTurn:
    """How one event stands for one handle, and the work on it for whoever owns it. Made by `bus.admit` and `bus.turn`.

    `state`: "new", "resumed" (admitted before, unfinished, nobody alive had it), "running" (somebody alive has it) or
    "duplicate" (it has ended; `failed` and `error` tell how). Work on it only if `should_run`.

    Ownership ends with `finish`, `fail`, `release`, with the bus, and with the process: killed, its turn is resumable at
    once. `step`, `reserve`, `post` and `finish` raise TurnLost for anybody but the owner. With `conn=` a call is part of
    that transaction: it holds when that commits, and is never retried.
    """

    def __init__(self, turns: AsyncTurns, handle: str, msg: Message, admitted: Admitted) -> None:
        self.handle = handle
        self.message = msg
        self.state: TurnState = admitted.state
        self.should_run = admitted.should_run
        """Whether this caller is to do the work: new and resumed yes, running never, duplicate with on_duplicate="run"."""
        self.failed = admitted.failed
        """Whether the turn has failed."""
        self.error = admitted.error
        """What the last failed attempt said."""
        self.attempt = admitted.claim.attempt
        """How often somebody began to work on it, this time included."""
        self.posts = admitted.posts
        """How many messages it has posted, in all attempts."""
        self._turns = turns
        self._claim = admitted.claim
        self._owned = admitted.should_run
        self._ended = False

    def __repr__(self) -> str:
        return f"<Turn of {self.handle!r} for {self.message.channel!r}#{self.message.seq}: {self.state}, attempt {self.attempt}>"

    @asynccontextmanager
    async def step(self, name: str, *, conn: Connection | None = None) -> AsyncIterator[AsyncStep]:
        """One step, in a transaction of its own or in the caller's: do it in the block `if step.pending:`.

        Its record commits with what the block writes through `step.conn`; an exception leaves it pending. When another
        session took the turn over meanwhile, TurnLost leaves the block and rolls that back. Keep it short: no transaction
        should span a model call.
        """
        claim = self._owner()
        if conn is not None:
            step = await self._begin(claim, name, conn)
            yield step
            await self._record(claim, step)
            return
        async with self._turns.store.transaction() as own:
            step = await self._begin(claim, name, own)
            yield step
            await self._record(claim, step)

    async def _begin(self, claim: Claim, name: str, conn: Connection) -> AsyncStep:
        return AsyncStep(name, conn, await self._turns.store._run(admission.step_pending(claim, name), conn))

    async def _record(self, claim: Claim, step: AsyncStep) -> None:
        if step.pending and not await self._turns.store._run(admission.record_step(claim, step.name), step.conn):
            raise admission.step_taken(step.name)

    async def reserve(self, correlation_id: str, *, conn: Connection | None = None) -> datetime:
        """The time, in UTC, that belongs to this correlation id: now at first, and the same ever after, in every attempt.

        The one thing to remember for an event that goes elsewhere: a retry rebuilds the same bytes from it.
        """
        return await self._turns.store._run(admission.reserve(self._owner(), correlation_id), conn)

    async def post(
        self,
        channel: str,
        body: str,
        *,
        correlation_id: str,
        headers: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        conn: Connection | None = None,
    ) -> Message:
        """Post as the turn's handle, once for this correlation id, however often the turn is retried.

        A retry gets the original message, wherever and whatever it says now: compare its body with yours to see that they
        differ. Raises as MessageBus.post, and TurnLost.
        """
        store = self._turns.store
        call = admission.post(
            self._owner(),
            self.handle,
            channel,
            body,
            correlation_id=correlation_id,
            headers=headers,
            idempotency_key=idempotency_key,
            notify=conn is not None and store._announces,
            lock_timeout=store._lock_timeout,
        )
        result = await store._run(call, conn)
        self.posts = result.posts
        if conn is None:
            store._posted(result.posted)
        return result.posted.message

    async def finish(self, *, conn: Connection | None = None) -> None:
        """End the turn: settle its deliveries, and move the cursor over the longest unbroken run of settled messages.

        A message that nobody has admitted stops the cursor. On a duplicate that is skipped, this settles its delivery. Again:
        nothing happens; a turn that has failed stays failed.
        """
        if not self._owned and self.state == "duplicate":
            await self._turns.store._run(admission.settle(self.handle, self.message), conn)
            return
        outcome = await self._turns.store._run(admission.finish(self._owner(ended=True)), conn)
        if conn is None:
            self._owned, self._ended = False, True
            self.failed = outcome == "failed"

    async def fail(
        self,
        error: str | BaseException,
        *,
        notice_to: str | None = None,
        notice: str | None = None,
        conn: Connection | None = None,
    ) -> Message | None:
        """End the turn as failed: record the error, settle as `finish` does, and say so in `notice_to`, once.

        The notice (default: the error's line) is posted only if the turn has posted nothing: it speaks only once. Returns
        that message, or None. Terminal: the event is a duplicate from then on.
        """
        store = self._turns.store
        call = admission.fail(
            self._owner(ended=True),
            error,
            notice_to=notice_to,
            notice=notice,
            notify=conn is not None and store._announces,
            lock_timeout=store._lock_timeout,
        )
        posted = await store._run(call, conn)
        if conn is None:
            self._owned, self._ended, self.failed, self.error = False, True, True, admission.error_line(error)
            if posted is not None:
                store._posted(posted)
        return None if posted is None else posted.message

    async def release(self, error: str | BaseException | None = None) -> None:
        """Give the turn back unfinished: whoever is delivered the message next resumes it. Nothing when it is not owned."""
        if self._owned:
            self._owned = False
            await self._turns.store._run(admission.release(self._claim, error))

    def _owner(self, *, ended: bool = False) -> Claim:
        if not self._owned and not (ended and self._ended):
            raise admission.not_owned(self.state)
        return self._claim

    async def _leave(self, error: BaseException | None, max_attempts: int | None) -> None:
        """What `with bus.turn(…)` does at its end."""
        what = admission.leaving(self.state, owned=self._owned, attempt=self.attempt, max_attempts=max_attempts, error=error)
        if what in ("finish", "settle"):
            await self.finish()
        elif error is not None and what != "nothing":
            try:
                # Shielded: a task that is cancelled again has given its turn back all the same.
                await asyncio.shield(self._turns.spawn(self.fail(error) if what == "fail" else self.release(error)))
            except BaseException as exc:  # the error that leaves the block matters more
                self._turns.send_later(admission.release(self._claim, error))
                admission.note(error, exc)
                if not isinstance(exc, Exception):
                    raise


class AsyncTurns:
    """One bus's side of admission: the token that says that this session lives, and what could not be given back yet."""

    def __init__(self, store: AsyncStore) -> None:
        self.store = store
        self._token = admission.new_token()
        self._unsent: list[Call[bool]] = []
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def admit(
        self,
        handle: str,
        msg: Message,
        *,
        event_id: str | None,
        on_duplicate: OnDuplicate,
        conn: Connection | None = None,
    ) -> AsyncTurn:
        admission.checked(msg, on_duplicate)
        self.store.check_usable()
        await self._sent()
        ends, unheld = asyncio.get_running_loop().time() + self._patience, 0
        holder, nonce = await self._holder(), admission.new_nonce()
        while True:
            call = admission.admit(handle, msg, event_id=event_id, on_duplicate=on_duplicate, holder=holder, nonce=nonce)
            try:
                admitted = await self.store._run(call, conn)
                if admitted is not None:
                    return AsyncTurn(self, handle, msg, admitted)
                if asyncio.get_running_loop().time() >= ends:
                    raise admission.unheld()
                unheld += 1
                held = await self._holder(unheld)
            except BaseException as exc:
                if conn is None and not admission.is_refusal(exc):
                    self.send_later(admission.abandon(handle, msg, holder=holder, nonce=nonce))
                raise
            if conn is None and held != holder:
                # What this call has taken, if its answer was lost, would not be known as its own under another token.
                self.send_later(admission.abandon(handle, msg, holder=holder, nonce=nonce))
                await self._sent()
            holder = held

    @asynccontextmanager
    async def turn(
        self, handle: str, msg: Message, *, event_id: str | None, on_duplicate: OnDuplicate, max_attempts: int | None
    ) -> AsyncIterator[AsyncTurn]:
        admission.checked(msg, on_duplicate, max_attempts)
        turn = await self.admit(handle, msg, event_id=event_id, on_duplicate=on_duplicate)
        try:
            if turn.state == "resumed" and max_attempts is not None and turn.attempt > max_attempts:
                await turn.fail(admission.given_up(turn.attempt, turn.error))
                turn.state, turn.should_run = "duplicate", False
            yield turn
            await turn._leave(None, max_attempts)
        except BaseException as error:  # also of the end itself: a turn that was left is not held
            await turn._leave(error, max_attempts)
            raise

    async def unfinished(self, handle: str) -> list[UnfinishedTurn]:
        return await self.store._run(admission.unfinished(handle))

    def send_later(self, call: Call[bool]) -> None:
        """What this session does not give back reads as running as long as it lives: it is sent soon, and before the next
        admission."""
        self._unsent.append(call)
        self._send()

    def _send(self) -> asyncio.Task[None] | None:
        if self._unsent and (self._sending is None or self._sending.done()):
            self._sending = self.spawn(self._send_unsent())
        return self._sending if self._sending is not None and not self._sending.done() else None

    async def _sent(self) -> None:
        if (sending := self._send()) is not None:
            await asyncio.shield(sending)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on when the task that wants it is cancelled."""
        task = asyncio.create_task(work, name="doorbell-turn")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits the task has it; nobody else needs it

    async def _send_unsent(self) -> None:
        while self._unsent:
            call = self._unsent.pop(0)
            try:
                await self.store._run(call)
            except BaseException:
                self._unsent.append(call)
                raise

    @property
    def _patience(self) -> float:
        return max(5.0, self.store._retry_for)

    async def _holder(self, unheld: int = 0) -> int:
        """A token that the listener's session holds, so far as it knows; 0 where no session can be held.

        `unheld`: how often the database has said since that nobody holds it.
        """
        listener, token = (await self.store.opened()).listener, self._token
        if not unheld and listener.holds(token):
            return token
        if unheld > 1:
            listener.redial()
        held = await listener.hold(token, self._patience)
        while held is False:  # an earlier session of this bus has it, which ends at any moment
            token = self._token = admission.new_token()
            held = await listener.hold(token, self._patience)
        return token if held else 0
