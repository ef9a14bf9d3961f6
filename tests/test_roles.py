"""Who may do what: agents call the contract, operators read the views, and nobody touches a table."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import errors
from psycopg.conninfo import make_conninfo

from doorbell_postgres import MessageBus, cli, migrate
from support import TestServer
from support.processes import plain_environment

Sql = Callable[..., list[tuple[Any, ...]]]
Role = Callable[..., str]
PASSWORD = "of a role"  # asked for by the container's server
TESTS = Path(__file__).resolve().parent

AGENTS = {
    "abandon_admission", "ack", "acked_seq", "admit", "announce", "arm", "backlog_of", "bell_floors", "channel_names",
    "collect", "fail_turn", "finish_turn", "glance", "head", "head_moved", "heads_moved", "hello", "hold_session",
    "messages_after", "number_or_give_up", "peek", "post", "post_combined", "post_many", "record_step",
    "release_turn", "reserve", "settle_delivery", "skip_pruned", "stage", "step_pending", "subscribe", "subscriptions",
    "try_post", "turn_post", "unacked", "unacked_count", "unfinished_turns", "unsubscribe",
}  # fmt: skip
OPERATORS = {"backlog_of", "channel_names", "head", "hello", "prune_plan", "subscriptions", "unacked_count"}
OWNER = {"grant_role", "new_epoch", "prune", "prune_all", "prune_turns", "revoke_role"}
VIEWS = {"backlog", "channels", "health", "turns", "violations"}


@pytest.fixture
def new_role(server: TestServer, dbname: str, sql: Sql) -> Iterator[Role]:
    """`new_role()` creates a role that may log in and has been granted nothing."""
    made: list[str] = []

    def run(options: str = "login") -> str:
        made.append(f'ro"le {secrets.token_hex(4)}')
        sql(f"create role {quoted(made[-1])} {options} password '{PASSWORD}'")
        return made[-1]

    yield run
    with psycopg.connect(server.dsn(dbname), autocommit=True) as admin:
        for name in made:
            admin.execute(f"drop owned by {quoted(name)}; drop role {quoted(name)}".encode())


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def command(dsn: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli.main, [*arguments, "--dsn", dsn])


def as_role(dsn: str, role: str) -> str:
    return make_conninfo(dsn, user=role, password=PASSWORD)


def functions_of(sql: Sql, role: str) -> set[str]:
    rows = sql(
        "select p.proname from pg_proc as p where p.pronamespace = 'doorbell'::regnamespace"
        " and has_function_privilege(%s, p.oid, 'execute')",
        role,
    )
    return {name for (name,) in rows}


def relations_of(sql: Sql, role: str, rights: str = "select, insert, update, delete, truncate, references, trigger") -> set[str]:
    rows = sql(
        "select c.relname from pg_class as c where c.relnamespace = 'doorbell'::regnamespace and c.relkind in ('r', 'v')"
        " and has_table_privilege(%s, c.oid, %s)",
        role,
        rights,
    )
    return {name for (name,) in rows}


def test_the_one_list_names_every_public_function(sql: Sql) -> None:
    listed = sql("select function, agent, operator from doorbell._rights()")
    public = sql("select distinct proname from pg_proc where pronamespace = 'doorbell'::regnamespace and proname !~ '^_'")
    assert sorted(name for name, _, _ in listed) == sorted(name for (name,) in public)
    assert {name for name, agent, _ in listed if agent} == AGENTS
    assert {name for name, _, operator in listed if operator} == OPERATORS
    assert {name for name, agent, operator in listed if not agent and not operator} == OWNER


def test_an_agent_may_call_the_contract_and_nothing_else(dsn: str, sql: Sql, new_role: Role) -> None:
    role = new_role()
    assert functions_of(sql, role) == relations_of(sql, role) == set()
    done = command(dsn, "grant", role)
    assert (done.exit_code, done.output) == (0, f"{role!r} may call the contract\n")
    assert functions_of(sql, role) == AGENTS
    assert relations_of(sql, role) == set()
    assert sql("select has_schema_privilege(%s, 'doorbell', 'create')", role) == [(False,)]
    with MessageBus(as_role(dsn, role)) as bus:
        bus.subscribe("worker", "events")
        posted = bus.post("events", "hello", sender="ci")
        assert bus.catch_up("worker") == [posted]
        assert bus.ack("worker", "events", 1) == 1


def test_an_operator_reads_the_views_and_changes_nothing(dsn: str, sql: Sql, new_role: Role) -> None:
    role = new_role()
    sql("select doorbell.subscribe('worker', 'events'), doorbell.post('events', 'secret', 'ci')")
    done = command(dsn, "grant", role, "--operator")
    assert (done.exit_code, done.output) == (0, f"{role!r} may read the views\n")
    assert functions_of(sql, role) == OPERATORS
    assert relations_of(sql, role, "select") == VIEWS
    assert relations_of(sql, role, "insert, update, delete, truncate, references, trigger") == set()
    with psycopg.connect(as_role(dsn, role), autocommit=True) as operator:
        for view in VIEWS:
            operator.execute(f"select * from doorbell.{view}".encode())
        for refused in (
            "select doorbell.post('events', 'x', 'x')",
            "select doorbell.prune('0')",
            "call doorbell.prune_all('0')",
            "select doorbell.unacked('worker')",
            "select doorbell.messages_after('events', 0)",
            "select doorbell.grant_role(current_user)",
            "select doorbell.new_epoch()",
            "select body from doorbell.message",
            "delete from doorbell.backlog",
        ):
            with pytest.raises((errors.InsufficientPrivilege, errors.ObjectNotInPrerequisiteState)):
                operator.execute(refused.encode())
    for arguments in (["status"], ["doctor"], ["channels"], ["handles"], ["turns"], ["metrics"]):
        assert command(as_role(dsn, role), *arguments).exit_code == 0, arguments
    for arguments in (["prune", "--keep", "1d", "--yes"], ["grant", "x"], ["skip", "worker", "events"]):
        refused_command = command(as_role(dsn, role), *arguments)
        assert refused_command.exit_code == 1
        assert "ermission denied" in refused_command.stderr or "no role" in refused_command.stderr
    assert command(as_role(dsn, role), "prune", "--keep", "1d").exit_code == 0, "a plan changes nothing"


def test_an_agent_that_asks_for_a_view_is_told_who_may(dsn: str, new_role: Role) -> None:
    role = new_role()
    command(dsn, "grant", role)
    refused = command(as_role(dsn, role), "status")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "doorbell: The role may not do this: permission denied for view health. doorbell grant ROLE lets it call the contract, "
        "with --operator read the views; pruning, importing and granting are for the owner of the schema.\n"
    )


def test_without_pg_read_all_stats_health_says_unknown_and_never_none(dsn: str, sql: Sql, new_role: Role) -> None:
    role = new_role()
    sql("select doorbell.grant_role(%s, true)", role)
    question = (
        "select oldest_transaction, oldest_transaction_seconds, blocked_sessions, blocked_session_count from doorbell.health"
    )
    with psycopg.connect(as_role(dsn, role), autocommit=True) as operator, psycopg.connect(dsn) as other:
        other.execute("select 1")
        assert operator.execute(question).fetchall() == [("unknown", None, "unknown", None)]
        done = command(as_role(dsn, role), "doctor")
        assert done.exit_code == 0
        assert "warning  oldest transaction: unknown: this role may not see the sessions of others" in done.output
        assert "doorbell_oldest_transaction_seconds" not in command(as_role(dsn, role), "metrics").output

        sql(f"grant pg_read_all_stats to {quoted(role)}")
        oldest, seconds, blocked, count = operator.execute(question).fetchone() or ()
        assert oldest.startswith("pid ")
        assert seconds > 0
        assert (blocked, count) == ("none", 0) or blocked.startswith("1 waiting")


def test_who_may_not_grant_pg_read_all_stats_is_told(server: TestServer, sql: Sql, new_role: Role, empty_dsn: str) -> None:
    """The owner of a schema need not be a superuser."""
    owner, role = new_role(), new_role()
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute(
            f"grant create on database {psycopg.conninfo.conninfo_to_dict(empty_dsn)['dbname']} to {quoted(owner)}".encode()
        )
    owned = as_role(empty_dsn, owner)
    assert migrate.upgrade(owned).ready
    done = command(owned, "grant", role, "--operator")
    assert done.exit_code == 0
    assert done.stdout == f"{role!r} may read the views\n"
    assert "pg_read_all_stats could not be granted" in done.stderr
    assert "without it health says unknown" in done.stderr
    with psycopg.connect(as_role(empty_dsn, role)) as operator:
        assert operator.execute("select oldest_transaction from doorbell.health").fetchone() == ("unknown",)
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute(f"drop owned by {quoted(role)}; drop schema doorbell cascade; drop owned by {quoted(owner)}".encode())


def test_a_role_may_be_both_and_is_neither_after_revoke(dsn: str, sql: Sql, new_role: Role) -> None:
    role = new_role()
    command(dsn, "grant", role, "--operator")
    command(dsn, "grant", role)
    assert functions_of(sql, role) == AGENTS | OPERATORS
    assert relations_of(sql, role) == VIEWS
    done = command(dsn, "grant", role, "--revoke")
    assert done.exit_code == 0
    assert "REVOKE pg_read_all_stats" in done.stderr
    assert functions_of(sql, role) == relations_of(sql, role) == set()
    assert sql("select has_schema_privilege(%s, 'doorbell', 'usage')", role) == [(False,)]
    again = command(dsn, "grant", role, "--revoke")
    assert (again.exit_code, again.stderr) == (1, f"doorbell: Role {role!r} was not let in.\n")


def test_an_agent_that_is_revoked_hears_nothing_of_an_operators_rights(dsn: str, new_role: Role) -> None:
    role = new_role()
    command(dsn, "grant", role)
    done = command(dsn, "grant", role, "--revoke")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{role!r} has no rights here any more\n", "")


def test_a_role_that_is_not_there_is_refused(dsn: str) -> None:
    done = command(dsn, "grant", "no such role")
    assert done.exit_code == 1
    assert done.stderr.startswith("doorbell: There is no role 'no such role'.")


def test_look_alikes_change_nothing_for_an_owner_who_prunes_and_grants(dsn: str, sql: Sql, new_role: Role) -> None:
    """prune_all runs as its caller, without a search_path of its own: every name and operator in it is qualified."""
    role = new_role()
    sql("select doorbell.post_many('events', 'ci', array['one', 'two', 'three'])")
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute("""
            create schema evil;
            create function evil.fail() returns boolean language plpgsql as $$ begin raise 'a look-alike ran'; end $$;
            create function evil.plus(bigint, bigint) returns bigint language sql as $$ select 1::bigint where evil.fail() $$;
            create function evil.clock_timestamp() returns timestamptz language sql
              as $$ select '1970-01-01'::timestamptz where evil.fail() $$;
            create function evil.quote_literal(text) returns text language sql as $$ select '' where evil.fail() $$;
            create function evil.format(text, variadic text[]) returns text language sql as $$ select '' where evil.fail() $$;
            create operator evil.+ (leftarg = bigint, rightarg = bigint, function = evil.plus);
            create temporary table channel (id bigint, name text);
            create temporary table message (channel_id bigint, seq bigint);
            create temporary table pg_roles (rolname name);
            create temporary table role_grant (role_name name, agent boolean, operator boolean);
            create domain pg_temp.text as pg_catalog.text check (evil.fail());
            create domain pg_temp.int8 as pg_catalog.int8 check (evil.fail());
            set search_path = pg_temp, evil, pg_catalog;
        """)
        assert owner.execute("call doorbell.prune_all('0', keep_keys => '0', batch => 1)").fetchone() == (2,)
        owner.execute("select doorbell.prune_plan('0'), doorbell.prune('0'), doorbell.prune_turns(), doorbell.new_epoch()")
        owner.execute("select doorbell.grant_role(%s)", (role,))
        for view in VIEWS:
            owner.execute(f"select * from doorbell.{view}".encode())
        assert owner.execute("select violation from doorbell.violations").fetchall() == []
    assert functions_of(sql, role) == AGENTS


@pytest.mark.failure_mode
def test_upgrade_keeps_agents_operators_and_live_clients(server: TestServer, dsn: str, sql: Sql, new_role: Role) -> None:
    """An upgrade drops the grants of roles, or changes a function under a live client's prepared statements.

    Grants are recorded and applied anew with the functions, in the same transaction; a client whose prepared statement lost its
    function's plan goes on with its next call.
    """
    agent, operator = new_role(), new_role()
    command(dsn, "grant", agent)
    command(dsn, "grant", operator, "--operator")
    with MessageBus(as_role(dsn, agent), max_size=1) as bus, psycopg.connect(as_role(dsn, operator), autocommit=True) as looking:
        bus.subscribe("worker", "events")
        looking.prepare_threshold = 0
        for n in range(1, 6):  # often enough for every statement to be prepared
            bus.post("events", f"m{n}", sender="ci", idempotency_key=f"k{n}")
            bus.ack("worker", "events", n)
            assert bus.catch_up("worker") == []
            looking.execute("select head from doorbell.backlog").fetchall()
        (pid,) = sql("select pid from pg_stat_activity where datname = current_database() and usename = %s limit 1", agent)[0]

        # What an upgrade does: every function and view is another one afterwards.
        before = sql("select min(oid) from pg_proc where pronamespace = 'doorbell'::regnamespace")
        sql("update doorbell.meta set declares = 'of an older package'")
        assert migrate.upgrade(dsn).ready
        assert sql("select min(oid) from pg_proc where pronamespace = 'doorbell'::regnamespace") > before

        assert bus.post("events", "after it", sender="ci", idempotency_key="k6").seq == 6
        assert [m.body for m in bus.catch_up("worker")] == ["after it"]
        assert bus.ack("worker", "events", 6) == 6
        assert looking.execute("select head, unacked from doorbell.backlog").fetchall() == [(6, 0)]
        assert sql("select count(*) from pg_stat_activity where pid = %s", pid) == [(1,)], "on the same connection"
    assert functions_of(sql, agent) == AGENTS
    assert functions_of(sql, operator) == OPERATORS
    assert relations_of(sql, operator) == VIEWS
    assert relations_of(sql, agent) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(os.environ.get("DOORBELL_TEST_AGENT")), reason="this is that run")
@pytest.mark.parametrize("name", ["failure_modes", "api", "cross_process", "gate"])
def test_an_agent_role_passes_the_whole_contract_suite(server: TestServer, tmp_path: Path, name: str) -> None:
    role = f"agent_{secrets.token_hex(4)}"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner"),
            "-m", "not slow and not timing",
            str(TESTS / f"test_{name}.py"),
        ],
        env=plain_environment(DOORBELL_TEST_DSN=server.dsn("postgres"), DOORBELL_TEST_AGENT=role),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=850,
    )  # fmt: skip
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        admin.execute(f"drop owned by {role}; drop role {role}".encode())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
