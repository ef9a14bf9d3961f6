"""An agent harness around the command `doorbell`: wait, wake, catch up, handle, ack, wait again.

    DOORBELL_DSN=... python examples/harness.py HANDLE PROGRAM [ARGUMENT ...]

PROGRAM is the agent's turn: it is run once for each message, with the message as one JSON line on its stdin, and has
handled it when it exits 0. Only then the message is acked. Kill this at any moment and start it again, on any host: what
was not acked comes again. So PROGRAM must bear to see a message twice.

It uses nothing but processes and JSON, so that it reads the same in any language.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

DOORBELL = [sys.executable, "-m", "doorbell_postgres"]  # where `doorbell` is on the PATH: ["doorbell"]

# What `doorbell` says with its exit code.
RANG, REFUSED, USAGE, IDLE, UNREACHABLE = 0, 1, 2, 3, 4

WAIT = 300  # seconds; some harnesses end background commands after a time of their own: stay below it
PAUSE_FIRST, PAUSE_MOST = 1.0, 60.0


def say(text: str) -> None:
    print(f"harness: {text}", file=sys.stderr, flush=True)


def handle_all(handle: str, program: list[str]) -> int:
    """Handle what is there, message by message. 0 when all of it is acked, else the code of what failed."""
    with subprocess.Popen([*DOORBELL, "catch-up", "--json", "--", handle], stdout=subprocess.PIPE) as catching_up:
        assert catching_up.stdout is not None
        for line in catching_up.stdout:
            message = json.loads(line)
            turn = subprocess.run(program, input=line, check=False)
            if turn.returncode != 0:
                # Not acked, and nothing behind it either: an ack of a later one would cover it.
                say(f"#{message['seq']} was not handled, the program exited {turn.returncode}")
                catching_up.kill()
                return REFUSED
            ack = [*DOORBELL, "ack", "--", handle, message["channel"], str(message["seq"])]
            acked = subprocess.run(ack, stdout=subprocess.DEVNULL, check=False)
            if acked.returncode != 0:
                catching_up.kill()
                return acked.returncode
    return catching_up.returncode


def wait(handle: str) -> int:
    """The background command. A harness that has other things to do goes on doing them, and looks at its exit."""
    bell = subprocess.Popen([*DOORBELL, "wait", "--timeout", str(WAIT), "--", handle], stdout=subprocess.PIPE, text=True)
    line, _ = bell.communicate()
    if line:
        say(f"woken: {line.rstrip()}")  # for people: content comes with the catch-up, never from here
    return bell.returncode


def main(handle: str, program: list[str]) -> int:
    pause = PAUSE_FIRST
    while True:
        code = handle_all(handle, program)
        if code == 0:
            pause = PAUSE_FIRST
            code = wait(handle)
        if code in (RANG, IDLE):
            continue  # catch up, whatever it was: that also finds what a lost wake would have announced
        if code == USAGE or code < 0 or code > 128:
            return code if code > 0 else 128 - code  # called wrongly, or somebody wants this to end
        # Unreachable, refused, or the program failed: later may be better, and a person sees it on stderr.
        say(f"trying again in {pause:g} s")
        time.sleep(pause)
        pause = min(PAUSE_MOST, pause * 2)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        say("usage: harness.py HANDLE PROGRAM [ARGUMENT ...]")
        sys.exit(USAGE)
    if shutil.which(sys.argv[2]) is None:
        say(f"{sys.argv[2]!r} is no program that can be run")
        sys.exit(USAGE)
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
