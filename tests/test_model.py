"""Bus, store and bells against a small model of the contract, driven by hypothesis through random histories."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from doorbell_postgres.contract import Draft, Message, WakeEvent
from doorbell_postgres.errors import AckBeyondHead, NotSubscribed, UnknownChannel
from doorbell_postgres.wakeline import sanitize, wake_line
from support import Api, TestServer

# Each of these is hard in its own way.
CHANNELS = [
    "events",
    "Events",
    "zeta",
    "Éclair",
    'o\'brien "x"',
    "two\nlines",
    "%s{}\\",
    "👍" * 63,
    "x" * 255,
    "x" * 254 + "y",
]
HANDLES = ["worker", "Worker", "wörker", "wo\u0308rker", "a'b;--", "h" * 255]
SENDERS = ["ci", "\x1b[31mred", "line\r\nbreak"]
KEYS = ["k", "K", "k ", "κ" * 512, "'", "\\u0000"]
# Each history has up to three channels and handles of these; rules name them by place.
places = st.integers(0, 2)
keys = st.none() | st.sampled_from(KEYS[:2]) | st.sampled_from(KEYS)
bodies = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
    st.sampled_from(["", "\r\n", "\\u0000", "\uffff", "x" * 5000, "é" * 300, '{"a": 1}']),
)
headers = st.none() | st.dictionaries(st.sampled_from(["event-id", "a'b", "É"]), st.sampled_from(["", "1", "\n"]), max_size=2)
drafts = st.one_of(bodies, st.builds(Draft, bodies, keys, headers))


@dataclass
class Bell:
    """A bell of the model: its floors and the heads at its construction, by channel."""

    real: Any
    handle: str
    floors: dict[str, int]
    heads: dict[str, int]
    only_even: bool


@dataclass
class Model:
    """The contract, in memory."""

    logs: dict[str, list[Message]] = field(default_factory=dict)
    cursors: dict[tuple[str, str], int] = field(default_factory=dict)  # by (handle, channel)

    def head(self, channel: str) -> int:
        return len(self.logs.get(channel, []))

    def post(self, channel: str, sender: str, draft: Draft) -> Message:
        """The message as it must come back, but for its time."""
        log = self.logs.setdefault(channel, [])
        for message in log:
            if draft.idempotency_key is not None and message.idempotency_key == draft.idempotency_key:
                return message
        return Message(channel, len(log) + 1, sender, draft.body, 0.0, dict(draft.headers or {}), draft.idempotency_key)

    def subscriptions(self, handle: str) -> list[str]:
        return sorted(c for h, c in self.cursors if h == handle)

    def unacked(self, handle: str) -> list[Message]:
        return [m for c in self.subscriptions(handle) for m in self.logs[c][self.cursors[handle, c] :]]

    def wait(self, bell: Bell) -> tuple[Message, str] | None:
        for channel in sorted(bell.floors):
            for message in self.logs[channel][bell.floors[channel] :]:
                bell.floors[channel] = message.seq
                if message.sender != bell.handle and not (bell.only_even and len(message.body) % 2):
                    return message, "backlog" if message.seq <= bell.heads[channel] else "post"
        return None


def same(real: Message, expected: Message) -> bool:
    """Equal in everything but the time, which a new message only gets from the server."""
    return (real.channel, real.seq, real.sender, real.body, dict(real.headers), real.idempotency_key) == (
        *(expected.channel, expected.seq, expected.sender, expected.body),
        *(dict(expected.headers), expected.idempotency_key),
    )


class Contract(RuleBasedStateMachine):
    """One random history, through one bus and one store, on a database of its own."""

    api: Api
    server: TestServer
    template: str
    bells: Bundle[Bell] = Bundle("bells")

    @initialize(
        channels=st.lists(st.sampled_from(CHANNELS), min_size=3, max_size=3, unique=True),
        handles=st.lists(st.sampled_from(HANDLES), min_size=2, max_size=2, unique=True),
        seeded=st.sampled_from([True, True, True, False]),
    )
    def open(self, channels: list[str], handles: list[str], seeded: bool) -> None:
        self.channels, self.handles = channels, handles
        self.name = self.server.create_database(self.template)
        self.bus = self.api.MessageBus(self.server.dsn(self.name))
        self.store = self.api.Store(self.server.dsn(self.name))
        self.model = Model()
        if seeded:  # so that every rule finds something to do; a rule that needs another is seldom met otherwise
            for place in (0, 1):
                self._post_many(place, 0, ["one", "two", "three"][place:])
                self._subscribe(0, place, "start", True)
            self._subscribe(1, 0, None, False)
            self._post_many(0, 3, ["mine"])

    def teardown(self) -> None:
        if hasattr(self, "bus"):
            self.bus.close()
            self.store.close()
            self.server.discard(self.name)

    def channel(self, place: int) -> str:
        return self.channels[place]

    def handle(self, place: int) -> str:
        return self.handles[place % 2]

    def sender(self, place: int) -> str:
        """One of the handles now and then: own posts are what bells must not ring for."""
        return [*SENDERS, *self.handles][place]

    # -- writing

    @rule(place=places, sender=st.integers(0, 4), body=bodies, key=keys, extra=headers, by_bus=st.booleans())
    def post(self, place: int, sender: int, body: str, key: str | None, extra: dict[str, str] | None, by_bus: bool) -> None:
        channel, name = self.channel(place), self.sender(sender)
        if by_bus:
            real = self.bus.post(channel, body, sender=name, idempotency_key=key, headers=extra)
        else:
            extra = None
            real = self.store.post(channel, name, body, idempotency_key=key)
        self._take(real, self.model.post(channel, name, Draft(body, key, extra)))

    @rule(place=places, sender=st.integers(0, 4), batch=st.lists(drafts, max_size=6))
    def post_many(self, place: int, sender: int, batch: list[str | Draft]) -> None:
        self._post_many(place, sender, batch)

    def _post_many(self, place: int, sender: int, batch: list[Any]) -> None:
        channel, name = self.channel(place), self.sender(sender)
        got = self.bus.post_many(channel, batch, sender=name)
        assert len(got) == len(batch)
        for real, item in zip(got, batch, strict=True):
            self._take(real, self.model.post(channel, name, item if isinstance(item, Draft) else Draft(item)))

    def _take(self, real: Message, expected: Message) -> None:
        assert same(real, expected)
        log = self.model.logs[expected.channel]
        if real.seq > len(log):
            assert real.created_at > 1.5e9
            log.append(real)
        else:
            assert real == log[real.seq - 1]

    @rule(who=places, place=places, at=st.sampled_from(["start", "head", None]), by_bus=st.booleans())
    def subscribe(self, who: int, place: int, at: str | None, by_bus: bool) -> None:
        self._subscribe(who, place, at, by_bus)

    def _subscribe(self, who: int, place: int, at: str | None, by_bus: bool) -> None:
        handle, channel = self.handle(who), self.channel(place)
        real = self.bus if by_bus else self.store
        assert (real.subscribe(handle, channel, at=at) if at else real.subscribe(handle, channel)) is None
        self.model.logs.setdefault(channel, [])
        start = 0 if at == "start" else self.model.head(channel)
        self.model.cursors.setdefault((handle, channel), start)

    @rule(who=places, place=places, really=st.integers(0, 3))
    def unsubscribe(self, who: int, place: int, really: int) -> None:
        handle, channel = self.handle(who), self.channel(place)
        if channel not in self.model.logs:
            with pytest.raises(UnknownChannel):
                self.bus.unsubscribe(handle, channel)
        elif really == 0 or (handle, channel) not in self.model.cursors:  # else there would be few left to test
            expected = self.model.cursors.pop((handle, channel), None) is not None
            assert self.bus.unsubscribe(handle, channel) is expected

    @rule(who=places, place=places, beyond=st.sampled_from([-3, -2, -1, 0, 0, 1, 2**31]), by_bus=st.booleans())
    def ack(self, who: int, place: int, beyond: int, by_bus: bool) -> None:
        """At the head, behind it, or beyond it; then a stale one."""
        handle, channel = self.handle(who), self.channel(place)
        for up_to in (max(0, self.model.head(channel) + beyond), 0, 1):
            self._ack(self.bus if by_bus else self.store, handle, channel, up_to)

    def _ack(self, real: Any, handle: str, channel: str, up_to: int) -> None:
        if channel not in self.model.logs:
            refused: type[Exception] | None = UnknownChannel
        elif (handle, channel) not in self.model.cursors:
            refused = NotSubscribed
        else:
            refused = AckBeyondHead if up_to > self.model.head(channel) else None
        if refused:
            with pytest.raises(refused):
                real.ack(handle, channel, up_to)
        else:
            self.model.cursors[handle, channel] = max(self.model.cursors[handle, channel], up_to)
            assert real.ack(handle, channel, up_to) == self.model.cursors[handle, channel]

    @rule(who=places, many=st.integers(1, 3))
    def handle_some(self, who: int, many: int) -> None:
        """What a session does: catch up, handle a few, ack each of them."""
        handle = self.handle(who)
        for message in self.bus.catch_up(handle)[:many]:
            self._ack(self.bus, handle, message.channel, message.seq)

    # -- reading

    @rule(
        page_size=st.integers(1, 5),
        max_bytes=st.sampled_from([1, 10, 100, 6000, 2**40]),
        after=st.integers(0, 8),
        limit=st.integers(1, 6),
    )
    def read(self, page_size: int, max_bytes: int, after: int, limit: int) -> None:
        self._read_everything(page_size, max_bytes)
        self._read_channels(after, limit)
        self._read_cursors()
        self._read_backlog()

    def _read_everything(self, page_size: int, max_bytes: int) -> None:
        for handle in self.handles:
            expected = self.model.unacked(handle)
            for real in (
                self.bus.catch_up(handle),
                self.bus.catch_up(handle, page_size=page_size),
                list(self.bus.unacked(handle, page_size=page_size, max_bytes=max_bytes)),
            ):
                assert real == expected
                assert all(map(same, real, expected))

    def _read_channels(self, after: int, limit: int) -> None:
        for channel in self.channels:
            log = self.model.logs.get(channel, [])
            assert self.store.messages_after(channel, 0) == log[:100]
            real = self.store.messages_after(channel, after, limit=limit)
            assert real == log[after:][:limit]
            assert all(map(same, real, log[after:][:limit]))
            assert self.bus.store.head(channel) == len(log)

    def _read_cursors(self) -> None:
        for handle in self.handles:
            assert self.store.subscriptions(handle) == self.model.subscriptions(handle)
            for channel in self.channels:
                expected = self.model.cursors.get((handle, channel))
                if expected is None:
                    with pytest.raises(NotSubscribed if channel in self.model.logs else UnknownChannel):
                        self.store.acked_seq(handle, channel)
                else:
                    assert self.store.acked_seq(handle, channel) == expected
                quiet = expected is None or expected == self.model.head(channel)
                assert self.bus.wait_until_quiet(channel=channel, handle=handle, timeout=0) is quiet

    def _read_backlog(self) -> None:
        expected = []
        for h, c in sorted(self.model.cursors):
            acked, log = self.model.cursors[h, c], self.model.logs[c]
            oldest = log[acked].created_at if acked < len(log) else None
            expected.append((h, c, len(log), acked, len(log) - acked, oldest))
        for handle in (None, *self.handles):
            real = self.bus.backlog(handle)
            assert [
                (b.handle, b.channel, b.head, b.acked_seq, b.unacked, b.oldest_unacked_at and b.oldest_unacked_at.timestamp())
                for b in real
            ] == [row for row in expected if handle in (None, row[0])]

    # -- the doorbell

    @rule(target=bells, who=places, only_even=st.booleans())
    def make_a_bell(self, who: int, only_even: bool) -> Any:
        handle = self.handle(who)
        subscribed = self.model.subscriptions(handle)
        if not subscribed:
            return multiple()
        match = (lambda m: len(m.body) % 2 == 0) if only_even else None
        return Bell(
            self.api.Doorbell(self.bus, handle, match=match),
            handle,
            {c: self.model.cursors[handle, c] for c in subscribed},
            {c: self.model.head(c) for c in subscribed},
            only_even,
        )

    @rule(bell=bells, times=st.sampled_from([1, 2, 20]))
    def wait(self, bell: Bell, times: int) -> None:
        for _ in range(times):
            expected = self.model.wait(bell)
            event = bell.real.wait(0)
            if expected is None:
                assert event is None
                return
            message, reason = expected
            assert event == WakeEvent(
                sanitize(message.channel, max_len=64),
                message.seq,
                sanitize(message.sender, max_len=64),
                reason,
                wake_line(message),
            )

    # -- always

    @invariant()
    def no_other_channel_has_come(self) -> None:
        if hasattr(self, "model"):
            assert self.store.channels() == sorted(self.model.logs)


@pytest.mark.timeout(900)  # hypothesis may take five minutes to shrink what it has found
def test_bus_store_and_bells_do_what_the_contract_says(api: Api, server: TestServer, template: str) -> None:
    class OnThisServer(Contract):
        pass

    OnThisServer.api, OnThisServer.server, OnThisServer.template = api, server, template
    run_state_machine_as_test(OnThisServer, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))
