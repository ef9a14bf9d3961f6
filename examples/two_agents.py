"""Two agents share a channel; one of them crashes in the middle of its work. Nothing is lost.

    python examples/two_agents.py                    a private throwaway Postgres, gone afterwards
    python examples/two_agents.py DSN                your own

The coordinator posts three jobs. A worker session, a process of its own, handles the first and is killed with SIGKILL
while it handles the second. Its successor, another process under the same handle, inherits exactly what was left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from doorbell_postgres import Doorbell, MessageBus, throwaway

JOBS = ["deploy the api", "rotate the keys", "write the changelog"]


def say(who: str, what: str) -> None:
    print(f"{who:<12} {what}", flush=True)


def worker(dsn: str, name: str, crash_on: str | None) -> None:
    """One agent session: catch up, handle, ack, wait on a doorbell; again until nothing more comes."""
    with MessageBus(dsn) as bus:
        inherited = bus.catch_up("worker")
        say(name, f"starts; {len(inherited)} unacked message(s) wait for it")
        while True:
            for message in bus.catch_up("worker"):
                if message.body == crash_on:
                    say(name, f"#{message.seq} {message.body!r}: working on it ... and the session is killed")
                    os.kill(os.getpid(), signal.SIGKILL)
                say(name, f"#{message.seq} {message.body!r}: handled, then acked")
                bus.post("results", f"done: {message.body}", sender="worker", idempotency_key=f"done-{message.seq}")
                bus.ack("worker", message.channel, message.seq)
            ring = Doorbell(bus, "worker").wait(timeout=1.0)
            if ring is None:
                say(name, "nothing more to do")
                return
            say(name, f"wakes: {ring.wake_line}")


def session(dsn: str, name: str, crash_on: str = "") -> int:
    return subprocess.run([sys.executable, __file__, "--worker", dsn, name, crash_on], check=False).returncode


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        dsn, name, crash_on = sys.argv[2:5]
        worker(dsn, name, crash_on or None)
        return 0

    if sys.argv[1:]:
        dsn = sys.argv[1]
    else:
        say("demo", "starting a private Postgres (it ends with this process)")
        began = time.monotonic()
        dsn = throwaway.shared().create_database()
        say("demo", f"it is up after {time.monotonic() - began:.1f} s")

    with MessageBus(dsn, migrate=True) as bus:
        bus.subscribe("worker", "jobs")
        bus.subscribe("coordinator", "results")
        for job in JOBS:
            posted = bus.post("jobs", job, sender="coordinator")
            say("coordinator", f"posts #{posted.seq} {job!r}")

        code = session(dsn, "session 1", crash_on=JOBS[1])
        say("coordinator", f"session 1 ended with {code}; it had acked up to #{bus.store.acked_seq('worker', 'jobs')}")
        session(dsn, "session 2")

        results = [message.body for message in bus.catch_up("coordinator")]
        say("coordinator", f"results: {results}")
        complete = results == [f"done: {job}" for job in JOBS] and bus.wait_until_quiet(handle="worker", timeout=0)
        say("coordinator", "every job was done once, and nothing is left unacked" if complete else "SOMETHING IS MISSING")
        return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
