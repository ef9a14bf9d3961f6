"""A real Postgres, a database per test, and every behaviour test once for each shell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql as sql_text
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support import APIS, Api, Processes, TestServer, aio, choose, open_api
from support.proxy import Proxy

# A real server answers in milliseconds, not in the microseconds that hypothesis expects.
settings.register_profile(
    "doorbell",
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("doorbell")

# The role that the suite runs as, when it is to run as an agent; created where it is not there.
AGENT = os.environ.get("DOORBELL_TEST_AGENT", "")

_SERVER = pytest.StashKey[TestServer]()


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[TestServer]:
    """The server of this run: DOORBELL_TEST_DSN, a container, or the embedded one."""
    chosen = choose()
    pytestconfig.stash[_SERVER] = chosen
    yield chosen
    chosen.stop()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    chosen = config.stash.get(_SERVER, None)
    if chosen is not None:
        terminalreporter.write_line(f"server: PostgreSQL {chosen.version} ({chosen.kind})")


@pytest.fixture(scope="session")
def template(server: TestServer) -> Iterator[str]:
    """The name of a migrated database that nobody connects to: what every test's own is cloned from."""
    from doorbell_postgres import migrate

    name = server.create_database()
    migrate.upgrade(server.dsn(name))
    if AGENT:
        let_agent_in(server.dsn(name))
    yield name
    server.discard(name)


def let_agent_in(dsn: str) -> None:
    role = sql_text.Identifier(AGENT)
    with psycopg.connect(dsn, autocommit=True) as admin:
        if not admin.execute("select from pg_roles where rolname = %s", (AGENT,)).fetchall():
            admin.execute(sql_text.SQL("create role {} login").format(role))
        admin.execute("select doorbell.grant_role(%s)", (AGENT,))
        # For tables of the application's own, beside which it posts.
        admin.execute(sql_text.SQL("grant create on schema public to {}").format(role))


@pytest.fixture
def direct_dsn(server: TestServer, template: str) -> Iterator[str]:
    """A migrated database for this test alone, reached directly."""
    name = server.create_database(template)
    yield server.dsn(name)
    server.discard(name)


@pytest.fixture
def dsn(direct_dsn: str) -> str:
    """A migrated database for this test alone, behind the pooler that DOORBELL_TEST_POOLER names, if any.

    With DOORBELL_TEST_AGENT, as a role that may call the contract and nothing else.
    """
    user = {"user": AGENT} if AGENT else {}
    return make_conninfo(direct_dsn, **(conninfo_to_dict(os.environ.get("DOORBELL_TEST_POOLER", "")) | user))


@pytest.fixture
def empty_dsn(server: TestServer) -> Iterator[str]:
    """A database for this test alone that nobody has migrated."""
    name = server.create_database()
    yield server.dsn(name)
    server.discard(name)


@pytest.fixture
def sql(direct_dsn: str) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """`sql(query, *params)` runs a statement on this test's database, past the package, and gives its rows."""
    with psycopg.connect(direct_dsn, autocommit=True, application_name="test") as connection:

        def run(query: str, *params: Any) -> list[tuple[Any, ...]]:
            cursor = connection.execute(query, params or None)
            return cursor.fetchall() if cursor.description else []

        yield run


@pytest.fixture
def connect(direct_dsn: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """Open one more psycopg connection to this test's database, of the kind that the shell takes; closed with the test."""
    opened: list[Any] = []
    api = request.getfixturevalue("api") if "api" in request.fixturenames else None
    opens = psycopg.connect if api is None or api.name == "sync" else aio.Connection.connect

    def run(**parameters: Any) -> Any:
        opened.append(opens(direct_dsn, **parameters))
        return opened[-1]

    yield run
    for connection in opened:
        connection.close()


@pytest.fixture
def announced(connect: Callable[..., psycopg.Connection[Any]]) -> Callable[..., list[str]]:
    """The payloads of the notifications on this test's database since the last question; waits for the first one."""
    listening = connect(autocommit=True)
    listening.execute("listen doorbell")

    def run(*, within: float = 10.0) -> list[str]:
        return [note.payload for note in listening.notifies(timeout=within, stop_after=1)]

    return run


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    """In front of this test's database."""
    with Proxy(dsn) as running:
        yield running


@pytest.fixture
def dbname(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["dbname"])


@pytest.fixture(params=sorted(APIS))
def api(request: pytest.FixtureRequest) -> Api:
    """One shell of the package, as a program sees it."""
    return open_api(request.param)


@pytest.fixture
def open_bus(api: Api, dsn: str) -> Iterator[Callable[..., Any]]:
    """Open a bus on this test's database; each is closed with the test."""
    opened: list[Any] = []

    def run(**parameters: Any) -> Any:
        opened.append(api.MessageBus(parameters.pop("dsn", dsn), **parameters))
        return opened[-1]

    yield run
    for bus in opened:
        bus.close()


@pytest.fixture
def bus(open_bus: Callable[..., Any]) -> Any:
    """A bus on this test's database."""
    return open_bus()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts real Python processes; SIGKILL for those that are left over."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the caller's shell says, but for the choice of the server."""
    for name in list(os.environ):
        if name.startswith("DOORBELL_") and not name.startswith(("DOORBELL_TEST_", "DOORBELL_PG_")):
            monkeypatch.delenv(name)
