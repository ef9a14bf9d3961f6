"""How sync calls are sent: prepared once, with plain parameters, and read without a cursor."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.generators import execute
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from doorbell_postgres import wire

_numbers = itertools.count()  # of prepared statements


class Direct(psycopg.Connection[Any]):
    """A connection that sends calls by the shortest way."""

    def send(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of one statement.

        psycopg's cursor adapts any type, keeps its result and knows row factories. That was half of what a call cost its
        process. So a statement that comes up again is prepared here, and sent with plain parameters as the text they are.
        """
        name = self._statements.get(sql) or self._name_of(sql)
        values = _as_text(params) if name else None
        if name is None or values is None:
            rows = self._cursor.execute(sql, params).fetchall()
            if len(rows) > 1:
                del self._cursor  # its result would stay in memory until the next call
            return rows
        with self.lock:
            self.pgconn.send_query_prepared(name, values)
            result = self._result()
        self._loading.set_pgresult(result)
        loaded: list[tuple[Any, ...]] = self._loading.load_rows(0, result.ntuples, tuple)
        return loaded

    def _name_of(self, sql: str) -> bytes | None:
        """The name of the statement, from its second use on: a process that sends one message never pays for it.

        Before it is sent, not after: what fails here must not be taken for the failure of a call that has succeeded.
        """
        if sql not in self._statements:
            self._statements[sql] = None
        elif self._statements[sql] is None and not wire.is_pooled(self) and "%b" not in sql:
            name = b"doorbell_%d" % next(_numbers)
            places = itertools.count(1)
            with self.lock:
                self.pgconn.send_prepare(name, re.sub("%s", lambda _: f"${next(places)}", sql).encode())
                self._result()
            self._statements[sql] = name
        return self._statements[sql]

    def _result(self) -> PGresult:
        result: PGresult = self.wait(execute(self.pgconn))[-1]
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise psycopg.errors.error_from_result(result, encoding="utf-8")
        return result

    @cached_property
    def _cursor(self) -> psycopg.Cursor[Any]:
        return psycopg.Cursor(self, row_factory=tuple_row)

    @cached_property
    def _loading(self) -> Any:
        return Transformer.from_context(self)

    @cached_property
    def _statements(self) -> dict[str, bytes | None]:
        return {}


_TEXT: dict[type, Callable[[Any], bytes | None]] = {
    type(None): lambda _: None,
    str: str.encode,
    int: lambda value: b"%d" % value,
    bool: lambda value: b"t" if value else b"f",
    float: lambda value: repr(value).encode(),
}


def _as_text(params: Sequence[Any]) -> list[bytes | None] | None:
    """The parameters as Postgres reads them; the casts in the statement say what they are. None: not all are plain."""
    try:
        return [_TEXT[type(each)](each) for each in params]
    except KeyError:
        return None
