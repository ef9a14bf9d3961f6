"""Turns, synchronously: the work that one event causes, admitted once from a log that delivers at least once.

What a turn promises is what the functions of admission.sql promise; this is the thin shell over `admission`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from doorbell_postgres import admission
from doorbell_postgres.admission import Admitted, Claim
from doorbell_postgres.calls import Call
from doorbell_postgres.contract import Message, OnDuplicate, TurnState, UnfinishedTurn
from doorbell_postgres.pool import Connection
from doorbell_postgres.store import Store


class Step:
    """One step of a turn, inside its block: `pending` says whether it is still to be done; write through `conn`."""

    def __init__(self, name: str, conn: Connection, pending: bool) -> None:
        self.name = name
        self.conn = conn
        """The connection whose transaction the step's record commits with."""
        self.pending = pending
        """False when an earlier attempt has done it."""


class Turn:
    """How one event stands for one handle, and the work on it for whoever owns it. Made by `bus.admit` and `bus.turn`.

    `state`: "new", "resumed" (admitted before, unfinished, nobody alive had it), "running" (somebody alive has it) or
    "duplicate" (it has ended; `failed` and `error` tell how). Work on it only if `should_run`.

    Ownership ends with `finish`, `fail`, `release`, with the bus, and with the process: killed, its turn is resumable at
    once. `step`, `reserve`, `post` and `finish` raise TurnLost for anybody but the owner. With `conn=` a call is part of
    that transaction: it holds when that commits, and is never retried.
    """

    def __init__(self, turns: Turns, handle: str, msg: Message, admitted: Admitted) -> None:
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

    @contextmanager
    def step(self, name: str, *, conn: Connection | None = None) -> Iterator[Step]:
        """One step, in a transaction of its own or in the caller's: do it in the block `if step.pending:`.

        Its record commits with what the block writes through `step.conn`; an exception leaves it pending. When another
        session took the turn over meanwhile, TurnLost leaves the block and rolls that back. Keep it short: no transaction
        should span a model call.
        """
        claim = self._owner()
        if conn is not None:
            step = self._begin(claim, name, conn)
            yield step
            self._record(claim, step)
            return
        with self._turns.store.transaction() as own:
            step = self._begin(claim, name, own)
            yield step
            self._record(claim, step)

    def _begin(self, claim: Claim, name: str, conn: Connection) -> Step:
        return Step(name, conn, self._turns.store._run(admission.step_pending(claim, name), conn))

    def _record(self, claim: Claim, step: Step) -> None:
        if step.pending and not self._turns.store._run(admission.record_step(claim, step.name), step.conn):
            raise admission.step_taken(step.name)

    def reserve(self, correlation_id: str, *, conn: Connection | None = None) -> datetime:
        """The time, in UTC, that belongs to this correlation id: now at first, and the same ever after, in every attempt.

        The one thing to remember for an event that goes elsewhere: a retry rebuilds the same bytes from it.
        """
        return self._turns.store._run(admission.reserve(self._owner(), correlation_id), conn)

    def post(
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
        result = store._run(call, conn)
        self.posts = result.posts
        if conn is None:
            store._posted(result.posted)
        return result.posted.message

    def finish(self, *, conn: Connection | None = None) -> None:
        """End the turn: settle its deliveries, and move the cursor over the longest unbroken run of settled messages.

        A message that nobody has admitted stops the cursor. On a duplicate that is skipped, this settles its delivery. Again:
        nothing happens; a turn that has failed stays failed.
        """
        if not self._owned and self.state == "duplicate":
            self._turns.store._run(admission.settle(self.handle, self.message), conn)
            return
        outcome = self._turns.store._run(admission.finish(self._owner(ended=True)), conn)
        if conn is None:
            self._owned, self._ended = False, True
            self.failed = outcome == "failed"

    def fail(
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
        posted = store._run(call, conn)
        if conn is None:
            self._owned, self._ended, self.failed, self.error = False, True, True, admission.error_line(error)
            if posted is not None:
                store._posted(posted)
        return None if posted is None else posted.message

    def release(self, error: str | BaseException | None = None) -> None:
        """Give the turn back unfinished: whoever is delivered the message next resumes it. Nothing when it is not owned."""
        if self._owned:
            self._owned = False
            self._turns.store._run(admission.release(self._claim, error))

    def _owner(self, *, ended: bool = False) -> Claim:
        if not self._owned and not (ended and self._ended):
            raise admission.not_owned(self.state)
        return self._claim

    def _leave(self, error: BaseException | None, max_attempts: int | None) -> None:
        """What `with bus.turn(…)` does at its end."""
        what = admission.leaving(self.state, owned=self._owned, attempt=self.attempt, max_attempts=max_attempts, error=error)
        if what in ("finish", "settle"):
            self.finish()
        elif error is not None and what != "nothing":
            try:
                if what == "fail":
                    self.fail(error)
                else:
                    self.release(error)
            except BaseException as exc:  # the error that leaves the block matters more
                self._turns.send_later(admission.release(self._claim, error))
                admission.note(error, exc)
                if not isinstance(exc, Exception):
                    raise


class Turns:
    """One bus's side of admission: the token that says that this session lives, and what could not be given back yet."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._token = admission.new_token()
        self._unsent: list[Call[bool]] = []
        self._lock = threading.Lock()

    def admit(
        self,
        handle: str,
        msg: Message,
        *,
        event_id: str | None,
        on_duplicate: OnDuplicate,
        conn: Connection | None = None,
    ) -> Turn:
        admission.checked(msg, on_duplicate)
        self.store.check_usable()
        self._send_unsent()
        ends, unheld = time.monotonic() + self._patience, 0
        holder, nonce = self._holder(), admission.new_nonce()
        while True:
            call = admission.admit(handle, msg, event_id=event_id, on_duplicate=on_duplicate, holder=holder, nonce=nonce)
            try:
                admitted = self.store._run(call, conn)
                if admitted is not None:
                    return Turn(self, handle, msg, admitted)
                if time.monotonic() >= ends:
                    raise admission.unheld()
                unheld += 1
                held = self._holder(unheld)
            except BaseException as exc:
                if conn is None and not admission.is_refusal(exc):
                    self.send_later(admission.abandon(handle, msg, holder=holder, nonce=nonce))
                raise
            if conn is None and held != holder:
                # What this call has taken, if its answer was lost, would not be known as its own under another token.
                self.send_later(admission.abandon(handle, msg, holder=holder, nonce=nonce))
                self._send_unsent()
            holder = held

    @contextmanager
    def turn(
        self, handle: str, msg: Message, *, event_id: str | None, on_duplicate: OnDuplicate, max_attempts: int | None
    ) -> Iterator[Turn]:
        admission.checked(msg, on_duplicate, max_attempts)
        turn = self.admit(handle, msg, event_id=event_id, on_duplicate=on_duplicate)
        try:
            if turn.state == "resumed" and max_attempts is not None and turn.attempt > max_attempts:
                turn.fail(admission.given_up(turn.attempt, turn.error))
                turn.state, turn.should_run = "duplicate", False
            yield turn
            turn._leave(None, max_attempts)
        except BaseException as error:  # also of the end itself: a turn that was left is not held
            turn._leave(error, max_attempts)
            raise

    def unfinished(self, handle: str) -> list[UnfinishedTurn]:
        return self.store._run(admission.unfinished(handle))

    def send_later(self, call: Call[bool]) -> None:
        """The database is away, and this session lives: what it does not give back reads as running."""
        with self._lock:
            self._unsent.append(call)

    def _send_unsent(self) -> None:
        while self._unsent:
            with self._lock:
                if not self._unsent:
                    return
                call = self._unsent.pop(0)
            try:
                self.store._run(call)
            except BaseException:
                self.send_later(call)
                raise

    @property
    def _patience(self) -> float:
        return max(5.0, self.store._retry_for)

    def _holder(self, unheld: int = 0) -> int:
        """A token that the listener's session holds, so far as it knows; 0 where no session can be held.

        `unheld`: how often the database has said since that nobody holds it.
        """
        listener, token = self.store.listener, self._token
        if not unheld and listener.holds(token):
            return token
        if unheld > 1:
            listener.redial()
        held = listener.hold(token, self._patience)
        while held is False:  # an earlier session of this bus has it, which ends at any moment
            token = self._token = admission.new_token()
            held = listener.hold(token, self._patience)
        return token if held else 0
