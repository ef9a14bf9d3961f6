"""Messages for agent sessions that crash: durable, on one Postgres, from any number of hosts."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doorbell_postgres.bus import MessageBus
    from doorbell_postgres.contract import Backlog, Draft, Message, UnfinishedTurn, WakeEvent
    from doorbell_postgres.errors import (
        AccessDenied,
        AckBeyondHead,
        BusClosed,
        ChannelBusy,
        DatabaseUnavailable,
        DoorbellError,
        ForkedBus,
        HistoryPruned,
        InvalidInput,
        LogRewound,
        NotSubscribed,
        OutcomeUnknown,
        SchemaMismatch,
        TurnLost,
        UnknownChannel,
        WrongLoop,
    )
    from doorbell_postgres.store import Store
    from doorbell_postgres.turns import Step, Turn
    from doorbell_postgres.waiter import Doorbell
    from doorbell_postgres.wakeline import sanitize, wake_line

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AckBeyondHead",
    "Backlog",
    "BusClosed",
    "ChannelBusy",
    "DatabaseUnavailable",
    "Doorbell",
    "DoorbellError",
    "Draft",
    "ForkedBus",
    "HistoryPruned",
    "InvalidInput",
    "LogRewound",
    "Message",
    "MessageBus",
    "NotSubscribed",
    "OutcomeUnknown",
    "SchemaMismatch",
    "Step",
    "Store",
    "Turn",
    "TurnLost",
    "UnfinishedTurn",
    "UnknownChannel",
    "WakeEvent",
    "WrongLoop",
    "__version__",
    "sanitize",
    "wake_line",
]

# Which module a name is loaded from, at its first use: loading psycopg takes a tenth of a second, and not every importer
# needs it.
_HOME = {
    "AccessDenied": "errors",
    "AckBeyondHead": "errors",
    "Backlog": "contract",
    "BusClosed": "errors",
    "ChannelBusy": "errors",
    "DatabaseUnavailable": "errors",
    "Doorbell": "waiter",
    "DoorbellError": "errors",
    "Draft": "contract",
    "ForkedBus": "errors",
    "HistoryPruned": "errors",
    "InvalidInput": "errors",
    "LogRewound": "errors",
    "Message": "contract",
    "MessageBus": "bus",
    "NotSubscribed": "errors",
    "OutcomeUnknown": "errors",
    "SchemaMismatch": "errors",
    "Step": "turns",
    "Store": "store",
    "Turn": "turns",
    "TurnLost": "errors",
    "UnfinishedTurn": "contract",
    "UnknownChannel": "errors",
    "WakeEvent": "contract",
    "WrongLoop": "errors",
    "sanitize": "wakeline",
    "wake_line": "wakeline",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
