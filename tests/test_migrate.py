"""Bringing a database to this package's schema, and what a bus says that is opened on one that is not there."""

from __future__ import annotations

import ast
import logging
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from doorbell_postgres import cli, migrate
from doorbell_postgres.cli import command
from doorbell_postgres.errors import DatabaseUnavailable, DoorbellError, InvalidInput, SchemaMismatch
from support import Api, TestServer

CATALOG = {
    "columns": """
        select c.relname, a.attname, a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
               l.collname, pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum)
        from pg_class as c
        join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0
        left join pg_collation as l on l.oid = a.attcollation
        left join pg_attrdef as d on d.adrelid = c.oid and d.adnum = a.attnum
        where c.relnamespace = 'doorbell'::regnamespace order by 1, 3""",
    "relations": """
        select c.relname, c.relkind, c.reloptions, c.relacl::text, obj_description(c.oid, 'pg_class')
        from pg_class as c where c.relnamespace = 'doorbell'::regnamespace order by 1""",
    "constraints": """
        select n.conrelid::regclass::text, n.conname, pg_get_constraintdef(n.oid)
        from pg_constraint as n where n.connamespace = 'doorbell'::regnamespace order by 1, 2""",
    "indexes": """
        select indexname, indexdef from pg_indexes where schemaname = 'doorbell' order by 1""",
    "views": """
        select viewname, definition from pg_views where schemaname = 'doorbell' order by 1""",
    "functions": """
        select pg_get_functiondef(p.oid), p.proacl::text, obj_description(p.oid, 'pg_proc')
        from pg_proc as p where p.pronamespace = 'doorbell'::regnamespace order by 1""",
    "schema": """
        select nspacl::text, obj_description(oid, 'pg_namespace') from pg_namespace where nspname = 'doorbell'""",
    "revision": "select version_num from doorbell.schema_version",
    "declares": "select declares from doorbell.meta",
}


def catalog(dsn: str) -> dict[str, list[tuple[Any, ...]]]:
    """What a schema is made of, as far as the catalogs tell, without oids and without data."""
    with psycopg.connect(dsn) as connection:
        return {what: connection.execute(query.encode()).fetchall() for what, query in CATALOG.items()}


