"""What a handle does with its cursors: `doorbell subscribe`, `catch-up`, `ack`."""

from __future__ import annotations

from itertools import islice
from typing import cast

import click

from doorbell_postgres.bus import MessageBus
from doorbell_postgres.calls import UNACKED_BYTES
from doorbell_postgres.cli import output
from doorbell_postgres.cli.command import DONE, complain, dsn_of, dsn_option, json_option
from doorbell_postgres.contract import Start
from doorbell_postgres.wakeline import FIELD_LEN, sanitize, wake_line
from doorbell_postgres.watch import to_nothing

PAGE = 100


@click.command()
@click.argument("handle")
@click.argument("channel")
@click.option(
    "--at",
    type=click.Choice(["head", "start"]),
    default="head",
    show_default=True,
    help="Begin behind the newest message, or before the oldest one that is kept.",
)
@dsn_option
def subscribe(handle: str, channel: str, at: str, dsn: str | None) -> None:
    """Subscribe HANDLE to CHANNEL: what is posted from now on is delivered to it.

    Creates the channel if need be. Again, it changes nothing: a cursor is never moved by subscribing.

    \b
    Example: doorbell subscribe worker events
             doorbell subscribe auditor events --at start
    """
    with MessageBus(dsn_of(dsn), max_size=1) as bus:
        bus.subscribe(handle, channel, at=cast(Start, at))
        cursor = bus.store.acked_seq(handle, channel)
    who, where = sanitize(handle, max_len=FIELD_LEN), sanitize(channel, max_len=FIELD_LEN)
    output.human(f"{who!r} is subscribed to {where!r}; its cursor stands at {cursor}")


@click.command("catch-up")
@click.argument("handle")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N messages.")
@click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop before the bodies exceed N bytes; the first message is printed whatever its size.",
)
@json_option
@dsn_option
def catch_up(handle: str, limit: int | None, max_bytes: int | None, as_json: bool, dsn: str | None) -> None:
    """Print what HANDLE has not acked: channels in name order, each from its cursor to its head.

    Consumes nothing: what is not acked comes again. For people each message is one line, sanitised and cut; with --json it
    is exact. Holds one page in memory, however long the backlog. What --limit and --max-bytes leave out comes next time.

    \b
    Example: doorbell catch-up worker
             doorbell catch-up worker --json --limit 10
    """
    with MessageBus(dsn_of(dsn), max_size=1) as bus:
        page_size, page_bytes = min(limit or PAGE, PAGE), min(max_bytes or UNACKED_BYTES, UNACKED_BYTES)
        n, size = -1, 0
        for n, msg in enumerate(islice(bus.unacked(handle, page_size=page_size, max_bytes=page_bytes), limit)):
            size += len(msg.body.encode())
            if max_bytes is not None and n > 0 and size > max_bytes:
                break
            if as_json:
                output.json_line(output.message(msg))
            else:
                output.human(wake_line(msg))
        if n < 0 and not bus.store.subscriptions(handle):
            complain(f"{to_nothing(handle)}, so nothing ever comes. Run: doorbell subscribe HANDLE CHANNEL.", DONE)


@click.command()
@click.argument("handle")
@click.argument("channel")
@click.argument("seq", type=int)
@dsn_option
def ack(handle: str, channel: str, seq: int, dsn: str | None) -> None:
    """Say that HANDLE has handled everything on CHANNEL up to SEQ; prints where its cursor stands then.

    Do it after handling: a crash in between means that the message comes again, never that it is lost. The cursor never
    moves back, and an ack beyond the newest message is refused.

    Example: doorbell ack worker events 42
    """
    with MessageBus(dsn_of(dsn), max_size=1) as bus:
        output.human(str(bus.ack(handle, channel, seq)))
