"""How long it takes until a process can work: the import, and `doorbell wait` from its start to armed."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

import psycopg

from benchmarks.harness import Bench, Result, Row, clock, keys_held, until, within
from benchmarks.ringing import command
from doorbell_postgres import MessageBus

_TIMED = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def _import(what: str) -> float:
    done = subprocess.run([sys.executable, "-c", _TIMED.format(what)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def start(bench: Bench) -> Iterator[Result]:
    """import doorbell_postgres; `doorbell wait` from start to armed"""
    rounds = bench.size.starts
    modules = ("psycopg, psycopg_pool", "doorbell_postgres")
    for module in modules:
        _import(module)  # its bytecode is written now
    imports: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(rounds):
        for module in modules:
            imports[module].append(_import(module))
    floor, ours = (statistics.median(imports[module]) for module in modules)
    yield Row("import doorbell_postgres, against import psycopg and its pool", "s", floor, ours, within(0.15))

    dsn = bench.database()
    with MessageBus(dsn) as bus:
        bus.subscribe("worker", "events")
    bare, armed = [], []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(rounds + 1):
            begin = clock()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            bare.append(clock() - begin)
            begin = clock()
            process = subprocess.Popen([*command(), "wait", "worker", "--timeout", "60"], env={**os.environ, "DOORBELL_DSN": dsn})
            try:
                armed.append(until(lambda: keys_held(connection) == 1, timeout=60) - begin)
            finally:
                process.kill()
                process.wait()
            until(lambda: keys_held(connection) == 0, timeout=60)
    yield Row(
        "`doorbell wait` from start to armed, against a Python that does nothing",
        "s",
        statistics.median(bare[1:]),
        statistics.median(armed[1:]),
        within(0.5),
    )
