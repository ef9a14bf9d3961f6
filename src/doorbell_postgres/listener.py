"""One per bus: the connection that bells wait on. It listens, polls, notices that it died, and dials again.

The connection is read-only and never in a transaction between polls; nothing that it does consumes or writes. Its thread
owns it alone. Bells hand in a watch and get an outcome in their mailbox; their deadlines are their own, so whatever the
network does to this thread, a `wait` returns in time.
"""

from __future__ import annotations

import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from doorbell_postgres import calls, watch, wire
from doorbell_postgres.calls import Call, News, Question
from doorbell_postgres.direct import Direct
from doorbell_postgres.watch import ListenerState, Look, Outcome, Rest, Status, Watch, Watchlist

T = TypeVar("T")
log = logging.getLogger("doorbell_postgres")
Mailbox: TypeAlias = queue.SimpleQueue[Outcome]


class Wire(Direct):
    """A connection whose every wait ends: when nothing has come for `patience` seconds, or when the rope is pulled."""

    rope: socket.socket
    idle: wire.Readable
    patience: float = watch.PATIENCE
    heard: list[bytes]
    armed: set[int]
    rest: Rest
    keep_at: float
    refusals: int

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        try:
            want = next(gen)
            while True:
                got = self._until_ready(self._answered if want == Wait.R else wire.readable(*self._fds, writable=self._fds[1]))
                # An error or a hang-up is something to read.
                want = gen.send(Ready((got & ~wire.WRITE and Wait.R) | (got & wire.WRITE and Wait.W)))
        except StopIteration as done:
            result: T = done.value
            return result

    def _until_readable(self) -> None:
        self._until_ready(self._answered)

    def _until_ready(self, ask: wire.Readable) -> int:
        """What poll says of the server's socket."""
        got = dict(ask(1000 * self.patience))
        rope, server = self._fds
        if rope in got:
            raise psycopg.OperationalError("closed while waiting")
        if not got:
            raise wire.Late(f"no answer within {self.patience:g} s")
        return got[server]

    @property
    def _fds(self) -> tuple[int, int]:
        return self.rope.fileno(), self.pgconn.socket

    @cached_property
    def _answered(self) -> wire.Readable:
        return wire.readable(*self._fds)

    def _answer(self, send: Callable[..., None], *args: Any) -> PGresult:
        try:
            return super()._answer(send, *args)
        finally:
            while note := self.pgconn.notifies():  # what came with the answer makes nothing readable any more
                self.heard.append(note.extra)


class _Expected(NamedTuple):
    """What a lone bell waits for: how that is announced, and the look that then finds it."""

    announced: bytes
    watch: Watch
    mailbox: Mailbox
    call: Call[News | None]


