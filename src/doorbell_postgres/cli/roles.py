"""Who may do what: `doorbell grant`."""

from __future__ import annotations

import click
import psycopg
from psycopg import sql

from doorbell_postgres import operations, wire
from doorbell_postgres.cli import output
from doorbell_postgres.cli.command import DONE, REFUSED, complain, dsn_option
from doorbell_postgres.cli.operator import opened
from doorbell_postgres.wakeline import FIELD_LEN, sanitize

_READS_STATS = (
    "select 1 from pg_auth_members as a join pg_roles as r on r.oid = a.member"
    " where r.rolname = %s and a.roleid = 'pg_read_all_stats'::regrole"
)


@click.command()
@click.argument("role")
@click.option("--operator", is_flag=True, help="Let it read the views instead of calling the contract.")
@click.option("--revoke", is_flag=True, help="Take back all that this command gave.")
@dsn_option
def grant(role: str, operator: bool, revoke: bool, dsn: str | None) -> int:
    """Let ROLE in: as an agent it may call the contract, as an --operator read the views. Neither touches a table.

    A role may be both: run it twice. An upgrade keeps it. The role exists already (CREATE ROLE … LOGIN). For the owner of
    the schema; an operator also gets pg_read_all_stats, which takes the right to grant that: without it some of the view
    health reads unknown, and this says so.

    \b
    Example: doorbell grant agents
             doorbell grant watchers --operator
             doorbell grant agents --revoke
    """
    if operator and revoke:
        raise click.UsageError("--operator and --revoke exclude each other: --revoke takes everything back.")
    shown = repr(sanitize(role, max_len=FIELD_LEN))
    with opened(dsn) as admin:
        if revoke:
            if not admin.run(operations.revoke_role(role)):
                return complain(f"Role {shown} was not let in.", REFUSED)
            output.human(f"{shown} has no rights here any more")
            if admin.connection.execute(_READS_STATS, (role,)).fetchone():
                output.flush()
                name = sql.Identifier(role).as_string()
                complain(f"It may still read all statistics. As a superuser: REVOKE pg_read_all_stats FROM {name}", DONE)
            return DONE
        admin.run(operations.grant_role(role, operator=operator))
        output.human(f"{shown} may " + ("read the views" if operator else "call the contract"))
        if operator:
            try:
                admin.connection.execute(sql.SQL("grant pg_read_all_stats to {}").format(sql.Identifier(role)))
            except psycopg.errors.InsufficientPrivilege as exc:
                output.flush()
                complain(
                    f"pg_read_all_stats could not be granted ({wire.why(exc)}): without it health says unknown. "
                    f"As a superuser: GRANT pg_read_all_stats TO {sql.Identifier(role).as_string()}",
                    DONE,
                )
    return DONE
