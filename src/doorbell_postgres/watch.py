"""What rings, why, and how long to wait before looking again. Pure: no I/O, no clock of its own.

A `Watch` is one bell's position in memory. A `Watchlist` holds the watches of the bells that wait, for one listener, and
says which of them to look at and when: at once when they join, when their channel was announced, and else every
`poll_interval`, all together in one statement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from doorbell_postgres.calls import Floor, News, Question
from doorbell_postgres.contract import Message, Reason, WakeEvent
from doorbell_postgres.errors import HistoryPruned
from doorbell_postgres.wakeline import FIELD_LEN, line, sanitize

# Characters of a body that a wake line is made from. More than it shows, since escapes and controls vanish.
PREVIEW = 4_096


@dataclass
class _Position:
    channel_id: int
    channel: str
    seq: int
    created_at: float | None
    head_at_start: int


@dataclass(frozen=True)
class Candidate:
    """A message that may ring: the first behind the floor of its channel that is not the handle's own."""

    channel: str
    seq: int
    sender: str
    preview: str
    created_at: float
    reason: Reason

    def event(self) -> WakeEvent:
        return WakeEvent(
            sanitize(self.channel, max_len=FIELD_LEN),
            self.seq,
            sanitize(self.sender, max_len=FIELD_LEN),
            self.reason,
            line(self.channel, self.seq, self.sender, self.preview),
        )


class Watch:
    """Where one bell has looked to, channel by channel in name order.

    Its floors start at the handle's cursors and then move by what was looked at, not by acks. Nothing of it is durable.
    """

    def __init__(self, handle: str, floors: Iterable[Floor], *, poll_interval: float, preview: int = PREVIEW) -> None:
        self.handle = handle
        self.poll_interval = poll_interval
        self.preview = preview
        self.reset(floors)

    def reset(self, floors: Iterable[Floor]) -> None:
        """Start over from these floors."""
        self._positions = [_Position(f.channel_id, f.channel, f.seq, f.created_at, f.head) for f in floors]

    @property
    def channel_ids(self) -> list[int]:
        return [p.channel_id for p in self._positions]

    def questions(self) -> list[Question]:
        return [Question(self.handle, p.channel_id, p.seq, p.created_at) for p in self._positions]

    def settle(self, news: Sequence[News]) -> Candidate | HistoryPruned | Literal["rewound"] | None:
        """Take the answers to `questions()`, numbered in their order; move the floors past what was looked at."""
        for item in news:
            if item.lost_to is not None:
                return history_pruned(self.handle, self._positions[item.question].channel, item.lost_from, item.lost_to)
        if any(item.rewound for item in news):
            return "rewound"
        for item in news:
            position = self._positions[item.question]
            if item.seq is None:
                position.seq, position.created_at = item.head, item.created_at
                continue
            assert item.created_at is not None
            position.seq, position.created_at = item.seq, item.created_at
            return Candidate(position.channel, item.seq, item.sender, item.preview, item.created_at, self._reason(position))
        return None

    def advance(self, message: Message) -> Candidate:
        """Look past `message`, which the bell itself has read, and say how it would ring."""
        position = next(p for p in self._positions if p.channel == message.channel)
        position.seq, position.created_at = message.seq, message.created_at
        return Candidate(message.channel, message.seq, message.sender, message.body, message.created_at, self._reason(position))

    def _reason(self, position: _Position) -> Reason:
        return "backlog" if position.seq <= position.head_at_start else "post"


# After joining a watch is looked at again this soon, then at twice the distance each time up to its poll_interval: a post
# that committed while the bell was arming has been announced to nobody.
EARLY = 0.010


class Watchlist:
    """The watches that wait, and when each is to be looked at next. Times are of any one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._due: dict[Watch, float] = {}
        self._step: dict[Watch, float] = {}
        self._by_channel: defaultdict[int, set[Watch]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, watch: Watch) -> bool:
        return watch in self._due

    def add(self, watch: Watch, now: float) -> None:
        self._due[watch] = now
        self._step[watch] = min(EARLY, watch.poll_interval)
        for channel_id in watch.channel_ids:
            self._by_channel[channel_id].add(watch)

    def remove(self, watch: Watch) -> bool:
        """Whether it was still waiting."""
        for channel_id in watch.channel_ids:
            self._by_channel[channel_id].discard(watch)
            if not self._by_channel[channel_id]:
                del self._by_channel[channel_id]
        self._step.pop(watch, None)
        return self._due.pop(watch, None) is not None

    def channel_ids(self) -> list[int]:
        """The channels that anybody watches."""
        return list(self._by_channel)

    def announced(self, channel_id: int, now: float) -> bool:
        """Look at the channel's watches now. False when nobody watches it."""
        watches = self._by_channel.get(channel_id, ())
        for watch in watches:
            self._due[watch] = now
        return bool(watches)

    def wake_all(self, now: float) -> None:
        """Look at everything now: whatever was announced meanwhile may have been missed."""
        for watch in self._due:
            self._due[watch] = now

    def next_due(self) -> float | None:
        return min(self._due.values(), default=None)

    def take(self, now: float) -> list[Watch]:
        """The watches to look at now, when any is due.

        Whoever is due within half its interval comes along, so that bells armed at different times soon share one
        statement per interval.
        """
        if not any(due <= now for due in self._due.values()):
            return []
        taken = [watch for watch, due in self._due.items() if due <= now + self._step[watch] / 2]
        for watch in taken:
            self._due[watch] = now + self._step[watch]
            self._step[watch] = min(watch.poll_interval, 2 * self._step[watch])
        return taken

    def clear(self) -> list[Watch]:
        """Remove and return all of them."""
        watches = list(self._due)
        self._due.clear()
        self._step.clear()
        self._by_channel.clear()
        return watches


def ask(watches: Sequence[Watch]) -> tuple[list[Question], int]:
    """The questions of all of them in one list, and the longest preview that any of them wants."""
    return [q for watch in watches for q in watch.questions()], max((watch.preview for watch in watches), default=0)


def answer(watches: Sequence[Watch], news: Iterable[News]) -> list[list[News]]:
    """The news of each watch, with indexes of its own."""
    owner: list[tuple[int, int]] = [(w, i) for w, watch in enumerate(watches) for i in range(len(watch.channel_ids))]
    parts: list[list[News]] = [[] for _ in watches]
    for item in news:
        which, index = owner[item.question]
        parts[which].append(item._replace(question=index))
    return parts


def history_pruned(handle: str, channel: str, lost_from: int | None, lost_to: int) -> HistoryPruned:
    """What a bell raises where catch_up and ack are refused with RB006, in the same words."""
    handle, channel = sanitize(handle, max_len=FIELD_LEN), sanitize(channel, max_len=FIELD_LEN)
    return HistoryPruned(
        f"Messages {lost_from} to {lost_to} of {channel!r} were removed before {handle!r} had acked them. Retention was forced "
        f"past the cursor. Call skip_pruned to give that range up, and go on with message {lost_to + 1}."
    )


def refused_for_good(sqlstate: str | None) -> bool:
    """Whether a scan that failed this way is to be raised in `wait` rather than tried again until its deadline.

    Permission (42), schema (3F, 42), our own errors (RB): waiting longer cannot help.
    """
    return sqlstate is not None and sqlstate[:2] in {"42", "3F", "RB", "0A"}


# What a waiting bell finds in its mailbox.
Outcome: TypeAlias = Candidate | Exception | Literal["rewound", "nothing", "closed"]
