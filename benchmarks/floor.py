"""The floor: the least that one durable row costs, as one prepared INSERT, by psycopg and by pgbench."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.harness import BODY
from doorbell_postgres import throwaway

# A message without its number: what the database gives is one identity, taken without a lock.
TABLE = """
create table floor (
  id bigint generated always as identity primary key,
  channel_id bigint not null,
  sender text collate "C" not null,
  body text not null,
  headers jsonb not null,
  created_at timestamptz not null default clock_timestamp()
) with (autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_insert_threshold = 10000)
"""

INSERT = (
    "insert into floor (channel_id, sender, body, headers)"
    " values (%s::bigint, %s::text, %s::text, %s::jsonb) returning id, created_at"
)
VALUES = (1, "bench", BODY, "{}")


class Writer:
    """One psycopg connection that repeats the prepared INSERT."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self._cursor = self.connection.cursor()

    def insert(self) -> Any:
        return self._cursor.execute(INSERT, VALUES, prepare=True).fetchone()


def _pgbench() -> Path | None:
    try:
        places = [throwaway.find_binaries()]
    except throwaway.NoServerBinaries:
        places = []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place / "pgbench" for place in places if (place / "pgbench").exists()), None)


def pgbench(dsn: str, clients: int, seconds: float) -> float | None:
    """What pgbench reaches with the same statement, in rows a second; None where there is no pgbench that runs."""
    program = _pgbench()
    if program is None:
        return None
    script = (
        "insert into floor (channel_id, sender, body, headers)"
        " values (:channel_id::bigint, :sender::text, :body::text, :headers::jsonb) returning id, created_at;\n"
    )
    variables: dict[str, object] = dict(zip(("channel_id", "sender", "body", "headers"), VALUES, strict=True))
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        done = subprocess.run(
            [
                *(str(program), "-n", "-M", "prepared"),
                *(f"-c{clients}", f"-j{min(clients, 2)}", f"-T{max(1, round(seconds))}"),
                *(f"-D{name}={value}" for name, value in variables.items()),
                *("-f", file.name, dsn),
            ],
            capture_output=True,
            text=True,
        )
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    return float(found[1]) if found else None


def pgbench_note(dsn: str, clients: int, seconds: float) -> str:
    rate = pgbench(dsn, clients, seconds)
    return "pgbench: absent" if rate is None else f"pgbench, same statement: {rate:,.0f}/s"
