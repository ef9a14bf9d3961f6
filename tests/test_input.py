"""Bad input is refused before anything is sent; good input, however odd, comes back to the letter."""

from __future__ import annotations

import logging
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doorbell_postgres import errors, throwaway
from doorbell_postgres.contract import Draft
from doorbell_postgres.errors import DatabaseUnavailable, DoorbellError, InvalidInput, SchemaMismatch
from support import Api, TestServer, eventually

Sql = Callable[..., list[tuple[Any, ...]]]

NOT_TEXT = [None, 5, b"bytes", ["list"], object()]
NOT_STORABLE = ["\0", "a\0b", "\ud800", "a\udfffb"]
BAD_NAMES = [*NOT_TEXT, *NOT_STORABLE, "", "x" * 256, "é" * 128, "👍" * 64]
BAD_BODIES = [*NOT_TEXT, *NOT_STORABLE]
BAD_KEYS = [*(k for k in NOT_TEXT if k is not None), *NOT_STORABLE, "", "x" * 1025, "é" * 513]
BAD_COUNTS = [0, -1, True, False, 1.0, "1", None, 2**63]
BAD_SECONDS = [-1, -0.001, "1", True, None, float("nan")]
BAD_HEADERS = [5, "text", [("a", "b")], {"a": 1}, {1: "a"}, {"a": None}, {"a": "\0"}, {"\0": "a"}, {"a": "\ud800"}, {"": "a"}]


