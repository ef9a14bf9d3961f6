"""Moving in: `doorbell import`."""

from __future__ import annotations

import time

import click

from doorbell_postgres import reference
from doorbell_postgres.cli import output, table
from doorbell_postgres.cli.command import REFUSED, complain, dsn_of, dsn_option
from doorbell_postgres.cli.operator import progress
from doorbell_postgres.operations import counted


@click.command("import")
@click.argument("file")
@click.option("--check", is_flag=True, help="Only look whether the file can be taken over; write nothing.")
@dsn_option
def import_(file: str, check: bool, dsn: str | None) -> int | None:
    """Take over FILE, a store of the SQLite reference: channels, messages, keys, subscriptions and cursors.

    All of it or nothing, in one transaction; afterwards each handle goes on where it stopped. Stop every program that uses
    the file first. What cannot be taken over, such as an over-long name, is listed with its place before anything is written.
    The file is opened read-only. Channels that are in use in the database are refused. For the owner of the schema.

    \b
    Example: doorbell import team.sqlite3 --check
             doorbell import team.sqlite3
    """
    begun = time.monotonic()
    try:
        with progress("import") as tell:
            found = reference.inspect(file, progress=tell) if check else reference.take_over(file, dsn_of(dsn), progress=tell)
    except reference.Refused as exc:
        for fault in exc.faults:
            output.human(table.cell(fault))
        output.flush()
        return complain(str(exc), REFUSED)
    output.human(
        f"{'can be imported' if check else 'imported'}: {counted(found.channels, 'channel')}, "
        f"{counted(found.messages, 'message')} ({found.keys:,} with keys), {counted(found.subscriptions, 'subscription')}, "
        f"in {time.monotonic() - begun:.1f} s"
    )
    return None
