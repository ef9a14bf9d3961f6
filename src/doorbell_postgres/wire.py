"""What both shells know of psycopg: how to dial, how an error becomes ours, when to send again.

No connection is held here and nothing waits: the shells do that, each in its own way.
"""

from __future__ import annotations

import logging
import os
import random
import re
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, LiteralString, TypeAlias

from doorbell_postgres import calls, errors
from doorbell_postgres.calls import Call
from doorbell_postgres.errors import (
    AccessDenied,
    BusClosed,
    ChannelBusy,
    DatabaseUnavailable,
    DoorbellError,
    ForkedBus,
    InvalidInput,
    OutcomeUnknown,
    SchemaMismatch,
    WrongLoop,
)
from doorbell_postgres.wakeline import sanitize

try:
    import psycopg
    import psycopg.conninfo
except ImportError as exc:  # psycopg itself is a dependency: what is missing is the C library below it
    raise ImportError(
        "psycopg found no libpq on this machine. Install one with: pip install 'doorbell-postgres[binary]'"
    ) from exc

_AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

MEMORY = ":memory:"
A_DSN = "a DSN looks like postgresql://user@host:5432/dbname or 'host=… dbname=…'"

# Both ends notice a dead peer within about 25 s: idle + interval × count.
KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

# One try to get a connection from the pool takes from here to there: a dial needs its time, also where nothing is to be
# sent again, and the next try may find the server back.
POOL_LEAST, POOL_PATIENCE = 1.0, 3.0
# How long a connection may be kept out of the pool, in seconds: the pool renews connections that have grown old.
POOL_KEEP = 60.0
# After so many seconds without an end of the query, a cancel is sent again: one that comes before the server has begun with
# the query is forgotten.
CANCEL_AGAIN = 0.1
_POOL = "doorbell"


def _is_not_of_our_pool(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, tuple) and _POOL in record.args)


# The pool logs every dial that fails, on a logger of its own. Whoever asked for the connection gets the reason instead.
logging.getLogger("psycopg.pool").addFilter(_is_not_of_our_pool)

# Executions after which a statement is prepared; a process that sends one message never pays for it.
PREPARE_AFTER = 2

# Run once on every new connection. The handshake's backend pid is compared first: behind a pooler in transaction mode it
# is another, and nothing may be set there, since it would stay on a server session that others use next.
ON_CONNECT: LiteralString = """
select pg_backend_pid(), case when pg_backend_pid() = %(pid)s then
  set_config('tcp_keepalives_idle', '10', false) || set_config('tcp_keepalives_interval', '5', false)
  || set_config('tcp_keepalives_count', '3', false) || set_config('tcp_user_timeout', '25000', false)
  || case when %(read_only)s then set_config('default_transaction_read_only', 'on', false) else '' end
end
"""


def on_connect(connection: _AnyConnection, *, read_only: bool) -> tuple[LiteralString, dict[str, Any]]:
    return ON_CONNECT, {"pid": connection.info.backend_pid, "read_only": read_only}


def set_up(connection: _AnyConnection, answer: tuple[Any, ...] | None) -> None:
    """Take the answer to `on_connect`: behind a pooler in transaction mode nothing may be prepared either."""
    pooled = answer is not None and answer[0] != connection.info.backend_pid
    connection.prepare_threshold = None if pooled else PREPARE_AFTER


def is_pooled(connection: _AnyConnection) -> bool:
    return connection.prepare_threshold is None


LISTEN: LiteralString = "listen doorbell"
LISTEN_REFUSED = (psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.FeatureNotSupported)


def why_not_listen(connection: _AnyConnection, *, wanted: bool) -> str | None:
    """Why a listener does not even try to LISTEN on this connection."""
    if not wanted:
        return "notify is off"
    return "a pooler in transaction mode is in between" if is_pooled(connection) else None


class Late(psycopg.OperationalError):
    """The server has not answered in time: the connection is dead, or frozen, or the server is very slow."""


@dataclass(frozen=True)
class Settings:
    """What the user of a bus or store has asked for, checked. See Store for the meaning of each."""

    dsn: str
    options: dict[str, Any]
    migrate: bool
    announces: bool
    max_size: int
    retry_for: float
    lock_timeout: float

    def on(self, dsn: str) -> Settings:
        """The same on the throwaway server that now exists for ":memory:"; it always needs migrating."""
        return replace(self, dsn=dsn, migrate=True)


