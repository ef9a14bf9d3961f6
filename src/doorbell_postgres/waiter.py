"""The doorbell: finite, peek-only, and nothing to clean up when it dies."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from doorbell_postgres import calls
from doorbell_postgres.bus import MessageBus
from doorbell_postgres.contract import Message, WakeEvent
from doorbell_postgres.errors import BusClosed, DatabaseUnavailable
from doorbell_postgres.watch import GRACE, LONGEST, MATCH_PAGE, PREVIEW, Candidate, Outcome, Watch, rewound, to_nothing

log = logging.getLogger("doorbell_postgres")


class Doorbell:
    """Rings for the next message that the handle has not acked and did not send itself.

    Rings at once for backlog; for a new post in milliseconds where notifications work, else within `poll_interval`. It
    reads only, in read-only sessions: killing it loses nothing and leaves nothing behind. It holds nothing outside memory
    except while `wait` runs, so a bell that is dropped leaks nothing.

    The channels are those subscribed to at construction. `match(message)` narrows what rings; it runs in the waiting
    thread, is not called for own posts, and what it raises leaves `wait`.

    Not promised: that a ring is still unacked when you look. Catch up, handle, ack, wait again.
    """

    def __init__(
        self,
        bus: MessageBus,
        handle: str,
        *,
        match: Callable[[Message], bool] | None = None,
        idle_timeout: float = 300.0,
        poll_interval: float = 0.5,
    ) -> None:
        self._bus = bus
        self._match = match
        self._idle_timeout = calls.seconds("idle_timeout", idle_timeout, zero=True)
        interval = calls.seconds("poll_interval", poll_interval)
        self._floors = calls.bell_floors(handle)
        preview = PREVIEW if match is None else 0  # match reads the whole message anyway
        self._watch = Watch(handle, bus.store.peek(self._floors), poll_interval=interval, preview=preview)
        if not self._watch.channel_ids:
            log.warning("%s: its bell never rings", to_nothing(handle))
        self._closed = threading.Event()
        self._waiting = threading.Lock()
        self._mailbox: queue.SimpleQueue[Outcome] | None = None

    @property
    def closed(self) -> bool:
        return self._closed.is_set() or self._bus.closed

    def wait(self, timeout: float | None = None) -> WakeEvent | None:
        """The next ring, or None after `timeout` seconds (default: `idle_timeout`), or when bell or bus are closed.

        0 looks once. Returns by its deadline, whatever the network does; during an outage it goes on waiting until then.
        The next `wait` gives the next message, whether this one was acked or not.

        Raises what `match` raises; SchemaMismatch or AccessDenied when a scan is refused; HistoryPruned when retention was
        forced past the handle's cursor; LogRewound, once, when
        the log behind it was replaced by an older one: the bell has then started over from the cursors.
        """
        timeout = self._idle_timeout if timeout is None else calls.seconds("timeout", timeout, zero=True)
        deadline = time.monotonic() + timeout
        self._bus.store.check_fork()
        if not self._waiting.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            return None  # another thread waits on this bell
        try:
            return self._wait(deadline)
        finally:
            self._waiting.release()

    def _wait(self, deadline: float) -> WakeEvent | None:
        if self.closed:
            return None
        looked = False
        look_until = time.monotonic() + GRACE
        with self._bus.store.listener.watching(self._watch) as mailbox:
            self._mailbox = mailbox
            if self._closed.is_set():
                return None
            while True:
                left = deadline - time.monotonic()
                try:
                    grace = 0.0 if looked else look_until - time.monotonic()
                    outcome = mailbox.get(timeout=min(max(left, grace, 0.0), LONGEST))
                except queue.Empty:
                    if left > LONGEST:
                        continue
                    return None
                looked = True
                if isinstance(outcome, Candidate):
                    if self._match is None:
                        self._watch.passed(outcome)
                        return outcome.event()
                    event = self._first_match(outcome, self._match, deadline)
                    if event is not None:
                        return event
                    if self.closed:
                        return None
                    looked = False  # at what lies behind it, and in the other channels
                    self._bus.store.listener.again(self._watch, mailbox)
                elif isinstance(outcome, Exception):
                    raise outcome
                elif outcome == "rewound":
                    self._start_over(min(LONGEST, max(GRACE, deadline - time.monotonic())))
                elif outcome == "closed":
                    return None

    def _first_match(self, first: Candidate, match: Callable[[Message], bool], deadline: float) -> WakeEvent | None:
        """The first message of the channel, from `first` on, that matches; the floor moves past each that was looked at."""
        after = first.seq - 1
        while True:
            left = min(LONGEST, max(GRACE, deadline - time.monotonic()))
            try:
                page = self._bus.store.listener.run(calls.messages_after(first.channel, after, limit=MATCH_PAGE), left)
            except (DatabaseUnavailable, BusClosed):
                return None  # the deadline has come, or the end; what was not looked at rings in the next wait
            for message in page:
                self._watch.passed(message)
                if message.sender != self._watch.handle and match(message):
                    return self._watch.candidate(message).event()
            if len(page) < MATCH_PAGE or time.monotonic() >= deadline or self.closed:
                return None
            after = page[-1].seq

    def _start_over(self, timeout: float) -> None:
        with suppress(DatabaseUnavailable, BusClosed):  # the next wait notices again
            self._watch.reset(self._bus.store.listener.run(self._floors, timeout))
            raise rewound()

    def close(self) -> None:
        """End a running `wait` with None, and every later one at once. A second call does nothing."""
        self._closed.set()
        if self._mailbox is not None:
            self._mailbox.put("closed")
        with self._bus.activity:
            self._bus.activity.notify_all()

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