@pytest.fixture
def unsent(bus: Any, sql: Sql) -> Iterator[None]:
    """Fails when the test's calls on `bus` have made any session of it send a statement, or have changed a row."""
    bus.subscribe("worker", "events")
    sql("select doorbell.post('events', 'first', 'ci')")  # not by the bus: it would still be announcing

    def sessions() -> set[tuple[Any, ...]]:
        return set(
            sql(
                "select pid, query_start, query from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
        )

    def contents() -> list[Any]:
        tables = ("channel", "message", "cursor")
        return [sql(f"select to_jsonb(t) from doorbell.{table} as t order by t") for table in tables]

    eventually(lambda: len(sessions()) == 1)  # the one that looked at the schema has gone
    before = sessions(), contents()
    yield
    assert sessions() == before[0]
    assert contents() == before[1]


def refused(field: str, call: Callable[[], Any]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    said = str(caught.value)
    assert said.isprintable()
    assert field in said, said
    assert len(said) < 500
    return caught.value


# Each public argument that is a name, and a call with it. `b` is a bus, `x` the bad value.
NAMES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "post channel": ("channel", lambda b, x: b.post(x, "body", sender="ci")),
    "post sender": ("sender", lambda b, x: b.post("events", "body", sender=x)),
    "post_many channel": ("channel", lambda b, x: b.post_many(x, ["body"], sender="ci")),
    "post_many sender": ("sender", lambda b, x: b.post_many("events", ["body"], sender=x)),
    "subscribe handle": ("handle", lambda b, x: b.subscribe(x, "events")),
    "subscribe channel": ("channel", lambda b, x: b.subscribe("worker", x)),
    "unsubscribe handle": ("handle", lambda b, x: b.unsubscribe(x, "events")),
    "unsubscribe channel": ("channel", lambda b, x: b.unsubscribe("worker", x)),
    "ack handle": ("handle", lambda b, x: b.ack(x, "events", 1)),
    "ack channel": ("channel", lambda b, x: b.ack("worker", x, 1)),
    "catch_up handle": ("handle", lambda b, x: b.catch_up(x)),
    "unacked handle": ("handle", lambda b, x: list(b.unacked(x))),
    "store.post channel": ("channel", lambda b, x: b.store.post(x, "ci", "body")),
    "store.post sender": ("sender", lambda b, x: b.store.post("events", x, "body")),
    "store.head": ("channel", lambda b, x: b.store.head(x)),
    "store.messages_after": ("channel", lambda b, x: b.store.messages_after(x, 0)),
    "store.subscribe handle": ("handle", lambda b, x: b.store.subscribe(x, "events")),
    "store.subscribe channel": ("channel", lambda b, x: b.store.subscribe("worker", x)),
    "store.subscriptions": ("handle", lambda b, x: b.store.subscriptions(x)),
    "store.acked_seq handle": ("handle", lambda b, x: b.store.acked_seq(x, "events")),
    "store.acked_seq channel": ("channel", lambda b, x: b.store.acked_seq("worker", x)),
    "store.ack handle": ("handle", lambda b, x: b.store.ack(x, "events", 1)),
    "store.ack channel": ("channel", lambda b, x: b.store.ack("worker", x, 1)),
}


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.usefixtures("unsent")
def test_a_bad_name_is_refused_before_anything_is_sent(bus: Any, where: str) -> None:
    field, call = NAMES[where]
    for value in BAD_NAMES:
        refused(field, lambda value=value: call(bus, value))


@pytest.mark.usefixtures("unsent")
def test_a_bad_name_is_refused_where_none_means_all(bus: Any) -> None:
    for value in [v for v in BAD_NAMES if v is not None]:
        refused("handle", lambda value=value: bus.backlog(value))
        refused("handle", lambda value=value: bus.wait_until_quiet(handle=value, timeout=0))
        refused("channel", lambda value=value: bus.wait_until_quiet(channel=value, timeout=0))


@pytest.mark.usefixtures("unsent")
def test_a_bell_refuses_what_it_cannot_wait_for(api: Api, bus: Any) -> None:
    for value in BAD_NAMES:
        refused("handle", lambda value=value: api.Doorbell(bus, value))
    for value in [0, 0.0, *BAD_SECONDS]:
        refused("poll_interval", lambda value=value: api.Doorbell(bus, "worker", poll_interval=value))
    for value in BAD_SECONDS:
        refused("idle_timeout", lambda value=value: api.Doorbell(bus, "worker", idle_timeout=value))


def test_a_bell_refuses_a_timeout_that_is_no_time(api: Api, bus: Any) -> None:
    bus.subscribe("worker", "events")
    bell = api.Doorbell(bus, "worker")
    for value in [v for v in BAD_SECONDS if v is not None]:
        refused("timeout", lambda value=value: bell.wait(value))
    assert bell.wait(0) is None


@pytest.mark.usefixtures("unsent")
def test_a_bad_body_is_refused_before_anything_is_sent(bus: Any) -> None:
    for value in [*BAD_BODIES, "x" * (16 * 1024 * 1024 + 1), "é" * (8 * 1024 * 1024 + 1)]:
        refused("body", lambda value=value: bus.post("events", value, sender="ci"))
        refused("body", lambda value=value: bus.store.post("events", "ci", value))
        refused("body", lambda value=value: bus.post_many("events", ["good", Draft(value)], sender="ci"))


@pytest.mark.usefixtures("unsent")
def test_a_bad_key_is_refused_before_anything_is_sent(bus: Any) -> None:
    for value in BAD_KEYS:
        refused("idempotency_key", lambda value=value: bus.post("events", "b", sender="ci", idempotency_key=value))
        refused("idempotency_key", lambda value=value: bus.store.post("events", "ci", "b", idempotency_key=value))
        refused("idempotency_key", lambda value=value: bus.post_many("events", ["g", Draft("b", value)], sender="ci"))


@pytest.mark.usefixtures("unsent")
def test_bad_headers_are_refused_before_anything_is_sent(bus: Any) -> None:
    for value in [*BAD_HEADERS, {"a": "x" * 70_000}, {str(n): "x" * 100 for n in range(700)}]:
        refused("headers", lambda value=value: bus.post("events", "b", sender="ci", headers=value))
        refused("headers", lambda value=value: bus.post_many("events", ["g", Draft("b", None, value)], sender="ci"))


@pytest.mark.usefixtures("unsent")
def test_a_bad_number_is_refused_before_anything_is_sent(bus: Any) -> None:
    for value in [v for v in BAD_COUNTS if v != 0 or v is False]:
        refused("up_to", lambda value=value: bus.ack("worker", "events", value))
        refused("up_to", lambda value=value: bus.store.ack("worker", "events", value))
    for value in BAD_COUNTS:
        refused("page_size", lambda value=value: bus.catch_up("worker", page_size=value))
        refused("page_size", lambda value=value: bus.unacked("worker", page_size=value))
        refused("limit", lambda value=value: bus.store.messages_after("events", 0, limit=value))
    for value in [v for v in BAD_COUNTS if v is not None]:
        refused("max_bytes", lambda value=value: bus.unacked("worker", max_bytes=value))
    for value in (1.0, "1", None, True):
        refused("after_seq", lambda value=value: bus.store.messages_after("events", value))


@pytest.mark.usefixtures("unsent")
def test_a_bad_place_to_start_is_refused_before_anything_is_sent(bus: Any) -> None:
    for value in ("middle", "", "HEAD", 0, None, ["head"]):
        refused("at", lambda value=value: bus.subscribe("worker", "events", at=value))
        refused("at", lambda value=value: bus.store.subscribe("new", "events", at=value))


@pytest.mark.usefixtures("unsent")
def test_a_batch_is_all_or_nothing(bus: Any) -> None:
    good = [f"good {n}" for n in range(20)]
    for place in (0, 10, 20):
        batch: list[Any] = [*good]
        batch.insert(place, "bad\0")
        assert str(place) in str(refused("body", lambda batch=batch: bus.post_many("events", batch, sender="ci")))
    for no_batch in (None, 5, "one text", b"bytes"):
        refused("messages", lambda no_batch=no_batch: bus.post_many("events", no_batch, sender="ci"))


def test_an_iterable_that_fails_half_way_posts_nothing(bus: Any) -> None:
    def failing() -> Iterator[str]:
        yield "one"
        raise LookupError("source is gone")

    with pytest.raises(LookupError, match="source is gone"):
        bus.post_many("events", failing(), sender="ci")
    assert bus.store.channels() == []


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("notify", ["sometimes", None, True, 5]),
        ("max_size", [0, -1, True, 1.5, "4", None]),
        ("connect_timeout", [0, *BAD_SECONDS]),
        ("retry_for", BAD_SECONDS),
        ("lock_timeout", BAD_SECONDS),
        ("application_name", ["\0", "\ud800", 5]),
    ],
)
def test_a_bad_setting_of_the_bus_is_refused(api: Api, dsn: str, parameter: str, values: list[Any]) -> None:
    for value in values:
        refused(parameter, lambda value=value: api.MessageBus(dsn, **{parameter: value}).close())


