"""Bring a database to this package's schema, and say where it stands.

One transaction under one lock: ten hosts may migrate an empty database at once, and one that is killed half-way has done
nothing. Forward only: there is no way back but a restore.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doorbell_postgres import wire
from doorbell_postgres.errors import SchemaMismatch

if TYPE_CHECKING:
    from sqlalchemy import Connection

SCHEMA = "doorbell"
# Advisory keys are listed in docs/architecture.md; this is class 0x51, the migration guard.
GUARD = 0x51 << 56
DECLARED = ("contract.sql", "combining.sql", "admission.sql", "operations.sql", "views.sql")


@dataclass(frozen=True)
class Status:
    """Where a database stands: `current` is its revision (None: no schema), `newest` this package's.

    `declared` says whether its functions and views are the ones of this package; `encoding` is what the database is encoded
    in; `changed`, after `upgrade`, says whether that has done something.
    """

    current: str | None
    newest: str
    known: bool
    declared: bool
    encoding: str
    changed: bool | None = field(default=None, compare=False)

    @property
    def ready(self) -> bool:
        return self.current == self.newest and self.declared

    @property
    def refusal(self) -> str | None:
        """Why `upgrade` refuses this database, if it does."""
        if not self.known:
            return (
                f"The schema is at revision {self.current}, which this doorbell-postgres does not know: a newer version has "
                "migrated it. Going on would put old functions over newer tables. Upgrade doorbell-postgres on this host."
            )
        if self.encoding != "UTF8" and not self.ready:
            return (
                f"The database is encoded in {self.encoding}, and messages are any Unicode text. Nothing was changed. Create one "
                "for them: createdb --encoding UTF8 --template template0 NAME"
            )
        return None

    def __str__(self) -> str:
        if self.refusal is not None:
            return self.refusal
        if self.ready:
            did = {True: "Migrated. ", False: "Nothing to do. ", None: ""}[self.changed]
            return f"{did}The schema is at revision {self.current}, the newest."
        if self.current is None:
            return f"There is no doorbell schema; the newest revision is {self.newest}. Run: doorbell migrate."
        if self.current == self.newest:
            return f"The schema is at revision {self.current}, but its functions are not this version's. Run: doorbell migrate."
        return f"The schema is at revision {self.current}; the newest is {self.newest}. Run: doorbell migrate."


@cache
def directory() -> Path:
    """The migrations: inside the installed package, or at the top of a checkout."""
    here = Path(__file__).resolve().parent
    for place in (here / "migrations", here.parents[1] / "migrations"):
        if (place / "env.py").is_file():
            return place
    raise SchemaMismatch(f"The migrations are missing beside {here.name}. Install doorbell-postgres again.")


def declared_hash() -> str:
    """sha256 over the declared files: what the newest revision records, and what a database remembers."""
    digest = hashlib.sha256()
    for name in DECLARED:
        digest.update((directory() / name).read_bytes())
    return digest.hexdigest()


def upgrade(dsn: str) -> Status:
    """Migrate to the newest revision and return where the database stands; a second run changes nothing.

    Safe from many processes at once: all but one wait, then find nothing to do. Raises SchemaMismatch when the database
    is at a revision that this package does not know, since going on would put old functions over a newer schema, or is not
    encoded in UTF8.
    """
    from alembic import command

    with _connect(dsn) as connection, connection.begin():
        # The guard covers CREATE SCHEMA and the version table too. A transaction lock: a pooler would strand a session's.
        connection.exec_driver_sql(f"select pg_advisory_xact_lock({GUARD})")
        # Only now: before, it would cancel those who wait for the guard.
        connection.exec_driver_sql("set local lock_timeout = '30s'")
        before = _status(connection)
        if before.refusal is not None:
            raise SchemaMismatch(before.refusal)
        if not before.ready:
            for statement in preamble():
                connection.exec_driver_sql(statement)
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return replace(_status(connection), changed=not before.ready)


def status(dsn: str) -> Status:
    """Where the database stands. Reads only."""
    with _connect(dsn) as connection, connection.begin():
        connection.exec_driver_sql("set transaction read only")
        return _status(connection)


def sql() -> str:
    """The whole migration of an empty database as plain SQL, for psql."""
    from alembic import command

    text = io.StringIO()
    config = _config()
    config.output_buffer = text
    command.upgrade(config, "head", sql=True)
    return text.getvalue()


def preamble() -> Iterator[str]:
    yield f"create schema if not exists {SCHEMA}"
    yield f"comment on schema {SCHEMA} is 'Durable message delivery: call the functions, read the views; tables are private.'"


def declare(connection: Connection) -> None:
    import psycopg

    # Straight to psycopg, without parameters: in between, every % of the text would be taken for a placeholder.
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("set local check_function_bodies = off")
    try:
        driver.execute(declaration())
    except psycopg.errors.DependentObjectsStillExist as exc:
        raise SchemaMismatch(
            f"The functions and views cannot be declared anew: {exc.diag.message_primary} ({exc.diag.message_detail}). "
            "Nothing was changed. Drop what depends on them, migrate, and create it again."
        ) from None


def declaration() -> str:
    """Drop every function and view of the schema and create those of this package, grants included, as SQL."""
    parts = [_PATH, _DROP, *((directory() / name).read_text(encoding="utf-8") for name in DECLARED), _GRANT]
    parts.append(f"update {SCHEMA}.meta set declares = '{declared_hash()}';\n")
    return "\n".join(parts)


# Some functions have their names bound when they are made.
_PATH = "set local search_path = pg_catalog, pg_temp;\n"

# Each kind in one statement and without CASCADE: what an operator has built on a view stops the migration, and is not lost.
_DROP = f"""\
do $$
begin
  execute coalesce(
    (select 'drop view ' || string_agg(c.oid::regclass::text, ', ')
     from pg_class as c where c.relnamespace = '{SCHEMA}'::regnamespace and c.relkind = 'v'), '');
  execute coalesce(
    (select 'drop routine ' || string_agg(p.oid::regprocedure::text, ', ')
     from pg_proc as p where p.pronamespace = '{SCHEMA}'::regnamespace), '');
