"""Is everything in order? One named check after the other, each with what is true and, where it is not well, the fix."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import psycopg
from psycopg import sql

from doorbell_postgres import calls, operations, wire
from doorbell_postgres.admin import Admin
from doorbell_postgres.errors import AccessDenied, DoorbellError
from doorbell_postgres.operations import Health, counted
from doorbell_postgres.wakeline import FIELD_LEN, sanitize

Verdict = Literal["ok", "warning", "failing"]

# The first minor of each major without the known faults of LISTEN and NOTIFY (lost and refused notifications when old
# transaction ids are frozen); all of one day.
NOTIFY_FIXED = {15: 16, 16: 12, 17: 8, 18: 2}
OLDEST_MAJOR = 15

QUEUE_FILLING, QUEUE_FULL = 0.1, 0.5
OLD_TRANSACTION, VERY_OLD_TRANSACTION = 300.0, 3_600.0
# A notification within one server takes a millisecond.
ROUND_TRIP = 3.0
NAMED = 5


@dataclass(frozen=True)
class Check:
    """One finding. `fix` is what to do; empty when there is nothing to do."""

    name: str
    verdict: Verdict
    said: str
    fix: str = ""


def examine(dsn: str, *, idle: float = 86_400.0) -> Iterator[Check]:
    """The checks in order, each as soon as it is made. Writes nothing; sends one notification on a channel of its own.

    `idle` is how many seconds a backlog may wait, or a turn be left, before it is reported. Raises DatabaseUnavailable when
    there is nothing to examine.
    """
    with Admin(dsn, check=False) as admin:
        yield _version(admin.connection.info.server_version)
        schema = _schema(admin)
        yield schema
        yield _pooler(admin)
        yield _read_only(admin)
        yield _notifications(admin, dsn)
        if schema.verdict == "failing":
            return
        try:
            health = admin.run(operations.health())
        except AccessDenied as exc:
            yield _refused("rights", exc)
            return
        yield _queue(health)
        yield _oldest_transaction(health)
        yield _blocked(health)
        yield _prepared(health)
        yield from _violations(admin)
        yield _without_reader(admin)
        yield _idle_handles(admin, idle)
        yield _lost(admin)
        yield _turns(admin, idle)


def _version(number: int) -> Check:
    major, minor = divmod(number, 10_000)
    if major < OLDEST_MAJOR:
        return Check(
            "server version", "failing", f"Postgres {major}.{minor} is too old.", f"Upgrade to Postgres {OLDEST_MAJOR} or newer."
        )
    fixed = NOTIFY_FIXED.get(major, 0)
    if minor < fixed:
        return Check(
            "server version",
            "warning",
            f"Postgres {major}.{minor} has known faults in LISTEN and NOTIFY: they may be lost. Bells poll all the same.",
            f"Install the minor release {major}.{fixed} or newer.",
        )
    return Check("server version", "ok", f"Postgres {major}.{minor}")


def _schema(admin: Admin) -> Check:
    try:
        hello = admin.run(calls.hello())
        wire.check_hello(hello)
    except DoorbellError as exc:
        return _refused("schema", exc)
    return Check("schema", "ok", f"revision {hello.revision}")


def _refused(name: str, exc: DoorbellError) -> Check:
    """What an error of ours says; it ends with what to do, which is the fix."""
    said, *fix = re.split(r" (?:Run: )?(?=doorbell (?:migrate|grant)|Upgrade )", str(exc), maxsplit=1)
    return Check(name, "failing", said, "".join(fix).rstrip("."))


def _pooler(admin: Admin) -> Check:
    row = admin.connection.execute("select pg_backend_pid()").fetchone()
    if row is not None and row[0] != admin.connection.info.backend_pid:
        return Check(
            "pooler",
            "warning",
            "A pooler in transaction mode is in between: bells poll, and a turn's session cannot be held.",
            "Give the agents a DSN that leads to the server itself, or to a pool in session mode.",
        )
    return Check("pooler", "ok", "none in between")


def _read_only(admin: Admin) -> Check:
    recovering, read_only = admin.connection.execute(
        "select pg_is_in_recovery(), current_setting('transaction_read_only')::boolean"
    ).fetchone() or (False, False)
    if recovering:
        return Check(
            "read-only",
            "failing",
            "This server is a standby: it takes no posts and no acks.",
            "Name all servers in the DSN and add target_session_attrs=read-write.",
        )
    if read_only:
        return Check(
            "read-only",
            "failing",
            "Sessions of this role are read-only: default_transaction_read_only is on.",
            "ALTER ROLE … RESET default_transaction_read_only, or the same for the database.",
        )
    return Check("read-only", "ok", "no")


def _notifications(admin: Admin, dsn: str) -> Check:
    """A round trip: one session listens, another one notifies, on a channel that nobody else listens to."""
    name = "doorbell_doctor_" + secrets.token_hex(8)
    fix = "See 'Notifications are off' in docs/runbook.md. Bells poll meanwhile; nothing is lost."
    try:
        with Admin(dsn, check=False) as listener:
            listener.connection.execute(sql.SQL("listen {}").format(sql.Identifier(name)))
            begun = time.monotonic()
            admin.connection.execute("select pg_notify(%s, '')", (name,))
            for _ in listener.connection.notifies(timeout=ROUND_TRIP, stop_after=1):
                return Check("notifications", "ok", f"a round trip took {(time.monotonic() - begun) * 1000:.1f} ms")
    except (psycopg.Error, DoorbellError) as exc:
        said = wire.why(exc) if isinstance(exc, psycopg.Error) else str(exc)
        return Check("notifications", "warning", f"LISTEN or NOTIFY is refused: {said}.", fix)
    return Check("notifications", "warning", f"A notification did not arrive within {ROUND_TRIP:g} s.", fix)


def _queue(health: Health) -> Check:
    used = health.notification_queue_usage
    said = f"{used:.1%} of the notification queue is in use"
    if used < QUEUE_FILLING:
        return Check("notification queue", "ok", said)
    return Check(
        "notification queue",
        "failing" if used >= QUEUE_FULL else "warning",
        said + ": some session listens and stays in a transaction",
        "End the oldest transaction: the view health names its pid, and pg_terminate_backend ends it.",
    )


def _oldest_transaction(health: Health) -> Check:
    age = health.oldest_transaction_seconds
    if health.oldest_transaction == "unknown":
        return _unknown("oldest transaction")
    if age is None or age < OLD_TRANSACTION:
        return Check("oldest transaction", "ok", health.oldest_transaction)
    return Check(
        "oldest transaction",
        "failing" if age >= VERY_OLD_TRANSACTION else "warning",
        f"{health.oldest_transaction}: while it lives, old row versions stay and acks of a hot cursor slow down",
        "Find out what it is in pg_stat_activity; set idle_in_transaction_session_timeout for the role that leaves it.",
    )


def _blocked(health: Health) -> Check:
    if health.blocked_session_count is None:
        return _unknown("blocked sessions")
    if health.blocked_session_count == 0:
        return Check("blocked sessions", "ok", "none")
    return Check(
        "blocked sessions",
        "warning",
        health.blocked_sessions,
        "If it stays so: keep transactions that post short. See 'A post waits' in docs/runbook.md.",
    )


def _unknown(name: str) -> Check:
    return Check(
        name,
        "warning",
        "unknown: this role may not see the sessions of others",
        "GRANT pg_read_all_stats TO ROLE, as a superuser",
    )


def _prepared(health: Health) -> Check:
    if not health.prepared_transactions:
        return Check("prepared transactions", "ok", "none")
    return Check(
        "prepared transactions",
        "warning",
        f"{health.prepared_transactions} left prepared: each holds its locks and its snapshot until it is ended",
        "COMMIT PREPARED or ROLLBACK PREPARED what pg_prepared_xacts lists.",
    )


def _violations(admin: Admin) -> Iterator[Check]:
    found = admin.run(operations.violations())
    public = [v for v in found if v.violation == "open to everybody"]
    rest = [v for v in found if v.violation != "open to everybody"]
    if public:
        yield Check(
            "rights of PUBLIC",
            "failing",
            _several([v.detail for v in public]),
            "REVOKE ALL … FROM PUBLIC. Who put it there? doorbell migrate never does.",
        )
    else:
        yield Check("rights of PUBLIC", "ok", "none")
    if rest:
        shown = [f"{v.violation} ({_place(v.channel, v.handle, v.seq)}{v.detail})" for v in rest]
        yield Check(
            "violations",
            "failing",
            _several(shown),
            "Something has written past the functions. See 'A violation' in docs/runbook.md.",
        )
    else:
        yield Check("violations", "ok", "none")


def _place(channel: str | None, handle: str | None, seq: int | None) -> str:
    where = " ".join([*([_quoted(channel)] if channel is not None else []), *([f"#{seq}"] if seq is not None else [])])
    who = f" {_quoted(handle)}" if handle is not None else ""
    return f"{where}{who}: " if where or who else ""


def _without_reader(admin: Admin) -> Check:
    found = admin.run(operations.without_reader(100))
    if not found:
        return Check("channels without a reader", "ok", "none")
    return Check(
        "channels without a reader",
        "warning",
        _several([f"{_quoted(channel)} with {counted(messages, 'message')}" for channel, messages in found], most=100),
        "Subscribe whoever should read them, or stop posting there; prune removes them by age.",
    )


def _idle_handles(admin: Admin, idle: float) -> Check:
    found = [
        b
        for b in admin.run(operations.behind())
        if (b.oldest_unacked_seconds or 0) > idle and (b.last_acked_seconds is None or b.last_acked_seconds > idle)
    ]
    if not found:
        return Check("idle handles", "ok", f"no backlog has waited longer than {human_age(idle)} without an ack")
    return Check(
        "idle handles",
        "warning",
        _several(
            [
                f"{_quoted(b.handle)} on {_quoted(b.channel)}: {b.unacked:,} since {human_age(b.oldest_unacked_seconds)}"
                for b in found
            ]
        ),
        "Start a session for it, or unsubscribe it: its cursor holds retention back.",
    )


def _lost(admin: Admin) -> Check:
    found = [b for b in admin.run(operations.behind()) if b.lost]
    if not found:
        return Check("readers passed by retention", "ok", "none")
    return Check(
        "readers passed by retention",
        "warning",
        _several([f"{_quoted(b.handle)} on {_quoted(b.channel)}: {counted(b.lost, 'message')}" for b in found]),
        "They are refused with HistoryPruned until: doorbell skip HANDLE CHANNEL",
    )


def _turns(admin: Admin, idle: float) -> Check:
    found = [t for t in admin.run(operations.turns(None, ["unfinished"], 1_000)) if not t.held and t.age_seconds > idle]
    if not found:
        return Check("turns left unfinished", "ok", f"none for longer than {human_age(idle)}")
    return Check(
        "turns left unfinished",
        "warning",
        _several(
            [
                f"{_quoted(t.handle)}: {_quoted(t.event)}, {counted(t.attempts, 'attempt')}, {human_age(t.age_seconds)}"
                for t in found
            ]
        ),
        "Start a session of that handle, which resumes it; if it fails each time, let it fail with max_attempts.",
    )


def _quoted(text: str) -> str:
    return repr(sanitize(text, max_len=FIELD_LEN))


def _several(items: Sequence[str], *, most: int | None = None) -> str:
    count = f"{len(items)}" if most is None or len(items) < most else f"{most} or more"
    more = f"; and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return f"{count}: " + "; ".join(sanitize(item, max_len=200) for item in items[:NAMED]) + more


_UNITS: Sequence[tuple[float, str]] = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def human_age(seconds: float | None, none: str = "") -> str:
    """The largest two units of it: 3 d 4 h, 12 min 5 s, 0 s."""
    if seconds is None:
        return none
    left = max(0.0, seconds)
    for n, (size, unit) in enumerate(_UNITS):
        if left >= size or size == 1:
            whole = int(left // size)
            rest = int((left - whole * size) // _UNITS[n + 1][0]) if n + 1 < len(_UNITS) else 0
            return f"{whole} {unit} {rest} {_UNITS[n + 1][1]}" if rest else f"{whole} {unit}"
    raise AssertionError
