"""How it stands: `doorbell status`, `doctor`, `metrics`."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import click

from doorbell_postgres import doctor as examination
from doorbell_postgres import metrics as exposition
from doorbell_postgres import operations
from doorbell_postgres.admin import Admin
from doorbell_postgres.cli import output, table
from doorbell_postgres.cli.command import DONE, REFUSED, complain, dsn_of, dsn_option, json_option, seconds_option
from doorbell_postgres.cli.operator import opened
from doorbell_postgres.cli.table import Column
from doorbell_postgres.doctor import human_age
from doorbell_postgres.operations import Behind, Health, Totals, counted

CLEAR = "\x1b[H\x1b[2J\x1b[3J"

_BEHIND = (
    Column("handle", ratio=3),
    Column("channel", ratio=3),
    Column("unacked", "number"),
    Column("head", "number"),
    Column("waiting for"),
    Column("last ack"),
)


@click.command()
@dsn_option
@click.option("--limit", type=click.IntRange(min=0), default=10, show_default=True, metavar="N", help="Rows of who is behind.")
@click.option("--watch", "every", type=click.FloatRange(min=0.2, max=86_400), metavar="SECONDS", help="Redraw this often.")
@json_option
def status(dsn: str | None, limit: int, every: float | None, as_json: bool) -> None:
    """Show how it stands: the server, how much there is, and who is furthest behind.

    For operators. It reads no message. The ages are the database's.

    \b
    Example: doorbell status
             doorbell status --watch 2
             doorbell status --json
    """
    with opened(dsn, read_only=True) as admin:
        while True:
            health, totals = admin.run(operations.health()), admin.run(operations.totals())
            behind = admin.run(operations.behind(limit))
            if as_json:
                output.json_line(
                    {
                        "health": dataclasses.asdict(health),
                        "totals": dataclasses.asdict(totals),
                        "behind": [dataclasses.asdict(row) for row in behind],
                    }
                )
            else:
                _draw(list(_lines(health, totals, behind)), clear=every is not None and table.width() is not None)
            output.flush()
            if every is None:
                return
            time.sleep(every)


def _draw(lines: list[str], *, clear: bool) -> None:
    # In one write, so that the screen does not flicker.
    output.human((CLEAR if clear else "") + "\n".join(lines))


def _lines(health: Health, totals: Totals, behind: list[Behind]) -> Iterator[str]:
    width = table.width()
    facts = [
        ("server", f"Postgres {health.server_version}" + (", a standby: it takes no posts" if health.replica else "")),
        ("schema", f"revision {health.schema_revision}"),
        (
            "log",
            f"{counted(totals.messages, 'message')} in {counted(totals.channels, 'channel')}, "
            f"about {table.size(totals.estimated_bytes)}",
        ),
        (
            "readers",
            f"{counted(totals.handles, 'handle')} with {counted(totals.subscriptions, 'subscription')}; "
            f"{counted(health.waiting_sessions, 'session')} waiting",
        ),
        ("unacked", f"{totals.unacked:,}" + _since(totals) + (f"; {totals.lost:,} lost to retention" if totals.lost else "")),
        ("queue", f"{health.notification_queue_usage:.1%} of the notification queue in use"),
        ("transactions", f"oldest: {health.oldest_transaction}; blocked: {health.blocked_sessions}"),
    ]
    shown = table.lines((Column("status"), Column("", ratio=1, wrap=True)), facts, width=width)
    yield from shown if width is not None else shown[1:]  # in a pipe their titles say nothing
    if behind:
        yield ""
        yield from table.lines(
            _BEHIND,
            [
                (
                    b.handle,
                    b.channel,
                    b.unacked,
                    b.head,
                    human_age(b.oldest_unacked_seconds),
                    human_age(b.last_acked_seconds, "never"),
                )
                for b in behind
            ],
            width=width,
        )


def _since(totals: Totals) -> str:
    return f", the oldest for {human_age(totals.oldest_unacked_seconds)}" if totals.oldest_unacked_seconds is not None else ""


@click.command()
@dsn_option
@seconds_option("--idle", default=86_400.0, help="Report a backlog or an unfinished turn that is left for longer than this.")
@json_option
def doctor(dsn: str | None, idle: float, as_json: bool) -> int:
    """Check that everything is in order; each check is named: ok, warning or failing, with what to do.

    Exits 1 when a check is failing. It writes nothing, and looks for broken invariants in the whole log: some seconds
    on millions of messages.

    \b
    Example: doorbell doctor
             doorbell doctor --json --idle 3600
    """
    failing = False
    width = table.width()
    for check in examination.examine(dsn_of(dsn), idle=idle):
        failing = failing or check.verdict == "failing"
        if as_json:
            output.json_line(dataclasses.asdict(check))
        else:
            for line in _shown(check, width):
                output.human(line)
        output.flush()
    return REFUSED if failing else DONE


_MARKS = {"ok": "ok     ", "warning": "warning", "failing": "FAILING"}


def _shown(check: examination.Check, width: int | None) -> list[str]:
    said = table.cell(check.said)
    first = f"{_MARKS[check.verdict]}  {check.name}: {said}"
    second = f"         -> {table.cell(check.fix)}"
    texts = [first, second] if check.fix else [first]
    if width is None:
        return texts
    import textwrap

    return [line for text in texts for line in textwrap.wrap(text, width - 1, subsequent_indent=" " * 12, drop_whitespace=True)]


def _address(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, _colon, port = value.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise click.BadParameter(f"{value!r} is no address; it must be PORT or HOST:PORT, such as 9187 or 0.0.0.0:9187.")
    return host.strip("[]") or "127.0.0.1", int(port)


@click.command()
@dsn_option
@click.option("--serve", "address", callback=_address, metavar="[HOST:]PORT", help="Serve them over HTTP until Ctrl-C.")
@click.option("--violations", is_flag=True, help="Count broken invariants too: a scan of the log each time.")
def metrics(dsn: str | None, address: tuple[str, int] | None, violations: bool) -> int:
    """Print the state of the log as Prometheus metrics, once, or serve them.

    Wants the extra: pip install 'doorbell-postgres[metrics]'. With --serve, every scrape asks the database; without a host
    only this machine is served.

    \b
    Example: doorbell metrics
             doorbell metrics --serve 9187
    """
    where = dsn_of(dsn)
    if address is None:
        for line in exposition.text(where, violations=violations).decode().splitlines():
            output.human(line)
        return DONE
    with Admin(where, read_only=True) as admin:  # refuse now what every scrape would be refused
        admin.run(operations.health())
    host, port = address
    try:
        port = exposition.serve(where, port, host=host, violations=violations)
    except OSError as exc:
        return complain(
            f"Port {port} of {host} cannot be served: {exc.strerror or exc}. Choose another, such as --serve 9187; ports "
            "below 1024 are for root.",
            REFUSED,
        )
    complain(f"serving http://{host}:{port}/metrics until Ctrl-C.", DONE)
    threading.Event().wait()
    return DONE
