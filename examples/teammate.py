"""Teammates in a chat room: kill any of them anywhere, run it again, and each answers each mention once.

    python examples/teammate.py                          a private throwaway Postgres; two crashes
    python examples/teammate.py --crash-at after-model   another crash; also after-post, between-steps, ...
    python examples/teammate.py --dsn DSN                your own server

A mention is posted to the channel `inbound`. The relay takes each event in by the hash of its content, records it, and
dispatches it to the personas that it mentions, each with a channel of its own. A persona asks its (scripted) model once,
and its answer goes through the same relay. Sessions are processes of their own, and die by SIGKILL.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime

import psycopg

from doorbell_postgres import Message, MessageBus, throwaway

PERSONAS = {
    "ada": "Kill me where you like: / what commits with what I wrote / wakes up and goes on.",
    "bob": "What Ada said.",
}
POINTS = {
    "before-admit": ("relay", "the relay has read the mention and not admitted it"),
    "inside-record": ("relay", "the relay has written the event to the room, and its transaction is open"),
    "between-steps": ("relay", "the event is recorded, and dispatched to nobody"),
    "inside-dispatch": ("relay", "the event is dispatched to the first persona only"),
    "before-finish": ("relay", "all steps are done, and the turn is not finished"),
    "before-model": ("ada", "the persona has admitted its turn"),
    "after-model": ("ada", "the model has answered, and nobody has heard it"),
    "after-reserve": ("ada", "the time of the answer is reserved"),
    "after-post": ("ada", "the answer is posted, and the turn is not finished"),
}
TABLES = """
create table if not exists room (id text not null, event text not null, at timestamptz not null default now());
create table if not exists model_call (persona text not null, id text not null);
truncate room, model_call;
"""


def say(who: str, what: str) -> None:
    print(f"{who:<10} {what}", flush=True)


def event(author: str, text: str, at: datetime | None, re_id: str | None = None) -> str:
    """The one way to write this event: the same content is the same bytes, and so has the same id."""
    return json.dumps({"at": at and at.isoformat(), "author": author, "re": re_id, "text": text}, sort_keys=True)


def content_id(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


class Session:
    """One life of one of them: handle what waits, then end. `crash_at` is where this life ends before."""

    def __init__(self, dsn: str, role: str, crash_at: str) -> None:
        self.bus = MessageBus(dsn)
        self.app = psycopg.connect(dsn, autocommit=True)
        self.role = role
        self.crash_at = crash_at

    def at(self, point: str) -> None:
        if point == self.crash_at:
            say(self.role, f"KILLED {point}: {POINTS[point][1]}")
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        with self.bus:
            for message in self.bus.catch_up(self.role):
                if self.role == "relay":
                    self.relay(message)
                else:
                    self.persona(message)

    def relay(self, message: Message) -> None:
        """The first place where a duplicate is recognised: an event that is there is not done; its missing steps run."""
        self.at("before-admit")
        event_id = content_id(message.body)
        with self.bus.turn("relay", message, event_id=event_id) as turn:
            if not turn.should_run:
                say("relay", f"#{message.seq} is a {turn.state} of {event_id[:8]}")
                return
            say("relay", f"#{message.seq} is event {event_id[:8]}: {turn.state}")
            with turn.step("record") as step:
                if step.pending:
                    step.conn.execute("insert into room (id, event) values (%s, %s)", [event_id, message.body])
                    self.at("inside-record")
            self.at("between-steps")
            with turn.step("dispatch") as step:
                if step.pending:
                    content = json.loads(message.body)
                    for name in sorted(set(re.findall(r"@(\w+)", content["text"])) & PERSONAS.keys()):
                        turn.post(
                            f"turns.{name}", message.body, correlation_id=name, headers={"event-id": event_id}, conn=step.conn
                        )
                        say("relay", f"dispatches {event_id[:8]} to {name}")
                        self.at("inside-dispatch")
            self.at("before-finish")

    def persona(self, message: Message) -> None:
        """The second place: the relay may dispatch twice, and the persona admits the turn once, under the event's own id."""
        with self.bus.turn(self.role, message, max_attempts=5) as turn:
            if not turn.should_run:
                say(self.role, f"#{message.seq} is a {turn.state}")
                return
            say(self.role, f"#{message.seq}: {turn.state}, attempt {turn.attempt}")
            self.at("before-model")
            answer = self.model(message.headers["event-id"])
            self.at("after-model")
            at = turn.reserve("answer")
            self.at("after-reserve")
            turn.post("inbound", event(self.role, answer, at, message.headers["event-id"]), correlation_id="answer")
            self.at("after-post")

    def model(self, event_id: str) -> str:
        """It takes no part in any commit: a crash after it means that it is asked again."""
        self.app.execute("insert into model_call values (%s, %s)", [self.role, event_id])
        return PERSONAS[self.role]


