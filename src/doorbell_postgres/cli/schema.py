"""The schema: `doorbell migrate`."""

from __future__ import annotations

import click
import psycopg

from doorbell_postgres.cli import output
from doorbell_postgres.cli.command import DONE, REFUSED, dsn_of, dsn_option


@click.command()
@dsn_option
@click.option("--sql", "as_sql", is_flag=True, help="Print the migration of an empty database as SQL, and do nothing.")
@click.option("--check", is_flag=True, help="Only say where the database stands; exit 1 when it is not ready.")
def migrate(dsn: str | None, as_sql: bool, check: bool) -> int:
    """Bring the database to this version's schema. Safe from many hosts at once; again, it changes nothing.

    Example: doorbell migrate --dsn postgresql://localhost/team
    """
    from doorbell_postgres import migrate as migration

    if as_sql and check:
        raise click.UsageError("--sql and --check exclude each other.")
    if as_sql:
        click.echo(migration.sql(), nl=False)
        return DONE
    where = dsn_of(dsn)
    try:
        found = migration.status(where) if check else migration.upgrade(where)
    except Exception as exc:
        # SQLAlchemy wraps what the server has answered, such as a permission that is missing.
        answer = getattr(exc, "orig", None)
        if isinstance(answer, psycopg.Error):
            raise answer from None
        raise
    output.human(str(found))
    return DONE if found.ready else REFUSED
