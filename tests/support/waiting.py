"""Waiting for a state instead of for a time: everything here polls what is true, and fails at a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_OTHERS = (
    "select pid, application_name, state, query from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
)
Sql = Callable[..., list[tuple[Any, ...]]]


def eventually(predicate: Callable[[], T], *, within: float = 10.0, what: str = "") -> T:
    """The first true value of `predicate`, asked again until it is; AssertionError when it never was."""
    deadline = time.monotonic() + within
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what or predicate}")
        time.sleep(0.005)


def scanned(bus: Any, times: int = 1) -> None:
    """Wait until the listener of this bus has been answered so many scans more."""
    for _ in range(times):
        before = bus.listener.scanned
        eventually(lambda before=before: bus.listener.scanned != before, what="a scan")


def backends(sql: Sql, condition: str = "true", *params: Any) -> list[tuple[int, str, str, str]]:
    """(pid, application_name, state, query) of the other client sessions of this database."""
    return sql(f"{_OTHERS} and ({condition}) order by pid", *params)


def waiting_in_database(sql: Sql, count: int = 1, *, within: float = 20.0) -> list[int]:
    """Wait until `count` sessions of this database wait for a heavyweight lock; their pids."""

    def enough() -> list[int]:
        pids = [pid for pid, *_ in backends(sql, "wait_event_type = 'Lock'")]
        return pids if len(pids) >= count else []

    return eventually(enough, within=within, what=f"{count} sessions waiting for a lock")


def bell_is_waiting(sql: Sql, count: int = 1, *, armed: bool = True, silent_for: float = 0.0, within: float = 20.0) -> list[int]:
    """Wait until `count` listeners are armed and sit between two polls, silent for `silent_for` seconds; their pids.

    Armed is who holds a bell's key, which nobody does behind `notify="off"`: there, ask for `armed=False`. After arming,
    the time between two polls doubles from 10 ms on up to the poll interval, so one that has been silent for 2.8 s will be
    silent for two more: what rings within those was no poll.
    """
    condition = (
        "state = 'idle' and query ~ 'doorbell[.](peek|heads?_moved)'"
        " and state_change <= clock_timestamp() - make_interval(secs => %s)"
        " and (not %s or exists (select from pg_locks as l"
        " where l.pid = pg_stat_activity.pid and l.locktype = 'advisory' and l.mode = 'ShareLock' and l.granted))"
    )

    if os.environ.get("DOORBELL_TEST_POOLER"):  # nobody is armed there, and sessions are everybody's: a poll has ended
        condition, count = "state = 'idle' and query ~* '^(rollback|commit)' and %s >= 0 and %s is not null", 1

    def enough() -> list[int]:
        pids = [pid for pid, *_ in backends(sql, condition, silent_for, armed)]
        return pids if len(pids) >= count else []

    return eventually(enough, within=within, what=f"{count} listeners at rest")
