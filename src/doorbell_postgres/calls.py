"""Every conversation with the database, once: its SQL, its parameters, how its rows are read.

Pure: a `Call` is a value that a shell sends. Arguments are checked here, before anything is sent, so that a refusal is
the same in every shell and leaves nothing half-done; the functions in the database check again for everybody else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

from doorbell_postgres.contract import NO_HEADERS, Backlog, Draft, Headers, Message, MutableMessage
from doorbell_postgres.errors import InvalidInput

T_co = TypeVar("T_co", covariant=True)
Rows = Sequence[tuple[Any, ...]]

# The revision of the schema whose functions are called here.
SCHEMA_REVISION = "0005"

NAME_BYTES = 255
KEY_BYTES = 1_024
BODY_BYTES = 16 * 1024 * 1024
HEADERS_BYTES = 64 * 1024
MAX_BIGINT = 2**63 - 1
MAX_PAGE = 2**31 - 1
LOCK_TIMEOUT = 5.0
UNACKED_BYTES = 8 * 1024 * 1024
GROWN_PAGE = 1_000


class Call(NamedTuple, Generic[T_co]):
    """One statement, and what its rows mean.

    `repeatable`: sending it twice has the effect of sending it once, so that a lost answer is no loss. `posts` names the
    channel that a post would append to: a post that cannot get the channel's lock is told so instead of being retried.
    `commits`: it commits by itself and goes on, so that one that was cancelled may have taken effect.
    """

    sql: str
    params: Sequence[Any]
    read: Callable[[Rows], T_co]
    repeatable: bool = True
    posts: str | None = None
    commits: bool = False


class Posted(NamedTuple):
    """What a post returned: the message in the log, and whom to tell of it."""

    message: Message
    channel_id: int
    armed: bool
    shared: bool = False  # its flush, with other processes


class Unposted:
    """Why a call has posted nothing. Its two instances are told apart by identity; an Enum takes a µs for each look."""


BUSY = Unposted()  # others are posting to the channel
UNUSUAL = Unposted()  # only doorbell.post can do it


class Hello(NamedTuple):
    """What a database says of itself when a client opens it."""

    revision: str | None
    epoch: str
    read_only: bool


class Floor(NamedTuple):
    """Where a bell starts on one channel."""

    channel_id: int
    channel: str
    seq: int
    created_at: float | None
    head: int
    epoch: str


class Question(NamedTuple):
    """What a waiting bell asks of one channel: anything behind this floor that is not this handle's own?"""

    handle: str
    channel_id: int
    floor: int
    floor_at: float | None
    epoch: str


class News(NamedTuple):
    """The answer to the question at place `question`: `seq` is None when all that is new is the handle's own.

    `lost_from` to `lost_to` is what retention was forced past before the handle had acked it.
    """

    question: int
    head: int
    rewound: bool
    seq: int | None
    sender: str
    preview: str
    created_at: float | None
    lost_from: int | None = None
    lost_to: int | None = None


# -- checking ---------------------------------------------------------------------------------------------------------


