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
    precondition,
    rule,
    run_state_machine_as_test,
)

from doorbell_postgres.contract import Draft, Message, WakeEvent
from doorbell_postgres.errors import AckBeyondHead, NotSubscribed, UnknownChannel
from doorbell_postgres.wakeline import sanitize, wake_line
from support import Api, TestServer

# Few names, so that they meet; each of them hard in its own way.
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
SENDERS = ["ci", *HANDLES[:3], "\x1b[31mred", "line\r\nbreak"]
KEYS = ["k", "K", "k ", "κ" * 512, "'", "\\u0000"]
channels, handles, senders = st.sampled_from(CHANNELS), st.sampled_from(HANDLES), st.sampled_from(SENDERS)
keys = st.none() | st.sampled_from(KEYS)
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
    """Random histories through one bus and one store of another process's making, each on a database of its own."""

    api: Api
    server: TestServer
    template: str
    bells: Bundle[Bell] = Bundle("bells")

    @initialize()
    def open(self) -> None:
        self.name = self.server.create_database(self.template)
        self.bus = self.api.MessageBus(self.server.dsn(self.name))
        self.store = self.api.Store(self.server.dsn(self.name))
        self.model = Model()

    def teardown(self) -> None:
        if hasattr(self, "bus"):
            self.bus.close()
            self.store.close()
            self.server.drop_database(self.name)

    # -- writing

    @rule(channel=channels, sender=senders, body=bodies, key=keys, extra=headers, by_bus=st.booleans())
    def post(self, channel: str, sender: str, body: str, key: str | None, extra: dict[str, str] | None, by_bus: bool) -> None:
        if by_bus:
            real = self.bus.post(channel, body, sender=sender, idempotency_key=key, headers=extra)
        else:
            extra = None
            real = self.store.post(channel, sender, body, idempotency_key=key)
        self._take(real, self.model.post(channel, sender, Draft(body, key, extra)))

    @rule(channel=channels, sender=senders, batch=st.lists(drafts, max_size=5))
    def post_many(self, channel: str, sender: str, batch: list[str | Draft]) -> None:
        got = self.bus.post_many(channel, batch, sender=sender)
        assert len(got) == len(batch)
        for real, item in zip(got, batch, strict=True):
            self._take(real, self.model.post(channel, sender, item if isinstance(item, Draft) else Draft(item)))

    def _take(self, real: Message, expected: Message) -> None:
        assert same(real, expected)
        log = self.model.logs[expected.channel]
        if real.seq > len(log):
            assert real.created_at > 1.5e9
            log.append(real)
        else:
            assert real == log[real.seq - 1]

    @rule(handle=handles, channel=channels, at=st.sampled_from(["head", "start", None]), by_bus=st.booleans())
    def subscribe(self, handle: str, channel: str, at: str | None, by_bus: bool) -> None:
        real = self.bus if by_bus else self.store
        assert (real.subscribe(handle, channel, at=at) if at else real.subscribe(handle, channel)) is None
        self.model.logs.setdefault(channel, [])
        start = 0 if at == "start" else self.model.head(channel)
        self.model.cursors.setdefault((handle, channel), start)

    @rule(handle=handles, channel=channels)
    def unsubscribe(self, handle: str, channel: str) -> None:
        if channel not in self.model.logs:
            with pytest.raises(UnknownChannel):
                self.bus.unsubscribe(handle, channel)
        else:
            expected = self.model.cursors.pop((handle, channel), None) is not None
            assert self.bus.unsubscribe(handle, channel) is expected

    @rule(handle=handles, channel=channels, data=st.data(), by_bus=st.booleans())
    def ack(self, handle: str, channel: str, data: st.DataObject, by_bus: bool) -> None:
        head = self.model.head(channel)
        up_to = data.draw(st.integers(0, head + 2) | st.sampled_from([2**31, 2**63 - 1]), label="up_to")
        real = self.bus if by_bus else self.store
        refused = (
            UnknownChannel
            if channel not in self.model.logs
            else NotSubscribed
            if (handle, channel) not in self.model.cursors
            else AckBeyondHead
            if up_to > head
            else None
        )
        if refused:
            with pytest.raises(refused):
                real.ack(handle, channel, up_to)
        else:
            self.model.cursors[handle, channel] = max(self.model.cursors[handle, channel], up_to)
            assert real.ack(handle, channel, up_to) == self.model.cursors[handle, channel]

    @precondition(lambda self: self.model.cursors)
    @rule(data=st.data())
    def handle_some(self, data: st.DataObject) -> None:
        """What a session does: catch up, handle a few, ack each of them."""
        handle = data.draw(st.sampled_from(sorted({h for h, _ in self.model.cursors})), label="handle")
        for message in self.bus.catch_up(handle)[: data.draw(st.integers(1, 4), label="handled")]:
            assert self.bus.ack(handle, message.channel, message.seq) == message.seq
            self.model.cursors[handle, message.channel] = message.seq

    # -- reading

    @rule(handle=handles, page_size=st.integers(1, 7) | st.just(100))
    def catch_up(self, handle: str, page_size: int) -> None:
        assert self.bus.catch_up(handle, page_size=page_size) == self.model.unacked(handle)

    @rule(handle=handles, page_size=st.integers(1, 7), max_bytes=st.sampled_from([1, 10, 100, 6000, 2**40]))
    def unacked(self, handle: str, page_size: int, max_bytes: int) -> None:
        real = list(self.bus.unacked(handle, page_size=page_size, max_bytes=max_bytes))
        expected = self.model.unacked(handle)
        assert real == expected
        assert all(map(same, real, expected))

    @rule(channel=channels, after=st.integers(0, 12), limit=st.integers(1, 6) | st.none())
    def messages_after(self, channel: str, after: int, limit: int | None) -> None:
        real = self.store.messages_after(channel, after, **({} if limit is None else {"limit": limit}))
        expected = self.model.logs.get(channel, [])[after:][: limit or 100]
        assert real == expected
        assert all(map(same, real, expected))

    @rule(handle=handles, channel=channels)
    def acked_seq(self, handle: str, channel: str) -> None:
        expected = self.model.cursors.get((handle, channel))
        if expected is None:
            with pytest.raises(NotSubscribed if channel in self.model.logs else UnknownChannel):
                self.store.acked_seq(handle, channel)
        else:
            assert self.store.acked_seq(handle, channel) == expected

    @rule(handle=handles | st.none())
    def backlog(self, handle: str | None) -> None:
        expected = []
        for h, c in sorted(self.model.cursors):
            if handle in (None, h):
                acked, log = self.model.cursors[h, c], self.model.logs[c]
                oldest = log[acked].created_at if acked < len(log) else None
                expected.append((h, c, len(log), acked, len(log) - acked, oldest))
        real = self.bus.backlog() if handle is None else self.bus.backlog(handle)
        assert [
            (
                b.handle,
                b.channel,
                b.head,
                b.acked_seq,
                b.unacked,
                b.oldest_unacked_at and b.oldest_unacked_at.timestamp(),
            )
            for b in real
        ] == expected

    @rule(handle=handles | st.none(), channel=channels | st.none())
    def wait_until_quiet(self, handle: str | None, channel: str | None) -> None:
        unacked = [
            (h, c)
            for (h, c), acked in self.model.cursors.items()
            if handle in (None, h) and channel in (None, c) and acked < self.model.head(c)
        ]
        assert self.bus.wait_until_quiet(channel=channel, handle=handle, timeout=0) is not bool(unacked)

    # -- the doorbell

    @rule(target=bells, handle=handles, only_even=st.booleans())
    def arm(self, handle: str, only_even: bool) -> Any:
        if not self.model.subscriptions(handle):
            return multiple()
        subscribed = self.model.subscriptions(handle)
        match = (lambda m: len(m.body) % 2 == 0) if only_even else None
        return Bell(
            self.api.Doorbell(self.bus, handle, match=match),
            handle,
            {c: self.model.cursors[handle, c] for c in subscribed},
            {c: self.model.head(c) for c in subscribed},
            only_even,
        )

    @rule(bell=bells)
    def wait(self, bell: Bell) -> None:
        expected = self.model.wait(bell)
        event = bell.real.wait(0)
        if expected is None:
            assert event is None
        else:
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
    def nothing_else_has_changed(self) -> None:
        if not hasattr(self, "model"):
            return
        assert self.store.channels() == sorted(self.model.logs)

    @rule()
    def heads_and_subscriptions(self) -> None:
        for channel in CHANNELS:
            assert self.bus.store.head(channel) == self.model.head(channel)
        for handle in HANDLES:
            assert self.store.subscriptions(handle) == self.model.subscriptions(handle)


def test_bus_store_and_bells_do_what_the_contract_says(api: Api, server: TestServer, template: str) -> None:
    class OnThisServer(Contract):
        pass

    OnThisServer.api, OnThisServer.server, OnThisServer.template = api, server, template
    run_state_machine_as_test(OnThisServer, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