# -- what is odd, and fine --------------------------------------------------------------------------------------------

ODD = [
    "\uffff",
    "\ufffe",
    "\U0010ffff",
    "\U0001fffe",
    "\r\n",
    "\r",
    "a\r\nb\nc\rd",
    "\\u0000",
    "\\",
    "\\x41",
    "'",
    '"',
    "%s %(a)s %%",
    "{} {0}",
    "$1",
    "; drop table doorbell.message; --",
    "\x01\x1b[31m\x7f\x85\x9b",
    "e\u0301",
    "\u00e9",
    " ",
    "  lead and trail  ",
    "\t",
    "\u2028\u2029",
    "\ufeffbom",
    "NULL",
    "null",
    "\u202eright to left",
    "👩\u200d👩\u200d👧",
]


@pytest.mark.parametrize("text", ODD)
def test_odd_text_comes_back_to_the_letter_wherever_it_stands(bus: Any, text: str) -> None:
    bus.subscribe(text, text)
    headers = {text: text, "plain": ""}
    sent = bus.post(text, text, sender=text, idempotency_key=text, headers=headers)
    (batch,) = bus.post_many(text, [Draft(text, text + "2", headers)], sender=text)
    again = bus.post(text, "another", sender="another", idempotency_key=text)
    for message in (sent, batch, again, *bus.catch_up(text), *bus.unacked(text), *bus.store.messages_after(text, 0)):
        assert (message.channel, message.sender, message.body) == (text, text, text)
        assert message.idempotency_key in (text, text + "2")
        assert dict(message.headers) == headers
    assert (sent.seq, batch.seq, again) == (1, 2, sent)
    assert bus.store.channels() == bus.store.subscriptions(text) == [text]
    assert bus.ack(text, text, 2) == bus.store.acked_seq(text, text) == 2
    assert [(b.handle, b.channel) for b in bus.backlog(text)] == [(text, text)]
    assert bus.unsubscribe(text, text) is True


def test_texts_of_one_look_are_not_one_name(bus: Any) -> None:
    for text in ODD:
        bus.post(text, "x", sender="ci")
    assert bus.store.channels() == sorted(ODD)
    assert all(bus.store.head(text) == 1 for text in ODD)


@given(batch=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=20))
@settings(max_examples=40)
def test_any_storable_text_comes_back_to_the_letter(bus: Any, batch: list[str]) -> None:
    posted = bus.post_many("events", batch, sender="ci")
    assert [m.body for m in posted] == batch
    assert bus.store.messages_after("events", posted[0].seq - 1, limit=len(batch)) == posted


def test_the_largest_of_everything_is_taken(bus: Any) -> None:
    name, key, body = "é" * 127 + "x", "👍" * 256, "é" * (8 * 1024 * 1024)
    bus.subscribe(name, name)
    message = bus.post(name, body, sender=name, idempotency_key=key)
    assert message.seq == 1
    (fetched,) = bus.catch_up(name)
    assert fetched == message
    assert (fetched.sender, fetched.idempotency_key, len(fetched.body)) == (name, key, len(body))
    assert bus.post(name, "", sender=name).body == ""


