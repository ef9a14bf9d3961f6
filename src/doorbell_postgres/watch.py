"""What rings, why, and how long to wait before looking again. Pure: no I/O, no clock of its own.

A `Watch` is one bell's position in memory. A `Watchlist` holds the watches of the bells that wait, for one listener, and
says which of them to look at and when: at once when they join, when their channel was announced, and else every
`poll_interval`, all together in one statement.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Literal, TypeAlias

from doorbell_postgres.calls import Floor, News, Question
from doorbell_postgres.contract import Message, Reason, WakeEvent
from doorbell_postgres.errors import HistoryPruned, LogRewound
from doorbell_postgres.wakeline import FIELD_LEN, line, sanitize

# A wait whose deadline has come still gives its first scan this long: wait(0) is one look, not none.
GRACE = 0.4
# One sleep of a wait without an end: what the platform's clocks can take.
LONGEST = 86_400.0
# Bodies that `match` wants to see are fetched in pages of this many.
MATCH_PAGE = 20

# A poll that has no answer by then is lost: with poll_interval before it and a dial behind it, a bell on a dead connection
# rings within poll_interval + 2 s.
PATIENCE = 1.2
# A server that is merely slow must not be given up for ever: each late answer in a row doubles the patience up to this.
MOST_PATIENCE = 10.0
# A dial without an answer gets another one beside it after this time, so that one swallowed packet costs no more.
DIAL_AGAIN = 1.0
MOST_DIALS = 6
# Keys of single channels that one session holds, and as many that it is about to let go; a default server has some 12,000
# locks for everybody.
MOST_KEYS = 16
WILDCARD = 0
# How often a key is tried for: a probe holds it for microseconds.
TRIES, TRY_AGAIN = 20, 0.001
# How long the connection is kept when nobody waits: handling a message and arming again should find it there.
LINGER = 60.0
# How long the keys of a wait that has ended are kept: whoever waits again at once need not take them anew.
LET_GO = 0.02
# The thread that rang keeps the interpreter for itself until it sleeps: the wait that it has ended returns meanwhile.
MAKE_WAY = 0.0001
# Announcements that follow a first one are gathered for this long.
GATHER = 0.010
# A token that another session holds, the dead one of before, is tried again so soon, then at twice the distance each time.
HOLD_AGAIN, HOLD_AT_LEAST = 0.002, 0.1
# A session that holds tokens is looked after this often: the server may have dropped it without a word, and its turns then
# read as nobody's.
BEAT = 5.0
# Who has served for so long was not in vain: the next dial follows at once.
SERVED = 1.0
# At most this share of its time is spent on announcing, so that a slow server is not asked more than it can do.
SHARE = 0.1
# Where no connection came for an announcement, the next one is asked for after this time.
NO_CONNECTION = 0.1
# A poll asks for heads only. So often it asks for everything: a log that was replaced by another as long, lost messages.
WHOLE = 10.0
# A connection that flaps is reported once in this time, with its return.
QUIET = 10.0

# Characters of a body that a wake line is made from. More than it shows, since escapes and controls vanish.
PREVIEW = 4_096


@dataclass
class _Position:
    channel_id: int
    channel: str
    seq: int
    created_at: float | None
    head_at_start: int
    epoch: str


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
        self._positions = [_Position(f.channel_id, f.channel, f.seq, f.created_at, f.head, f.epoch) for f in floors]

    @property
    def channel_ids(self) -> list[int]:
        return [p.channel_id for p in self._positions]

    def questions(self) -> list[Question]:
        return [Question(self.handle, p.channel_id, p.seq, p.created_at, p.epoch) for p in self._positions]

    def settle(self, news: Sequence[News]) -> Candidate | HistoryPruned | Literal["rewound"] | None:
        """Take the answers to `questions()`, numbered in their order; move the floors past own posts.

        The floor stays before a candidate until the bell says `passed`: a wait that ended while the answer was on its way
        has not rung for it, and the next one must.
        """
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
            reason = self._reason(position, item.seq)
            return Candidate(position.channel, item.seq, item.sender, item.preview, item.created_at, reason)
        return None

    def candidate(self, message: Message) -> Candidate:
        """How `message`, which the bell itself has read, would ring."""
        reason = self._reason(self._position(message.channel), message.seq)
        return Candidate(message.channel, message.seq, message.sender, message.body, message.created_at, reason)

    def passed(self, looked_at: Candidate | Message) -> None:
        """Look behind this one from now on, whether it rang or not."""
        position = self._position(looked_at.channel)
        position.seq, position.created_at = looked_at.seq, looked_at.created_at

    def _position(self, channel: str) -> _Position:
        return next(p for p in self._positions if p.channel == channel)

    @staticmethod
    def _reason(position: _Position, seq: int) -> Reason:
        return "backlog" if seq <= position.head_at_start else "post"


# After joining a watch is looked at again this soon, then each time when as much time has passed again, up to its
# poll_interval: a post that committed while the bell was arming has been announced to nobody.
EARLY = 0.010


# What a look is for: news that somebody has announced, or that a watch which has just joined may find at once; whatever may
# have happened; new heads.
Look: TypeAlias = Literal["expecting", "whole", "heads"]


@dataclass
class _Times:
    """Of a watch that waits: when it joined, when to look at it next, and when to look at everything again."""

    joined: float
    due: float
    whole: float


class Watchlist:
    """The watches that wait, and when each is to be looked at next. Times are of any one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._times: dict[Watch, _Times] = {}
        self._by_channel: defaultdict[int, set[Watch]] = defaultdict(set)
        self._expecting = False

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, watch: Watch) -> bool:
        return watch in self._times

    def add(self, watch: Watch, now: float) -> None:
        self._times[watch] = _Times(now, now, now)
        self._expecting = True
        for channel_id in watch.channel_ids:
            self._by_channel[channel_id].add(watch)

    def remove(self, watch: Watch) -> bool:
        """Whether it was still waiting."""
        for channel_id in watch.channel_ids:
            self._by_channel[channel_id].discard(watch)
            if not self._by_channel[channel_id]:
                del self._by_channel[channel_id]
        return self._times.pop(watch, None) is not None

    def lone(self) -> Watch | None:
        """The watch, if there is but one."""
        return next(iter(self._times)) if len(self._times) == 1 else None

    def channel_ids(self) -> list[int]:
        """The channels that anybody watches."""
        return list(self._by_channel)

    def has(self, channel_id: int) -> bool:
        """Whether anybody watches this channel."""
        return channel_id in self._by_channel

    def announced(self, channel_id: int, now: float) -> bool:
        """Look at the channel's watches now. False when nobody watches it."""
        watches = self._by_channel.get(channel_id, ())
        for watch in watches:
            self._times[watch].due = now
            self._expecting = True
        return bool(watches)

    def wake_all(self, now: float) -> None:
        """As if all of them joined now: whatever was announced meanwhile may have been missed, and the log be another one."""
        self._times.update({watch: _Times(now, now, now) for watch in self._times})

    def next_due(self) -> float | None:
        return min((times.due for times in self._times.values()), default=None)

    def take(self, now: float) -> tuple[list[Watch], Look]:
        """The watches to look at now, when any is due, and how: see Look.

        Whoever is due within half its interval comes along, so that bells armed at different times soon share one
        statement per interval.
        """
        if not any(times.due <= now for times in self._times.values()):
            return [], "heads"
        expecting, self._expecting = self._expecting, False
        taken = []
        for watch, times in self._times.items():
            interval = min(watch.poll_interval, max(EARLY, now - times.joined))
            if times.due <= now + interval / 2:
                times.due = now + interval
                taken.append(watch)
        whole = any(self._times[watch].whole <= now for watch in taken)
        look: Look = "expecting" if expecting else "whole" if whole else "heads"
        if look != "heads":
            for watch in taken:
                self._times[watch].whole = now + WHOLE
        return taken, look

    def clear(self) -> list[Watch]:
        """Remove and return all of them."""
        watches = list(self._times)
        self._times.clear()
        self._by_channel.clear()
        return watches


