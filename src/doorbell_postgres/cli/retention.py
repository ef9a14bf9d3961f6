"""Retention: `doorbell prune`, and `doorbell skip` for whom it was forced past."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import click

from doorbell_postgres import calls, operations
from doorbell_postgres.admin import Admin
from doorbell_postgres.cli import output, table
from doorbell_postgres.cli.command import DONE, REFUSED, complain, dsn_option, json_option
from doorbell_postgres.cli.operator import length, opened, progress
from doorbell_postgres.cli.table import Column
from doorbell_postgres.errors import ChannelBusy
from doorbell_postgres.operations import Plan, Pruned, counted
from doorbell_postgres.wakeline import FIELD_LEN, sanitize

_BECAUSE = {
    "cursor": "{who} has not acked {at}",
    "turn": "{who} has a turn on {at} that has not ended",
    "key": "the key of {at} is in the key window",
}


@click.command()
@click.option("--keep", required=True, callback=length, metavar="TIME", help="Keep what is younger than this: 30d, 12h, 1d12h.")
@click.option(
    "--keep-keys",
    default="7d",
    show_default=True,
    callback=length,
    metavar="TIME",
    help="Keep messages with a key, and turns that have ended, at least this long: a retry after that is new.",
)
@click.option("--channel", "channels", multiple=True, metavar="CHANNEL", help="Only this channel; repeatable.")
@click.option(
    "--batch",
    type=click.IntRange(1, operations.MOST_BATCH),
    default=operations.BATCH,
    show_default=True,
    metavar="N",
    help="Messages a transaction; posts to the channel wait for one batch.",
)
@click.option("--force", is_flag=True, help="Pass cursors that lag: their readers lose messages, and are told so.")
@click.option("--yes", is_flag=True, help="Do it; without, only what would be done is shown.")
@json_option
@dsn_option
def prune(
    keep: timedelta,
    keep_keys: timedelta,
    channels: tuple[str, ...],
    batch: int,
    force: bool,
    yes: bool,
    as_json: bool,
    dsn: str | None,
) -> int:
    """Remove what every subscriber has acked and is older than --keep. Without --yes it only shows what would go.

    Kept in any case: the newest message of each channel, messages whose key is in the key window, and messages of a turn
    that has not ended. A reader that lags holds its channel back, and is named. With --force it does not: its next catch-up,
    bell and ack are refused with the range it has lost, until: doorbell skip HANDLE CHANNEL.

    Works in batches beside running posts and acks; interrupted, it has done what it has done. For the owner of the schema.
    Exits 1 when a channel was held by a long transaction and was left out.

    \b
    Example: doorbell prune --keep 30d
             doorbell prune --keep 30d --yes
             doorbell prune --keep 12h --channel metrics --force --yes
    """
    with opened(dsn) as admin:
        plans = [
            plan
            for channel in channels or (None,)
            for plan in admin.run(operations.prune_plan(keep, channel, keep_keys=keep_keys, force=force))
        ]
        if not yes:
            _show_plans(plans, as_json=as_json)
            return DONE
        return _prune(admin, plans, keep, keep_keys, batch=batch, force=force, everything=not channels, as_json=as_json)


def _show_plans(plans: list[Plan], *, as_json: bool) -> None:
    if as_json:
        for plan in plans:
            output.json_line(dataclasses.asdict(plan))
        return
    rows = [
        (p.channel, p.first_kept, p.removable, _losers(p.loses) or _held(p.held_because, p.held_by, p.held_at))
        for p in plans
        if p.removable or p.held_because
    ]
    table.show(
        (
            Column("channel", ratio=2),
            Column("from", "number"),
            Column("would go", "number"),
            Column("held, lost", ratio=4, wrap=True),
        ),
        rows,
    )
    complain(f"{counted(sum(p.removable for p in plans), 'message')} would go. Nothing was removed; add --yes to do it.", DONE)


def _prune(
    admin: Admin,
    plans: list[Plan],
    keep: timedelta,
    keep_keys: timedelta,
    *,
    batch: int,
    force: bool,
    everything: bool,
    as_json: bool,
) -> int:
    busy: list[str] = []
    results: list[Pruned] = []
    expected, done = sum(plan.removable for plan in plans), 0
    with progress("prune") as tell:
        for plan in plans:
            removed, lost = 0, set[str]()
            while True:
                try:
                    result = admin.run(operations.prune(keep, plan.channel, keep_keys=keep_keys, batch=batch, force=force))
                except ChannelBusy:
                    busy.append(plan.channel)
                    break
                removed, done = removed + result.removed, done + result.removed
                lost.update(result.lost_by)
                tell("messages", min(done, expected), max(expected, 1))
                if not result.more:
                    results.append(dataclasses.replace(result, removed=removed, lost_by=tuple(sorted(lost))))
                    break
        turns, more = 0, everything
        while more:
            ended, more = admin.run(operations.prune_turns(keep_keys, batch=batch))
            turns += ended
    _show_results(results, as_json=as_json)
    complain(f"Removed: {counted(done, 'message')} and {counted(turns, 'ended turn')}.", DONE)
    if busy:
        shown = ", ".join(repr(sanitize(channel, max_len=FIELD_LEN)) for channel in busy[:5])
        return complain(
            f"Not finished, held by long transactions: {counted(len(busy), 'channel')}, {shown}. Run it again.", REFUSED
        )
    return DONE


def _show_results(results: list[Pruned], *, as_json: bool) -> None:
    if as_json:
        for result in results:
            output.json_line(dataclasses.asdict(result))
        return
    rows = [
        (r.channel, r.removed, r.up_to, _losers(r.lost_by) or _held(r.held_because, r.held_by, r.held_at))
        for r in results
        if r.removed or r.held_because
    ]
    table.show(
        (
            Column("channel", ratio=2),
            Column("removed", "number"),
            Column("up to", "number"),
            Column("held, lost", ratio=4, wrap=True),
        ),
        rows,
    )


def _held(because: str | None, who: str | None, at: int | None) -> str:
    shown = repr(sanitize(who, max_len=FIELD_LEN)) if who is not None else ""
    return "" if because is None else _BECAUSE[because].format(who=shown, at=at)


def _losers(handles: tuple[str, ...]) -> str:
    return "" if not handles else "lost by " + ", ".join(repr(sanitize(handle, max_len=FIELD_LEN)) for handle in handles)


@click.command()
@click.argument("handle")
@click.argument("channel")
@dsn_option
def skip(handle: str, channel: str, dsn: str | None) -> None:
    """Give up what retention was forced past before HANDLE had acked it on CHANNEL, and go on behind it.

    Changes nothing when nothing was lost. Until then catch-up, bell and ack are refused with the lost range.

    \b
    Example: doorbell skip worker events
    """
    with opened(dsn) as admin:
        lost = admin.run(calls.skip_pruned(handle, channel))
        cursor = admin.run(calls.acked_seq(handle, channel))
    who, where = repr(sanitize(handle, max_len=FIELD_LEN)), repr(sanitize(channel, max_len=FIELD_LEN))
    output.human(f"{who} has given up {counted(lost, 'message')} of {where}; its cursor stands at {cursor}")