class Listener:
    """Serves the bells of one bus from one thread and one connection, both made at first use."""

    def __init__(self, dsn: str, options: dict[str, Any], *, listen: bool, on_news: Callable[[], None]) -> None:
        self._dsn = dsn
        self._options = options
        self._listen = listen
        self._on_news = on_news
        self._lock = threading.Lock()
        self._list = Watchlist()
        self._mailboxes: dict[Watch, Mailbox] = {}
        self._fresh: set[Watch] = set()
        self._jobs: list[tuple[Call[Any], Future[Any], int | None]] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._pull, self._rope = socket.socketpair()  # closing the pulled end ends every wait on the rope
        self._nudge, self._nudged = socket.socketpair()
        for end in (self._nudge, self._nudged):
            end.setblocking(False)
        self._patience = watch.PATIENCE
        self._failures = 0
        self._tokens: dict[int, bool] = {}  # and whether the connection holds them
        self._distrusted = False
        self._let_go: float | None = None  # when this thread comes to let keys go
        self._status = Status(time.monotonic())

    @property
    def state(self) -> ListenerState:
        return self._status.state

    # -- for bells ----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[Mailbox]:
        """Register the watch while the block runs. The first thing in the mailbox is the outcome of a scan made after that.

        A watch with an outcome in its mailbox is not looked at again until `again`.
        """
        mailbox: Mailbox = queue.SimpleQueue()
        self._enter(watch, mailbox)
        try:
            yield mailbox
        finally:
            with self._lock:
                sees_to_it = watch not in self._list and self._let_go is not None
                self._list.remove(watch)
                self._fresh.discard(watch)
                self._mailboxes.pop(watch, None)
            # Its key is let go soon: while it is held, every post there is announced. After a ring the thread sees to that
            # by itself; a nudge would have it run at once, and the wait return behind it.
            if not sees_to_it:
                self._wake()

    def again(self, watch: Watch, mailbox: Mailbox) -> None:
        self._enter(watch, mailbox)

    def _enter(self, watch: Watch, mailbox: Mailbox) -> None:
        with self._lock:
            if self._closing:
                mailbox.put("closed")
                return
            self._mailboxes[watch] = mailbox
            self._fresh.add(watch)
            self._list.add(watch, time.monotonic())
        self._wake()

    def run(self, call: Call[T], timeout: float) -> T:
        """Run a read-only call on the listener's connection. DatabaseUnavailable when it has not succeeded in time."""
        return self._ask(call, timeout)

    def holds(self, token: int) -> bool:
        """Whether the listener's session holds the token. As far as it knows: that session may have ended without a word."""
        return self._tokens.get(token, False)

    def hold(self, token: int, timeout: float) -> bool | None:
        """Keep an exclusive lock on the token for as long as this listener lives, again after each reconnect.

        False while another session holds it, a dead one of this bus: it is tried again until it is free. None where no
        session can be held, behind a pooler in transaction mode.
        """
        with self._lock:
            self._tokens.setdefault(token, False)
        return self._ask(calls.hold_session(token), timeout, token)

    def redial(self) -> None:
        """Make a new connection: what this one holds is not seen where it matters."""
        self._distrusted = True
        self._wake()

    def _ask(self, call: Call[T], timeout: float, token: int | None = None) -> T:
        future: Future[T] = Future()
        with self._lock:
            if self._closing:
                raise wire.closed()
            self._jobs.append((call, future, token))
        self._wake()
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise wire.unanswered(timeout, self.state.reason) from None
        except CancelledError:
            raise wire.closed_meanwhile() from None

    def announced(self, channel_id: int) -> None:
        """This process has posted there: look without waiting for the database to say so."""
        if not self._list.has(channel_id):  # asked without the lock: who joins now looks after this post
            return
        with self._lock:
            watched = self._list.announced(channel_id, time.monotonic())
        if watched:
            self._wake()

    def close(self, timeout: float = 1.0) -> None:
        """End every wait with "closed" and the thread; returns within `timeout` whatever the network does."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for each in self._list.clear():
                self._mailboxes[each].put("closed")
            for _, future, _ in self._jobs:
                future.cancel()
            self._jobs.clear()
            thread = self._thread
        self._pull.close()
        self._status.become("closed", None, time.monotonic())
        if thread is None:
            self._hang_up()
        elif thread is not threading.current_thread():
            thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing:
                    self._thread = threading.Thread(target=self._run, name="doorbell-listener", daemon=True)
                    self._thread.start()
        # A full pipe holds plenty of nudges already; a closed one needs none.
        with suppress(OSError):
            self._nudge.send(b"!")

    def _run(self) -> None:
        while not self._closing:
            if not self._wanted():
                self._sleep(None)
                continue
            try:
                connection = self._open()
                connection.patience = self._patience
                served_from = time.monotonic()
                try:
                    self._became_ready(connection)
                    self._serve(connection)
                finally:
                    with self._lock:
                        self._tokens = dict.fromkeys(self._tokens, False)
                    if time.monotonic() - served_from >= watch.SERVED:
                        self._failures = 0
                    connection.close()
            except Exception as exc:
                if self._closing:
                    break
                if not isinstance(exc, psycopg.Error):
                    log.exception("listener failed")
                if isinstance(exc, wire.Late):
                    self._patience = min(watch.MOST_PATIENCE, self._patience * 2)
                self._fell(exc)
                self._failures += 1
                # The first dial follows at once; then the waits grow, jittered, so that a fleet does not come back as one.
                if self._failures > 1:
                    self._sleep(min(0.5, 0.05 * 2 ** min(self._failures, 5)) * random.uniform(0.5, 1.0))
        self._hang_up()

    def _hang_up(self) -> None:
        for end in (self._rope, self._nudge, self._nudged):
            end.close()

    def _open(self) -> Wire:
        """Dial; and again, beside it, while no answer comes. The first that is ready wins, the others are hung up."""
        answers: queue.SimpleQueue[Wire | Exception] = queue.SimpleQueue()
        over = threading.Event()
        won: list[Wire] = []
        dials = 0
        next_dial = time.monotonic()
        try:
            while not self._closing:
                if dials < watch.MOST_DIALS and time.monotonic() >= next_dial:
                    dials += 1
                    next_dial = time.monotonic() + watch.DIAL_AGAIN
                    threading.Thread(target=self._dial, args=(answers, over, won), name="doorbell-dial", daemon=True).start()
                try:
                    answer = answers.get(timeout=0.1)
                except queue.Empty:
                    continue
                if isinstance(answer, Wire):
                    won.append(answer)
                    return answer
                dials -= 1
                if dials == 0:
                    raise answer
            raise psycopg.OperationalError("closed while dialling")
        finally:
            over.set()
            while not answers.empty():
                if isinstance(late := answers.get(), Wire):
                    late.close()

    def _dial(self, answers: queue.SimpleQueue[Wire | Exception], over: threading.Event, won: list[Wire]) -> None:
        try:
            connection = Wire.connect(self._dsn, autocommit=True, **self._options)
            connection.rope = self._rope
            # Others are dialled beside it, so this one may take its time: it is what tells slow from dead.
            connection.patience = watch.MOST_PATIENCE
            connection.heard = []
            connection.armed = set()
            connection.rest = Rest()
            connection.keep_at, connection.refusals = 0.0, 0
            # Notifications that come with the answer of a query, not while waiting for one.
            connection.add_notify_handler(lambda note: connection.heard.append(note.payload.encode()))
            try:
                connection.idle = wire.readable(self._rope.fileno(), self._nudged.fileno(), connection.pgconn.socket)
                wire.set_up(connection, connection.execute(*wire.on_connect(connection, read_only=True)).fetchone())
            except BaseException:
                connection.close()
                raise
        except Exception as exc:
            answers.put(exc)
            return
        answers.put(connection)
        if over.is_set() and connection not in won:  # nobody reads the answers any more, or has just stopped
            connection.close()

    def _became_ready(self, connection: Wire) -> None:
        """LISTEN, committed, before the first scan: what is posted after it is announced, what was before it is scanned."""
        self._distrusted = False
        why_not = wire.why_not_listen(connection, wanted=self._listen)
        if why_not is None:
            try:
                connection.execute(wire.LISTEN)
            except wire.LISTEN_REFUSED as exc:
                why_not = wire.why(exc)
        with self._lock:
            self._list.wake_all(time.monotonic())
        self._log(self._status.ready(why_not, time.monotonic(), warn=self._listen))

    def _serve(self, connection: Wire) -> None:
        unwanted_since: float | None = None
        while not self._closing:
            if self._distrusted:
                raise psycopg.OperationalError("its session is not seen where turns are admitted")
            self._keep(connection)
            self._do_jobs(connection)
            self._arm(connection)
            self._look(connection)
            now = time.monotonic()
            if self._wanted():
                unwanted_since = None
            else:
                unwanted_since = unwanted_since or now
                if now - unwanted_since >= watch.LINGER:
                    self._status.become("idle", None, time.monotonic())
                    return
            due = self._next_due()
            until = due if due is not None else (unwanted_since or now) + watch.LINGER
            if self._let_go is not None:
                until = min(until, self._let_go)
            if self._tokens and not wire.is_pooled(connection):
                until = min(until, connection.keep_at)
            expected = self._expect()
            if connection.heard or self._ready(max(0.0, until - now), connection):
                self._hear(connection, expected)

    def _keep(self, connection: Wire) -> None:
        """Hold the tokens again after a reconnect. The dead session may hold them for a while; then ask again."""
        if not self._tokens or time.monotonic() < connection.keep_at or wire.is_pooled(connection):
            return
        with self._lock:
            missing = [token for token, held in self._tokens.items() if not held]
        if not missing:
            self._execute(connection, calls.beat())
        refused = [token for token in missing if not self._take(connection, token)]
        connection.keep_at = time.monotonic() + watch.keep_again(connection.refusals if refused else None)
        connection.refusals += bool(refused)

    def _take(self, connection: Wire, token: int) -> bool | None:
        if wire.is_pooled(connection):
            return None
        held = self._execute(connection, calls.hold_session(token))
        with self._lock:
            self._tokens[token] = held
        return held

    def _arm(self, connection: Wire) -> None:
        """Hold the keys of the channels that are waited on, so that their posts are announced; let the others go.

        Before the scan: a post whose probe came too early for the key is found by the scan or by an early poll. Where keys
        take the place of others, as the wildcard does for many, both are held for a moment: a probe asks for one after the
        other, and must not find either gone.
        """
        let_go, self._let_go = self._let_go, None
        if self.state.kind != "listening":
            return
        with self._lock:
            wanted = watch.keys_for(self._list.channel_ids())
        drop = connection.armed - wanted
        for _ in range(watch.TRIES):
            take = wanted - connection.armed
            if not take:
                break
            connection.armed |= take.difference(self._execute(connection, calls.arm(sorted(take), [])))
            if drop:
                let_go = time.monotonic() + watch.LET_GO
            if wanted <= connection.armed:
                break
            time.sleep(watch.TRY_AGAIN)
        else:
            return  # not armed: these bells poll, and the next round tries again
        if let_go is not None and time.monotonic() < let_go and 0 < len(drop) <= watch.MOST_KEYS:
            self._let_go = let_go
        elif drop:
            self._execute(connection, calls.arm([], sorted(drop)))
            connection.armed -= drop

    def _expect(self) -> _Expected | None:
        """The look for the next message of a lone bell's one channel, made ready: when it is announced, that bell waits.

        It cannot be stale when it is sent. Only this thread moves the floor of a watch that waits, and it makes this ready
        between its last look and its sleep; a wait that has ended meanwhile has another mailbox.
        """
        with self._lock:
            lone = self._list.lone()
            questions = lone.questions() if lone is not None else []
            if lone is None or len(questions) != 1:
                return None
            call = calls.glance(questions[0], preview=lone.preview)
            return _Expected(b"%d" % questions[0].channel_id, lone, self._mailboxes[lone], call)

    def _hear(self, connection: Wire, expected: _Expected | None) -> None:
        connection.pgconn.consume_input()
        heard = set(connection.heard)
        connection.heard.clear()
        while note := connection.pgconn.notifies():
            heard.add(note.extra)
        if expected is not None and expected.announced in heard:
            self._glance(connection, expected)
        now = time.monotonic()
        with self._lock:
            watched = [self._list.announced(int(each), now) for each in heard if each.isdigit()]
        if any(watched):
            self._on_news()

    def _glance(self, connection: Wire, expected: _Expected) -> None:
        try:
            found = self._execute(connection, expected.call)
        except psycopg.Error as exc:
            if not watch.refused_for_good(exc.sqlstate):
                raise
            return  # the look that follows is refused too, and tells the bell
        if found is not None:
            self._deliver([(expected.watch, expected.mailbox)], [[found]])

    def _look(self, connection: Wire) -> None:
        with self._lock:
            watches, look = self._list.take(time.monotonic())
            asked = [(each, self._mailboxes[each]) for each in watches]
            questions, preview = watch.ask(watches)
        if not watches:
            return
        began = time.monotonic()
        try:
            news: list[News] = []
            if look == "expecting" and len(questions) == 1:
                next_one = self._execute(connection, calls.glance(questions[0], preview=preview))
                news = [next_one] if next_one else []
            if questions and not news and (look == "expecting" or self._moved(connection, questions, look)):
                news = self._execute(connection, calls.peek(questions, preview=preview))
        except psycopg.Error as exc:
            if not watch.refused_for_good(exc.sqlstate):
                raise
            self._refuse(asked, wire.translate(exc, calls.hello()))
            return
        self._patience = connection.patience = watch.patience_after(time.monotonic() - began)
        self._deliver(asked, watch.answer(watches, news))

    def _deliver(self, asked: list[tuple[Watch, Mailbox]], news: list[list[News]]) -> None:
        """Tell each bell that still waits what the database has said to it."""
        self._failures = 0
        self._status.scanned = time.monotonic()
        rang = False
        with self._lock:
            for (each, mailbox), own in zip(asked, news, strict=True):
                if not self._waits(each, mailbox):
                    continue  # its wait has ended: what comes of this would take the next one off the list, and ring nobody
                outcome: Outcome | None = each.settle(own)
                rang = rang or outcome is not None
                if outcome is None and each in self._fresh:
                    mailbox.put("nothing")
                elif outcome is not None:
                    self._let_go = time.monotonic() + watch.LET_GO
                    self._list.remove(each)
                    mailbox.put(outcome)
                self._fresh.discard(each)
        if rang:
            time.sleep(watch.MAKE_WAY)
            self._on_news()

    def _moved(self, connection: Wire, questions: list[Question], look: Look) -> bool:
        """Whether a head is another than was looked at, or anything else may be, if it is time to look at everything."""
        # Behind a pooler the server may crash unnoticed, and then give the same snapshot another content.
        since = None if wire.is_pooled(connection) else connection.rest.since(questions)
        now = self._execute(connection, calls.unmoved(questions, since))
        return connection.rest.settle(questions, since, now, look)

    def _do_jobs(self, connection: Wire) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    return
                call, future, token = self._jobs[0]
            if not future.cancelled():
                try:
                    result = self._execute(connection, call) if token is None else self._take(connection, token)
                except psycopg.Error as exc:
                    if not watch.refused_for_good(exc.sqlstate):
                        raise  # the connection goes, the job stays for the next one
                    self._resolve(future, wire.translate(exc, call))
                else:
                    self._resolve(future, result)
            with self._lock:
                if self._jobs and self._jobs[0][1] is future:
                    self._jobs.pop(0)

    @staticmethod
    def _resolve(future: Future[Any], result: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _execute(self, connection: Wire, call: Call[T]) -> T:
        if not wire.is_pooled(connection):  # the session itself is read-only
            return call.read(connection.send(call.sql, call.params))
        connection.execute("begin read only")
        try:
            return call.read(connection.execute(call.sql, call.params).fetchall())
        finally:
            # A connection that broke has its own error to raise.
            if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                connection.execute("rollback")

    def _waits(self, each: Watch, mailbox: Mailbox) -> bool:
        """Whether that wait still lasts. The bell's next one has a mailbox of its own, and gets a scan of its own."""
        return each in self._list and self._mailboxes[each] is mailbox

    def _refuse(self, asked: list[tuple[Watch, Mailbox]], error: Exception) -> None:
        with self._lock:
            for each, mailbox in asked:
                if self._waits(each, mailbox):
                    self._list.remove(each)
                    self._fresh.discard(each)
                    mailbox.put(error)

    def _wanted(self) -> bool:
        with self._lock:
            return bool(self._jobs) or len(self._list) > 0 or bool(self._tokens)

    def _next_due(self) -> float | None:
        with self._lock:
            return self._list.next_due()

    def _ready(self, timeout: float | None, connection: Wire | None) -> bool:
        """Wait for something to do; whether the connection has something to read."""
        idle = wire.readable(self._rope.fileno(), self._nudged.fileno()) if connection is None else connection.idle
        ready = dict(idle(None if timeout is None else 1000 * timeout))
        if self._nudged.fileno() in ready:
            self._nudged.recv(4096)
        return connection is not None and connection.pgconn.socket in ready

    def _sleep(self, timeout: float | None) -> None:
        """Until something happens, or for `timeout` whatever happens short of closing."""
        if timeout is None:
            self._ready(None, None)
            return
        wire.readable(self._rope.fileno())(1000 * timeout)

    def _fell(self, exc: Exception) -> None:
        self._log(self._status.fell(wire.why(exc), time.monotonic()))

    @staticmethod
    def _log(line: tuple[int, str] | None) -> None:
        if line is not None:
            log.log(*line)
