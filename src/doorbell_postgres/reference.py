"""Moving in: take over a store of the SQLite reference, all of it or nothing.

The file is opened read-only and read in one transaction. Everything is checked before anything is written; then one
Postgres transaction copies channels, messages with their numbers, times and keys, subscriptions and cursors, counts them
on the other side, and commits. A reader goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from doorbell_postgres import calls, operations, wire
from doorbell_postgres.admin import Admin
from doorbell_postgres.errors import DoorbellError, InvalidInput
from doorbell_postgres.wakeline import FIELD_LEN, sanitize

TABLES = {
    "channels": {"id", "name"},
    "messages": {"channel_id", "seq", "sender", "body", "idempotency_key", "created_at"},
    "subscriptions": {"handle", "channel_id"},
    "cursors": {"handle", "channel_id", "acked_seq"},
}
# Faults that are listed; the rest is counted.
LISTED = 20
# How often progress is told, in messages.
STEP = 1_000

Progress = Callable[[str, int, int], None]


class Refused(DoorbellError):
    """The file is not taken over; `faults` says why, each with its place in the file. Nothing was written."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message, faults)
        self.faults = faults


@dataclass
class Contents:
    """How much a store holds, counted on either side."""

    channels: int = 0
    messages: int = 0
    keys: int = 0
    bytes: int = 0
    subscriptions: int = 0
    acked: int = 0
    heads: dict[str, int] = field(default_factory=dict)


def inspect(path: str, *, progress: Progress = lambda what, done, of: None) -> Contents:
    """What the file holds. Raises Refused when it is busy, foreign, or holds what our limits refuse. Writes nothing."""
    with _opened(path) as source:
        return _check(source, progress)


def take_over(path: str, dsn: str, *, progress: Progress = lambda what, done, of: None) -> Contents:
    """Import the file and return what was counted in Postgres after it; the two counts are equal, or nothing is kept.

    Holds the new channels until it commits: who posts to them meanwhile waits, then gets ChannelBusy. `progress(what, done,
    of)` is called now and then, `what` being "checking" or "copying".

    Raises Refused; InvalidInput and DatabaseUnavailable for the DSN; psycopg's errors when this role may not write the
    tables: it takes the owner of the schema.
    """
    with _opened(path) as source, Admin(dsn) as admin:
        expected = _check(source, progress)
        with admin.transaction() as connection:
            ids = _create_channels(connection, source)
            _copy(connection, source, ids, expected, progress)
            _copy_cursors(connection, source, ids)
            found = _count(connection, list(ids.values()))
            if found != expected:
                raise Refused(f"What arrived is not what the file holds: {_difference(expected, found)}. Nothing was kept.")
            _still(source, path)
    return found


# -- the file ---------------------------------------------------------------------------------------------------------


@dataclass
class _Source:
    connection: sqlite3.Connection
    version: int


@contextmanager
def _opened(path: str) -> Iterator[_Source]:
    file = Path(path)
    shown = sanitize(path, max_len=200)
    if not file.is_file():
        found = f"There is no file {shown!r}." if not file.exists() else f"{shown!r} is no file."
        raise Refused(f"{found} Give the path of the reference's SQLite file.")
    try:
        with file.open("rb") as head:
            magic = head.read(16)
    except OSError as exc:
        raise Refused(f"{shown!r} cannot be read: {exc.strerror or exc}.") from None
    if magic != b"SQLite format 3\0":
        raise Refused(f"{shown!r} is no SQLite database. What was expected: the file that the reference's MessageBus was given.")
    if who := _used_by(file):
        raise Refused(
            f"{shown!r} is in use{who}. What it posts from now on would be lost. Stop every program that uses the file, and "
            "start them again with the DSN."
        )
    connection = None
    try:
        connection = sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
        connection.text_factory = bytes
        connection.execute("pragma query_only = on")
        version = connection.execute("pragma data_version").fetchone()[0]
        connection.execute("begin")
        _refuse_foreign(connection, shown)
        yield _Source(connection, version)
    except sqlite3.OperationalError as exc:
        if "locked" in str(exc) or "busy" in str(exc):
            raise Refused(f"{shown!r} is in use: {exc}. Stop every program that uses the file, and try again.") from None
        raise Refused(f"{shown!r} cannot be read: {exc}.") from None
    except sqlite3.DatabaseError as exc:
        raise Refused(f"{shown!r} cannot be read: {exc}. Check it with: sqlite3 FILE 'pragma integrity_check'.") from None
    finally:
        if connection is not None:
            connection.close()


def _refuse_foreign(connection: sqlite3.Connection, shown: str) -> None:
    for table, wanted in TABLES.items():
        found = {bytes(row[1]).decode(errors="replace") for row in connection.execute(f"pragma table_info({table})")}
        if not wanted <= found:
            what = f"has no table {table!r}" if not found else f"lacks {', '.join(sorted(wanted - found))} in its table {table!r}"
            raise Refused(f"{shown!r} is an SQLite database, but no store of the reference: it {what}.")


# Where SQLite locks: one byte for pending, one for reserved, 510 for shared, and in the file beside it those of the WAL.
_LOCKS = ((0x40000000, 512),)
_WAL_LOCKS = ((120, 8),)


