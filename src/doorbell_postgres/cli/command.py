"""The command `doorbell`. Exit codes: 0 done, 1 refused (one line on stderr), 2 usage or no DSN, 4 unreachable."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click
import psycopg

from doorbell_postgres import __version__, wire
from doorbell_postgres.errors import DatabaseUnavailable, DoorbellError

REFUSED, USAGE, UNREACHABLE = 1, 2, 4


class _Group(click.Group):
    """Turns what a command raises into one line on stderr and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DatabaseUnavailable as exc:
            _fail(exc, UNREACHABLE)
        except DoorbellError as exc:
            _fail(exc, REFUSED)
        except psycopg.Error as exc:  # what the server said of it, such as a permission that is missing
            _fail(wire.why(exc), REFUSED)


def _fail(exc: Exception | str, code: int) -> NoReturn:
    click.echo(f"doorbell: {exc}", err=True)
    sys.exit(code)


def _dsn(given: str | None) -> str:
    """The command never starts a throwaway server: what it would read or write there nobody else could see."""
    dsn = given or os.environ.get("DOORBELL_DSN")
    if not dsn or dsn == ":memory:":
        raise click.UsageError(
            "no database given. Pass --dsn, or set DOORBELL_DSN: postgresql://user@host:5432/dbname or 'host=… dbname=…'."
        )
    return dsn


dsn_option = click.option("--dsn", metavar="DSN", help="The database; default: the environment's DOORBELL_DSN.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="doorbell")
def main() -> None:
    """Durable message delivery for crash-prone agent sessions, on Postgres."""


@main.command()
@dsn_option
@click.option("--sql", "as_sql", is_flag=True, help="Print the migration of an empty database as SQL, and do nothing.")
@click.option("--check", is_flag=True, help="Only say where the database stands; exit 1 when it is not ready.")
def migrate(dsn: str | None, as_sql: bool, check: bool) -> None:
    """Bring the database to this version's schema. Safe from many hosts at once; again, it changes nothing.

    Example: doorbell migrate --dsn postgresql://localhost/team
    """
    from doorbell_postgres import migrate as migration

    if as_sql and check:
        raise click.UsageError("--sql and --check exclude each other.")
    if as_sql:
        click.echo(migration.sql(), nl=False)
        return
    found = migration.status(_dsn(dsn)) if check else migration.upgrade(_dsn(dsn))
    click.echo(found)
    if not found.ready:
        sys.exit(REFUSED)
