"""An operator's connection: one, plain, without threads; what it is told comes from `operations`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

from doorbell_postgres import calls, wire
from doorbell_postgres.calls import Call

T = TypeVar("T")


class Admin:
    """One session of an operator, or of the owner of the schema. Nothing is retried; for use in a `with` block.

    `read_only` makes the database refuse whatever would write. `check=False` opens a database with another schema too.

    Raises DatabaseUnavailable, SchemaMismatch or InvalidInput when it cannot be opened.
    """

    def __init__(self, dsn: str, *, read_only: bool = False, check: bool = True, connect_timeout: float = 5) -> None:
        options = wire.dial_options(dsn, application_name=None, connect_timeout=connect_timeout)
        try:
            self.connection: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True, **options)
        except psycopg.Error as exc:
            raise wire.unreachable(exc) from None
        try:
            wire.set_up(
                self.connection, self.connection.execute(*wire.on_connect(self.connection, read_only=read_only)).fetchone()
            )
            self.connection.prepare_threshold = None
            if check:
                wire.check_hello(self.run(calls.hello()))
        except BaseException:
            self.connection.close()
            raise

    def run(self, call: Call[T]) -> T:
        """Send the call once. Errors of ours as themselves; what the server said otherwise as psycopg raises it."""
        try:
            cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
            return call.read(cursor.execute(call.sql, call.params).fetchall())
        except psycopg.Error as exc:
            raise self._translated(exc, call) from None

    @staticmethod
    def _translated(exc: psycopg.Error, call: Call[Any]) -> Exception:
        if isinstance(exc, psycopg.OperationalError) and exc.sqlstate is None:
            return wire.unreachable(exc)
        return wire.translate(exc, call)

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """All or nothing: a connection in a transaction that commits when the block ends. Errors as of `run`."""
        try:
            with self.connection.transaction():
                yield self.connection
        except psycopg.Error as exc:
            raise self._translated(exc, calls.hello()) from None

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