def execute(dsn: str, statement: str, *params: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def role(dsn: str) -> Iterator[str]:
    name = f"agent_{secrets.token_hex(4)}"
    execute(dsn, f"create role {name}")
    yield name
    execute(dsn, f"drop owned by {name}; drop role {name}")


# ---------------------------------------------------------------------------------------------------------------------
# Upgrading
# ---------------------------------------------------------------------------------------------------------------------


def test_an_upgrade_makes_an_empty_database_ready(empty_dsn: str) -> None:
    before = migrate.status(empty_dsn)
    assert (before.current, before.known, before.declared, before.ready) == (None, True, False, False)
    after = migrate.upgrade(empty_dsn)
    assert (after.current, after.declared, after.ready) == (after.newest, True, True)
    assert migrate.status(empty_dsn) == after
    assert (after.changed, migrate.status(empty_dsn).changed) == (True, None)


def test_a_second_upgrade_changes_nothing(dsn: str) -> None:
    rows = "select oid::text, xmin::text from pg_proc where pronamespace = 'doorbell'::regnamespace order by 1"
    before = execute(dsn, rows)
    again = migrate.upgrade(dsn)
    assert (again.ready, again.changed) == (True, False)
    assert execute(dsn, rows) == before


def test_status_writes_nothing(empty_dsn: str) -> None:
    execute(empty_dsn, "alter database current set default_transaction_read_only = on".replace("current", dbname(empty_dsn)))
    assert migrate.status(empty_dsn).current is None
    assert execute(empty_dsn, "select count(*) from pg_namespace where nspname = 'doorbell'") == [(0,)]


def test_functions_that_somebody_replaced_are_declared_anew(dsn: str) -> None:
    expected = catalog(dsn)
    execute(dsn, "create or replace function doorbell.head(channel text) returns bigint language sql as 'select 7::bigint'")
    execute(
        dsn,
        "create view doorbell.stray as select 1 as one; create view doorbell.on_it as select one from doorbell.stray",
    )
    execute(dsn, "update doorbell.meta set declares = 'of an older package'")
    assert not migrate.status(dsn).ready
    assert migrate.upgrade(dsn).ready
    assert catalog(dsn) == expected


@pytest.fixture
def latin_dsn(server: TestServer) -> Iterator[str]:
    """A database that is not encoded in UTF8."""
    name = f"latin_{secrets.token_hex(4)}"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        admin.execute(f"create database {name} encoding 'LATIN1' locale 'C' template template0".encode())
        yield server.dsn(name)
        admin.execute(f"drop database {name} with (force)".encode())


def test_a_database_that_cannot_hold_all_text_is_refused(latin_dsn: str) -> None:
    with pytest.raises(SchemaMismatch, match=r"encoded in LATIN1.*createdb --encoding UTF8"):
        migrate.upgrade(latin_dsn)
    assert execute(latin_dsn, "select count(*) from pg_namespace where nspname = 'doorbell'") == [(0,)]


def test_the_check_says_what_upgrade_would_refuse(latin_dsn: str) -> None:
    """And not to run what refuses."""
    with pytest.raises(SchemaMismatch) as refused:
        migrate.upgrade(latin_dsn)
    found = migrate.status(latin_dsn)
    assert (found.encoding, found.ready) == ("LATIN1", False)
    assert str(found) == str(refused.value)
    done = CliRunner().invoke(cli.main, ["migrate", "--check", "--dsn", latin_dsn])
    assert (done.exit_code, done.stdout) == (command.REFUSED, f"{refused.value}\n")


def test_a_declaration_restores_the_recorded_grants(dsn: str, role: str, server: TestServer) -> None:
    def rights() -> dict[str, list[tuple[Any, ...]]]:
        return {what: execute(dsn, query, role, role) for what, query in checks.items()}

    checks = {
        "functions": "select p.proname, has_function_privilege(%s, p.oid, 'execute') from pg_proc as p"
        " where p.pronamespace = 'doorbell'::regnamespace and has_function_privilege(%s, p.oid, 'execute') order by 1",
        "views": "select c.relname, has_table_privilege(%s, c.oid, 'select') from pg_class as c"
        " where c.relnamespace = 'doorbell'::regnamespace and c.relkind in ('r', 'v')"
        " and has_table_privilege(%s, c.oid, 'select') order by 1",
        "schema": "select has_schema_privilege(%s, 'doorbell', 'usage'), has_schema_privilege(%s, 'doorbell', 'create')",
    }
    execute(dsn, "insert into doorbell.role_grant (role_name, operator) values (%s, true)", role)
    execute(dsn, "insert into doorbell.role_grant (role_name) values ('a role that was dropped since')")
    execute(dsn, "select doorbell._apply_grants()")
    before = rights()
    assert before["functions"]
    assert before["views"] == [(view, True) for view in ("backlog", "channels", "health", "turns", "violations")]
    assert before["schema"] == [(True, False)]

    execute(dsn, "update doorbell.meta set declares = 'of an older package'")
    migrate.upgrade(dsn)
    assert rights() == before


def test_printed_sql_gives_the_same_schema_as_an_upgrade(empty_dsn: str, dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(migrate.sql().encode())
    assert catalog(empty_dsn) == catalog(dsn)
    assert migrate.status(empty_dsn).ready


def test_printed_sql_is_what_psql_reads(empty_dsn: str, dsn: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("this machine has no psql")
    subprocess.run(
        [psql, "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--dbname", empty_dsn],
        input=migrate.sql(),
        text=True,
        encoding="utf-8",
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert catalog(empty_dsn) == catalog(dsn)


def test_printed_sql_is_all_or_nothing(empty_dsn: str) -> None:
    broken = migrate.sql().replace("create view doorbell.channels", "create view doorbell.backlog", 1)
    with psycopg.connect(empty_dsn, autocommit=True) as connection, pytest.raises(psycopg.Error):
        connection.execute(broken.encode())
    assert migrate.status(empty_dsn).current is None
    assert execute(empty_dsn, "select count(*) from pg_namespace where nspname = 'doorbell'") == [(0,)]


def test_an_upgrade_that_fails_leaves_nothing(empty_dsn: str) -> None:
    execute(empty_dsn, "create schema doorbell; create table doorbell.message (of_somebody_else integer)")
    with pytest.raises(Exception, match="message"):
        migrate.upgrade(empty_dsn)
    assert execute(empty_dsn, "select relname from pg_class where relnamespace = 'doorbell'::regnamespace") == [("message",)]


def test_an_upgrade_leaves_host_loggers_alone(empty_dsn: str) -> None:
    """Alembic's usual env.py configures logging from a file, and so silences whatever the host has set up."""
    mine = logging.getLogger("of.the.host")
    loggers = [logging.getLogger(), mine, *(logging.getLogger(name) for name in ("alembic", "sqlalchemy", "psycopg"))]

    def state() -> list[Any]:
        return [(x.name, x.level, x.disabled, x.propagate, list(x.handlers), list(x.filters)) for x in loggers]

    before, disabled = state(), logging.root.manager.disable
    migrate.upgrade(empty_dsn)
    migrate.status(empty_dsn)
    migrate.sql()
    assert state() == before
    assert logging.root.manager.disable == disabled


def test_an_upgrade_prints_nothing(empty_dsn: str, capfd: pytest.CaptureFixture[str]) -> None:
    migrate.upgrade(empty_dsn)
    assert capfd.readouterr() == ("", "")


def test_a_database_whose_default_is_an_old_snapshot_is_migrated_all_the_same(empty_dsn: str) -> None:
    execute(empty_dsn, f"alter database {dbname(empty_dsn)} set default_transaction_isolation = 'serializable'")
    assert migrate.upgrade(empty_dsn).ready
    assert migrate.upgrade(empty_dsn).ready


def test_a_newer_schema_is_refused_and_left_as_it_is(dsn: str) -> None:
    execute(dsn, "update doorbell.schema_version set version_num = '9999'")
    execute(dsn, "update doorbell.meta set declares = 'of a newer package'")
    before = catalog(dsn)
    assert not migrate.status(dsn).known
    with pytest.raises(SchemaMismatch) as caught:
        migrate.upgrade(dsn)
    assert str(caught.value) == (
        "The schema is at revision 9999, which this doorbell-postgres does not know: a newer version has migrated it. "
        "Going on would put old functions over newer tables. Upgrade doorbell-postgres on this host."
    )
    assert catalog(dsn) == before


# ---------------------------------------------------------------------------------------------------------------------
# The revisions
# ---------------------------------------------------------------------------------------------------------------------


def revisions() -> dict[str, dict[str, Any]]:
    """The constants of each revision, by revision, without running it."""
    found = {}
    for path in sorted((migrate.directory() / "versions").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants: dict[str, Any] = {
            "path": path,
            "functions": {n.name for n in tree.body if isinstance(n, ast.FunctionDef)},
        }
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                constants |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
        found[constants["revision"]] = constants
    return found


def test_revisions_are_one_line_and_only_go_forward() -> None:
    found = revisions()
    parents = [constants["down_revision"] for constants in found.values()]
    assert sorted(parents, key=str) == sorted([None, *sorted(found)[:-1]], key=str), "one after the other, in name order"
    for constants in found.values():
        assert "upgrade" in constants["functions"]
        assert "downgrade" not in constants["functions"], f"{constants['path'].name}: the way back is a restore"
        text = constants["path"].read_text(encoding="utf-8").lower()
        assert "concurrently" not in text, f"{constants['path'].name}: it would wait for those who wait for the guard"


def test_the_newest_revision_records_the_functions_and_views_that_it_declares() -> None:
    newest = revisions()[max(revisions())]
    assert newest["DECLARES"] == migrate.declared_hash(), (
        f"contract.sql or views.sql differs from what {newest['path'].name} records. Was that revision released? Then "
        "add a new one, even without tables of its own: it is what keeps an older package from restoring its functions. "
        f'Was it not? Then its line must be:\nDECLARES = "{migrate.declared_hash()}"'
    )


def test_the_package_speaks_the_newest_revision(dsn: str) -> None:
    from doorbell_postgres import calls

    assert max(revisions()) == calls.SCHEMA_REVISION == migrate.status(dsn).newest


# ---------------------------------------------------------------------------------------------------------------------
# Opening a bus
# ---------------------------------------------------------------------------------------------------------------------


def dbname(dsn: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


def absent(dsn: str, server: TestServer) -> str:
    return server.dsn("doorbell_test_that_is_not_there")


def unreachable(dsn: str, server: TestServer) -> str:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and nobody answers
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return make_conninfo(host="127.0.0.1", port=port, dbname="doorbell", user="doorbell", password="s3cret-word")


def unmigrated(dsn: str, server: TestServer) -> str:
    execute(dsn, "drop schema doorbell cascade")
    return dsn


def too_old(dsn: str, server: TestServer) -> str:
    execute(dsn, "update doorbell.schema_version set version_num = '0000'")
    return dsn


def too_new(dsn: str, server: TestServer) -> str:
    execute(dsn, "update doorbell.schema_version set version_num = '9999'")
    return dsn


def no_role(dsn: str, server: TestServer) -> str:
    return make_conninfo(dsn, user="doorbell_test_nobody", password="s3cret-word")


OPENING: dict[str, tuple[Callable[[str, TestServer], str], type[DoorbellError], str]] = {
    "absent": (absent, DatabaseUnavailable, "createdb"),
    "unreachable": (unreachable, DatabaseUnavailable, "Check host and port"),
    "no such role": (no_role, DatabaseUnavailable, "Check user and password"),
    "unmigrated": (unmigrated, SchemaMismatch, "Run: doorbell migrate"),
    "too old": (too_old, SchemaMismatch, "Run: doorbell migrate"),
    "too new": (too_new, SchemaMismatch, "Upgrade doorbell-postgres"),
}


@pytest.mark.parametrize("case", OPENING)
@pytest.mark.parametrize("door", ["MessageBus", "Store"])
def test_opening_says_what_is_wrong_and_what_to_run(case: str, door: str, dsn: str, server: TestServer, api: Api) -> None:
    make, kind, remedy = OPENING[case]
    opener = getattr(api, door)
    parameters = {"retry_for": 0.5} if door == "MessageBus" else {}
    with pytest.raises(kind) as caught:
        opener(make(dsn, server), **parameters)
    said = str(caught.value)
    assert remedy in said
    assert "s3cret" not in said
    assert said.isprintable(), "one line"


def test_each_opening_error_is_another(dsn: str, server: TestServer, api: Api) -> None:
    said = set()
    for make, kind, _ in OPENING.values():
        if make is not unmigrated:
            with pytest.raises(kind) as caught:
                api.MessageBus(make(dsn, server), retry_for=0.5)
            said.add(str(caught.value))
    with pytest.raises(SchemaMismatch) as caught:
        api.MessageBus(unmigrated(dsn, server))
    assert len(said | {str(caught.value)}) == len(OPENING)


@pytest.mark.parametrize("text", ["team.sqlite3", "postgres", "mysql://x", "", "host=x prot=5", "postgresql://u:s3cret@[x/d"])
def test_what_is_no_dsn_is_refused_with_what_one_looks_like(api: Api, text: str) -> None:
    with pytest.raises(InvalidInput, match="DSN") as caught:
        api.MessageBus(text)
    assert "postgresql://" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_migrate_true_brings_an_empty_database_up(empty_dsn: str, api: Api) -> None:
    bus = api.MessageBus(empty_dsn, migrate=True)
    try:
        assert bus.post("events", "b", sender="s").seq == 1
    finally:
        bus.close()
    assert migrate.status(empty_dsn).ready