class Rest:
    """What one session's last poll has found, so that the next need not look where nothing has committed since."""

    def __init__(self) -> None:
        self._asked: list[Question] = []
        self._snapshot: str | None = None
        self._whole = False  # everything was looked at, and not before that snapshot

    def since(self, questions: list[Question]) -> str | None:
        """The snapshot in which these questions were answered, if the last ones were the same."""
        return self._snapshot if questions == self._asked else None

    def settle(self, questions: list[Question], since: str | None, now: str | None, look: Look) -> bool:
        """Take the answer to `calls.unmoved`; whether there is reason to look at everything now.

        Without a new head that is when it is time for it, and something has committed since it was done last.
        """
        known = bool(since) and now == since and self._whole
        self._asked, self._snapshot, self._whole = questions, now, known or look == "whole"
        return now is None or (look == "whole" and not known)


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
    skip = f"doorbell skip {shlex.quote(handle)} {shlex.quote(channel)}"
    return HistoryPruned(
        f"Messages {lost_from} to {lost_to} of {channel!r} were removed before {handle!r} had acked them. Retention was forced "
        f"past the cursor. Call skip_pruned ({skip}) to give that range up, and go on with message {lost_to + 1}."
    )


def to_nothing(handle: str) -> str:
    return f"{sanitize(handle, max_len=FIELD_LEN)!r} is subscribed to nothing"


