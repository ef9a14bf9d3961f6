"""Admission's conversations with the database, and what both shells decide alike. Pure, like `calls`.

A turn's owner is whoever passes its (holder, attempt). `holder` is the token of the bus's session, 0 where no session can
be held. Every call here may be sent twice: the functions recognise what the same owner has done already.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, get_args

from doorbell_postgres import calls
from doorbell_postgres.calls import Call, Posted, Rows
from doorbell_postgres.contract import Message, OnDuplicate, TurnState, UnfinishedTurn
from doorbell_postgres.errors import (
    BusClosed,
    DatabaseUnavailable,
    DoorbellError,
    ForkedBus,
    InvalidInput,
    LogRewound,
    SchemaMismatch,
    TurnLost,
    UnknownChannel,
)
from doorbell_postgres.wakeline import sanitize

ERROR_LEN = 500
EVENT_ID_BYTES = 1_024


class Claim(NamedTuple):
    """What its owner shows for a turn."""

    channel_id: int
    turn_id: int
    attempt: int
    holder: int


class Admitted(NamedTuple):
    """What `admit` found: how the turn stood, and what it takes to work on it."""

    claim: Claim
    state: TurnState
    should_run: bool
    failed: bool
    error: str | None
    posts: int


class TurnPosted(NamedTuple):
    """The message that a turn has posted, now or before, and how many there are by now."""

    posted: Posted
    posts: int


def new_token() -> int:
    """A session's token: 56 random bits, never 0. The top byte of the advisory key is its class."""
    return secrets.randbelow(2**56 - 1) + 1


def checked(msg: object, on_duplicate: object, max_attempts: object = None) -> None:
    """Refuse what no admission can be made of."""
    if not isinstance(msg, Message):
        raise InvalidInput(
            f"msg is of type {type(msg).__name__}; it must be a Message, as catch_up, unacked and post return it. "
            "A wake event only says where to look."
        )
    if on_duplicate not in get_args(OnDuplicate):
        raise InvalidInput(
            f"on_duplicate is {on_duplicate!r}; it must be 'skip' (a turn that has ended stays so) or 'run' (it runs again)."
        )
    if max_attempts is not None:
        calls.count("max_attempts", max_attempts, least=1, most=2**31 - 1)


def new_nonce() -> int:
    """What one admit call is known by, however often it is sent."""
    return secrets.randbits(63)


def admit(
    handle: str, msg: Message, *, event_id: str | None, on_duplicate: OnDuplicate, holder: int, nonce: int
) -> Call[Admitted | None]:
    """None: nothing was taken, because nobody holds the token `holder`. Hold it, and send this again."""
    checked(msg, on_duplicate)

    def read(rows: Rows) -> Admitted | None:
        channel_id, turn_id, state, should_run, attempt, failed, error, posts = rows[0]
        if state == "unheld":
            return None
        return Admitted(Claim(channel_id, turn_id, attempt, holder), state, should_run, failed, error, posts)

    return Call(
        "select turn_channel_id, turn_id, state, should_run, attempt, failed, error, posts"
        " from doorbell.admit(%s::text, %s::text, %s::bigint, %s::text, %s::text, %s::bigint, %s::bigint,"
        " to_timestamp(%s::float8))",
        (
            calls.name("handle", handle),
            calls.name("msg.channel", msg.channel),
            calls.count("msg.seq", msg.seq, least=1, most=calls.MAX_BIGINT),
            None if event_id is None else calls.name("event_id", event_id, EVENT_ID_BYTES),
            on_duplicate,
            holder,
            nonce,
            msg.created_at,
        ),
        read,
    )


def abandon(handle: str, msg: Message, *, holder: int, nonce: int) -> Call[bool]:
    """For an admit call that has failed without a refusal: it may have taken the turn all the same."""
    return Call(
        "select doorbell.abandon_admission(%s::text, %s::text, %s::bigint, %s::bigint, %s::bigint)",
        (handle, msg.channel, msg.seq, nonce, holder),
        calls.read_one,
    )


def is_refusal(exc: BaseException) -> bool:
    """Whether an admission that failed so has certainly not happened."""
    return isinstance(exc, (InvalidInput, UnknownChannel, LogRewound, BusClosed, ForkedBus, SchemaMismatch))