def test_names_that_share_their_first_bytes_do_not_meet(bus: Any) -> None:
    shared = "x" * 200
    for n, tail in enumerate(("a", "b", "A", "é", "", "y" * 55), start=1):
        for _ in range(n):
            bus.post(shared + tail, "x", sender="ci")
    assert [bus.store.head(shared + tail) for tail in ("a", "b", "A", "é", "", "y" * 55)] == [1, 2, 3, 4, 5, 6]


def test_a_subclass_of_str_is_text(bus: Any) -> None:
    class Name(str):
        def __str__(self) -> str:
            return "another"

    message = bus.post(Name("events"), Name("body"), sender=Name("ci"), idempotency_key=Name("k"))
    assert (message.channel, message.body, message.sender) == ("events", "body", "ci")
    assert bus.store.messages_after("events", 0) == [message]


# -- errors -----------------------------------------------------------------------------------------------------------

ERRORS = sorted(
    {e for module in (errors, throwaway) for e in vars(module).values() if isinstance(e, type) and issubclass(e, DoorbellError)},
    key=lambda e: e.__name__,
)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda e: e.__name__)
def test_every_error_survives_pickling_and_says_its_plain_sentence(kind: type[DoorbellError]) -> None:
    error = kind("Channel 'x' does not exist.")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert copy.args == error.args
        assert str(copy) == str(error) == "Channel 'x' does not exist."
    assert kind.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidInput", ValueError),
        ("UnknownChannel", KeyError),
        ("NotSubscribed", KeyError),
        ("AckBeyondHead", ValueError),
        ("BusClosed", RuntimeError),
        ("ForkedBus", RuntimeError),
        ("DatabaseUnavailable", ConnectionError),
        ("SchemaMismatch", DoorbellError),
        ("ChannelBusy", TimeoutError),
        ("OutcomeUnknown", DoorbellError),
        ("HistoryPruned", DoorbellError),
        ("LogRewound", DoorbellError),
        ("TurnLost", DoorbellError),
    ],
)
def test_every_error_is_what_the_reference_would_raise(name: str, builtin: type[Exception]) -> None:
    import doorbell_postgres

    kind = getattr(doorbell_postgres, name)
    assert issubclass(kind, builtin)
    assert issubclass(kind, doorbell_postgres.DoorbellError)


HOSTILE = "bad\x1b[31m\r\nname\u202e\x00"[:-1]


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.ack("worker", HOSTILE, 1),
        lambda b: b.ack(HOSTILE, "events", 1),
        lambda b: b.unsubscribe("worker", HOSTILE),
        lambda b: b.store.acked_seq(HOSTILE, "events"),
        lambda b: b.store.acked_seq("worker", HOSTILE),
        lambda b: b.subscribe("worker", "events", at=HOSTILE),
        lambda b: b.post("events", "b", sender="ci", headers={HOSTILE: 5}),
        lambda b: b.post(HOSTILE + "\0", "b", sender="ci"),
        lambda b: b.ack("worker", "events", 99),
    ],
)
def test_an_error_that_the_database_or_a_hostile_name_causes_is_one_printable_line(bus: Any, call: Callable[[Any], Any]) -> None:
    bus.post("events", "x", sender="ci")
    bus.subscribe("worker", "events")
    with pytest.raises(DoorbellError) as caught:
        call(bus)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


# -- a DSN that does not work -----------------------------------------------------------------------------------------

SECRET = "s3cr3t-Pa55"


