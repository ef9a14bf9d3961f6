"""Messages for agent sessions that crash: durable, on one Postgres, from any number of hosts."""

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