def text(field: str, value: object, most: int) -> str:
    """`value` if it is text that the database can hold as it is, in at most `most` bytes of UTF-8."""
    if _is_plain(value, most):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"{field} is {_kind(value)}; it must be a str.")
    if "\0" in value:
        raise InvalidInput(f"{field} contains a NUL character; Postgres cannot store it. Remove it, or encode the value.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as exc:
        raise InvalidInput(
            f"{field} contains a lone surrogate at position {exc.start}; it must be valid Unicode. "
            "Decode its source with its real encoding."
        ) from None
    if size > most:
        raise InvalidInput(f"{field} has {size:,} bytes of UTF-8; at most {most:,} are allowed.")
    return value if type(value) is str else str.__str__(value)


def _is_plain(value: object, most: int) -> TypeGuard[str]:
    """Whether there is nothing to look into: most text is ASCII, where characters are bytes."""
    return type(value) is str and value.isascii() and "\0" not in value and len(value) <= most


def name(field: str, value: object, most: int = NAME_BYTES) -> str:
    """`value` if it can name a channel, a handle, a sender or (with its own limit) a key."""
    checked = text(field, value, most)
    if not checked:
        raise InvalidInput(f"{field} is empty; it must have 1 to {most:,} bytes of UTF-8.")
    return checked


_known_name = lru_cache(maxsize=1_024)(name)  # for what is a str and nothing else


def count(field: str, value: object, *, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{field} is {_kind(value)}; it must be an int.")
    if not least <= value <= most:
        raise InvalidInput(f"{field} is {value}; it must be between {least:,} and {most:,}.")
    return value


def seconds(field: str, value: object, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInput(f"{field} is {_kind(value)}; it must be a number of seconds.")
    if not (value >= 0 if zero else value > 0) or (math.isinf(value) and not zero):
        raise InvalidInput(f"{field} is {value} s; it must be {'0 or more' if zero else 'more than 0, and finite'}.")
    return float(value)


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def checked_headers(field: str, value: object) -> tuple[Headers, str]:
    """The headers as they are kept, and as JSON text."""
    if value is None:
        return NO_HEADERS, "{}"
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{field} is {_kind(value)}; it must be a mapping of str to str.")
    items = {name(f"a name in {field}", key): text(f"{field}[{key!r}]", item, HEADERS_BYTES) for key, item in value.items()}
    encoded = json.dumps(items, ensure_ascii=False, separators=(", ", ": "))
    if len(encoded.encode()) > HEADERS_BYTES:
        raise InvalidInput(f"{field} has {len(encoded.encode()):,} bytes as JSON; at most {HEADERS_BYTES:,} are allowed.")
    return Headers(items), encoded


def _key(field: str, value: object) -> str | None:
    return None if value is None else name(field, value, KEY_BYTES)


# -- reading rows -----------------------------------------------------------------------------------------------------

# date_part gives the same float8 as extract(epoch …)::float8, which computes a numeric first.
_MESSAGE = "seq, sender, body, date_part('epoch', created_at), nullif(headers, '{}'), idempotency_key"


def read_message(*row: Any) -> Message:
    """The message of a row: its fields as the database gives them."""
    return _message(row)


def _message(row: tuple[Any, ...]) -> Message:
    message: Any = MutableMessage()
    message.channel, message.seq, message.sender, message.body, message.created_at, headers, message.idempotency_key = row
    message.headers = NO_HEADERS if headers is None else headers if type(headers) is Headers else _headers(headers)
    message.__class__ = Message
    return message  # type: ignore[no-any-return]


def _headers(value: Any) -> Headers:
    if isinstance(value, str):  # the caller's connection loads jsonb as text, as Django's does
        value = json.loads(value)
    return Headers(value) if value else NO_HEADERS


def _messages(rows: Rows) -> list[Message]:
    return [_message(row) for row in rows]


def read_one(rows: Rows) -> Any:
    return rows[0][0]


def _names(rows: Rows) -> list[str]:
    return [row[0] for row in rows]


def _nothing(rows: Rows) -> None:
    return None


# -- posting ----------------------------------------------------------------------------------------------------------


class Outgoing(NamedTuple):
    """A message that was checked and has no number yet."""

    channel: str
    body: str
    sender: str
    key: str | None
    headers: Headers
    encoded: str

    def read(self, rows: Rows) -> Posted:
        channel_id, seq, created_at, posted, armed, *original = rows[0]
        if posted:
            message = read_message(self.channel, seq, self.sender, self.body, created_at, self.headers, self.key)
        else:
            message = read_message(self.channel, seq, original[0], original[1], created_at, original[2], self.key)
        return Posted(message, channel_id, armed)

    def read_answer(self, rows: Rows) -> Posted | Unposted:
        answer = rows[0][0]
        if not answer:
            return UNUSUAL if answer is None else BUSY
        channel_id, seq, micros, flags = answer
        message = _message((self.channel, seq, self.sender, self.body, micros / 1e6, self.headers, self.key))
        return Posted(message, channel_id, flags & 1 != 0, flags & 2 != 0)


def outgoing(
    channel: str, body: str, *, sender: str, idempotency_key: str | None = None, headers: Mapping[str, str] | None = None
) -> Outgoing:
    # Between two posts a process loses its caches to others, and each function that is entered is read from memory again.
    return Outgoing(
        _known_name("channel", channel) if type(channel) is str else name("channel", channel),
        body if _is_plain(body, BODY_BYTES) else text("body", body, BODY_BYTES),
        _known_name("sender", sender) if type(sender) is str else name("sender", sender),
        None if idempotency_key is None else name("idempotency_key", idempotency_key, KEY_BYTES),
        *((NO_HEADERS, "{}") if headers is None else checked_headers("headers", headers)),
    )


_POSTED = "seq, date_part('epoch', created_at), posted, armed, original_sender, original_body, original_headers"
_THREE = "%s::text, %s::text, %s::text"
_FIVE = f"{_THREE}, %s::text, %s::jsonb"
_TRY_THREE = f"select doorbell.try_post({_THREE})"
_TRY_FIVE = f"select doorbell.try_post({_FIVE})"
_COMBINED = {
    busy: (
        f"call doorbell.post_combined({_THREE}, busy => {busy})",
        f"call doorbell.post_combined({_FIVE}, %s::boolean, %s::integer, {busy})",
    )
    for busy in (False, True)
}


def post(message: Outgoing, *, notify: bool, lock_timeout: float) -> Call[Posted]:
    """As part of a transaction, where `notify` makes its commit announce it; or by itself, where nothing else will do."""
    return Call(
        f"select channel_id, {_POSTED} from doorbell.post({_FIVE}, %s::boolean, %s::integer)",
        (message.channel, message.body, message.sender, message.key, message.encoded, notify, milliseconds(lock_timeout)),
        message.read,
        repeatable=message.key is not None,
        posts=message.channel,
    )


def try_post(message: Outgoing) -> Call[Posted | Unposted]:
    """By itself, on a channel where that meets nobody: the shortest way."""
    return _by_itself(_TRY_THREE, _TRY_FIVE, message, ())


def post_combined(message: Outgoing, *, announce: bool, lock_timeout: float, busy: bool) -> Call[Posted | Unposted]:
    """By itself, wherever others may be posting. With `announce`, it announces itself behind its commit, if a bell is armed."""
    short, whole = _COMBINED[busy]
    if not announce or lock_timeout != LOCK_TIMEOUT:
        short = ""
    return _by_itself(short, whole, message, (announce, milliseconds(lock_timeout)), commits=True)


def _by_itself(
    short: str, whole: str, message: Outgoing, options: tuple[Any, ...], *, commits: bool = False
) -> Call[Posted | Unposted]:
    # Most posts can go by the short statement, and each parameter costs them on both sides of the wire.
    params: tuple[Any, ...] = (message.channel, message.body, message.sender)
    if not short or message.key is not None or message.encoded != "{}":
        short, params = whole, (*params, message.key, message.encoded, *options)
    return Call(short, params, message.read_answer, message.key is not None, message.channel, commits)


class Traffic:
    """Whom the last post of a bus met, on each of at least the newest 10,000 channels: what the next one there tries first."""

    MOST = 10_000

    def __init__(self) -> None:
        self._met: dict[str, bool] = {}

    def is_quiet(self, channel: str) -> bool:
        """It met nobody, neither a rival nor a bell."""
        return self._met.get(channel) is False

    def is_busy(self, channel: str) -> bool:
        """It met rivals."""
        return self._met.get(channel) is True

    def note(self, posted: Posted) -> None:
        # Threads share this without a lock: each step is one operation, and a wrong guess costs one call more.
        if len(self._met) >= self.MOST:
            self._met = {}
        if posted.armed and not posted.shared:
            self._met.pop(posted.message.channel, None)
        else:
            self._met[posted.message.channel] = posted.shared


def post_many(
    channel: str,
    messages: Iterable[str | Draft],
    *,
    sender: str,
    notify: bool,
    lock_timeout: float,
) -> Call[list[Posted]]:
    channel, sender = name("channel", channel), name("sender", sender)
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise InvalidInput(f"messages is {_kind(messages)}; it must be an iterable of bodies or Drafts.")
    bodies: list[str] = []
    keys: list[str | None] = []
    kept: list[Headers | None] = []
    encoded: list[str] = []
    for i, item in enumerate(messages):
        body, key, headers = (item.body, item.idempotency_key, item.headers) if isinstance(item, Draft) else (item, None, None)
        # The names of the fields are made for those only that need a closer look.
        bodies.append(body if _is_plain(body, BODY_BYTES) else text(f"messages[{i}]: body", body, BODY_BYTES))
        keys.append(None if key is None else _key(f"messages[{i}]: idempotency_key", key))
        own, as_json = (None, "{}") if headers is None else checked_headers(f"messages[{i}]: headers", headers)
        kept.append(own)
        encoded.append(as_json)

    def read(rows: Rows) -> list[Posted]:
        channel_id, _, first, posted_at, _, armed, *_ = rows[0] if rows else (0, 0, 0, 0.0, False, False)
        originals = {draft: row for _, draft, *row in rows if not row[2]}
        result = []
        for n, (body, key, own) in enumerate(zip(bodies, keys, kept, strict=True), 1):
            if n in originals:
                seq, created_at, _, _, *original = originals[n]
                message = read_message(channel, seq, original[0], original[1], created_at, original[2], key)
            else:
                message = read_message(channel, first, sender, body, posted_at, own, key)
                first += 1
            result.append(Posted(message, channel_id, armed))
        return result

    # Of the drafts that were posted one row is enough: they have consecutive numbers and one time.
    return Call(
        f"select distinct on (case when posted then 0 else draft end) channel_id, draft, {_POSTED}"
        " from doorbell.post_many(%s::text, %s::text, %b::text[], %b::text[], %b::text[]::jsonb[], %s::boolean, %s::integer)"
        " order by case when posted then 0 else draft end, draft",
        (
            channel,
            sender,
            bodies,
            keys if any(key is not None for key in keys) else None,
            encoded if any(kept) else None,
            notify,
            milliseconds(lock_timeout),
        ),
        read,
        repeatable=all(key is not None for key in keys),
        posts=channel,
    )


def post_together(messages: Sequence[Outgoing], *, lock_timeout: float) -> Call[list[Posted]]:
    """Several messages of one channel in one commit, each with its own sender."""
    keyed = any(message.key is not None for message in messages)
    return Call(
        f"select channel_id, {_POSTED} from doorbell.post_many("
        "%s::text, %s::text, %b::text[], %b::text[], %b::text[]::jsonb[], false, %s::integer, %b::text[])"
        " order by draft",
        (
            messages[0].channel,
            messages[0].sender,
            [message.body for message in messages],
            [message.key for message in messages] if keyed else None,
            [message.encoded for message in messages] if any(message.headers for message in messages) else None,
            milliseconds(lock_timeout),
            [message.sender for message in messages],
        ),
        lambda rows: [message.read([row]) for message, row in zip(messages, rows, strict=True)],
        repeatable=all(message.key is not None for message in messages),
        posts=messages[0].channel,
    )


def announce(channel_ids: Sequence[int]) -> Call[None]:
    return Call("select doorbell.announce(%s::bigint[])", (_literal(channel_ids),), _nothing)


# -- subscribing and acking -------------------------------------------------------------------------------------------


def subscribe(handle: str, channel: str, *, at: str, lock_timeout: float) -> Call[None]:
    if at not in ("head", "start"):
        raise InvalidInput(f"at is {at!r}; it must be 'head' (join behind the newest message) or 'start' (before the oldest).")
    return Call(
        "select doorbell.subscribe(%s::text, %s::text, %s::text, %s::integer)",
        (name("handle", handle), name("channel", channel), at, milliseconds(lock_timeout)),
        _nothing,
    )


def unsubscribe(handle: str, channel: str) -> Call[bool]:
    return Call(
        "select doorbell.unsubscribe(%s::text, %s::text)",
        (name("handle", handle), name("channel", channel)),
        read_one,
        repeatable=False,
    )


_Times = dict[tuple[str, int], float]


class ReadTimes:
    """The times of the messages that a bus has returned, of at least the newest 10,000: an ack says which one it means."""

    MOST = 10_000

    def __init__(self) -> None:
        self._times: tuple[_Times, _Times] = {}, {}

    def remember(self, messages: Sequence[Message]) -> None:
        # Threads share this without a lock: each step is one operation, and a lost race forgets the times of one page.
        newer, _ = self._times
        for message in messages[-self.MOST :]:
            newer[message.channel, message.seq] = message.created_at
        if len(newer) >= self.MOST:
            self._times = {}, newer

    def time_of(self, channel: str, seq: int) -> float | None:
        newer, older = self._times
        return newer.get((channel, seq), older.get((channel, seq)))


def ack(handle: str, channel: str, up_to: int, time_of: Callable[[str, int], float | None]) -> Call[int]:
    """`time_of` tells the time of the message that was handled, where it is known: see LogRewound."""
    handle = _known_name("handle", handle) if type(handle) is str else name("handle", handle)
    channel = _known_name("channel", channel) if type(channel) is str else name("channel", channel)
    up_to = count("up_to", up_to, least=0, most=MAX_BIGINT)
    return Call(
        "select doorbell.ack(%s::text, %s::text, %s::bigint, to_timestamp(%s::float8))",
        (handle, channel, up_to, time_of(channel, up_to)),
        read_one,
    )


def skip_pruned(handle: str, channel: str) -> Call[int]:
    return Call(
        "select doorbell.skip_pruned(%s::text, %s::text)",
        (name("handle", handle), name("channel", channel)),
        read_one,
        repeatable=False,
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def unacked(handle: str, after: tuple[str, int] | None, *, page_size: int, max_bytes: int | None = None) -> Call[list[Message]]:
    """One page behind `after`, a position (channel, seq) in channel order; None is the cursors themselves."""
    channel, seq = after or (None, 0)
    return Call(
        f"select channel, {_MESSAGE} from doorbell.unacked(%s::text, %s::text, %s::bigint, %s::integer, %s::bigint)",
        (
            name("handle", handle),
            channel,
            seq,
            count("page_size", page_size, least=1, most=MAX_PAGE),
            None if max_bytes is None else count("max_bytes", max_bytes, least=1, most=MAX_BIGINT),
        ),
        _messages,
    )


def messages_after(channel: str, after_seq: int, *, limit: int) -> Call[list[Message]]:
    channel = name("channel", channel)
    return Call(
        f"select %s::text, {_MESSAGE} from doorbell.messages_after(%s::text, %s::bigint, %s::integer)",
        (
            channel,
            channel,
            count("after_seq", after_seq, least=0, most=MAX_BIGINT),
            count("limit", limit, least=1, most=MAX_PAGE),
        ),
        _messages,
    )


def head(channel: str) -> Call[int]:
    return Call("select doorbell.head(%s::text)", (name("channel", channel),), read_one)


def channels() -> Call[list[str]]:
    return Call("select doorbell.channel_names()", (), _names)


def subscriptions(handle: str) -> Call[list[str]]:
    return Call("select doorbell.subscriptions(%s::text)", (name("handle", handle),), _names)


def acked_seq(handle: str, channel: str) -> Call[int]:
    return Call("select doorbell.acked_seq(%s::text, %s::text)", (name("handle", handle), name("channel", channel)), read_one)


def backlog(handle: str | None) -> Call[list[Backlog]]:
    return Call(
        "select handle_name, channel, head, acked_seq, unacked, oldest_unacked_at, last_acked_at, lost"
        " from doorbell.backlog_of(%s::text)",
        (None if handle is None else name("handle", handle),),
        lambda rows: [Backlog(*row) for row in rows],
    )


def unacked_count(channel: str | None, handle: str | None) -> Call[int]:
    return Call(
        "select doorbell.unacked_count(%s::text, %s::text)",
        (None if channel is None else name("channel", channel), None if handle is None else name("handle", handle)),
        lambda rows: int(rows[0][0]),
    )


# -- the doorbell -----------------------------------------------------------------------------------------------------


def bell_floors(handle: str) -> Call[list[Floor]]:
    return Call(
        "select channel_id, channel, floor, extract(epoch from floor_at)::float8, head, epoch::text"
        " from doorbell.bell_floors(%s::text)",
        (name("handle", handle),),
        lambda rows: [Floor(*row) for row in rows],
    )


def unmoved(questions: Sequence[Question], since: str | None) -> Call[str | None]:
    """What bells at rest ask: the snapshot in which all these channels end with the message looked at; None, if one does not.

    Where the snapshot is still `since`, the answer to the same questions in the same session, the server does not look: what
    has committed makes it another one. Not so on a standby, where it does not name all that is under way: there it is empty.
    """
    if len(questions) == 1:
        moved = "doorbell.head_moved(%s::bigint, %s::bigint)"
        heads: tuple[object, object] = questions[0].channel_id, questions[0].floor
    else:
        moved = "doorbell.heads_moved(%s::bigint[], %s::bigint[])"
        heads = _literal(q.channel_id for q in questions), _literal(q.floor for q in questions)
    return Call(
        f"select case when pg_current_snapshot()::text = %s::text or not {moved}"
        " then case when pg_is_in_recovery() then '' else pg_current_snapshot()::text end end",
        (since, *heads),
        read_one,
    )


def _literal(values: Iterable[object]) -> str:
    # Of the parameter's own type: psycopg would choose a smaller one, which the server then converts in every poll.
    return "{" + ",".join("null" if value is None else str(value) for value in values) + "}"


def _texts(values: Iterable[str]) -> str:
    return "{" + ",".join('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values) + "}"


def _columns(questions: Sequence[Question]) -> list[list[Any]]:
    return [list(column) for column in zip(*questions, strict=True)] if questions else [[], [], [], [], []]


def peek(questions: Sequence[Question], *, preview: int) -> Call[list[News]]:
    """`preview` is how many characters of a body come along; 0 for none."""
    handles, channel_ids, floors, times, epochs = _columns(questions)
    return Call(
        "select watch - 1, head, coalesce(rewound, false), seq, sender, preview, date_part('epoch', created_at),"
        " lost_from, lost_to from doorbell.peek(%s::text[], %s::bigint[], %s::bigint[],"
        " array(select to_timestamp(t) from unnest(%s::float8[]) with ordinality as u (t, n) order by n),"
        " %s::integer, %s::uuid[])",
        (
            _texts(handles),
            _literal(channel_ids),
            _literal(floors),
            _literal(times),
            preview,
            _literal(epochs if len(set(epochs)) > 1 else epochs[:1]),
        ),
        lambda rows: [News(*row) for row in rows],
    )


def glance(question: Question, *, preview: int) -> Call[News | None]:
    """What `peek` would say of this one, if that is the usual: the next message. None says nothing."""

    def read(rows: Rows) -> News | None:
        if (found := rows[0][0]) is None:
            return None
        seq, sender, start, created_at = found
        return News(0, int(seq), False, int(seq), sender, start, float(created_at))

    return Call(
        "select doorbell.glance(%s::text, %s::bigint, %s::bigint, %s::float8, %s::integer, %s::uuid)",
        (question.handle, question.channel_id, question.floor, question.floor_at, preview, question.epoch),
        read,
    )


def arm(take: Sequence[int], drop: Sequence[int]) -> Call[list[int]]:
    """Channel 0 stands for all of them. The ids that were refused for the moment come back."""
    return Call("select doorbell.arm(%s::bigint[], %s::bigint[])", (_literal(take), _literal(drop)), read_one)


def hold_session(token: int) -> Call[bool]:
    return Call("select doorbell.hold_session(%s::bigint)", (token,), read_one)


def beat() -> Call[bool]:
    """Only to see whether the session is still there."""
    return Call("select true", (), read_one)


# -- opening ----------------------------------------------------------------------------------------------------------


def hello() -> Call[Hello]:
    return Call("select revision, epoch::text, read_only from doorbell.hello()", (), lambda rows: Hello(*rows[0]))


def milliseconds(value: float) -> int:
    return max(1, round(value * 1000))
