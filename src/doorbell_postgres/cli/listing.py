"""What is there: `doorbell channels`, `handles`, `turns`; and `unsubscribe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from doorbell_postgres import calls, operations
from doorbell_postgres.cli import output, table
from doorbell_postgres.cli.command import DONE, REFUSED, complain, dsn_option, json_option
from doorbell_postgres.cli.operator import opened
from doorbell_postgres.cli.table import Column
from doorbell_postgres.doctor import human_age
from doorbell_postgres.wakeline import FIELD_LEN, sanitize

STATES = ("unfinished", "failed", "finished")


@click.command()
@json_option
@dsn_option
def channels(as_json: bool, dsn: str | None) -> None:
    """List the channels: how long each log is, how large about, how many read it.

    For operators.

    \b
    Example: doorbell channels
             doorbell channels --json
    """
    with opened(dsn, read_only=True) as admin:
        found = admin.run(operations.channels())
    if as_json:
        return _json(found)
    table.show(
        (
            Column("channel", ratio=1),
            Column("head", "number"),
            Column("first kept", "number"),
            Column("messages", "number"),
            Column("size", "number"),
            Column("readers", "number"),
            Column("last post"),
        ),
        [
            (
                c.channel,
                c.head,
                c.first_kept,
                c.messages,
                table.size(c.estimated_bytes),
                c.subscribers,
                human_age(c.last_posted_seconds, "never"),
            )
            for c in found
        ],
    )
    return None


@click.command()
@json_option
@dsn_option
def handles(as_json: bool, dsn: str | None) -> None:
    """List the handles: how far each is behind over all its channels, and since when.

    For operators. A handle is there while it is subscribed to something.

    \b
    Example: doorbell handles
             doorbell handles --json
    """
    with opened(dsn, read_only=True) as admin:
        found = admin.run(operations.handles())
    if as_json:
        return _json(found)
    table.show(
        (
            Column("handle", ratio=1),
            Column("channels", "number"),
            Column("unacked", "number"),
            Column("lost", "number"),
            Column("waiting for"),
            Column("last ack"),
        ),
        [
            (
                h.handle,
                h.channels,
                h.unacked,
                h.lost,
                human_age(h.oldest_unacked_seconds),
                human_age(h.last_acked_seconds, "never"),
            )
            for h in found
        ],
    )
    return None


@click.command()
@click.option("--handle", help="Of this handle only.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES),
    help="In this state only; repeatable.  [default: unfinished, failed]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=calls.MAX_PAGE),
    default=100,
    show_default=True,
    metavar="N",
    help="At most so many.",
)
@json_option
@dsn_option
def turns(handle: str | None, states: tuple[str, ...], limit: int, as_json: bool, dsn: str | None) -> None:
    """List turns, the oldest first: what is unfinished and since when, what failed and why.

    For operators. held says whether a session that is alive works on it; one that nobody holds is resumed by the next
    session of its handle.

    \b
    Example: doorbell turns
             doorbell turns --handle worker --state failed
    """
    with opened(dsn, read_only=True) as admin:
        found = admin.run(operations.turns(handle, states or ("unfinished", "failed"), limit))
    if as_json:
        return _json(found)
    table.show(
        (
            Column("handle", ratio=2),
            Column("event", ratio=3),
            Column("state"),
            Column("held"),
            Column("tries", "number"),
            Column("age"),
            Column("last error", ratio=4, wrap=True),
        ),
        [(t.handle, t.event, t.state, t.held, t.attempts, human_age(t.age_seconds), t.last_error) for t in found],
    )
    return None


def _json(rows: Sequence[Any]) -> None:
    for row in rows:
        output.json_line(dataclasses.asdict(row))


@click.command()
@click.argument("handle")
@click.argument("channel")
@dsn_option
def unsubscribe(handle: str, channel: str, dsn: str | None) -> int:
    """End HANDLE's subscription to CHANNEL: its cursor goes, the messages stay.

    For a handle that nobody serves any more: its cursor holds retention back. Subscribing again joins at the head.
    Exits 1 when it was not subscribed.

    \b
    Example: doorbell unsubscribe worker events
    """
    with opened(dsn) as admin:
        was = admin.run(calls.unsubscribe(handle, channel))
    who, where = repr(sanitize(handle, max_len=FIELD_LEN)), repr(sanitize(channel, max_len=FIELD_LEN))
    if not was:
        return complain(f"{who} is not subscribed to {where}.", REFUSED)
    output.human(f"{who} is not subscribed to {where} any more")
    return DONE
