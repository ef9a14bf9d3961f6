"""One per bus: the connection that bells wait on. It listens, polls, notices that it died, and dials again.

As in the sync shell the connection is read-only and never in a transaction between polls. One task owns it alone. Bells
hand in a watch and get an outcome in their mailbox; their deadlines are their own.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait

from doorbell_postgres import calls, watch, wire
from doorbell_postgres.calls import Call, News, Question
from doorbell_postgres.watch import ListenerState, Look, Outcome, Rest, Status, Watch, Watchlist

T = TypeVar("T")
Mailbox = asyncio.Queue[Outcome]
log = logging.getLogger("doorbell_postgres")


async def drive(gen: PQGen[T], fd: int, patience: float | None = None) -> T:
    """Run a conversation of psycopg's on a socket. wire.Late when nothing has come for `patience` seconds.

    Cancelled, it leaves the socket to whoever goes on with the conversation, or closes it.
    """
    try:
        want = next(gen)
        while True:
            want = gen.send(await _ready(fd, want, patience))
    except StopIteration as done:
        result: T = done.value
        return result


async def _ready(fd: int, want: Wait, patience: float | None) -> Ready:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Ready] = loop.create_future()

    def found(what: Ready) -> None:
        if not ready.done():
            ready.set_result(what)

    def late() -> None:
        if not ready.done():
            ready.set_exception(wire.Late(f"no answer within {patience:g} s"))

    if want & Wait.R:
        loop.add_reader(fd, found, Ready.R)
    if want & Wait.W:
        loop.add_writer(fd, found, Ready.W)
    timer = loop.call_later(patience, late) if patience is not None else None
    try:
        return await ready
    finally:
        if timer is not None:
            timer.cancel()
        if want & Wait.R:
            loop.remove_reader(fd)
        if want & Wait.W:
            loop.remove_writer(fd)


class Wire(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection whose every wait ends when nothing has come for `patience` seconds. Cancelled, it is only good to close."""

    patience: float = watch.PATIENCE
    heard: list[bytes]
    armed: set[int]
    rest: Rest
    keep_at: float
    refusals: int

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        return await drive(gen, self.pgconn.socket, self.patience)


@dataclass
class _Job(Generic[T]):
    call: Call[T]
    future: asyncio.Future[T]
    token: int | None = None