def refused_for_good(sqlstate: str | None) -> bool:
    """Whether a scan that failed this way is to be raised in `wait` rather than tried again until its deadline.

    Permission (42), schema (3F, 42), our own errors (RB): waiting longer cannot help.
    """
    return sqlstate is not None and sqlstate[:2] in {"42", "3F", "RB", "0A"}


def keys_for(channel_ids: Iterable[int]) -> set[int]:
    """The channels whose keys a session holds while these are waited on: the wildcard alone when they are many."""
    keys = set(channel_ids)
    return keys if len(keys) <= MOST_KEYS else {WILDCARD}


def patience_after(took: float) -> float:
    """How long to wait for the next answer when the last one took `took` seconds: a far server is not a dead one."""
    return min(MOST_PATIENCE, max(PATIENCE, 2 * took))


def rest_after(began: float | None, now: float) -> float:
    """Until when not to announce again, after an announcement that began then; None: there was no connection to send it on.

    Waiting for a connection does not count: what keeps the connections busy need not be the server.
    """
    return now + (NO_CONNECTION if began is None else max(GATHER, (now - began) * (1 / SHARE - 1)))


def keep_again(refusals: int | None) -> float:
    """When to look after a session's tokens again: all are held (None), or some were refused, after so many times before."""
    return BEAT if refusals is None else min(HOLD_AT_LEAST, HOLD_AGAIN * 2 ** min(refusals, 10))


def rewound() -> LogRewound:
    return LogRewound(
        "The log is older than what this bell has seen: a restore or a failover has lost its end, and other messages may "
        "carry the lost numbers. The bell has started over from the cursors. Catch up again, then wait."
    )


Doing: TypeAlias = Literal["idle", "listening", "polling", "reconnecting", "closed"]


@dataclass(frozen=True)
class ListenerState:
    """What the listener is doing: `since` is `time.monotonic()` of the last change, `reason` says why it is not listening.

    `scanned` is that clock when the database last answered a scan for bells; None before the first.
    """

    kind: Doing
    reason: str | None
    since: float
    scanned: float | None = None


class Status:
    """A listener's state, and which of its changes are worth a line in the log: one per change, none per retry."""

    def __init__(self, now: float) -> None:
        self._state = ListenerState("idle", None, now)
        self.scanned: float | None = None  # apart from the rest: the thread that scans sets it, others may set the state
        self._reported = -QUIET
        self._warned = False

    @property
    def state(self) -> ListenerState:
        return replace(self._state, scanned=self.scanned)

    def become(self, kind: Doing, reason: str | None, now: float) -> None:
        if self.state.kind not in (kind, "closed"):
            self._state = ListenerState(kind, reason, now)

    def ready(self, why_not: str | None, now: float, *, warn: bool) -> tuple[int, str] | None:
        """Connected, and listening unless there is a reason why not: level and text of what to log. `warn` is for reasons
        that nobody has asked for; they are said once."""
        before, line = self.state, None
        if why_not and warn and not self._warned:
            self._warned = True
            line = WARNING, f"bells poll: notifications cannot be received ({why_not})"
        elif before.kind == "reconnecting" and self._reported > before.since - QUIET and now - before.since > 0.5:
            line = INFO, f"listener is back after {now - before.since:.1f} s"
        self.become("polling" if why_not else "listening", why_not, now)
        return line

    def fell(self, reason: str, now: float) -> tuple[int, str] | None:
        """The connection is gone, or could not be made: level and text of what to log."""
        if self.state.kind == "reconnecting":
            self._state = ListenerState("reconnecting", reason, self.state.since)
            return None
        self.become("reconnecting", reason, now)
        if now - self._reported <= QUIET:
            return None
        self._reported = now
        return WARNING, f"listener lost its connection, bells look again after reconnecting ({reason})"


# What a waiting bell finds in its mailbox.
Outcome: TypeAlias = Candidate | Exception | Literal["rewound", "nothing", "closed"]
