"""On what it was measured: the machine, its disk, the versions, the server's settings."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

import doorbell_postgres
from doorbell_postgres import throwaway

_SHOWN = ("fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "wal_level", "shared_buffers", "max_wal_size",
          "checkpoint_timeout", "max_connections", "autovacuum", "jit")  # fmt: skip


def describe(server: throwaway.Server) -> dict[str, Any]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        settings = {name: value for name in _SHOWN for (value,) in connection.execute("select current_setting(%s)", (name,))}
        postgres = connection.execute("show server_version").fetchone()
    assert postgres is not None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(),
        "flush_us": _flush(),
        "load": round(os.getloadavg()[0], 2),
        "postgres": postgres[0].split()[0],
        "connection": "unix socket",
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "doorbell_postgres": doorbell_postgres.__version__,
        "commit": _commit(),
        "settings": settings,
    }


def lines(machine: dict[str, Any]) -> list[str]:
    """The same for people."""
    memory = f", {machine['memory_gb']} GB" if machine["memory_gb"] else ""
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    return [
        f"{machine['processor']}, {machine['cores']} cores{memory}; {machine['system']}; load {machine['load']} at the start",
        f"{machine['filesystem']}; a write of 8 KiB with fdatasync takes {machine['flush_us']} µs (median)",
        f"Postgres {machine['postgres']} over a {machine['connection']}, on the same machine as its clients",
        f"doorbell-postgres {machine['doorbell_postgres']}{commit}; Python {machine['python']}; psycopg {machine['psycopg']}",
        "settings: " + ", ".join(f"{name} = {value}" for name, value in machine["settings"].items()),
    ]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    except (OSError, ValueError):
        return None


def _filesystem() -> str:
    """The kind of the filesystem that the server's directory is on."""
    kinds = {}
    try:
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            kinds[place] = kind
    except OSError:
        return "filesystem unknown"
    here = Path(tempfile.gettempdir()).resolve()
    return next((kinds[str(place)] for place in (here, *here.parents) if str(place) in kinds), "filesystem unknown")


def _flush() -> int:
    """What one flush costs, in microseconds: the least that a durable commit can take."""
    sync = getattr(os, "fdatasync", os.fsync)
    page = bytes(8192)
    spent = []
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), bytes(8192 * 256), 0)
        sync(file.fileno())
        for number in range(200):
            began = time.perf_counter()
            os.pwrite(file.fileno(), page, 8192 * (number % 256))
            sync(file.fileno())
            spent.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(spent))


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip()
