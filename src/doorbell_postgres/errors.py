"""The error tree, and which SQLSTATE becomes which error.

Every error is a `DoorbellError` and, where Python has a builtin for the kind, that builtin too, so that code written
against the reference (`KeyError`, `ValueError`, `RuntimeError`) goes on working. `str()` is the plain sentence; all of
them survive pickling.

Postgres errors that are none of ours reach the caller as psycopg raised them: a unique violation in the caller's own
transaction is the caller's.
"""

from __future__ import annotations


class DoorbellError(Exception):
    """The root of everything this package raises on purpose."""

    def __str__(self) -> str:
        # KeyError's own __str__ would show the sentence in quotes.
        return str(self.args[0]) if self.args else ""


class InvalidInput(DoorbellError, ValueError):
    """An argument is refused; nothing was sent or written."""


class UnknownChannel(DoorbellError, KeyError):
    """No post and no subscription has created this channel yet."""


class NotSubscribed(DoorbellError, KeyError):
    """The handle has no cursor on this channel."""


class AckBeyondHead(DoorbellError, ValueError):
    """The ack names a message that was never posted; the cursor has not moved."""


class BusClosed(DoorbellError, RuntimeError):
    """The bus, store or bell was closed before this call."""


class ForkedBus(DoorbellError, RuntimeError):
    """A bus made before fork() was used in the child. The parent's bus is unharmed."""


class WrongLoop(DoorbellError, RuntimeError):
    """An async bus was used in another event loop than its first one, or in a loop that psycopg cannot run in."""


class DatabaseUnavailable(DoorbellError, ConnectionError):
    """The database could not be reached, or went away and did not come back within `retry_for`."""


class AccessDenied(DoorbellError, PermissionError):
    """The role that the DSN names may not use the schema, or not this function of it."""


class SchemaMismatch(DoorbellError):
    """The database's schema is absent, or at another revision than this package speaks."""


class ChannelBusy(DoorbellError, TimeoutError):
    """Another transaction held the channel for longer than `lock_timeout`. Nothing was posted."""


class OutcomeUnknown(DoorbellError):
    """The connection broke, or the call was cancelled, under a post: it may or may not be in the log.

    With a key the post was sent again, and that was refused in turn; it may be sent again still.
    """


class HistoryPruned(DoorbellError):
    """Retention was forced past this cursor: the range that the message names is gone."""


class LogRewound(DoorbellError):
    """The log is not the one this client has read: after a restore or a failover, other messages carry its numbers."""


class TurnLost(DoorbellError):
    """Another session took this turn over; what this one still does for it would be done twice."""


# Class RB: classes that begin with 0-4 or A-H belong to the SQL standard. contract.sql raises these.
BY_SQLSTATE: dict[str, type[DoorbellError]] = {
    "RB001": InvalidInput,
    "RB002": UnknownChannel,
    "RB003": NotSubscribed,
    "RB004": AckBeyondHead,
    "RB005": LogRewound,
    "RB006": HistoryPruned,
    "RB007": TurnLost,
    "RB008": OutcomeUnknown,
}

# The schema, its version table or one of its functions is not there.
SCHEMA_ABSENT = frozenset({"3F000", "42P01", "42883"})

LOCK_TIMEOUT = "55P03"
DENIED = "42501"
CANCELED = "57014"

# Read-only after a failover (25006) and the two idle-session timeouts (25P03, 25P04) come as InternalError.
_TRANSIENT = frozenset(
    {"40001", "40P01", "57P01", "57P02", "57P03", "57P05", "53300", "25006", "25P03", "25P04"}
)  # fmt: skip


def is_transient(sqlstate: str | None, *, connection_lost: bool) -> bool:
    """Whether the same call may succeed when it is simply sent again.

    `connection_lost` stands for an OperationalError without SQLSTATE, which is how libpq reports a broken socket. A
    cancelled query (57014) and the server's own limits (53400, 54000) are answers, not accidents.
    """
    if sqlstate is None:
        return connection_lost
    return sqlstate in _TRANSIENT or sqlstate.startswith("08")


def leaves_outcome_open(sqlstate: str | None, *, commits: bool = False) -> bool:
    """Whether a call that failed this way may have taken effect all the same: its answer was lost, not refused.

    `commits`: the call commits on its way. Then what ends it later (a time limit, a resource that ran out) does not undo
    what was committed before.
    """
    if sqlstate is None or sqlstate.startswith("08") or sqlstate in {"57P01", "57P02", "57P05"}:
        return True
    return commits and (sqlstate in {CANCELED, "25P03", "25P04"} or sqlstate.startswith("53"))
