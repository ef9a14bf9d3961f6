"""The contract's nouns, in words and as values.

channel
    An append-only log of messages under one name. Posting or subscribing creates it.
handle
    The name of a role, such as "worker". A session acts under one; its successor acts under the same one, and finds its
    cursors where they were.
seq
    A message's number in its channel: 1, 2, 3 … without a gap, visible in that order.
head
    The seq of the newest message of a channel; 0 when there is none.
cursor
    The highest seq that a handle has acked on a channel. It only moves forward. Having one is being subscribed.
backlog
    What lies between a cursor and its head: fetched or not, it is unacked, and will be delivered again.
floor
    How far one bell has looked, in its memory only. It starts at the cursor and dies with the bell.
armed
    A bell is armed while its `wait` runs. Only then does it hold anything outside its own memory.
announced
    A post is announced when a notification has told the armed bells of other processes. Delivery never depends on it.
event
    What a message tells of: its id (passed, or the header `event-id`), else its key in its channel, else its number there.
turn
    The work that one event causes for one handle. It is admitted once, however often the event is delivered.
settled
    A delivery is settled when its turn has finished or failed: the cursor may pass the message.
quiet
    A channel is quiet for a handle when its cursor stands at the head: acked equals posted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

Start = Literal["head", "start"]
Notify = Literal["coalesced", "off"]
Reason = Literal["backlog", "post"]
OnDuplicate = Literal["skip", "run"]
TurnState = Literal["new", "resumed", "running", "duplicate"]


class Headers(Mapping[str, str]):
    """A read-only mapping of text to text. Compares equal to any mapping with the same items; picklable."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, name: str) -> str:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Headers({self._items!r})"


NO_HEADERS = Headers()


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the log holds it. Equal by value in its first five fields, whoever returned it.

    `created_at` is the server's clock in seconds since the epoch; nothing is ordered by it. `headers` and
    `idempotency_key` stay outside comparison and hash.
    """

    channel: str
    seq: int
    sender: str
    body: str
    created_at: float
    headers: Mapping[str, str] = field(default=NO_HEADERS, compare=False)
    idempotency_key: str | None = field(default=None, compare=False)


class MutableMessage:
    """A message that is being built: once its fields are set, its `__class__` is set to Message.

    A frozen dataclass sets each of its fields by object.__setattr__, which takes four times as long: most of what a page
    cost its reader. The same slots are the same layout in memory, and only between such does Python change a class.
    """

    __slots__ = Message.__slots__

    channel: str
    seq: int
    sender: str
    body: str
    created_at: float
    headers: Mapping[str, str]
    idempotency_key: str | None


@dataclass(frozen=True)
class Draft:
    """A message not posted yet, for `post_many`: a body with, if wanted, a key and headers of its own."""

    body: str
    idempotency_key: str | None = None
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class WakeEvent:
    """Why a bell rang. It has no body: what was said is read with `catch_up`, and acked after it was handled.

    Every string is sanitised and safe to print on one line; `channel` and `sender` are cut to 64 characters, so they
    are for showing, not for looking up. `reason` is "backlog" for a message at or below the head at the bell's
    construction, else "post".
    """

    channel: str
    seq: int
    sender: str
    reason: Reason
    wake_line: str


@dataclass(frozen=True)
class Backlog:
    """One row of the view `doorbell.backlog`: how far one handle is behind on one channel.

    `lost` counts the messages behind the cursor that retention has removed by force; see `skip_pruned`.
    """

    handle: str
    channel: str
    head: int
    acked_seq: int
    unacked: int
    oldest_unacked_at: datetime | None
    last_acked_at: datetime | None
    lost: int = 0


@dataclass(frozen=True)
class UnfinishedTurn:
    """A turn that was admitted and has not ended: what a predecessor left, or what somebody works on (`held`).

    `message` is the one that was admitted first, None when retention has removed it. To take the turn up again:
    `bus.turn(left.handle, left.message, event_id=left.event_id)`. `attempt` counts how often somebody began; `error` is
    what the last attempt that left by an exception said.
    """

    handle: str
    channel: str
    seq: int
    message: Message | None
    event_id: str | None
    attempt: int
    held: bool
    error: str | None
    steps: tuple[str, ...]
    posts: int
    admitted_at: datetime