def step_pending(claim: Claim, step: str) -> Call[bool]:
    return _owned("step_pending", claim, calls.name("step", step))


def record_step(claim: Claim, step: str) -> Call[bool]:
    return _owned("record_step", claim, calls.name("step", step))


def reserve(claim: Claim, correlation_id: str) -> Call[datetime]:
    correlation_id = calls.name("correlation_id", correlation_id, calls.KEY_BYTES)
    # In UTC, whatever the session's time zone: what is rebuilt from it must be the same on every host.
    return _owned("reserve", claim, correlation_id, read=lambda rows: rows[0][0].astimezone(UTC))


def _owned(function: str, claim: Claim, argument: str, *, read: Any = calls.read_one) -> Call[Any]:
    return Call(
        f"select doorbell.{function}(%s::bigint, %s::bigint, %s::integer, %s::text, %s::bigint)",
        (claim.channel_id, claim.turn_id, claim.attempt, argument, claim.holder),
        read,
    )


def post(
    claim: Claim,
    handle: str,
    channel: str,
    body: str,
    *,
    correlation_id: str,
    headers: Mapping[str, str] | None,
    idempotency_key: str | None,
    notify: bool,
    lock_timeout: float,
) -> Call[TurnPosted]:
    kept, encoded = calls.checked_headers("headers", headers)
    channel, body = calls.name("channel", channel), calls.text("body", body, calls.BODY_BYTES)
    key = None if idempotency_key is None else calls.name("idempotency_key", idempotency_key, calls.KEY_BYTES)

    def read(rows: Rows) -> TurnPosted:
        where, channel_id, seq, created_at, posted, armed, posts, *original = rows[0]
        if posted or original[0] is None:  # None: retention has removed the original, and its number is all that is left
            message = Message(where, seq, handle, body, created_at, kept, key)
        else:
            message = calls.read_message(where, seq, original[0], original[1], created_at, original[2], original[3])
        return TurnPosted(Posted(message, channel_id, armed), posts)

    return Call(
        "select posted_channel, channel_id, seq, extract(epoch from created_at)::float8, posted, armed, posts,"
        " original_sender, original_body, original_headers, original_key"
        " from doorbell.turn_post(%s::bigint, %s::bigint, %s::integer, %s::text, %s::text, %s::text, %s::jsonb, %s::text,"
        " %s::bigint, %s::boolean, %s::integer)",
        (
            claim.channel_id,
            claim.turn_id,
            claim.attempt,
            channel,
            body,
            calls.name("correlation_id", correlation_id, calls.KEY_BYTES),
            encoded,
            key,
            claim.holder,
            notify,
            calls.milliseconds(lock_timeout),
        ),
        read,
        posts=channel,
    )


def finish(claim: Claim) -> Call[str]:
    return Call(
        "select doorbell.finish_turn(%s::bigint, %s::bigint, %s::integer, %s::bigint)",
        (claim.channel_id, claim.turn_id, claim.attempt, claim.holder),
        calls.read_one,
    )


def settle(handle: str, msg: Message) -> Call[None]:
    return Call(
        "select doorbell.settle_delivery(%s::text, %s::text, %s::bigint)",
        (handle, msg.channel, msg.seq),
        lambda rows: None,
    )


def fail(
    claim: Claim,
    error: str | BaseException,
    *,
    notice_to: str | None,
    notice: str | None,
    notify: bool,
    lock_timeout: float,
) -> Call[Posted | None]:
    line = error_line(error)
    if notice is not None and notice_to is None:
        raise InvalidInput("notice_to is None; a notice needs the channel that it goes to.")
    if notice_to is not None:
        notice_to = calls.name("notice_to", notice_to)
        notice = calls.text("notice", line if notice is None else notice, calls.BODY_BYTES)

    def read(rows: Rows) -> Posted | None:
        armed, channel_id, channel, seq, sender, body, created_at, headers = rows[0]
        if channel is None:
            return None
        return Posted(calls.read_message(channel, seq, sender, body, created_at, headers, None), channel_id, armed)

    return Call(
        "select armed, channel_id, channel, seq, sender, body, extract(epoch from created_at)::float8, nullif(headers, '{}')"
        " from doorbell.fail_turn(%s::bigint, %s::bigint, %s::integer, %s::text, %s::text, %s::text,"
        " %s::bigint, %s::boolean, %s::integer)",
        (
            claim.channel_id,
            claim.turn_id,
            claim.attempt,
            line,
            notice_to,
            notice,
            claim.holder,
            notify,
            calls.milliseconds(lock_timeout),
        ),
        read,
        posts=notice_to,
    )


