"""What an operator asks and orders, as calls: the views, retention, grants. Pure, like `calls`.

Ages are computed by the database, in seconds: the clock of the operator's machine plays no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from doorbell_postgres.calls import Call, Rows, count, milliseconds, name
from doorbell_postgres.errors import InvalidInput

# Messages whose key may still be retried are kept this long, and so are the turns by which a replay is recognised.
KEEP_KEYS = timedelta(days=7)
BATCH = 1_000
MOST_BATCH = 100_000


@dataclass(frozen=True)
class Health:
    """The row of the view `doorbell.health`, and the totals of `channels` and `backlog`."""

    schema_revision: str
    server_version: str
    replica: bool
    notification_queue_usage: float
    waiting_sessions: int
    oldest_transaction: str
    oldest_transaction_seconds: float | None
    blocked_sessions: str
    blocked_session_count: int | None
    prepared_transactions: int
    epoch: str


@dataclass(frozen=True)
class Totals:
    """How much there is, in one row."""

    channels: int
    messages: int
    estimated_bytes: int
    handles: int
    subscriptions: int
    unacked: int
    lost: int
    oldest_unacked_seconds: float | None


@dataclass(frozen=True)
class Behind:
    """One row of the view `doorbell.backlog`, with ages."""

    handle: str
    channel: str
    head: int
    acked_seq: int
    unacked: int
    oldest_unacked_seconds: float | None
    last_acked_seconds: float | None
    lost: int


@dataclass(frozen=True)
class Channel:
    """One row of the view `doorbell.channels`, and how many handles are subscribed."""

    channel: str
    head: int
    first_kept: int | None
    messages: int
    estimated_bytes: int
    subscribers: int
    last_posted_seconds: float | None


@dataclass(frozen=True)
class Handle:
    """What the view `doorbell.backlog` says of one handle, over all its channels."""

    handle: str
    channels: int
    unacked: int
    lost: int
    oldest_unacked_seconds: float | None
    last_acked_seconds: float | None


@dataclass(frozen=True)
class TurnRow:
    """One row of the view `doorbell.turns`."""

    handle: str
    event: str
    channel: str
    seq: int
    state: str
    held: bool
    attempts: int
    age_seconds: float
    steps: int
    posts: int
    last_error: str | None


@dataclass(frozen=True)
class Violation:
    """One row of the view `doorbell.violations`."""

    violation: str
    channel: str | None
    handle: str | None
    seq: int | None
    detail: str


@dataclass(frozen=True)
class Plan:
    """What prune would remove from one channel now, and what holds the rest."""

    channel: str
    first_kept: int
    removable: int
    held_by: str | None
    held_at: int | None
    held_because: str | None
    loses: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """What one batch has removed."""

    channel: str | None
    removed: int
    up_to: int | None
    more: bool
    held_by: str | None
    held_at: int | None
    held_because: str | None
    lost_by: tuple[str, ...]


# -- looking ----------------------------------------------------------------------------------------------------------


def health() -> Call[Health]:
    return Call(
        "select schema_revision, server_version, replica, notification_queue_usage, waiting_sessions, oldest_transaction,"
        " oldest_transaction_seconds, blocked_sessions, blocked_session_count, prepared_transactions, epoch::text"
        " from doorbell.health",
        (),
        lambda rows: Health(*rows[0]),
    )


def totals() -> Call[Totals]:
    return Call(
        "select c.channels, c.messages, c.estimated_bytes, b.handles, b.subscriptions, b.unacked, b.lost,"
        " extract(epoch from clock_timestamp() - b.oldest)::float8"
        " from (select count(*) as channels, coalesce(sum(messages), 0)::bigint as messages,"
        " coalesce(sum(estimated_bytes), 0)::bigint as estimated_bytes from doorbell.channels) as c,"
        " (select count(distinct handle) as handles, count(*) as subscriptions, coalesce(sum(unacked), 0)::bigint as unacked,"
        " coalesce(sum(lost), 0)::bigint as lost, min(oldest_unacked_at) as oldest from doorbell.backlog) as b",
        (),
        lambda rows: Totals(*rows[0]),
    )


def behind(limit: int | None = None) -> Call[list[Behind]]:
    """Handles with a backlog, the one that has waited longest first."""
    return Call(
        "select handle, channel, head, acked_seq, unacked,"
        " extract(epoch from clock_timestamp() - oldest_unacked_at)::float8,"
        " extract(epoch from clock_timestamp() - last_acked_at)::float8, lost"
        " from doorbell.backlog where unacked > 0 order by oldest_unacked_at, handle, channel limit %s::bigint",
        (limit,),
        lambda rows: [Behind(*row) for row in rows],
    )


def channels() -> Call[list[Channel]]:
    return Call(
        "select c.channel, c.head, c.first_kept, c.messages, c.estimated_bytes, coalesce(b.subscribers, 0),"
        " extract(epoch from clock_timestamp() - c.last_posted_at)::float8"
        " from doorbell.channels as c"
        " left join (select channel, count(*) as subscribers from doorbell.backlog group by channel) as b using (channel)"
        " order by c.channel",
        (),
        lambda rows: [Channel(*row) for row in rows],
    )


def handles() -> Call[list[Handle]]:
    return Call(
        "select handle, count(*), sum(unacked)::bigint, sum(lost)::bigint,"
        " extract(epoch from clock_timestamp() - min(oldest_unacked_at))::float8,"
        " extract(epoch from clock_timestamp() - max(last_acked_at))::float8"
        " from doorbell.backlog group by handle order by handle",
        (),
        lambda rows: [Handle(*row) for row in rows],
    )


def turns(handle: str | None, states: Sequence[str], limit: int) -> Call[list[TurnRow]]:
    """The oldest first."""
    return Call(
        "select handle, event, channel, seq, state, held, attempts, extract(epoch from age)::float8, steps, posts, last_error"
        " from doorbell.turns where state = any (%s::text[]) and (%s::text is null or handle = %s::text)"
        " order by admitted_at, handle, channel, seq limit %s::bigint",
        (list(states), handle, handle, limit),
        lambda rows: [TurnRow(*row) for row in rows],
    )


def turn_counts() -> Call[list[tuple[str, bool, int]]]:
    return Call(
        "select state, held, count(*) from doorbell.turns group by state, held order by state, held",
        (),
        lambda rows: [(row[0], row[1], row[2]) for row in rows],
    )


def violations() -> Call[list[Violation]]:
    return Call(
        "select violation, channel, handle, seq, detail from doorbell.violations"
        " order by violation, channel nulls first, handle nulls first, seq nulls first",
        (),
        lambda rows: [Violation(*row) for row in rows],
    )


def without_reader(limit: int) -> Call[list[tuple[str, int]]]:
    """Channels that hold more than the newest message, which always stays, and have no subscriber; the fullest first."""
    return Call(
        "select c.channel, c.messages from doorbell.channels as c"
        " where c.messages > 1 and not exists (select from doorbell.backlog as b where b.channel = c.channel)"
        " order by c.messages desc, c.channel limit %s::bigint",
        (limit,),
        lambda rows: [(row[0], row[1]) for row in rows],
    )


# -- ordering ---------------------------------------------------------------------------------------------------------


def prune_plan(
    keep: timedelta, channel: str | None, *, keep_keys: timedelta = KEEP_KEYS, force: bool = False
) -> Call[list[Plan]]:
    return Call(
        "select channel_name, first_kept, removable, held_by, held_at, held_because, coalesce(loses, '{}')"
        " from doorbell.prune_plan(%s::interval, %s::text, %s::interval, %s::boolean)",
        (
            duration("keep", keep),
            None if channel is None else name("channel", channel),
            duration("keep_keys", keep_keys),
            force,
        ),
        lambda rows: [Plan(row[0], row[1], row[2], row[3], row[4], row[5], tuple(row[6])) for row in rows],
    )


def prune(
    keep: timedelta,
    channel: str | None = None,
    *,
    keep_keys: timedelta = KEEP_KEYS,
    batch: int = BATCH,
    force: bool = False,
    lock_timeout: float = 5,
) -> Call[Pruned]:
    """One batch. Again while `more`."""

    def read(rows: Rows) -> Pruned:
        row = rows[0]
        return Pruned(row[0], row[1], row[2], row[3], row[4], row[5], row[6], tuple(row[7]))

    return Call(
        "select channel, removed, up_to, more, held_by, held_at, held_because, coalesce(lost_by, '{}')"
        " from doorbell.prune(%s::interval, %s::text, %s::interval, %s::integer, %s::boolean, %s::integer)",
        (
            duration("keep", keep),
            None if channel is None else name("channel", channel),
            duration("keep_keys", keep_keys),
            count("batch", batch, least=1, most=MOST_BATCH),
            force,
            milliseconds(lock_timeout),
        ),
        read,
        repeatable=False,
    )


def prune_turns(keep_keys: timedelta = KEEP_KEYS, *, batch: int = BATCH) -> Call[tuple[int, bool]]:
    """How many ended turns one batch has removed, and whether there are more."""
    return Call(
        "select removed, more from doorbell.prune_turns(%s::interval, %s::integer)",
        (duration("keep_keys", keep_keys), count("batch", batch, least=1, most=MOST_BATCH)),
        lambda rows: (rows[0][0], rows[0][1]),
        repeatable=False,
    )


def grant_role(role: str, *, operator: bool) -> Call[None]:
    return Call("select doorbell.grant_role(%s::text, %s::boolean)", (name("role", role, 63), operator), lambda rows: None)


def revoke_role(role: str) -> Call[bool]:
    return Call("select doorbell.revoke_role(%s::text)", (name("role", role, 63),), lambda rows: bool(rows[0][0]))


def new_epoch() -> Call[str]:
    return Call("select doorbell.new_epoch()::text", (), lambda rows: str(rows[0][0]), repeatable=False)


def counted(number: int, noun: str) -> str:
    """1 message, 2 messages."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(field: str, value: object) -> timedelta:
    if not isinstance(value, timedelta):
        raise InvalidInput(f"{field} is of type {type(value).__name__}; it must be a timedelta.")
    if value < timedelta(0):
        raise InvalidInput(f"{field} is {value}; it must be 0 or more.")
    return value


def instant(seconds: float) -> datetime:
    """The moment of this many seconds since the epoch. Raises ValueError or OverflowError where no datetime can say it."""
    from datetime import UTC

    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=round(seconds * 1_000_000))