def _used_by(file: Path) -> str:
    """A few words on the process that has the file open, as far as its locks tell; "" when none can be seen."""
    if sys.platform != "linux":
        return ""
    for name, ranges in ((file, _LOCKS), (file.with_name(file.name + "-shm"), _WAL_LOCKS)):
        if pid := _locked(name, ranges):
            return f" by process {pid}"
    return ""


def _locked(file: Path, ranges: tuple[tuple[int, int], ...]) -> int:
    import fcntl
    import os

    shape = "hhqqi4x"
    with contextlib.suppress(OSError), file.open("rb") as opened:
        for start, length in ranges:
            asked = struct.pack(shape, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
            kind, _, _, _, pid = struct.unpack(shape, fcntl.fcntl(opened, fcntl.F_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                return int(pid)
    return 0


def _still(source: _Source, path: str) -> None:
    """Raises Refused when somebody has written to the file since it was opened."""
    source.connection.execute("commit")
    if source.connection.execute("pragma data_version").fetchone()[0] != source.version:
        raise Refused(
            f"{sanitize(path, max_len=200)!r} was written to meanwhile. Nothing was kept. Stop what uses it, and try again."
        )


# -- checking ---------------------------------------------------------------------------------------------------------


class _Faults:
    def __init__(self) -> None:
        self.listed: list[str] = []
        self.count = 0

    def add(self, place: str, fault: str) -> None:
        self.count += 1
        if len(self.listed) < LISTED:
            self.listed.append(f"{place}: {fault}")

    def refuse(self) -> None:
        if self.count:
            more = f" (the first {LISTED} are listed)" if self.count > LISTED else ""
            raise Refused(
                f"The file holds {operations.counted(self.count, 'thing')} that cannot be taken over{more}. "
                "Nothing was written. Mend them in a copy of the file, then import that.",
                tuple(self.listed),
            )


def _check(source: _Source, progress: Progress) -> Contents:
    faults, found = _Faults(), Contents()
    names: dict[int, str] = {}
    for row, channel_id, value in source.connection.execute("select rowid, id, name from channels order by id"):
        name = _name(faults, f"channels row {row}", "name", value)
        if name is None:
            name = f"channel id {channel_id}"  # named so in what else is wrong with it
        elif name in found.heads:
            faults.add(f"channels row {row}", f"the name {_shown(name)} is there twice")
        names[channel_id], found.heads[name] = name, 0
    found.channels = len(names)

    total = source.connection.execute("select count(*) from messages").fetchone()[0]
    last_channel, last_seq, keys = None, 0, set[str]()
    for n, (channel_id, seq, sender, body, key, created_at) in enumerate(_messages(source)):
        if n % STEP == 0:
            progress("checking", n, total)
        if channel_id != last_channel:
            last_channel, last_seq = channel_id, 0
            keys.clear()
        where = (
            f"messages, channel {_shown(names[channel_id])} seq {seq}"
            if channel_id in names
            else f"messages, channel id {channel_id} seq {seq}"
        )
        if channel_id not in names:
            faults.add(where, "its channel is not in the file")
        if seq != last_seq + 1:
            faults.add(where, f"the number before it is {last_seq}; numbers are 1, 2, 3 … without a gap")
        last_seq = seq if isinstance(seq, int) else last_seq + 1
        _name(faults, where, "sender", sender)
        text = _text(faults, where, "body", body, calls.BODY_BYTES)
        if key is not None:
            decoded = _name(faults, where, "idempotency_key", key, calls.KEY_BYTES)
            if decoded is not None and decoded in keys:
                faults.add(where, f"the idempotency_key {_shown(decoded)} is there twice")
            if decoded is not None:
                keys.add(decoded)
            found.keys += 1
        _time(faults, where, created_at)
        found.messages += 1
        found.bytes += len(text.encode()) if text is not None else 0
        if channel_id in names:
            found.heads[names[channel_id]] = last_seq
    progress("checking", total, total)

    for row, handle, channel_id, acked in source.connection.execute(_CURSORS):
        where = f"subscriptions row {row}"
        _name(faults, where, "handle", handle)
        if channel_id not in names:
            faults.add(where, f"its channel, id {channel_id}, is not in the file")
        elif not isinstance(acked, int) or not 0 <= acked <= found.heads[names[channel_id]]:
            faults.add(
                where, f"its cursor is {acked!r}, and the head of {_shown(names[channel_id])} is {found.heads[names[channel_id]]}"
            )
        else:
            found.acked += acked
        found.subscriptions += 1
    faults.refuse()
    return found


# A cursor without a subscription is one that was given up. A subscription without a cursor has acked nothing.
_CURSORS = """
select s.rowid, s.handle, s.channel_id, coalesce(c.acked_seq, 0)
from subscriptions as s left join cursors as c on c.handle = s.handle and c.channel_id = s.channel_id
order by s.channel_id, s.handle
"""


def _messages(source: _Source) -> Iterator[tuple[Any, ...]]:
    yield from source.connection.execute(
        "select channel_id, seq, sender, body, idempotency_key, created_at from messages order by channel_id, seq"
    )


def _name(faults: _Faults, where: str, what: str, value: object, most: int = calls.NAME_BYTES) -> str | None:
    text = _text(faults, where, what, value, most)
    if text == "":
        faults.add(where, f"{what} is empty; it must have 1 to {most:,} bytes of UTF-8.")
        return None
    return text


def _text(faults: _Faults, where: str, what: str, value: object, most: int) -> str | None:
    if not isinstance(value, bytes):
        faults.add(where, f"{what} is of type {type(value).__name__}; it must be text.")
        return None
    try:
        return calls.text(what, value.decode(), most)
    except UnicodeDecodeError as exc:
        faults.add(where, f"{what} is not UTF-8: its byte {exc.start:,} is 0x{value[exc.start]:02x}.")
    except InvalidInput as exc:
        faults.add(where, str(exc))
    return None


def _time(faults: _Faults, where: str, value: object) -> None:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError
        operations.instant(value)
    except (ValueError, OverflowError):
        faults.add(
            where,
            f"created_at is {sanitize(repr(value), max_len=60)}; it must be seconds since the epoch, in the years 1 to 9999",
        )


def _shown(text: str) -> str:
    return repr(sanitize(text, max_len=FIELD_LEN))


# -- Postgres ---------------------------------------------------------------------------------------------------------


def _create_channels(connection: psycopg.Connection[Any], source: _Source) -> dict[int, int]:
    """The ids of the new channels by their ids in the file, in name order like everybody who locks several."""
    rows = source.connection.execute("select id, name from channels").fetchall()
    ids: dict[int, int] = {}
    taken: list[str] = []
    for old, name in sorted(((row[0], row[1].decode()) for row in rows), key=lambda row: str(row[1])):
        try:
            new, used = connection.execute(
                "select l.id, exists (select from doorbell.message as m where m.channel_id = l.id)"
                " or exists (select from doorbell.cursor as cu where cu.channel_id = l.id)"
                " from (select doorbell._lock_channel(%s) as id offset 0) as l",
                (name,),
            ).fetchone() or (0, True)
        except psycopg.Error as exc:
            raise wire.translate(exc, calls.head(name)) from None
        ids[old] = new
        if used:
            taken.append(name)
    if taken:
        shown = ", ".join(_shown(name) for name in taken[:5]) + (f" and {len(taken) - 5:,} more" if len(taken) > 5 else "")
        raise Refused(
            f"{operations.counted(len(taken), 'channel')} of the file {'is' if len(taken) == 1 else 'are'} in the database "
            f"already, with messages or subscriptions: {shown}. "
            "Nothing was written: a log is taken over whole. Import into another database, or before anybody uses these channels."
        )
    return ids


def _copy(
    connection: psycopg.Connection[Any], source: _Source, ids: dict[int, int], expected: Contents, progress: Progress
) -> None:
    with (
        connection.cursor() as cursor,
        cursor.copy("copy doorbell.message (channel_id, seq, sender, body, idempotency_key, created_at) from stdin") as copy,
    ):
        for n, (channel_id, seq, sender, body, key, created_at) in enumerate(_messages(source)):
            if n % STEP == 0:
                progress("copying", n, expected.messages)
            copy.write_row(
                (
                    ids[channel_id],
                    seq,
                    sender.decode(),
                    body.decode(),
                    None if key is None else key.decode(),
                    operations.instant(created_at),
                )
            )
    progress("copying", expected.messages, expected.messages)


def _copy_cursors(connection: psycopg.Connection[Any], source: _Source, ids: dict[int, int]) -> None:
    with connection.cursor() as cursor, cursor.copy("copy doorbell.cursor (channel_id, handle, acked_seq) from stdin") as copy:
        for _, handle, channel_id, acked in source.connection.execute(_CURSORS):
            copy.write_row((ids[channel_id], handle.decode(), acked))


def _count(connection: psycopg.Connection[Any], ids: list[int]) -> Contents:
    heads = connection.execute(
        "select c.name, coalesce(max(m.seq), 0) from doorbell.channel as c"
        " left join doorbell.message as m on m.channel_id = c.id where c.id = any (%s) group by c.name",
        (ids,),
    ).fetchall()
    messages, keys, size = connection.execute(
        "select count(*), count(idempotency_key), coalesce(sum(octet_length(body)), 0)::bigint"
        " from doorbell.message where channel_id = any (%s)",
        (ids,),
    ).fetchone() or (0, 0, 0)
    subscriptions, acked = connection.execute(
        "select count(*), coalesce(sum(acked_seq), 0)::bigint from doorbell.cursor where channel_id = any (%s)", (ids,)
    ).fetchone() or (0, 0)
    return Contents(len(heads), messages, keys, size, subscriptions, acked, dict(heads))


def _difference(expected: Contents, found: Contents) -> str:
    return (
        "; ".join(
            f"{what}: {getattr(expected, what)} there, {getattr(found, what)} here"
            for what in ("channels", "messages", "keys", "bytes", "subscriptions", "acked")
            if getattr(expected, what) != getattr(found, what)
        )
        or "a head differs"
    )