class Listener:
    """Serves the bells of one bus from one task and one connection, both made at first use and let go when unused."""

    def __init__(self, dsn: str, options: dict[str, Any], *, listen: bool, on_news: Callable[[], None]) -> None:
        self._dsn = dsn
        self._options = options
        self._listen = listen
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._list = Watchlist()
        self._mailboxes: dict[Watch, Mailbox] = {}
        self._fresh: set[Watch] = set()
        self._jobs: list[_Job[Any]] = []
        self._task: asyncio.Task[None] | None = None
        self._nudged = asyncio.Event()
        self._closing = False
        self._failures = 0
        self._patience = watch.PATIENCE
        self._tokens: dict[int, bool] = {}  # and whether the connection holds them
        self._distrusted = False
        self._let_go = 0.0
        self._status = Status(self._loop.time())

    @property
    def state(self) -> ListenerState:
        return self._status.state

    # -- for bells ----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, each: Watch) -> Iterator[Mailbox]:
        """Register the watch while the block runs. The first thing in the mailbox is the outcome of a scan made after that.

        A watch with an outcome in its mailbox is not looked at again until `again`.
        """
        mailbox: Mailbox = asyncio.Queue()
        self.again(each, mailbox)
        try:
            yield mailbox
        finally:
            self._list.remove(each)
            self._fresh.discard(each)
            self._mailboxes.pop(each, None)
            self._let_go = self._loop.time() + watch.LET_GO
            self._nudged.set()

    def again(self, watch: Watch, mailbox: Mailbox) -> None:
        if self._closing:
            mailbox.put_nowait("closed")
            return
        self._mailboxes[watch] = mailbox
        self._fresh.add(watch)
        self._list.add(watch, self._loop.time())
        self._wake()

    async def run(self, call: Call[T], timeout: float) -> T:
        """Run a read-only call on the listener's connection. DatabaseUnavailable when it has not succeeded in time."""
        return await self._ask(_Job(call, self._loop.create_future()), timeout)

    def holds(self, token: int) -> bool:
        """Whether the listener's session holds the token. As far as it knows: that session may have ended without a word."""
        return self._tokens.get(token, False)

    async def hold(self, token: int, timeout: float) -> bool | None:
        """Keep an exclusive lock on the token for as long as this listener lives, again after each reconnect.

        False while another session holds it, a dead one of this bus: it is tried again until it is free. None where no
        session can be held, behind a pooler in transaction mode.
        """
        self._tokens.setdefault(token, False)
        return await self._ask(_Job(calls.hold_session(token), self._loop.create_future(), token), timeout)

    def redial(self) -> None:
        """Make a new connection: what this one holds is not seen where it matters."""
        self._distrusted = True
        self._wake()

    async def _ask(self, job: _Job[T], timeout: float) -> T:
        if self._closing:
            raise wire.closed()
        self._jobs.append(job)
        self._wake()
        try:
            await asyncio.wait({job.future}, timeout=min(timeout, watch.LONGEST))
            if not job.future.done():
                raise wire.unanswered(timeout, self.state.reason)
            return job.future.result()
        finally:
            job.future.cancel()
            if not job.future.cancelled():
                job.future.exception()  # seen, also by one that was cancelled before it could look

    def announced(self, channel_id: int) -> None:
        """This process has posted there: look without waiting for the database to say so."""
        if self._list.announced(channel_id, self._loop.time()):
            self._wake()

    async def close(self, timeout: float = 1.0) -> None:
        """End every wait with "closed" and the task; returns within `timeout` whatever the network does."""
        if self._closing:
            return
        self._closing = True
        for each in self._list.clear():
            self._mailboxes[each].put_nowait("closed")
        for job in self._jobs:
            if not job.future.done():
                job.future.set_exception(wire.closed_meanwhile())
        self._jobs.clear()
        self._status.become("closed", None, self._loop.time())
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=timeout)

    # -- the task -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if (self._task is None or self._task.done()) and not self._closing:
            self._task = asyncio.create_task(self._run(), name="doorbell-listener")
        self._nudged.set()

    async def _run(self) -> None:
        while self._wanted():
            try:
                connection = await self._open()
                connection.patience = self._patience
                served_from = self._loop.time()
                try:
                    await self._became_ready(connection)
                    await self._serve(connection)
                finally:
                    self._tokens = dict.fromkeys(self._tokens, False)
                    if self._loop.time() - served_from >= watch.SERVED:
                        self._failures = 0
                    await connection.close()
            except Exception as exc:
                if not isinstance(exc, psycopg.Error):
                    log.exception("listener failed")
                if isinstance(exc, wire.Late):
                    self._patience = min(watch.MOST_PATIENCE, self._patience * 2)
                self._log(self._status.fell(wire.why(exc), self._loop.time()))
                self._failures += 1
                # The first dial follows at once; then the waits grow, jittered, so that a fleet does not come back as one.
                if self._failures > 1:
                    await asyncio.sleep(min(0.5, 0.05 * 2 ** min(self._failures, 5)) * random.uniform(0.5, 1.0))

    async def _open(self) -> Wire:
        """Dial; and again, beside it, while no answer comes. The first that is ready wins, the others are hung up."""
        dials: set[asyncio.Task[Wire]] = set()
        next_dial = self._loop.time()
        try:
            while True:
                now = self._loop.time()
                if len(dials) < watch.MOST_DIALS and now >= next_dial:
                    next_dial = now + watch.DIAL_AGAIN
                    dials.add(asyncio.create_task(self._dial(), name="doorbell-dial"))
                pause = next_dial - now if len(dials) < watch.MOST_DIALS else None
                done, _ = await asyncio.wait(dials, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for dial in done:
                    dials.discard(dial)
                    failure = dial.exception()
                    if failure is None:
                        dials |= done - {dial}  # those that came at the same moment are hung up with the rest
                        return dial.result()
                if done and not dials:
                    assert failure is not None
                    raise failure
        finally:
            for dial in dials:
                dial.cancel()
            for late in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(late, Wire):
                    await late.close()

    async def _dial(self) -> Wire:
        connection = await Wire.connect(self._dsn, autocommit=True, **self._options)
        try:
            heard = connection.heard = []
            connection.armed = set()
            connection.rest = Rest()
            connection.keep_at, connection.refusals = 0.0, 0
            connection.patience = watch.MOST_PATIENCE  # one that is slow has others dialling beside it
            # Notifications that come with the answer of a query, not while waiting for one.
            connection.add_notify_handler(lambda note: heard.append(note.payload.encode()))
            cursor = await connection.execute(*wire.on_connect(connection, read_only=True))
            wire.set_up(connection, await cursor.fetchone())
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _became_ready(self, connection: Wire) -> None:
        """LISTEN, committed, before the first scan: what is posted after it is announced, what was before it is scanned."""
        self._distrusted = False
        why_not = wire.why_not_listen(connection, wanted=self._listen)
        if why_not is None:
            try:
                await connection.execute(wire.LISTEN)
            except wire.LISTEN_REFUSED as exc:
                why_not = wire.why(exc)
        self._list.wake_all(self._loop.time())
        self._log(self._status.ready(why_not, self._loop.time(), warn=self._listen))

    async def _serve(self, connection: Wire) -> None:
        unwanted_since: float | None = None
        while True:
            self._nudged.clear()
            if self._distrusted:
                raise psycopg.OperationalError("its session is not seen where turns are admitted")
            await self._keep(connection)
            await self._do_jobs(connection)
            until = await self._arm(connection)
            if self._tokens and not wire.is_pooled(connection):
                until = min(until, connection.keep_at)
            await self._look(connection)
            now = self._loop.time()
            if self._wanted():
                unwanted_since = None
            else:
                unwanted_since = unwanted_since or now
                if now - unwanted_since >= watch.LINGER:
                    self._status.become("idle", None, now)
                    return
            due = self._list.next_due()
            until = min(until, due if due is not None else (unwanted_since or now) + watch.LINGER)
            if not connection.heard:
                await self._idle(connection, max(0.0, until - now))
            self._hear(connection)

    async def _idle(self, connection: Wire, timeout: float) -> None:
        """Until a nudge, or until the server has something to say."""
        fd = connection.pgconn.socket
        self._loop.add_reader(fd, self._nudged.set)
        timer = self._loop.call_later(timeout, self._nudged.set)
        try:
            await self._nudged.wait()
        finally:
            timer.cancel()
            self._loop.remove_reader(fd)

    async def _keep(self, connection: Wire) -> None:
        """Hold the tokens again after a reconnect. The dead session may hold them for a while; then ask again."""
        if not self._tokens or self._loop.time() < connection.keep_at or wire.is_pooled(connection):
            return
        missing = [token for token, held in self._tokens.items() if not held]
        if not missing:
            await self._execute(connection, calls.beat())
        refused = [token for token in missing if not await self._take(connection, token)]
        connection.keep_at = self._loop.time() + watch.keep_again(connection.refusals if refused else None)
        connection.refusals += bool(refused)

    async def _take(self, connection: Wire, token: int) -> bool | None:
        if wire.is_pooled(connection):
            return None
        held = self._tokens[token] = await self._execute(connection, calls.hold_session(token))
        return held

    async def _arm(self, connection: Wire) -> float:
        """Hold the keys of the channels that are waited on, and let the others go; see the sync listener.

        Returns when to come again, because of keys that are let go a moment after their last wait.
        """
        if self.state.kind != "listening":
            return self._loop.time() + watch.LONGEST
        wanted = watch.keys_for(self._list.channel_ids())
        drop = connection.armed - wanted
        for _ in range(watch.TRIES):
            take = wanted - connection.armed
            if not take:
                break
            connection.armed |= take.difference(await self._execute(connection, calls.arm(sorted(take), [])))
            if drop:
                self._let_go = self._loop.time() + watch.LET_GO
            if wanted <= connection.armed:
                break
            await asyncio.sleep(watch.TRY_AGAIN)
        else:
            # Not armed, then: these bells poll, and the next round tries again.
            return self._loop.time() + watch.LONGEST
        if self._loop.time() < self._let_go and 0 < len(drop) <= watch.MOST_KEYS:
            return self._let_go
        if drop:
            await self._execute(connection, calls.arm([], sorted(drop)))
            connection.armed -= drop
        return self._loop.time() + watch.LONGEST

    def _hear(self, connection: Wire) -> None:
        connection.pgconn.consume_input()
        heard = set(connection.heard)
        connection.heard.clear()
        while note := connection.pgconn.notifies():
            heard.add(note.extra)
        now = self._loop.time()
        watched = [self._list.announced(int(payload), now) for payload in heard if payload.isdigit()]
        if any(watched):
            self._on_news()

    async def _look(self, connection: Wire) -> None:
        watches, look = self._list.take(self._loop.time())
        asked = [(each, self._mailboxes[each]) for each in watches]
        questions, preview = watch.ask(watches)
        if not watches:
            return
        began = self._loop.time()
        try:
            news: list[News] = []
            if look == "expecting" and len(questions) == 1:
                next_one = await self._execute(connection, calls.glance(questions[0], preview=preview))
                news = [next_one] if next_one else []
            if questions and not news and (look == "expecting" or await self._moved(connection, questions, look)):
                news = await self._execute(connection, calls.peek(questions, preview=preview))
        except psycopg.Error as exc:
            if not watch.refused_for_good(exc.sqlstate):
                raise
            self._refuse(asked, wire.translate(exc, calls.hello()))
            return
        self._failures = 0
        self._status.scanned = self._loop.time()
        self._patience = connection.patience = watch.patience_after(self._loop.time() - began)
        rang = False
        for (each, mailbox), own in zip(asked, watch.answer(watches, news), strict=True):
            if not self._waits(each, mailbox):
                continue  # its wait has ended: what comes of this would take the next one off the list, and ring nobody
            outcome: Outcome | None = each.settle(own)
            if outcome is not None:
                rang = True
                self._list.remove(each)
                mailbox.put_nowait(outcome)
            elif each in self._fresh:
                mailbox.put_nowait("nothing")
            self._fresh.discard(each)
        if rang:
            self._on_news()

    async def _moved(self, connection: Wire, questions: list[Question], look: Look) -> bool:
        """Whether a head is another than was looked at, or anything else may be, if it is time to look at everything."""
        # Behind a pooler the server may crash unnoticed, and then give the same snapshot another content.
        since = None if wire.is_pooled(connection) else connection.rest.since(questions)
        now = await self._execute(connection, calls.unmoved(questions, since))
        return connection.rest.settle(questions, since, now, look)

    async def _do_jobs(self, connection: Wire) -> None:
        while self._jobs:
            job = self._jobs[0]
            if not job.future.done():
                outcome = await self._outcome(connection, job)
                # Whoever asked may have gone meanwhile.
                if not job.future.done():
                    if isinstance(outcome, Exception):
                        job.future.set_exception(outcome)
                    else:
                        job.future.set_result(outcome)
            if self._jobs and self._jobs[0] is job:
                self._jobs.pop(0)

    async def _outcome(self, connection: Wire, job: _Job[Any]) -> Any:
        """What a job has come to. Raises when the connection goes: the job stays for the next one."""
        try:
            if job.token is not None:
                return await self._take(connection, job.token)
            return await self._execute(connection, job.call)
        except psycopg.Error as exc:
            if not watch.refused_for_good(exc.sqlstate):
                raise
            return wire.translate(exc, job.call)

    async def _execute(self, connection: Wire, call: Call[T]) -> T:
        if not wire.is_pooled(connection):  # the session itself is read-only
            return call.read(await (await connection.execute(call.sql, call.params)).fetchall())
        await connection.execute("begin read only")
        try:
            return call.read(await (await connection.execute(call.sql, call.params)).fetchall())
        finally:
            if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                await connection.execute("rollback")

    def _waits(self, each: Watch, mailbox: Mailbox) -> bool:
        """Whether that wait still lasts. The bell's next one has a mailbox of its own, and gets a scan of its own."""
        return each in self._list and self._mailboxes[each] is mailbox

    def _refuse(self, asked: list[tuple[Watch, Mailbox]], error: Exception) -> None:
        for each, mailbox in asked:
            if self._waits(each, mailbox):
                self._list.remove(each)
                self._fresh.discard(each)
                mailbox.put_nowait(error)

    def _wanted(self) -> bool:
        self._jobs = [job for job in self._jobs if not job.future.done()]
        return not self._closing and (bool(self._jobs) or len(self._list) > 0 or bool(self._tokens))

    @staticmethod
    def _log(line: tuple[int, str] | None) -> None:
        if line is not None:
            log.log(*line)