end
$$;
"""

# PUBLIC may execute a new function unless told otherwise, and a default privilege that says so cannot be scoped to one schema.
_GRANT = f"""\
revoke execute on all routines in schema {SCHEMA} from public;
select {SCHEMA}._apply_grants();
"""


def _status(connection: Connection) -> Status:
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(_config())
    newest = script.get_current_head()
    if newest is None:
        raise SchemaMismatch("The package holds no revision. Install doorbell-postgres again.")
    current: str | None = None
    declares: str | None = None
    if connection.exec_driver_sql(f"select to_regclass('{SCHEMA}.schema_version')").scalar() is not None:
        current = connection.exec_driver_sql(f"select version_num from {SCHEMA}.schema_version").scalar()
    if connection.exec_driver_sql(f"select to_regclass('{SCHEMA}.meta')").scalar() is not None:
        declares = connection.exec_driver_sql(f"select declares from {SCHEMA}.meta").scalar()
    known = current is None or current in {revision.revision for revision in script.walk_revisions()}
    encoding = str(connection.exec_driver_sql("show server_encoding").scalar())
    return Status(current, newest, known, declares == declared_hash(), encoding)


def _config() -> Any:
    from alembic.config import Config

    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(directory()).replace("%", "%%"))
    return config


@contextmanager
def _connect(dsn: str) -> Iterator[Connection]:
    import psycopg
    from sqlalchemy import create_engine, pool

    options = wire.dial_options(dsn, application_name="doorbell-migrate", connect_timeout=5)

    def dial() -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(dsn, **options)
        except psycopg.Error as exc:
            raise wire.unreachable(exc) from None

    # The DSN goes to libpq as it is: SQLAlchemy never parses it.
    engine = create_engine("postgresql+psycopg://", creator=dial, poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()