def release(claim: Claim, error: str | BaseException | None) -> Call[bool]:
    return Call(
        "select doorbell.release_turn(%s::bigint, %s::bigint, %s::integer, %s::text, %s::bigint)",
        (claim.channel_id, claim.turn_id, claim.attempt, None if error is None else error_line(error), claim.holder),
        calls.read_one,
    )


def unfinished(handle: str) -> Call[list[UnfinishedTurn]]:
    handle = calls.name("handle", handle)

    def read(rows: Rows) -> list[UnfinishedTurn]:
        return [
            UnfinishedTurn(
                handle=handle,
                channel=channel,
                seq=seq,
                message=None if sender is None else calls.read_message(channel, seq, sender, body, created_at, headers, key),
                event_id=event_id,
                attempt=attempt,
                held=held,
                error=error,
                steps=tuple(steps),
                posts=posts,
                admitted_at=admitted_at,
            )
            for (channel, seq, sender, body, created_at, headers, key, event_id, attempt, held, error, steps, posts, admitted_at)
            in rows
        ]  # fmt: skip

    return Call(
        "select channel, seq, sender, body, extract(epoch from created_at)::float8, nullif(headers, '{}'), idempotency_key,"
        " event_id, attempt, held, error, steps, posts, admitted_at from doorbell.unfinished_turns(%s::text)",
        (handle,),
        read,
    )


# -- what both shells decide alike ------------------------------------------------------------------------------------


def error_line(error: str | BaseException) -> str:
    """An error as it is kept: one sanitised line, for an exception with its type in front."""
    if isinstance(error, BaseException):
        said = sanitize(str(error), max_len=ERROR_LEN)
        return sanitize(f"{type(error).__name__}: {said}" if said else type(error).__name__, max_len=ERROR_LEN)
    if not isinstance(error, str):
        raise InvalidInput(f"error is of type {type(error).__name__}; it must be a str or an exception.")
    return sanitize(error, max_len=ERROR_LEN)


def given_up(attempt: int, error: str | None) -> str:
    """What is recorded for a turn that would begin more often than it may."""
    return f"gave up after {attempt - 1} attempts; the last one said: {error or 'nothing, it was killed'}"


def not_owned(state: TurnState) -> TurnLost:
    """For a turn that was never this caller's."""
    said = {
        "running": "A session that is alive works on this turn.",
        "duplicate": "This turn has ended, and duplicates are skipped.",
    }.get(state, "This turn was released, finished or failed.")
    return TurnLost(f"{said} Ask turn.should_run before working on it; admit the message again to see where it stands.")


def unheld() -> DatabaseUnavailable:
    return DatabaseUnavailable(
        "Nothing was admitted: the session that says that this bus lives ends again and again, or is on another server. "
        "Where the DSN names several servers, add target_session_attrs=read-write."
    )


Leaving = Literal["finish", "settle", "nothing", "release", "fail"]


def leaving(state: TurnState, *, owned: bool, attempt: int, max_attempts: int | None, error: BaseException | None) -> Leaving:
    """What leaving `with bus.turn(…)` does.

    An interruption (KeyboardInterrupt, a cancelled task, …) is no failure of the turn: it never counts as the last attempt.
    """
    if error is None:
        return "finish" if owned else "settle" if state == "duplicate" else "nothing"
    if not owned or isinstance(error, TurnLost):
        return "nothing"
    if max_attempts is not None and attempt >= max_attempts and isinstance(error, Exception):
        return "fail"
    return "release"


def step_taken(step: str) -> TurnLost:
    return TurnLost(
        f"Step {step!r} was recorded by another thread or task of this turn while this one worked on it; "
        "what this one wrote is rolled back. Let one of them run a step."
    )


def note(error: BaseException, exc: BaseException) -> None:
    """Say on the error that leaves the block what could not be recorded of it."""
    what = str(exc) if isinstance(exc, DoorbellError) else type(exc).__name__
    error.add_note(f"doorbell could not record that this turn was left: {what}")
