"""What the child processes of the tests do. Each takes its end of the pipe first, and opens its own bus."""

from __future__ import annotations

import os
import time
from typing import Any

from support.apis import open_api


def _bus(shell: str, dsn: str, **parameters: Any) -> Any:
    return open_api(shell).MessageBus(dsn, **parameters)


def catch_up_and_hang(pipe: Any, shell: str, dsn: str, handle: str) -> None:
    """A session that has fetched its messages and is about to handle them: says the bodies, then waits for its end."""
    bus = _bus(shell, dsn)
    pipe.send([m.body for m in bus.catch_up(handle)])
    pipe.recv()


def arm(pipe: Any, shell: str, dsn: str, handle: str, parameters: dict[str, Any]) -> Any:
    """A harness's background waiter: says when its bell exists, waits once, returns (channel, seq, reason)."""
    bus = _bus(shell, dsn)
    bell = open_api(shell).Doorbell(bus, handle, idle_timeout=60, **parameters)
    pipe.send("made")
    event = bell.wait()
    bus.close()
    return event and (event.channel, event.seq, event.reason)


def orphan(pipe: Any, shell: str, dsn: str, handle: str) -> None:
    """A waiter whose session is gone: it hears every ring, and nobody handles anything."""
    bus = _bus(shell, dsn)
    bell = open_api(shell).Doorbell(bus, handle, idle_timeout=60)
    pipe.send("made")
    while True:
        event = bell.wait()
        pipe.send(event and event.seq)


def post_many_one_by_one(
    pipe: Any, shell: str, dsn: str, channel: str, sender: str, count: int, keys: str | None
) -> list[tuple[int, str, str]]:
    """`count` posts, started on command; (seq, sender, body) of each. `keys` names a series of keys to share."""
    bus = _bus(shell, dsn)
    pipe.send("ready")
    pipe.recv()
    got = []
    for i in range(count):
        key = f"{keys}-{i}" if keys else None
        message = bus.post(channel, f"{sender} {i}", sender=sender, idempotency_key=key)
        got.append((message.seq, message.sender, message.body))
    bus.close()
    return got


def post_once(pipe: Any, shell: str, dsn: str, channel: str, body: str, sender: str, key: str | None) -> tuple[int, str]:
    bus = _bus(shell, dsn)
    message = bus.post(channel, body, sender=sender, idempotency_key=key)
    bus.close()
    return message.seq, message.body


def ack_all(pipe: Any, shell: str, dsn: str, handle: str, channel: str, numbers: list[int]) -> list[int]:
    """Ack these numbers in this order; what each ack returned."""
    bus = _bus(shell, dsn)
    pipe.send("ready")
    pipe.recv()
    moved = [bus.ack(handle, channel, n) for n in numbers]
    bus.close()
    return moved


def post_on_command(pipe: Any, shell: str, dsn: str, channel: str, sender: str) -> None:
    """One post for each body that it is told, with the time of the monotonic clock before it; None ends it."""
    bus = _bus(shell, dsn)
    pipe.send(os.getpid())
    while (body := pipe.recv()) is not None:
        before = time.monotonic()
        bus.post(channel, body, sender=sender)
        pipe.send(before)
    bus.close()
