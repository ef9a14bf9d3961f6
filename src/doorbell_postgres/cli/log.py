"""What anybody does with a channel's log: `doorbell post` and `doorbell tail`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import click

from doorbell_postgres import calls
from doorbell_postgres.bus import MessageBus
from doorbell_postgres.calls import BODY_BYTES, UNACKED_BYTES
from doorbell_postgres.cli import output
from doorbell_postgres.cli.command import DONE, complain, dsn_of, dsn_option, json_option, seconds_option
from doorbell_postgres.contract import Message
from doorbell_postgres.errors import InvalidInput
from doorbell_postgres.wakeline import FIELD_LEN, sanitize, wake_line

PAGE = 100


def _headers(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is no header; it must be NAME=VALUE, such as trace-id=7f3a.")
        if name in headers:
            raise click.BadParameter(f"{name!r} is given twice; give each name once.")
        headers[name] = text
    return headers


def _after(_: click.Context, __: click.Parameter, value: str) -> int | None:
    """The seq behind which to begin; None is the head."""
    if value == "head":
        return None
    if value == "start":
        return 0
    if value.isascii() and value.isdecimal() and len(value) < 20 and 1 <= int(value) <= calls.MAX_BIGINT:
        return int(value) - 1
    raise click.BadParameter(f"{value!r} is no place to begin; it must be 'start', 'head' or a number from 1 on.")


@click.command()
@click.argument("channel")
@click.argument("body", required=False, metavar="[BODY|-]")
@click.option("--sender", required=True, help="Whom it is from: a handle. Its own posts never ring for it.")
@click.option("--key", help="Idempotency key: posting it again prints the original's number, and posts nothing.")
@click.option("--header", "headers", multiple=True, callback=_headers, metavar="NAME=VALUE", help="A header; repeatable.")
@dsn_option
def post(channel: str, body: str | None, sender: str, key: str | None, headers: dict[str, str], dsn: str | None) -> None:
    """Append a message to CHANNEL; prints the channel and the message's number in it.

    The body is the argument, or with '-' or without one what stands on stdin: UTF-8, not empty, kept to the byte, at most
    16 MiB. When this has exited 0 the message is durable. Retry with a --key: then it is posted once, however often you try.

    \b
    Example: doorbell post events 'deploy finished' --sender ci --key deploy-42
             git log -1 | doorbell post events --sender ci --header repo=api
    """
    where = dsn_of(dsn)
    text = _from_stdin() if body in (None, "-") else body
    with MessageBus(where, max_size=2) as bus:
        head = 0 if key is None else bus.store.head(channel)
        posted = bus.post(channel, text or "", sender=sender, idempotency_key=key, headers=headers)
    output.human(f"{sanitize(posted.channel, max_len=FIELD_LEN)!r}#{posted.seq}")
    if posted.seq <= head:
        output.flush()
        complain("(already posted)", DONE)


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("no body given. Pass it as an argument, or on stdin.")
    read = sys.stdin.buffer.read(BODY_BYTES + 1)
    if not read:
        raise InvalidInput("The body on stdin is empty; nothing was posted. To post an empty message, pass '' as the argument.")
    if len(read) > BODY_BYTES:
        raise InvalidInput(f"The body on stdin has more than {BODY_BYTES:,} bytes; at most that many are allowed.")
    try:
        return read.decode()
    except UnicodeDecodeError as exc:
        raise InvalidInput(
            f"The body on stdin is not UTF-8: byte {exc.start:,} is 0x{read[exc.start]:02x}. Encode it, for example as base64."
        ) from None


@click.command()
@click.argument("channel")
@click.option(
    "--from",
    "after",
    callback=_after,
    default="head",
    show_default=True,
    metavar="SEQ|start|head",
    help="Begin with this number, with the oldest that is kept, or with the next that comes.",
)
@seconds_option("--poll-interval", default=0.5, help="Look this often.")
@json_option
@dsn_option
def tail(channel: str, after: int | None, poll_interval: float, as_json: bool, dsn: str | None) -> None:
    """Print the messages of CHANNEL as they come, until Ctrl-C.

    It peeks, in a read-only session: no handle, no cursor, nothing is consumed. For people each message is one line,
    sanitised and cut; with --json it is exact.

    \b
    Example: doorbell tail events
             doorbell tail events --from start --json
    """
    with MessageBus(dsn_of(dsn), max_size=1) as bus:
        head = bus.store.peek(calls.head(channel))
        if head == 0:
            complain(f"{sanitize(channel, max_len=FIELD_LEN)!r} has no message yet; waiting for the first.", 0)
        for page in _pages(bus, channel, head if after is None else after, poll_interval):
            for msg in page:
                if as_json:
                    output.json_line(output.message(msg))
                else:
                    output.human(wake_line(msg))
            output.flush()


def _pages(bus: MessageBus, channel: str, after: int, poll_interval: float) -> Iterator[list[Message]]:
    """For ever. A page shrinks where bodies are big, so that it stays within some megabytes."""
    limit = 1
    while True:
        page = bus.store.peek(calls.messages_after(channel, after, limit=limit))
        if page:
            yield page
            after = page[-1].seq
            biggest = max(len(msg.body.encode()) for msg in page)
            limit = max(1, min(PAGE, 2 * limit, UNACKED_BYTES // max(1, biggest)))
        else:
            time.sleep(poll_interval)