def run_until_quiet(bus: MessageBus, dsn: str, crashes: list[str]) -> int:
    """Start one session after the other until nobody has anything left; returns how many were killed."""
    kills = 0
    while not bus.wait_until_quiet(timeout=0):
        for role in ("relay", *PERSONAS):
            crash_at = next((point for point in crashes if POINTS[point][0] == role), "")
            command = [sys.executable, __file__, "--session", role, "--dsn", dsn, "--crash-at", crash_at or "nowhere"]
            code = subprocess.run(command, check=False).returncode
            if code == -signal.SIGKILL:
                crashes.remove(crash_at)
                kills += 1
            elif code:
                raise SystemExit(f"{role} ended with {code}")
    return kills


def counts(app: psycopg.Connection) -> tuple[dict[str, int], dict[str, int]]:
    calls = app.execute("select persona, count(*) from model_call group by 1 order by 1").fetchall()
    authors = [json.loads(row[0])["author"] for row in app.execute("select event from room").fetchall()]
    return {str(name): int(n) for name, n in calls}, {name: authors.count(name) for name in sorted(set(authors))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Teammates that answer once, wherever they are killed.")
    parser.add_argument("--dsn", help="a server of yours, migrated if need be; default: a private throwaway one")
    parser.add_argument("--crash-at", action="append", choices=[*POINTS, "nowhere"], metavar="POINT",
                        help=f"where a session dies, once each: {', '.join(POINTS)}")  # fmt: skip
    parser.add_argument("--session", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.session:
        Session(arguments.dsn, arguments.session, arguments.crash_at[0]).run()
        return 0

    crashes = [point for point in arguments.crash_at or ["between-steps", "after-post"] if point != "nowhere"]
    planned = len(crashes)
    dsn = arguments.dsn or throwaway.shared().create_database()
    with MessageBus(dsn, migrate=True) as bus, psycopg.connect(dsn, autocommit=True) as app:
        app.execute(TABLES)
        bus.subscribe("relay", "inbound")
        for name in PERSONAS:
            bus.subscribe(name, f"turns.{name}")

        # A time makes it another event than that of the last run on this server.
        now = app.execute("select clock_timestamp()").fetchone()
        mention = event("human", "@ada @bob, a haiku about crashes?", now and now[0])
        bus.post("inbound", mention, sender="human")
        say("human", "@ada @bob, a haiku about crashes?")
        kills = run_until_quiet(bus, dsn, crashes)
        calls, events = counts(app)
        threaded = all(json.loads(row[0])["re"] == content_id(mention) for row in
                       app.execute("select event from room where event::json ->> 'author' <> 'human'"))  # fmt: skip

        say("human", "posts the same event again, by hand, under a new number and without a key")
        bus.post("inbound", mention, sender="human")
        run_until_quiet(bus, dsn, crashes)
        again = counts(app)

    proofs = {
        f"{kills} of {planned} planned kills happened": kills == planned,
        f"each event is in the room once: {events}": events == {"ada": 1, "bob": 1, "human": 1},
        "each answer is threaded under the mention": threaded,
        f"model calls: {calls}, at least one each, and at most one more for each kill":
            calls.keys() == PERSONAS.keys() and sum(calls.values()) <= len(PERSONAS) + kills,
        "the replay was read (acked = posted) and changed no count": again == (calls, events),
    }  # fmt: skip
    for proof, holds in proofs.items():
        say("proof" if holds else "FAILED", proof)
    return 0 if all(proofs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
