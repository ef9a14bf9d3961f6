"""Posts that go together in one call: how many, how long they wait for it, and what becomes of them when it fails."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from doorbell_postgres import wire
from doorbell_postgres.calls import Outgoing
from doorbell_postgres.errors import BusClosed, ChannelBusy, DatabaseUnavailable, OutcomeUnknown

# Who has waited for so many seconds goes by itself: something holds up the posts before it.
PATIENCE = 1.0
# What one call carries: so many messages, and bodies of so many characters besides that of its first.
MOST, MOST_TEXT = 500, 4 * 1024 * 1024


class Carried(Protocol):
    message: Outgoing


W = TypeVar("W", bound=Carried)


def take(waiting: list[W]) -> list[W]:
    """Remove from the front of the queue what the next call carries."""
    size = count = 0
    for each in waiting[:MOST]:
        size += len(each.message.body)
        if count and size > MOST_TEXT:
            break
        count += 1
    taken = waiting[:count]
    del waiting[:count]
    return taken


@contextmanager
def after(failure: BaseException, message: Outgoing) -> Iterator[None]:
    """The block posts one message by itself after the call that carried it with others has failed, where it may.

    A refusal wrote nothing and may be another one's fault. A wait that was in vain was in vain for all of them. What may be in
    the log by that call is not said to be absent because the block was refused.
    """
    if isinstance(failure, (ChannelBusy, DatabaseUnavailable, BusClosed)):
        raise copy.copy(failure)
    if message.key is None and (isinstance(failure, OutcomeUnknown) or not isinstance(failure, Exception)):
        raise wire.interrupted() from failure
    try:
        yield
    except ChannelBusy as busy:
        if isinstance(failure, OutcomeUnknown):
            raise wire.interrupted() from busy
        raise
