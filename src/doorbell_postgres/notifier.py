"""Tells other processes' bells of new posts, after the posts and apart from them.

A notification inside the post's own transaction would hold a cluster-wide lock through its flush, so posts hand the
channel over and this thread announces it: the first at once, those that follow gathered for a moment. It is an
optimisation. What it drops, because the database is away or the process dies, the poll finds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from psycopg_pool import PoolTimeout

from doorbell_postgres.watch import GATHER, rest_after

log = logging.getLogger("doorbell_postgres")


class Notifier:
    """Announces channels through `send`: it calls what it is given for the channels, once it has a connection.

    It waits for one behind the posts of its own process. What is posted meanwhile goes with it, and while all are busy it
    tries again. When `send` fails in another way, what is pending is dropped.
    """

    def __init__(self, send: Callable[[Callable[[], list[int]]], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._rests_until = 0.0
        self._began: float | None = None

    def is_free(self) -> bool:
        """Whether a post may announce itself, in its own call: the first of a moment may, those that follow are gathered."""
        return not self._pending and time.monotonic() >= self._rests_until

    def rest(self) -> None:
        """A post has announced itself."""
        self._rests_until = time.monotonic() + GATHER

    def announce(self, channel_ids: list[int]) -> None:
        with self._changed:
            if self._closing:
                return
            self._pending.update(channel_ids)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="doorbell-notifier", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout: float = 1.0) -> None:
        """Announce what is pending, then end; gives up after `timeout`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                self._changed.wait_for(lambda: self._closing, self._rests_until - time.monotonic())
                if not self._pending:
                    return
            self._began = None
            try:
                self._send(self._take)
            except PoolTimeout:  # all are busy
                if self._closing:
                    return
            except Exception as exc:
                if self._began is None:
                    self._take()
                log.debug("announcement dropped (%s); bells find the posts by polling", type(exc).__name__)
            self._rests_until = rest_after(self._began, time.monotonic())

    def _take(self) -> list[int]:
        with self._changed:
            taken, self._pending = sorted(self._pending), set()
        self._began = time.monotonic()
        return taken
