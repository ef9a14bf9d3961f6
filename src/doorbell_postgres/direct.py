"""How sync calls are sent from their second time on: prepared, with plain parameters, and read without a cursor."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.generators import execute
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from doorbell_postgres import wire

# How long a server is given to take the cancel of a call that was interrupted, and then to end its query.
SETTLE = 5.0
_DONE = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
_numbers = itertools.count()  # of prepared statements


class Direct(psycopg.Connection[Any]):
    """A connection that sends calls by the shortest way."""

    def send(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of one statement.

        psycopg's cursor adapts any type, keeps its result and knows row factories. That was half of what a call cost its
        process. So a statement that comes up again is prepared here, and sent with plain parameters as the text they are.
        Between two calls the processor's caches are others', and each function that is entered counts: hence few of them.
        """
        name = self._statements.get(sql) or self._prepared_name(sql)
        values: list[bytes | None] = []
        if name:
            try:
                for each in params:
                    values.append(_TEXT[type(each)](each))  # noqa: PERF401 - a comprehension is a function
            except KeyError:  # not all are plain
                name = None
        if not name:
            rows = self._cursor.execute(sql, params).fetchall()
            if len(rows) > 1:
                del self._cursor  # its result would stay in memory until the next call
            return rows
        try:
            result = self._answer(self.pgconn.send_query_prepared, name, values)
        except psycopg.errors.InvalidSqlStatementName:  # deallocated in a transaction of the user's
            self._statements.clear()
            return self.send(sql, params)
        loading = self._loading.get(name)
        if loading is None:
            loading = Transformer.from_context(self)
            loading.set_pgresult(result)
            self._loading[name] = loading  # not before it has its loaders: Ctrl-C comes between any two steps
        else:
            loading.set_pgresult(result, set_loaders=False)
        rows = loading.load_rows(0, result.ntuples, tuple)
        loading.set_pgresult(None, set_loaders=False)
        return rows

    def _prepared_name(self, sql: str) -> bytes | None:
        """The name of the statement, from its second use on: a process that sends one message never pays for it.

        Before it is sent, not after: what fails here must not be taken for the failure of a call that has succeeded.
        """
        if sql not in self._statements:
            self._statements[sql] = None
        elif self._statements[sql] is None and not wire.is_pooled(self) and "%b" not in sql:
            name = b"doorbell_%d" % next(_numbers)
            self._answer(self.pgconn.send_prepare, name, numbered(sql))
            self._statements[sql] = name
        return self._statements[sql]

    def _answer(self, send: Callable[..., None], *args: Any) -> PGresult:
        """Send, and wait for the result. As by psycopg's wait, which takes its process a quarter longer."""
        pgconn = self.pgconn
        results: list[PGresult] = []
        try:
            send(*args)
            if pgconn.flush():  # more than the socket takes at once
                results = self.wait(execute(pgconn))
            else:
                while True:
                    while pgconn.is_busy():
                        self._until_readable()
                        pgconn.consume_input()
                    if (result := pgconn.get_result()) is None:
                        break
                    results.append(result)
        except psycopg.Error:
            if not results or results[-1].status != ExecStatus.FATAL_ERROR:  # else the server has said why it ends
                raise
        except BaseException:  # Ctrl-C
            if pgconn.transaction_status == TransactionStatus.ACTIVE:
                self._end()
            raise
        if results[-1].status not in _DONE:
            raise psycopg.errors.error_from_result(results[-1], encoding="utf-8")
        return results[-1]

    def _until_readable(self) -> None:
        self.readable(None)

    def _end(self) -> None:
        """End the query that runs, so that it holds nothing any more; the connection too, if that takes long."""
        try:
            ends = time.monotonic() + SETTLE
            self.cancel_safe(timeout=SETTLE)
            while self.pgconn.is_busy():
                if self.readable(1000 * wire.CANCEL_AGAIN):
                    self.pgconn.consume_input()
                elif time.monotonic() > ends:
                    raise TimeoutError
                else:
                    self.cancel_safe(timeout=SETTLE)
            while self.pgconn.get_result():
                pass
        except BaseException:  # whatever it was, a second Ctrl-C included: this connection is not to be trusted
            self.pgconn.finish()

    @cached_property
    def readable(self) -> wire.Readable:
        return wire.readable(self.pgconn.socket)

    @cached_property
    def _cursor(self) -> psycopg.Cursor[Any]:
        return psycopg.Cursor(self, row_factory=tuple_row)

    @cached_property
    def _statements(self) -> dict[str, bytes | None]:
        return {}

    @cached_property
    def _loading(self) -> dict[bytes, Any]:
        """For each statement what turns its rows into Python's types, which never change."""
        return {}


def numbered(sql: str) -> bytes:
    """The statement with its parameters as Postgres itself writes them: $1, $2 …"""
    places = itertools.count(1)
    return re.sub("%s", lambda _: f"${next(places)}", sql).encode()


# As Postgres reads them; the casts in the statement say what they are.
_TEXT: dict[type, Callable[[Any], bytes | None]] = {
    type(None): lambda _: None,
    str: str.encode,
    int: b"%d".__mod__,
    bool: lambda value: b"t" if value else b"f",
    float: b"%a".__mod__,
}
