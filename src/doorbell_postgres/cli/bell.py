"""`doorbell wait`: what a harness runs in the background, to be woken by its end."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from doorbell_postgres import calls
from doorbell_postgres.bus import MessageBus
from doorbell_postgres.cli import output
from doorbell_postgres.cli.command import (
    DONE,
    IDLE,
    REFUSED,
    UNREACHABLE,
    complain,
    dsn_of,
    dsn_option,
    json_option,
    seconds_option,
)
from doorbell_postgres.contract import Message, WakeEvent
from doorbell_postgres.errors import DatabaseUnavailable
from doorbell_postgres.waiter import Doorbell
from doorbell_postgres.wakeline import FIELD_LEN, sanitize
from doorbell_postgres.watch import to_nothing

# A wait that has not looked at the log for this long, or three polls, has not waited: it says unreachable, not idle.
BLIND = 30.0
# What `--grep` may take beyond the deadline.
OVERTIME = 1.0


def _regex(_: click.Context, __: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except (re.error, RecursionError, OverflowError) as exc:
        raise click.BadParameter(f"{value!r} is no regular expression of Python's: {exc}.") from None


@click.command()
@click.argument("handle")
@dsn_option
@seconds_option("--timeout", default=300.0, zero=True, help="Give up after this time; 5m and 1h30m do too.")
@seconds_option("--poll-interval", default=0.5, help="Look at least this often, whether notifications arrive or not.")
@click.option("--channel", "channels", multiple=True, metavar="CHANNEL", help="Ring for this channel only; repeatable.")
@click.option("--sender", "senders", multiple=True, metavar="SENDER", help="Ring for this sender only; repeatable.")
@click.option(
    "--grep", "pattern", metavar="REGEX", callback=_regex, help="Ring only where this regular expression is found in the body."
)
@json_option
def wait(
    handle: str,
    dsn: str | None,
    timeout: float,
    poll_interval: float,
    channels: tuple[str, ...],
    senders: tuple[str, ...],
    pattern: re.Pattern[str] | None,
    as_json: bool,
) -> int:
    """Wait until there is something that HANDLE has not acked and did not send itself.

    Prints the wake line of the first such message, and nothing else of its body. It only peeks: killing it loses nothing.
    Then: catch-up, handle, ack, wait again. Backlog rings at once.

    Exits 0 on a ring; 3 when nothing rang for --timeout seconds; 4 when the database cannot be reached at the start, or
    could not be looked at for the last 30 s (or three poll intervals) before the end. An outage in between is waited out.

    \b
    Example: doorbell wait worker --timeout 600
             doorbell wait worker --channel events --grep '^deploy' --json
    """
    deadline = time.monotonic() + timeout
    # What opens it has five seconds, then it is unreachable; from there on the bell itself is patient.
    with MessageBus(dsn_of(dsn), max_size=1, retry_for=5) as bus:
        # On the listener's connection, so that it stays the only one.
        subscribed = bus.store.peek(calls.subscriptions(handle))
        if why_never := _never_rings(handle, subscribed, channels):
            return complain(why_never, REFUSED)
        match = None if not (channels or senders or pattern) else _match(channels, senders, pattern)
        bell = Doorbell(bus, handle, match=match, poll_interval=poll_interval)
        with _at_the_latest(deadline + OVERTIME if pattern else None):
            try:
                event = bell.wait(max(0.0, deadline - time.monotonic()))
            except DatabaseUnavailable:  # something is there, and it could not be read up to the deadline
                event = None
        if event is not None:
            _print(event, as_json=as_json)
            return DONE
        state, window = bus.listener, max(BLIND, 3 * poll_interval)
        if state.scanned is None or time.monotonic() - state.scanned > window:
            return complain(
                f"The log could not be looked at for the last {min(timeout, window):g} s: {state.reason or 'no answer yet'}. "
                "Nothing is lost: run it again when the database is back.",
                UNREACHABLE,
            )
        return IDLE


def _never_rings(handle: str, subscribed: Sequence[str], channels: Sequence[str]) -> str | None:
    if not subscribed:
        return f"{to_nothing(handle)}, so nothing would ever ring. Run: doorbell subscribe HANDLE CHANNEL."
    if channels and not set(channels) & set(subscribed):
        which = ", ".join(repr(sanitize(channel, max_len=FIELD_LEN)) for channel in channels)
        who = repr(sanitize(handle, max_len=FIELD_LEN))
        return f"{who} is not subscribed to {which}, so nothing would ever ring. Run: doorbell subscribe HANDLE CHANNEL."
    return None


def _match(channels: Sequence[str], senders: Sequence[str], pattern: re.Pattern[str] | None) -> Callable[[Message], bool]:
    def rings(message: Message) -> bool:
        return (
            (not channels or message.channel in channels)
            and (not senders or message.sender in senders)
            and (pattern is None or pattern.search(message.body) is not None)
        )

    return rings


@contextmanager
def _at_the_latest(end: float | None) -> Iterator[None]:
    """End the process with IDLE at this time: a body can be made on which a careless expression takes years."""
    if end is None or not hasattr(signal, "setitimer"):
        yield
        return

    def leave(*_: object) -> None:
        complain("--grep has not finished with a body at the deadline. Catch up, and use a simpler expression.", IDLE)
        os._exit(IDLE)

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, end - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _print(event: WakeEvent, *, as_json: bool) -> None:
    if as_json:
        output.json_line(dataclasses.asdict(event))
    else:
        output.human(event.wake_line)
    output.flush()  # before the connections are closed: whoever waits for it has it now