def everything_shown(error: BaseException) -> str:
    """What a traceback in a log would show of it, with its causes and contexts."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))


@contextmanager
def server_that_refuses_passwords() -> Iterator[int]:
    """A port that speaks just enough of the protocol to ask for a password and refuse it."""

    def refuse(connection: socket.socket) -> None:
        def exactly(count: int) -> bytes:
            data = b""
            while len(data) < count and (more := connection.recv(count - len(data))):
                data += more
            return data

        with connection:
            while True:
                (length,) = struct.unpack("!i", exactly(4))
                (code,) = struct.unpack("!i", exactly(length - 4)[:4])
                if code not in (80877103, 80877104):  # TLS? GSS?
                    break
                connection.sendall(b"N")
            connection.sendall(b"R" + struct.pack("!ii", 8, 3))
            kind, length = struct.unpack("!ci", exactly(5))
            assert kind == b"p"
            exactly(length - 4)
            fields = b'SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user "agent"\0\0'
            connection.sendall(b"E" + struct.pack("!i", len(fields) + 4) + fields)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                refuse(connection)
            except (OSError, struct.error):
                continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_wrong_password_shows_the_reason_and_not_the_password(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with server_that_refuses_passwords() as port:
        for dsn in (
            f"postgresql://agent:{SECRET}@127.0.0.1:{port}/team",
            f"host=127.0.0.1 port={port} user=agent password={SECRET} dbname=team",
            f"host=127.0.0.1 port={port} user=agent password='{SECRET} \\' x' dbname=team",
        ):
            for opened in (api.MessageBus, api.Store, lambda d: api.MessageBus(d, migrate=True)):
                with pytest.raises(DatabaseUnavailable, match="password authentication failed") as caught:
                    opened(dsn)
                assert SECRET not in everything_shown(caught.value)
                assert str(caught.value).isprintable()
    assert SECRET not in caplog.text


def test_a_wrong_port_says_where_nobody_answers(api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for opened in (api.MessageBus, lambda d: api.MessageBus(d, migrate=True)):
        with pytest.raises(DatabaseUnavailable, match=str(port)) as caught:
            opened(f"postgresql://agent:{SECRET}@127.0.0.1:{port}/team")
        assert "refused" in str(caught.value)
        assert SECRET not in everything_shown(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("typo", "shown"),
    [
        (f"host=127.0.0.1 pasword={SECRET} dbname=team", "pasword"),
        (f"host=127.0.0.1 password=first {SECRET} dbname=team", "="),
        (f"host=127.0.0.1 password='{SECRET} dbname=team", "quote"),
        (f"postgresql://agent:%zz{SECRET}@127.0.0.1/team", "percent"),
        (f"postgresql://agent:{SECRET}@127.0.0.1:port/team", "port"),
        (f"postgresql://agent:{SECRET}@127.0.0.1/team?sslmod=require", "sslmod"),
        (f"postgresql://agent:{SECRET}@[::1/team", "matching"),
    ],
)
def test_a_typo_in_the_dsn_is_named_and_the_password_is_not(api: Api, typo: str, shown: str) -> None:
    for opened in (api.MessageBus, api.Store, lambda d: api.MessageBus(d, migrate=True)):
        with pytest.raises((InvalidInput, DatabaseUnavailable)) as caught:
            opened(typo)
        assert SECRET not in everything_shown(caught.value)
        assert shown in str(caught.value)
        assert str(caught.value).isprintable()


def test_a_password_with_an_at_sign_that_is_not_encoded_is_not_shown(api: Api) -> None:
    with pytest.raises((InvalidInput, DatabaseUnavailable)) as caught:
        api.MessageBus(f"postgresql://agent:pa@{SECRET}@127.0.0.1:1/team")
    assert SECRET not in everything_shown(caught.value)


def test_an_open_bus_does_not_show_its_dsn(api: Api, server: TestServer, dbname: str) -> None:
    dsn = server.dsn(dbname)
    with api.MessageBus(f"{dsn} application_name='{SECRET}'") as bus:
        assert SECRET not in repr(bus) + repr(bus.store) + str(bus)
        assert SECRET not in repr(api.Doorbell(bus, "worker"))


@pytest.mark.parametrize(
    "thing", ["team.sqlite3", "/var/lib/team.db", "localhost", "localhost:5432/team", "mysql://localhost/team", "", " "]
)
def test_text_that_is_no_dsn_is_told_what_one_looks_like(api: Api, thing: str) -> None:
    for opened in (api.MessageBus, api.Store):
        said = str(refused("postgresql://", lambda opened=opened: opened(thing)))
        assert ":memory:" in said


def test_a_thing_that_is_no_text_is_told_what_a_dsn_looks_like(api: Api) -> None:
    for thing in (Path("team.sqlite3"), 5, b"postgresql://localhost/team", {"host": "localhost"}):
        said = str(refused("postgresql://", lambda thing=thing: api.MessageBus(thing)))
        assert type(thing).__name__ in said


def test_a_database_that_is_absent_is_told_apart(api: Api, server: TestServer) -> None:
    with pytest.raises(DatabaseUnavailable, match="doorbell_no_such_db") as caught:
        api.MessageBus(server.dsn("doorbell_no_such_db"))
    assert "does not exist" in str(caught.value)


def test_a_database_that_nobody_has_migrated_says_what_to_run(api: Api, empty_dsn: str) -> None:
    for opened in (api.MessageBus, api.Store):
        with pytest.raises(SchemaMismatch, match="doorbell migrate"):
            opened(empty_dsn)
    for opened in (api.MessageBus, api.Store):
        opened(empty_dsn, migrate=True).close()
    api.MessageBus(empty_dsn).close()