def settings(
    dsn: object,
    *,
    migrate: bool,
    notify: str,
    max_size: int,
    application_name: str | None,
    connect_timeout: float,
    retry_for: float,
    lock_timeout: float,
) -> Settings:
    """Check all of them, before anything is dialled. Raises InvalidInput."""
    if notify not in ("coalesced", "off"):
        raise InvalidInput(f"notify is {notify!r}; it must be 'coalesced' or 'off'.")
    retry_for = calls.seconds("retry_for", retry_for, zero=True)
    lock_timeout = calls.seconds("lock_timeout", lock_timeout)
    max_size = calls.count("max_size", max_size, least=1, most=10_000)
    connect_timeout = calls.seconds("connect_timeout", connect_timeout)
    dsn = resolve(dsn)
    given = "" if dsn == MEMORY else dsn
    options = dial_options(given, application_name=application_name, connect_timeout=connect_timeout)
    return Settings(dsn, options, migrate, notify != "off", max_size, retry_for, lock_timeout)


def pool_options(settings: Settings) -> dict[str, Any]:
    """How psycopg_pool is made in both shells, beside the dialer and what looks at its connections."""
    return {
        "conninfo": settings.dsn,
        "kwargs": {**settings.options, "autocommit": True},
        "min_size": 0,
        "max_size": settings.max_size,
        # Short: who asks for a connection asks again, and an outage must not leave the pool in a long back-off.
        "reconnect_timeout": 1.0,
        "name": _POOL,
    }


def pool_patience(timeout: float) -> float:
    """How long one try to get a connection may take, where `timeout` is left for all of them."""
    return min(max(POOL_LEAST, timeout), POOL_PATIENCE)


MEMORY_WARNING = (
    "':memory:' is a throwaway Postgres of this process: no other host or process sees it, and it ends with the process"
)


