"""Where the time of one post, one page of catch_up and one ring goes.

Nothing is instrumented; each part is a difference of medians, measured alone on an idle connection:

- the flush: the same statement with and without synchronous_commit;
- the server: the function in a loop inside one DO block, so without protocol, parsing or commit;
- the round trip: a prepared `select 1`, so psycopg, the socket, and an empty statement;
- the client: our call against the bare statement that it sends;
- the rest: what remains, which is named for what it must be.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from benchmarks import floor
from benchmarks.harness import BODY, Bench, Breakdown, Crew, Result, clock, fill, percentile
from benchmarks.ringing import rings
from doorbell_postgres import MessageBus, calls


def _timed(step: Callable[[], object]) -> float:
    began = clock()
    step()
    return clock() - began


class Profiler:
    """Takes every part in turn, call by call, so that whatever disturbs one disturbs the others alike. In milliseconds."""

    def __init__(self, dsn: str, index: int) -> None:
        self._bus = MessageBus(dsn)
        self._on = psycopg.connect(dsn, autocommit=True)
        self._off = psycopg.connect(dsn, autocommit=True)
        self._off.execute("set synchronous_commit = off")
        self._writer = floor.Writer(dsn)

    def post(self, count: int) -> dict[str, float]:
        def bare(connection: psycopg.Connection[Any]) -> Callable[[], object]:
            call = calls.try_post(calls.outgoing("profile", BODY, sender="bench"))
            cursor = connection.cursor()
            return lambda: cursor.execute(call.sql, call.params, prepare=True).fetchall()

        steps = {
            "ours": lambda: self._bus.post("profile", BODY, sender="bench"),
            "bare": bare(self._on),
            "unflushed": bare(self._off),
            "empty": self._empty(self._on),
            "floor": self._writer.insert,
        }
        found = self._in_turn(steps, count)
        found["server"] = self._in_a_loop(f"perform doorbell.try_post('profile', '{BODY}', 'bench')", count)
        return found

    def page(self, count: int) -> dict[str, float]:
        call = calls.unacked("reader", None, page_size=100)
        cursor = self._on.cursor()
        steps = {
            "ours": lambda: self._bus.store.page("reader", None, page_size=100),
            "bare": lambda: cursor.execute(call.sql, call.params, prepare=True).fetchall(),
            "empty": self._empty(self._on),
        }
        found = self._in_turn(steps, count)
        found["server"] = self._in_a_loop("perform count(*) from doorbell.unacked('reader', null, 0, 100)", count)
        return found

    def peek(self, count: int) -> dict[str, float]:
        [at] = self._bus.store.peek(calls.bell_floors("worker"))
        call = calls.peek([calls.Question("worker", at.channel_id, at.head - 1, None, at.epoch)], preview=4_096)
        cursor = self._on.cursor()
        steps = {"bare": lambda: cursor.execute(call.sql, call.params, prepare=True).fetchall(), "empty": self._empty(self._on)}
        return self._in_turn(steps, count)

    @staticmethod
    def _empty(connection: psycopg.Connection[Any]) -> Callable[[], object]:
        cursor = connection.cursor()
        return lambda: cursor.execute("select 1", prepare=True).fetchall()

    @staticmethod
    def _in_turn(steps: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
        spent: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(count + 5):
            for name, step in steps.items():
                seconds = _timed(step)
                if number >= 5:
                    spent[name].append(seconds)
        return {name: 1000 * statistics.median(each) for name, each in spent.items()}

    def _in_a_loop(self, statement: str, count: int) -> float:
        """What the statement takes inside the server: many in one block, which is then rolled back."""
        rounds = []
        for _ in range(3):
            with self._on.transaction(force_rollback=True):
                heard: list[str] = []

                def note(diagnostic: psycopg.errors.Diagnostic, heard: list[str] = heard) -> None:
                    heard.append(diagnostic.message_primary or "")

                self._on.add_notice_handler(note)
                self._on.execute(
                    "do $do$ declare began timestamptz; begin"
                    f" {statement};"  # its plans are made now
                    f" began := clock_timestamp(); for i in 1..{count} loop {statement}; end loop;"
                    " raise notice '%', extract(epoch from clock_timestamp() - began); end $do$"
                )
                self._on.remove_notice_handler(note)
                rounds.append(float(heard[-1]) / count)
        return 1000 * statistics.median(rounds)


def profile(bench: Bench) -> Iterator[Result]:
    """where the time of one post, one page of catch_up and one ring goes"""
    dsn, count = bench.database(), bench.size.profile
    fill(dsn, "log", 1_000, handle="reader")
    with Crew(Profiler, dsn) as crew:
        [of] = crew.call("post", count)
        yield Breakdown(
            "one post",
            of["ours"],
            [
                (
                    "client: checking, the pool, building the Message (our call against the bare statement)",
                    of["ours"] - of["bare"],
                ),
                ("wire: psycopg, socket, scheduling (a prepared `select 1`)", of["empty"]),
                ("server: the function (in a loop in one block)", of["server"]),
                ("flush (against synchronous_commit = off)", of["bare"] - of["unflushed"]),
                ("rest: parameters, result, the commit without its flush", of["unflushed"] - of["empty"] - of["server"]),
            ],
            f"The floor, one prepared INSERT in the same alternation: {of['floor']:.2f} ms.",
        )
        [of] = crew.call("page", max(1, count // 5))
        yield Breakdown(
            "one page of catch_up (100 messages)",
            of["ours"],
            [
                ("client: building 100 Messages (our call against the bare statement)", of["ours"] - of["bare"]),
                ("wire: psycopg, socket, scheduling (a prepared `select 1`)", of["empty"]),
                ("server: the function (in a loop in one block)", of["server"]),
                ("rest: sending 100 rows, and psycopg turning them into Python", of["bare"] - of["empty"] - of["server"]),
            ],
            "Nothing is flushed: reading writes nothing.",
        )
        posted, bare, after = [], [], []
        for which, from_begin, from_end in rings(dsn, dataclasses.replace(bench.size, rounds=1)):
            if which == "floor":
                bare.append(percentile(from_begin, 0.5))
            else:
                after.append(percentile(from_end, 0.5))
                posted.append(percentile(from_begin, 0.5))
        whole, floor_p50 = 1000 * statistics.median(posted), 1000 * statistics.median(bare)
        returned = whole - 1000 * statistics.median(after)
        [of] = crew.call("peek", count)
        yield Breakdown(
            "one ring, from the call of post in one process to the return of wait in another",
            whole,
            [
                ("the post, until it is durable and has returned", returned),
                ("the announcement: one NOTIFY and its delivery (the bare NOTIFY)", floor_p50),
                ("the look: one peek, on the listener's connection", of["bare"]),
                (
                    "rest: handing over between threads: poster, notifier, listener, waiter",
                    whole - returned - floor_p50 - of["bare"],
                ),
            ],
            "The calls are paused between, so each wakes processes that sleep: everything is slower than under load.",
        )
