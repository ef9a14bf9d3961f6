"""Real processes for tests: started plain, spoken to through a pipe, killed with SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import doorbell_postgres

TESTS = Path(__file__).resolve().parents[1]
# The package under test here is the one under test there, wherever it was imported from.
PACKAGE = Path(doorbell_postgres.__file__).resolve().parents[1]


def plain_environment(**extra: str) -> dict[str, str]:
    """The environment without what would steer the package, measure coverage or randomise the run."""
    dropped = ("DOORBELL_DSN", "PYTHONWARNINGS", "PYTHONPATH", "PYTHONHASHSEED")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("COV_", "PYTEST_"))}
    return kept | {"PYTHONPATH": f"{TESTS}{os.pathsep}{PACKAGE}", "PYTHONUNBUFFERED": "1"} | extra


class WorkerFailed(AssertionError):
    """The function raised in the worker; the message is its traceback, `error` the exception where it could travel."""

    error: BaseException | None = None


class Worker:
    """One process that runs `function(pipe, *args)` and sends back what it returns.

    In the function, `pipe.send(x)` is heard here by `hear()`, and `pipe.recv()` gets what `tell(x)` sends.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> None:
        self.name = f"{function.__module__}:{function.__qualname__}"
        ours, theirs = Pipe()
        self._pipe: Connection = ours
        self._heard: list[Any] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=env,
            cwd=TESTS,
            start_new_session=True,
        )
        theirs.close()
        self._pipe.send((function.__module__, function.__qualname__, args))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        return self._process.poll()

    def tell(self, value: Any) -> None:
        self._pipe.send(value)

    def hear(self, *, within: float = 30.0) -> Any:
        """The next value that the function has sent."""
        kind, value = self._next(within)
        if kind == "said":
            return value
        raise AssertionError(f"{self.name} has ended and said nothing more: {kind} {value!r}")

    def result(self, *, within: float = 60.0) -> Any:
        """What the function returned. What it said and nobody heard is dropped."""
        while True:
            kind, value = self._next(within)
            if kind == "returned":
                self._process.wait(30)
                return value

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Whatever it started dies with it."""
        self.signal(signal.SIGKILL)
        self._process.wait(30)

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        # Its group may have other members when the leader is dead, and may be gone altogether.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._pipe.close()

    def _next(self, within: float) -> tuple[str, Any]:
        if not self._pipe.poll(within):
            raise AssertionError(f"{self.name} was silent for {within} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{self.name} died; exit code {self._process.wait(30)}") from None
        if kind == "raised":
            failure = WorkerFailed(f"in {self.name}:\n{value[0]}")
            failure.error = value[1]
            raise failure
        return kind, value


class Processes:
    """Starts workers, and leaves none behind."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def start(self, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Worker:
        """Run `function(pipe, *args)`, importable from tests/ (best: support.workers), in a new process."""
        worker = Worker(function, args, plain_environment(**(env or {})))
        self._workers.append(worker)
        return worker

    def run(self, function: Callable[..., Any], *argss: tuple[Any, ...], within: float = 60.0) -> list[Any]:
        """One process for each tuple of arguments, at the same time; what they returned."""
        workers = [self.start(function, *args) for args in argss]
        return [worker.result(within=within) for worker in workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def run_script(
    text: str, *args: str, env: dict[str, str] | None = None, within: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `text` as a Python program of its own; its exit code and what it printed."""
    return subprocess.run(
        [sys.executable, "-c", text, *args],
        env=plain_environment(**(env or {})),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=within,
        check=False,
    )