def dial_options(dsn: str, *, application_name: str | None, connect_timeout: float) -> dict[str, Any]:
    """Keyword arguments for psycopg.connect beside the untouched DSN. What the DSN or the environment says wins."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as exc:
        raise InvalidInput(f"The DSN cannot be read: {_without_quotes(str(exc))} What was expected: {A_DSN}.") from None
    if "@" in str(given.get("host", "")):
        raise InvalidInput("The DSN's host contains '@'. In a URL, an @ in the user's name or the password is written %40.")
    if not all(map(_is_port, str(given.get("port", "")).split(","))):
        # Not shown: where a password holds a slash, libpq takes a part of it for the port.
        raise InvalidInput(
            "The DSN's port is no number from 1 to 65535. In a URL, a / in the user's name or the password is written %2F."
        )
    options: dict[str, Any] = {
        **KEEPALIVE,
        "connect_timeout": max(2, round(connect_timeout)),
        "application_name": "doorbell",
    }
    if "PGCONNECT_TIMEOUT" in os.environ:
        del options["connect_timeout"]
    if "PGAPPNAME" in os.environ:
        del options["application_name"]
    options = {key: value for key, value in options.items() if key not in given}
    options["client_encoding"] = "UTF8"  # whatever is given: it is how this package writes and reads
    if application_name is not None:
        options["application_name"] = calls.name("application_name", application_name)
    return options


def _is_port(text: str) -> bool:
    """The empty one is the default."""
    return not text.strip() or bool(re.fullmatch(r"\s*\d{1,5}\s*", text, re.A) and 1 <= int(text) <= 65_535)


def resolve(dsn: object) -> str:
    """The DSN to use: the given one, else DOORBELL_DSN, else ":memory:". An empty one is refused, not passed over."""
    if dsn is None:
        dsn = os.environ.get("DOORBELL_DSN", MEMORY)
        if not dsn:
            raise InvalidInput(f"DOORBELL_DSN is set and empty; {A_DSN}. Unset, it means ':memory:', a private throwaway server.")
    if not isinstance(dsn, str):
        raise InvalidInput(f"dsn is of type {type(dsn).__name__}; {A_DSN}, and ':memory:' is a private throwaway server.")
    if dsn != MEMORY and not (dsn.startswith(("postgresql://", "postgres://")) or "=" in dsn):
        shown = sanitize(re.sub(r"^(\w*://)?.*@", r"\1…@", dsn, flags=re.S), max_len=80)  # before the @ may be a password
        raise InvalidInput(
            f"{shown!r} is not a DSN: {A_DSN}. ':memory:' is a private throwaway server; a file of the SQLite reference "
            "cannot be opened."
        )
    return dsn


def _without_quotes(reason: str) -> str:
    # libpq quotes the piece it stumbled over, and that may be part of a password. An option's name is safe and helps.
    if re.match(r'invalid (connection option|URI query parameter:) "\w+"', reason):
        return sanitize(reason, max_len=200).rstrip(".") + "."
    return sanitize(re.sub(r'".*"', "…", reason, flags=re.S), max_len=200).rstrip(".") + "."


def why(exc: BaseException) -> str:
    """What the server or libpq said, as one line, without what only a developer of psycopg wants to see."""
    said = exc.diag.message_primary if isinstance(exc, psycopg.Error) and exc.diag.message_primary else str(exc)
    said = re.sub(r"^connection failed: ", "", said)
    return sanitize(said, max_len=500).rstrip(".?")  # it is quoted inside a sentence


def unreachable(exc: psycopg.Error) -> DoorbellError:
    """The error for a database that could not be opened. The reason is the server's or libpq's; no password is in it."""
    reason = why(exc)
    if exc.sqlstate == "3D000" or re.search(r'database ".*" does not exist', reason):
        return DatabaseUnavailable(
            f"The server has no such database: {reason}. Create it with createdb, then run: doorbell migrate."
        )
    if (exc.sqlstate or "").startswith("28") or re.search(
        r'authentication failed|no password supplied|pg_hba|role ".*" does not exist', reason
    ):
        return DatabaseUnavailable(
            f"The server refused the login: {reason}. Check user and password of the DSN, and pg_hba.conf."
        )
    return DatabaseUnavailable(
        f"The database cannot be reached: {reason}. Check host and port of the DSN, and that the server runs."
    )


def check_hello(hello: calls.Hello) -> None:
    """Refuse a schema that this package does not speak, before anything is sent to it."""
    found, ours = hello.revision, calls.SCHEMA_REVISION
    if found is None:
        raise unmigrated()
    if found != ours:
        older = found < ours
        raise SchemaMismatch(
            f"The database's schema is at revision {found}; this doorbell-postgres speaks {ours}. "
            + ("Its functions are older than what would be called. Run: doorbell migrate." if older else
               "A newer version has migrated it. Upgrade doorbell-postgres on this host.")
        )  # fmt: skip


def unmigrated() -> SchemaMismatch:
    return SchemaMismatch("The database has no doorbell schema, or one too old to say its revision. Run: doorbell migrate.")


def translate(exc: psycopg.Error, call: Call[Any]) -> Exception:
    """The error of ours that stands for `exc`, or `exc` itself when it is not ours to interpret."""
    state = exc.sqlstate
    if state in errors.BY_SQLSTATE:
        said = " ".join(part for part in (exc.diag.message_primary, exc.diag.message_detail, exc.diag.message_hint) if part)
        return errors.BY_SQLSTATE[state](sanitize(said[:1].upper() + said[1:], max_len=1000))
    if state == errors.LOCK_TIMEOUT:
        which = f"Channel {sanitize(call.posts, max_len=64)!r}" if call.posts else "The channel"
        return ChannelBusy(
            f"{which} was held by another transaction for longer than lock_timeout. Nothing was written. "
            "Try again, or find the holder in pg_stat_activity: posts in a long transaction hold their channel until it ends."
        )
    if state == errors.DENIED:
        return AccessDenied(
            f"The role may not do this: {why(exc)}. doorbell grant ROLE lets it call the contract, with --operator read the "
            "views; pruning, importing and granting are for the owner of the schema."
        )
    if state in errors.SCHEMA_ABSENT:
        return unmigrated()
    return exc


class Attempts:
    """Whether, and when, a call that failed is sent again. One per call; used by both shells.

    Transient errors are retried until `ends`, a time of the monotonic clock. A post without a key is sent again only
    when it is certain that the first one did nothing. What is said of the last attempt, such as that it wrote nothing, is
    not true of a post whose earlier one had no answer: its outcome is not known.
    """

    def __init__(self, call: Call[Any], ends: float) -> None:
        self._call = call
        self._ends = ends
        self._delay = 0.05
        self._open = False  # an attempt ended without an answer, and may still post: what it staged can be numbered later

    def remaining(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def after(self, exc: psycopg.Error, *, sent: bool) -> float:
        """Seconds to wait before the next attempt; raises the final error when there is none.

        `sent` says that the call itself had gone out when `exc` came, not only the wish for a connection.
        """
        call, state = self._call, exc.sqlstate
        busy = state == errors.LOCK_TIMEOUT and call.posts is None
        lost = isinstance(exc, psycopg.OperationalError)
        unanswered = (state is not None or lost) and errors.leaves_outcome_open(state, commits=call.commits)
        behind = call.commits and _is_behind_commit(exc)
        unknown = OutcomeUnknown(
            f"The call ended before its answer came ({why(exc)}): the change may or may not be in the database. "
            "Look before sending it again, but not before the lock timeout is over; "
            "a post with an idempotency_key is retried safely."
        )
        was_open = self._open
        if sent and (unanswered or behind):
            if not call.repeatable:
                raise unknown from exc
            self._open = call.posts is not None
        if not (busy or behind or errors.is_transient(state, connection_lost=lost)):
            if was_open:
                raise unknown from exc
            raise translate(exc, call) from None
        delay = self._delay * random.uniform(0.5, 1.0)
        self._delay = min(1.0, self._delay * 2)
        if time.monotonic() + delay >= self._ends:
            raise (translate(exc, call) if busy else unknown if behind else unreachable(exc)) from exc
        return delay


def _is_behind_commit(exc: psycopg.Error) -> bool:
    """Whether post_combined failed by accident behind its first commit, without knowing that nothing was posted."""
    where, hint = exc.diag.context or "", exc.diag.message_hint or ""
    if exc.sqlstate == errors.CANCELED or "Nothing was posted" in hint:
        return False
    return "post_combined(" in where and not _BEFORE_COMMIT.search(where)


_BEFORE_COMMIT = re.compile(r"\b(try_post|stage)\(")


def spoils_connection(exc: BaseException) -> bool:
    """Whether the connection leads to the wrong server: one that turned read-only is no primary any more."""
    return isinstance(exc, psycopg.errors.ReadOnlySqlTransaction)


def closed() -> BusClosed:
    return BusClosed("The bus is closed; make a new one.")


def closed_meanwhile() -> BusClosed:
    return BusClosed("The bus was closed meanwhile; make a new one.")


def forked() -> ForkedBus:
    return ForkedBus("This bus was made before fork(): its connections belong to the parent. Make a new bus in the child.")


def wrong_loop() -> WrongLoop:
    return WrongLoop(
        "This bus belongs to the event loop that first used it: its connections cannot be used in another. Make a new bus "
        "in this loop, or run everything in one loop."
    )


def proactor_loop() -> WrongLoop:
    return WrongLoop(
        "psycopg cannot run in Windows' ProactorEventLoop. Use the other one: asyncio.run(main(), "
        "loop_factory=asyncio.SelectorEventLoop), or in Python 3.11 with asyncio.Runner(loop_factory=…) as runner."
    )


def unanswered(timeout: float, reason: str | None) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"The database did not answer within {timeout:g} s: {reason or 'no answer yet'}. "
        "Check that the server runs and the network lets it through."
    )


def interrupted() -> OutcomeUnknown:
    return OutcomeUnknown(
        "The call that carried this post was interrupted: it may or may not be in the log. "
        "Look before posting it again, but not before the lock timeout is over; "
        "a post with an idempotency_key is sent again safely."
    )


def refuse_foreign(conn: object, expected: type) -> None:
    if not isinstance(conn, expected):
        raise InvalidInput(
            f"conn is of type {type(conn).__name__}; it must be a psycopg.{expected.__name__} with the schema in reach."
        )


Readable: TypeAlias = Callable[[float | None], list[tuple[int, int]]]
READ, WRITE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)


def readable(*fds: int, writable: int | None = None) -> Readable:
    """Asks which of these sockets have something to read, in pairs with what poll says of each, within so many milliseconds.

    `writable` is the one of them that is ready when it can be written to, too. What an idle connection has to read is its
    end. One call of the system: a selector that is made for one wait wants six, which a ring would wait for.
    """
    if not hasattr(select, "poll"):  # pragma: no cover

        def ask(ms: float | None) -> list[tuple[int, int]]:
            # Without an end, in parts: Ctrl-C does not end a select there.
            read, write, _ = select.select(fds, [] if writable is None else [writable], [], 0.1 if ms is None else ms / 1000)
            return [(fd, (fd in read and READ) | (fd in write and WRITE)) for fd in {*read, *write}]

        return ask
    poll = select.poll()
    for fd in fds:
        poll.register(fd, READ | WRITE if fd == writable else READ)
    return poll.poll
