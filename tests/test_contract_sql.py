"""The contract straight from SQL: what a client in any language, or somebody at psql, gets. No bus in here."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from support import TestServer, eventually

Sql = Callable[..., list[tuple[Any, ...]]]
Connect = Callable[..., psycopg.Connection[Any]]

FUNCTIONS = """
select p.oid::regprocedure::text, p.proname, p.prokind, p.prosecdef, p.provolatile,
       coalesce(p.proconfig, '{}'), p.prosrc
from pg_proc as p
where p.pronamespace = 'doorbell'::regnamespace
order by 1
"""

# One call of each public function, in a form that has something to do on the log that `filled` makes.
READERS = {
    "acked_seq": "select doorbell.acked_seq('worker', 'events')",
    "backlog_of": "select * from doorbell.backlog_of('worker')",
    "bell_floors": "select * from doorbell.bell_floors('worker')",
    "channel_names": "select * from doorbell.channel_names()",
    "glance": "select doorbell.glance('worker', 1, 1, null, 40, h.epoch) from doorbell.hello() as h",
    "head_moved": "select doorbell.head_moved(1, 0)",
    "heads_moved": "select doorbell.heads_moved(array[1::bigint], array[0::bigint])",
    "head": "select doorbell.head('events')",
    "hello": "select * from doorbell.hello()",
    "messages_after": "select * from doorbell.messages_after('events', 1)",
    "peek": "select peek.* from doorbell.bell_floors('worker') as f,"
    " doorbell.peek(array['worker'], array[f.channel_id], array[0::bigint], array[null::timestamptz], 40) as peek",
    "subscriptions": "select * from doorbell.subscriptions('worker')",
    "unacked": "select * from doorbell.unacked('worker')",
    "unacked_count": "select doorbell.unacked_count()",
}
WRITERS = {
    "ack": "select doorbell.ack('worker', 'events', 2)",
    "post": "select * from doorbell.post('events', 'four', 'ci')",
    "post_many": "select * from doorbell.post_many('events', 'ci', array['four', 'five'])",
    "subscribe": "select doorbell.subscribe('reviewer', 'events')",
    "skip_pruned": "select doorbell.skip_pruned('worker', 'events')",
    "unsubscribe": "select doorbell.unsubscribe('worker', 'events')",
}
# Calls for the owner of a turn: of another handle, so that the worker's cursor stays where the other tests want it.
_TURN = "from doorbell.admit('persona', 'events', 2, 'event of {}') as t,"
WRITERS |= {
    "abandon_admission": "select a.* from doorbell.admit('persona', 'events', 3, 'lost', nonce => 1) as t,"
    " doorbell.abandon_admission('persona', 'events', 3, 1, 0) as a",
    "admit": "select * from doorbell.admit('persona', 'events', 1)",
    **{
        name: f"select w.* {_TURN.format(name)} doorbell.{name}(t.turn_channel_id, t.turn_id, t.attempt{rest}) as w"
        for name, rest in {
            "fail_turn": ", 'no', 'answers', 'sorry'",
            "finish_turn": "",
            "record_step": ", 'dispatch'",
            "release_turn": "",
            "reserve": ", 'answer'",
            "step_pending": ", 'dispatch'",
            "turn_post": ", 'answers', 'yes', 'answer'",
        }.items()
    },
    "settle_delivery": "select doorbell.settle_delivery('persona', 'events', 3) from doorbell.admit('persona', 'events', 3)",
}
# What the session of a waiting bell calls, which is read-only: they announce, and hold advisory locks.
SIGNALS = {
    "announce": "select doorbell.announce(array[1])",
    "arm": "select doorbell.arm(array[1, 0], array[2])",
    "hold_session": "select doorbell.hold_session(7)",
    "unfinished_turns": "select count(*) from doorbell.unfinished_turns('worker')",
}
VIEWS = ("backlog", "channels", "turns", "health", "violations")
# For operators and the owner: tests/test_roles.py and tests/test_prune.py.
OPERATED = {"grant_role", "new_epoch", "prune", "prune_all", "prune_plan", "prune_turns", "revoke_role"}
# Only functions that pin theirs call them.
UNPINNED = {"_head", "_lock_channel", "_number_staged"}
# In every post, ack or poll, where a pin would be a fortieth of the call: they write operators and functions in full.
IN_FULL = {"ack", "announce", "arm", "collect", "glance", "head_moved", "heads_moved", "stage", "try_post"}
COMBINING = {"collect", "number_or_give_up", "post_combined", "stage", "try_post"}  # tests/test_combining.py
CALLS = READERS | WRITERS | SIGNALS


@pytest.fixture
def filled(sql: Sql) -> None:
    """Channel events with the messages one, two, three; worker has acked the first."""
    sql("select doorbell.subscribe('worker', 'events')")
    sql("select doorbell.post_many('events', 'ci', array['one', 'two', 'three'])")
    sql("select doorbell.ack('worker', 'events', 1)")


@pytest.fixture
def role(server: TestServer, dbname: str, sql: Sql) -> Iterator[str]:
    """A role that nobody has granted anything; it may log in."""
    name = f"agent_{secrets.token_hex(4)}"
    sql(f"create role {name} login")
    yield name
    with psycopg.connect(server.dsn(dbname), autocommit=True) as admin:
        admin.execute(f"drop owned by {name}".encode())
        admin.execute(f"drop role {name}".encode())


@pytest.fixture
def as_agent(role: str, sql: Sql, connect: Connect) -> psycopg.Connection[Any]:
    """A connection that acts as a role that was let in as an agent."""
    let_in(sql, role)
    connection = connect(autocommit=True)
    connection.execute(f"set role {role}".encode())
    return connection


def let_in(sql: Sql, role: str, *, operator: bool = False) -> None:
    sql("insert into doorbell.role_grant (role_name, operator) values (%s, %s)", role, operator)
    sql("select doorbell._apply_grants()")


def volatility(sql: Sql) -> dict[str, str]:
    return {name: volatile for _, name, _, _, volatile, *_ in sql(FUNCTIONS)}


def everything(sql: Sql) -> tuple[Any, ...]:
    """All rows of all tables that the contract writes."""
    tables = ("channel", "message", "cursor", "turn", "delivery", "turn_step", "reservation")
    return tuple(sql(f"select to_jsonb(t) from doorbell.{table} as t order by 1") for table in tables)


# ---------------------------------------------------------------------------------------------------------------------
# Who may do what
# ---------------------------------------------------------------------------------------------------------------------


def test_every_public_function_is_known_to_these_tests(sql: Sql) -> None:
    public = {name for _, name, *_ in sql(FUNCTIONS) if not name.startswith("_")}
    assert public == set(CALLS) | OPERATED | COMBINING


def test_a_fresh_role_may_execute_and_read_nothing(sql: Sql, role: str) -> None:
    assert not sql(
        "select p.oid::regprocedure from pg_proc as p"
        " where p.pronamespace = 'doorbell'::regnamespace and has_function_privilege(%s, p.oid, 'execute')",
        role,
    )
    assert not sql(
        "select c.relname from pg_class as c"
        " where c.relnamespace = 'doorbell'::regnamespace and c.relkind in ('r', 'v', 'S')"
        " and case when c.relkind = 'S' then has_sequence_privilege(%s, c.oid, 'usage, select, update')"
        " else has_table_privilege(%s, c.oid, 'select, insert, update, delete, truncate, references, trigger') end",
        role,
        role,
    )
    assert sql(
        "select has_schema_privilege(%s, 'doorbell', 'usage'), has_schema_privilege(%s, 'doorbell', 'create')",
        role,
        role,
    ) == [(False, False)]


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_agent_role_may_call_each_public_function(as_agent: psycopg.Connection[Any], name: str) -> None:
    call = CALLS[name]
    as_agent.execute(call.encode())


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("table", ["channel", "message", "cursor", "turn", "meta", "role_grant", "schema_version", *VIEWS])
def test_an_agent_role_cannot_read_or_write_a_table(as_agent: psycopg.Connection[Any], table: str) -> None:
    with pytest.raises(errors.InsufficientPrivilege):
        as_agent.execute(f"select count(*) from doorbell.{table}".encode())
    if table not in VIEWS:
        with pytest.raises(errors.InsufficientPrivilege):
            as_agent.execute(f"delete from doorbell.{table}".encode())


def test_an_agent_role_may_not_call_private_functions(sql: Sql, as_agent: psycopg.Connection[Any], role: str) -> None:
    private = [signature for signature, name, *_ in sql(FUNCTIONS) if name.startswith("_")]
    assert private
    assert not [s for s in private if sql("select has_function_privilege(%s, %s, 'execute')", role, s)[0][0]]
    with pytest.raises(errors.InsufficientPrivilege):
        as_agent.execute("select doorbell._lock_channel('events')")


@pytest.mark.usefixtures("filled")
def test_an_operator_role_reads_the_views_and_no_table(sql: Sql, role: str, connect: Connect) -> None:
    let_in(sql, role, operator=True)
    operator = connect(autocommit=True)
    operator.execute(f"set role {role}".encode())
    assert operator.execute("select handle, channel, unacked from doorbell.backlog").fetchall() == [("worker", "events", 2)]
    assert operator.execute("select channel, head, messages from doorbell.channels").fetchall() == [("events", 3, 3)]
    with pytest.raises(errors.InsufficientPrivilege):
        operator.execute("select body from doorbell.message")


def test_every_function_pins_its_search_path_and_public_ones_run_as_the_owner(sql: Sql) -> None:
    for signature, name, kind, definer, _, config, source in sql(FUNCTIONS):
        if kind == "p":
            continue  # a procedure that commits can have neither
        # Without a source: its names were bound when it was made.
        if name not in UNPINNED | IN_FULL and source:
            assert "search_path=pg_catalog, pg_temp" in config, signature
        assert definer or name.startswith("_"), signature


def test_what_pins_no_search_path_writes_every_name_in_full(sql: Sql) -> None:
    """A bare operator, function, type or table there is looked up in the caller's search_path, with the owner's rights."""
    assigned = r"\b(acked_seq|acked_at|errcode|message|hint) = "
    syntax = {"and", "any", "array", "coalesce", "exists", "if", "not", "or", "return", "select", "then", "values", "where"}
    types = {"bigint", "boolean", "integer"}
    seen = set()
    for signature, name, kind, _, _, _, source in sql(FUNCTIONS):
        if name not in IN_FULL and kind != "p":
            continue
        seen.add(name)
        code = re.sub(r"--[^\n]*|'[^']*'", "", source)
        code = re.sub(rf"operator\(pg_catalog\.[^)]+\)|\b(?:into doorbell\.\w+ )?as \w+ \([\w, ]+\)|{assigned}|:=|=>", " ", code)
        calls = {call for call in re.findall(r"(?<![\w.])([a-z_]\w*)\s*\(", code) if call not in syntax}
        declared = re.findall(r"^ *\w+ (?:constant )?([\w.]+)(?:\[\])? *;", code.split("begin")[0], re.M)
        bare = {
            "operators": set(re.findall(r"[-+*/<>=~!@#%^&|`?]+", code)),
            "operators by another name": set(re.findall(r"\b(between|distinct|in \(|like|nullif|overlaps|similar)\b", code)),
            "functions": calls,
            "types": {t for t in re.findall(r"::([\w.]+)", code) + declared if t not in types and t[:11] != "pg_catalog."},
            "tables": set(re.findall(r"\b(?:from|join|(?<!key )update|insert into|delete from) ([a-z_]\w*)\b(?!\.)", code)),
        }
        assert not any(bare.values()), f"{signature}: {bare}"
    assert seen > IN_FULL


# Of the operator, who runs them seldom and wants most rows of a table.
READ_WHOLE_TABLES = {"_drop_expired", "channel_names", "prune_plan", "prune_turns"}
PINNED_BY_THEIR_CALLER = {"_number_staged"}


def test_every_function_that_looks_up_rows_does_not_depend_on_when_it_was_planned(sql: Sql) -> None:
    grows = r"doorbell\.(backlog|channel|cursor|delivery|message|pruned|reservation|staged|turn|turn_step)\b"
    pinned = {"enable_seqscan=off", "enable_bitmapscan=off"}
    # By a whole unique key, for which a bitmap is never the cheaper plan.
    one_row_each = {"ack", "collect"}
    looks_up = [(f, name, config) for f, name, _, _, _, config, source in sql(FUNCTIONS)
                if re.search(grows, re.sub(r"--[^\n]*|\binsert into doorbell\.\w+", "", source))
                and name not in READ_WHOLE_TABLES | PINNED_BY_THEIR_CALLER]  # fmt: skip
    assert len(looks_up) > 30
    for signature, name, config in looks_up:
        pins = {"enable_seqscan=off"} if name in one_row_each else pinned
        assert pins <= set(config or ()) or "plan_cache_mode=force_custom_plan" in config, signature


@pytest.mark.usefixtures("filled")
def test_look_alikes_and_a_hostile_search_path_change_nothing(sql: Sql, connect: Connect) -> None:
    """An owner's rights, names that the caller chose: the classic hole of SECURITY DEFINER."""
    hostile = connect(autocommit=True)
    hostile.execute("""
        create schema evil;
        create function evil.fail() returns boolean language plpgsql as $$ begin raise 'a look-alike ran'; end $$;
        create function evil.format(text, variadic text[]) returns text language sql
          as $$ select '' where evil.fail() $$;
        create function evil.cardinality(bigint[]) returns integer language sql
          as $$ select 1 where evil.fail() $$;
        create function evil.cardinality(text[]) returns integer language sql
          as $$ select 1 where evil.fail() $$;
        create function evil.unnest(bigint[]) returns setof bigint language sql
          as $$ select 1::bigint where evil.fail() $$;
        create function evil.less(double precision, numeric) returns boolean language sql
          as $$ select evil.fail() $$;
        create operator evil.< (leftarg = double precision, rightarg = numeric, function = evil.less);
    """)
    # And one for every function that is named in ours, and for every operator of the types that they handle.
    hostile.execute(r"""
        do $do$
        declare
          f record;
          body constant text := 'language plpgsql as $$ begin raise ''a look-alike ran''; end $$';
        begin
          for f in
            select p.proname, p.prorettype::regtype as result,
                   (select string_agg(u.a::regtype::text, ', ' order by u.n)
                    from unnest(p.proargtypes) with ordinality as u (a, n)) as args
            from pg_proc as p
            where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and not p.proretset and p.provariadic = 0
              and not exists (select from pg_type as t where t.oid = any (p.proargtypes) and t.typtype = 'p')
              and (select t.typtype <> 'p' or t.typname = 'void' from pg_type as t where t.oid = p.prorettype)
              and exists (
                select from pg_proc as d
                where d.pronamespace = 'doorbell'::regnamespace and d.prosrc ~ ('\y' || p.proname || '\s*\('))
          loop
            execute format('create function evil.%I(%s) returns %s %s', f.proname, f.args, f.result, body);
          end loop;
          for f in
            select o.oid, o.oprname, o.oprleft::regtype as l, o.oprright::regtype as r, o.oprresult::regtype as result
            from pg_operator as o
            where o.oprnamespace = 'pg_catalog'::regnamespace
              and array[o.oprleft, o.oprright] <@ array[
                'text', 'bigint', 'integer', 'double precision', 'numeric', 'timestamptz', 'interval', 'boolean', 'jsonb', 'uuid'
              ]::regtype[]::oid[]
          loop
            execute format('create function evil.operator_%s(%s, %s) returns %s %s', f.oid, f.l, f.r, f.result, body);
            execute format(
              'create operator evil.%s (leftarg = %s, rightarg = %s, function = evil.operator_%s)', f.oprname, f.l, f.r, f.oid);
          end loop;
        end
        $do$
    """)
    hostile.execute("""
        create table evil.channel (id bigint, name text);
        create temporary table channel (id bigint, name text, created_at timestamptz);
        create temporary table message (channel_id bigint, seq bigint, sender text, body text);
        create temporary table cursor (channel_id bigint, handle text, acked_seq bigint);
        create temporary table pg_roles (rolname name);
        create temporary table pg_proc (oid oid, proname name, pronamespace oid);
        create domain pg_temp.text as pg_catalog.text check (evil.fail());
        create domain pg_temp.int8 as pg_catalog.int8 check (evil.fail());
        set search_path = pg_temp, evil, pg_catalog;
    """)
    for name, call in sorted(CALLS.items()):
        if name != "unsubscribe":
            hostile.execute(call.encode())
    refused = {
        "stage('events', repeat('x', 70000), 'ci', for_ms => -1)",
        "ack('nobody', 'events', 1)",
        "ack('worker', 'events', -1)",
        "ack('worker', 'events', 100)",
    }
    for call in refused:
        with pytest.raises(psycopg.Error) as caught:
            hostile.execute(f"select doorbell.{call}".encode())
        assert str(caught.value.sqlstate).startswith("RB"), call
    hostile.execute("select doorbell.post('combined', 'body', 'ci')")
    for arguments in (
        "",
        ", busy => true",
        ", busy => null",
        ", busy => true, lock_timeout_ms => 100",
        ", 'key'",
        ", 'other', busy => true",
    ):
        answer = hostile.execute(f"call doorbell.post_combined('combined', 'body', 'ci'{arguments})".encode()).fetchone()
        assert answer is not None
        assert answer[0] is not None, arguments
    assert hostile.execute("select doorbell.collect('events', 1, 5000)").fetchone() is not None
    assert hostile.execute("select seq from doorbell.post('events', 'last', 'ci', lock_timeout_ms => 100)").fetchone() == (7,)
    assert sql("select seq, body from doorbell.unacked('worker')") == [
        (3, "three"),
        (4, "four"),
        (5, "four"),
        (6, "five"),
        (7, "last"),
    ]
    recent = "select distinct sender from doorbell.message where created_at > now() - interval '1 hour' order by 1"
    assert sql(recent) == [("ci",), ("persona",)]


# ---------------------------------------------------------------------------------------------------------------------
# How it is made
# ---------------------------------------------------------------------------------------------------------------------


def test_no_function_opens_a_subtransaction_and_every_raise_is_complete(sql: Sql) -> None:
    for signature, name, kind, _, _, _, source in sql(FUNCTIONS):
        if kind == "p" or name in {"collect", "number_or_give_up"}:
            continue  # never in a caller's transaction: a procedure that commits, and what it calls behind a commit
        code = re.sub(r"--[^\n]*|'[^']*'", "''", source).lower()
        assert not re.search(r"\bexception\s+when\b", code), signature
        for statement in re.findall(r"\braise\b[^;]*;", code):
            missing = [word for word in ("errcode", "message", "detail", "hint") if not re.search(rf"\b{word}\s*=", statement)]
            assert not missing, f"{signature}: {missing} in {statement}"


def test_the_log_has_no_trigger_and_no_foreign_key_and_its_unique_indexes_lead_with_the_channel(sql: Sql) -> None:
    hot = "('doorbell.message'::regclass, 'doorbell.cursor'::regclass)"
    assert not sql(f"select tgname from pg_trigger where tgrelid in {hot}")
    assert not sql("select conname from pg_constraint where contype = 'f' and connamespace = 'doorbell'::regnamespace")
    leading = sql(
        "select i.indexrelid::regclass::text, a.attname from pg_index as i"
        " join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]"
        f" where i.indrelid in {hot} and i.indisunique"
    )
    assert len(leading) == 3
    assert {column for _, column in leading} == {"channel_id"}


def test_every_table_and_every_column_of_a_view_has_a_comment(sql: Sql) -> None:
    assert not sql(
        "select c.relname from pg_class as c where c.relnamespace = 'doorbell'::regnamespace"
        " and c.relkind in ('r', 'v') and c.relname <> 'schema_version' and obj_description(c.oid, 'pg_class') is null"
    )
    assert not sql(
        "select c.relname, a.attname from pg_class as c join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0"
        " where c.relnamespace = 'doorbell'::regnamespace and c.relkind = 'v'"
        " and col_description(c.oid, a.attnum) is null"
    )


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", sorted(READERS | SIGNALS))
def test_what_does_not_write_runs_in_a_read_only_transaction(sql: Sql, connect: Connect, name: str) -> None:
    with connect() as connection:
        connection.execute("set transaction read only")
        assert connection.execute(CALLS[name].encode()).fetchall()
    assert volatility(sql)[name] in ("v" if name in SIGNALS else "si")


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_writer_is_refused_in_a_read_only_transaction(sql: Sql, connect: Connect, name: str) -> None:
    before = everything(sql)
    connection = connect()
    connection.execute("set transaction read only")
    with pytest.raises(errors.ReadOnlySqlTransaction):
        connection.execute(WRITERS[name].encode())
    connection.rollback()
    assert everything(sql) == before
    assert volatility(sql)[name] == "v", "a writer is declared volatile"


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------

LONG = "x" * 256
REFUSED = {
    "channel null": ("select doorbell.post(null, 'b', 's')", "RB001", "channel is null"),
    "channel empty": ("select doorbell.post('', 'b', 's')", "RB001", "channel is empty"),
    "channel long": (f"select doorbell.post('{LONG}', 'b', 's')", "RB001", "channel has 256 bytes"),
    "channel long in bytes": (f"select doorbell.post('{'ä' * 128}', 'b', 's')", "RB001", "channel has 256 bytes"),
    "sender null": ("select doorbell.post('c', 'b', null)", "RB001", "sender is null"),
    "sender empty": ("select doorbell.post('c', 'b', '')", "RB001", "sender is empty"),
    "sender long": (f"select doorbell.post('c', 'b', '{LONG}')", "RB001", "sender has 256 bytes"),
    "key empty": ("select doorbell.post('c', 'b', 's', '')", "RB001", "idempotency_key is empty"),
    "key long": (f"select doorbell.post('c', 'b', 's', '{'k' * 1025}')", "RB001", "idempotency_key has 1025 bytes"),
    "body null": ("select doorbell.post('c', null, 's')", "RB001", "body is null"),
    "body long": ("select doorbell.post('c', repeat('x', 16777217), 's')", "RB001", "body has 16777217 bytes"),
    "headers null": ("select doorbell.post('c', 'b', 's', headers => null)", "RB001", "headers is null"),
    "headers array": ("select doorbell.post('c', 'b', 's', headers => '[]')", "RB001", "headers is a JSON array"),
    "headers number": (
        "select doorbell.post('c', 'b', 's', headers => '{\"a\": 1}')",
        "RB001",
        "header 'a' is a JSON number",
    ),
    "headers long": (
        "select doorbell.post('c', 'b', 's', headers => jsonb_build_object('a', repeat('x', 65536)))",
        "RB001",
        "headers has",
    ),
    "batch body null": ("select doorbell.post_many('c', 's', array['a', null])", "RB001", "body 2 is null"),
    "batch key empty": (
        "select doorbell.post_many('c', 's', array['a', 'b'], array[null, ''])",
        "RB001",
        "idempotency_key 2 is empty",
    ),
    "batch keys missing": (
        "select doorbell.post_many('c', 's', array['a', 'b'], array['k'])",
        "RB001",
        "2 bodies and 1 keys",
    ),
    "batch headers": (
        """select doorbell.post_many('c', 's', array['a', 'b'], headers => array['{}', '[]']::jsonb[])""",
        "RB001",
        "draft 2: headers is a JSON array",
    ),
    "batch sender": ("select doorbell.post_many('c', '', array['a'])", "RB001", "sender is empty"),
    "batch channel": ("select doorbell.post_many(null, 's', array['a'])", "RB001", "channel is null"),
    "subscribe handle": ("select doorbell.subscribe('', 'c')", "RB001", "handle is empty"),
    "subscribe channel": ("select doorbell.subscribe('h', null)", "RB001", "channel is null"),
    "subscribe at": ("select doorbell.subscribe('h', 'c', 'tail')", "RB001", "at is 'tail'"),
    "subscribe at null": ("select doorbell.subscribe('h', 'c', null)", "RB001", "at is null"),
    "unsubscribe handle": ("select doorbell.unsubscribe('', 'c')", "RB001", "handle is empty"),
    "unsubscribe unknown": ("select doorbell.unsubscribe('h', 'nowhere')", "RB002", "'nowhere' does not exist"),
    "ack negative": ("select doorbell.ack('worker', 'events', -1)", "RB001", "up_to is -1"),
    "ack null": ("select doorbell.ack('worker', 'events', null)", "RB001", "up_to is null"),
    "ack unknown channel": ("select doorbell.ack('worker', 'nowhere', 9)", "RB002", "'nowhere' does not exist"),
    "ack not subscribed": (
        "select doorbell.ack('stranger', 'events', 9)",
        "RB003",
        "'stranger' is not subscribed to 'events'",
    ),
    "ack beyond head": (
        "select doorbell.ack('worker', 'events', 4)",
        "RB004",
        "cannot ack 4 on 'events': its head is 3",
    ),
    "ack other message": ("select doorbell.ack('worker', 'events', 2, '2001-01-01')", "RB005", "rewound"),
    "ack lost message": ("select doorbell.ack('worker', 'events', 4, '2001-01-01')", "RB005", "rewound"),
    "acked_seq unknown": ("select doorbell.acked_seq('worker', 'nowhere')", "RB002", "'nowhere' does not exist"),
    "acked_seq not subscribed": ("select doorbell.acked_seq('stranger', 'events')", "RB003", "is not subscribed"),
}


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_is_true_what_was_expected_and_what_to_do(sql: Sql, case: str) -> None:
    statement, sqlstate, words = REFUSED[case]
    before = everything(sql)
    with pytest.raises(psycopg.Error) as caught:
        sql(statement)
    assert caught.value.sqlstate == sqlstate
    assert words in (caught.value.diag.message_primary or "")
    assert caught.value.diag.message_detail
    assert caught.value.diag.message_hint
    assert everything(sql) == before


@pytest.mark.usefixtures("filled")
def test_the_limits_themselves_are_allowed(sql: Sql) -> None:
    name, key, body = "ä" * 127 + "x", "k" * 1024, "x" * 16_777_216
    assert sql("select seq from doorbell.post(%s, %s, %s, %s)", name, body, name, key) == [(1,)]
    assert sql("select doorbell.subscribe(%s, %s, 'start')", name, name) == [(0,)]
    assert sql("select channel, sender, octet_length(body), idempotency_key from doorbell.unacked(%s)", name) == [
        (name, name, 16_777_216, key)
    ]
    headers = {"a": "x" * (65536 - len('{"a": ""}'))}
    assert sql("select seq from doorbell.post(%s, '', 's', headers => %s)", name, Jsonb(headers)) == [(2,)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("name", ["post", "post_many", "subscribe"])
def test_an_old_snapshot_is_refused_where_a_number_is_given(sql: Sql, connect: Connect, level: str, name: str) -> None:
    """Under REPEATABLE READ the head that a poster sees may be somebody else's number already."""
    connection = connect()
    connection.execute(f"set transaction isolation level {level}".encode())
    with pytest.raises(psycopg.Error, match=f"runs at {level}") as caught:
        connection.execute(WRITERS[name].encode())
    assert caught.value.sqlstate == "RB001"
    assert "READ COMMITTED" in (caught.value.diag.message_hint or "")
    assert caught.value.diag.message_detail
    connection.rollback()
    assert sql("select count(*) from doorbell.channel") == [(0,)]


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", ["post", "post_many", "subscribe"])
def test_a_held_channel_is_waited_for_no_longer_than_asked(sql: Sql, connect: Connect, name: str) -> None:
    holder = connect()
    holder.execute("select doorbell.post('events', 'held', 'ci')")
    call = WRITERS[name].replace("')", "', lock_timeout_ms => 50)").replace("])", "], lock_timeout_ms => 50)")
    with pytest.raises(errors.LockNotAvailable):
        sql(call)
    holder.rollback()
    sql(call)


def test_the_lock_timeout_is_the_functions_own_and_ends_with_it(connect: Connect) -> None:
    with connect() as connection:
        connection.execute("set lock_timeout = '7s'")
        connection.execute("select doorbell.post('events', 'b', 's', lock_timeout_ms => 50)")
        connection.execute("select doorbell.subscribe('h', 'events')")
        assert connection.execute("show lock_timeout").fetchone() == ("7s",)


# ---------------------------------------------------------------------------------------------------------------------
# Posting
# ---------------------------------------------------------------------------------------------------------------------

POST = "select seq, posted, original_sender, original_body, original_headers from doorbell.post(%s, %s, %s, %s, %s)"
POST_MANY = "select draft, seq, posted, original_sender, original_body from doorbell.post_many(%s, %s, %s, %s) order by draft"


def test_a_known_key_gives_the_original_and_writes_nothing(sql: Sql) -> None:
    assert sql(POST, "events", "first", "ci", "k", Jsonb({"a": "b"})) == [(1, True, None, None, None)]
    (original,) = sql("select created_at from doorbell.messages_after('events', 0)")
    assert sql(POST, "events", "second", "cd", "k", Jsonb({})) == [(1, False, "ci", "first", {"a": "b"})]
    assert sql("select created_at from doorbell.post('events', 'x', 'y', 'k')") == [original]
    assert sql("select doorbell.head('events')") == [(1,)]
    assert sql(POST, "elsewhere", "second", "cd", "k", Jsonb({})) == [(1, True, None, None, None)]


def test_post_many_keeps_the_order_and_gives_one_run(sql: Sql) -> None:
    sql("select doorbell.post('events', 'zero', 'ci')")
    bodies = [f"b{n}" for n in range(50)]
    rows = sql(POST_MANY, "events", "ci", bodies, None)
    assert rows == [(n + 1, n + 2, True, None, None) for n in range(50)]
    assert sql("select seq, body from doorbell.messages_after('events', 1)") == [(n + 2, f"b{n}") for n in range(50)]


def test_post_many_gives_known_and_repeated_keys_their_original(sql: Sql) -> None:
    sql("select doorbell.post('events', 'old', 'cd', 'k-old')")
    rows = sql(POST_MANY, "events", "ci", ["a", "b", "c", "d", "e"], ["k1", "k-old", "k1", None, "k2"])
    assert rows == [
        (1, 2, True, None, None),
        (2, 1, False, "cd", "old"),
        (3, 2, False, "ci", "a"),
        (4, 3, True, None, None),
        (5, 4, True, None, None),
    ]
    assert sql("select seq, body, idempotency_key from doorbell.messages_after('events', 0)") == [
        (1, "old", "k-old"),
        (2, "a", "k1"),
        (3, "d", None),
        (4, "e", "k2"),
    ]
    again = sql(POST_MANY, "events", "ci", ["a", "b", "c", "d", "e"], ["k1", "k-old", "k1", "k2", "k2"])
    assert [(seq, posted) for _, seq, posted, *_ in again] == [
        (2, False),
        (1, False),
        (2, False),
        (4, False),
        (4, False),
    ]
    assert sql("select doorbell.head('events')") == [(4,)]


def test_post_many_of_nothing_does_nothing(sql: Sql) -> None:
    assert sql("select * from doorbell.post_many('events', 'ci', array[]::text[])") == []
    assert sql("select * from doorbell.channel_names()") == []


def test_post_many_takes_headers_by_draft(sql: Sql) -> None:
    sql(
        "select doorbell.post_many('events', 'ci', array['a', 'b'], headers => %s)",
        [Jsonb({"n": "1"}), Jsonb({})],
    )
    assert sql("select body, headers from doorbell.messages_after('events', 0)") == [("a", {"n": "1"}), ("b", {})]


def test_a_channel_of_another_case_or_with_a_trailing_space_is_another_channel(sql: Sql) -> None:
    for name in ("events", "Events", "events ", "évents", "e\u0301vents"):
        assert sql("select seq from doorbell.post(%s, 'b', 's')", name) == [(1,)]
    assert len(sql("select * from doorbell.channel_names()")) == 5


@pytest.mark.parametrize("key", ["of the channel", "wildcard"])
def test_notify_announces_with_the_commit_and_only_where_a_bell_waits(sql: Sql, connect: Connect, key: str) -> None:
    listener, poster = connect(autocommit=True), connect(autocommit=True)
    listener.execute("listen doorbell")
    post = "select channel_id, armed from doorbell.post('events', %s, 's', notify => %s)"
    ((channel_id, armed),) = sql(post, "nobody waits", True)
    assert not armed
    ((other_id, _),) = sql("select channel_id, seq from doorbell.post('elsewhere', 'b', 's')")

    waits_for = channel_id if key == "of the channel" else 0
    assert listener.execute("select doorbell.arm(array[%s], array[]::bigint[])", [waits_for]).fetchone() == ([],)
    with poster.transaction(force_rollback=True):
        assert poster.execute(post, ["rolled back", True]).fetchone() == (channel_id, True)
    assert sql(post, "without notify", False) == [(channel_id, True)]
    assert sql(post, "loud", True) == [(channel_id, True)]
    many = "select distinct channel_id, armed from doorbell.post_many(%s, 's', array['a', 'b'], notify => true)"
    assert sql(many, "events") == [(channel_id, True)]
    assert sql(many, "elsewhere") == [(other_id, key == "wildcard")]

    sql("select doorbell.announce(array[%s, %s])", channel_id, other_id)

    listener.execute("select doorbell.arm(array[]::bigint[], array[%s])", [waits_for])
    assert sql(post, "nobody waits any more", True) == [(channel_id, False)]
    sql("select doorbell.announce(array[%s, %s])", channel_id, other_id)
    sql("select pg_notify('doorbell', 'the end')")
    both = [channel_id, *([other_id] if key == "wildcard" else [])]
    expected = [str(each) for each in [channel_id, *both, *both]] + ["the end"]
    assert [n.payload for n in listener.notifies(timeout=20, stop_after=len(expected))] == expected
    locks = "select count(*) from pg_locks as l join pg_database as d on d.oid = l.database"
    assert sql(f"{locks} where l.locktype = 'advisory' and d.datname = current_database()") == [(0,)], "probes leave none"


def test_a_session_token_is_held_by_one_session_until_it_ends(sql: Sql, connect: Connect) -> None:
    hold = "select doorbell.hold_session(%s)"
    first = connect(autocommit=True)
    for token in (1, -1, 2**63 - 1, -(2**63)):
        assert first.execute(hold, [token]).fetchone() == (True,)
        assert first.execute(hold, [token]).fetchone() == (True,)
        assert sql(hold, token) == [(False,)]
    first.close()
    eventually(lambda: sql(hold, 1) == [(True,)])


# ---------------------------------------------------------------------------------------------------------------------
# Cursors and reading
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("filled")
def test_a_cursor_only_moves_forward(sql: Sql) -> None:
    assert sql("select doorbell.ack('worker', 'events', 3)") == [(3,)]
    (acked_at,) = sql("select acked_at from doorbell.cursor")
    for stale in (0, 1, 3):
        assert sql("select doorbell.ack('worker', 'events', %s)", stale) == [(3,)]
    assert sql("select doorbell.subscribe('worker', 'events', 'start')") == [(3,)]
    assert sql("select acked_at from doorbell.cursor") == [acked_at]


@pytest.mark.usefixtures("filled")
def test_unacked_pages_across_channels_and_stops_at_the_bytes(sql: Sql) -> None:
    sql("select doorbell.subscribe('worker', 'another')")
    sql("select doorbell.post_many('another', 'ci', array['aa', 'bb'])")
    seen: list[tuple[str, int]] = []
    while page := sql("select channel, seq from doorbell.unacked('worker', %s, %s, 1)", *(seen[-1] if seen else (None, 0))):
        seen += page
    assert seen == [("another", 1), ("another", 2), ("events", 2), ("events", 3)]
    assert sql("select channel, seq from doorbell.unacked('worker', max_bytes => 5)") == seen[:3]
    assert sql("select channel, seq from doorbell.unacked('worker', max_bytes => 1)") == seen[:1]
    assert sql("select channel, seq from doorbell.unacked('worker', 'another', 0)") == seen
    assert sql("select channel, seq from doorbell.unacked('worker', 'events', 0)") == seen[2:], "starts at the cursor"


def test_readers_of_what_is_absent_find_nothing(sql: Sql) -> None:
    assert sql("select doorbell.head('nowhere')") == [(0,)]
    assert sql("select * from doorbell.messages_after('nowhere', 0)") == []
    assert sql("select * from doorbell.subscriptions('nobody')") == []
    assert sql("select * from doorbell.unacked('nobody')") == []
    assert sql("select * from doorbell.bell_floors('nobody')") == []
    assert sql("select doorbell.unacked_count('nowhere', 'nobody')") == [(0,)]


@pytest.mark.usefixtures("filled")
def test_peek_skips_own_messages_and_sees_another_log(sql: Sql) -> None:
    ((channel_id, name, floor, floor_at, head, epoch),) = sql("select * from doorbell.bell_floors('worker')")
    assert (name, floor, head) == ("events", 1, 3)
    peek = "select head, rewound, seq, sender, preview from doorbell.peek(%s, %s, %s, %s, 2)"
    assert sql(peek, ["worker"], [channel_id], [floor], [floor_at]) == [(3, False, 2, "ci", "tw")]
    assert sql(peek, ["ci"], [channel_id], [floor], [floor_at]) == [(3, False, None, None, None)]
    assert sql(peek, ["worker"], [channel_id], [3], [None]) == []
    begun = peek.replace(", 2)", ", 2, %s)")
    assert sql(begun, ["worker"], [channel_id], [3], [None], [epoch]) == []
    sql("select doorbell.new_epoch()")
    assert sql(begun, ["worker"], [channel_id], [3], [None], [epoch])[0][:2] == (3, True)
    assert sql(peek, ["worker"], [channel_id], [4], [None]) == [(3, True, None, None, None)]
    other = sql("select %s::timestamptz - interval '1 s'", floor_at)[0][0]
    assert sql(peek, ["worker"], [channel_id], [floor], [other])[0][:2] == (3, True)


@pytest.mark.usefixtures("filled")
def test_polls_and_glance_say_what_peek_says(sql: Sql) -> None:
    """A poll that it has a row, where that is because of the heads; glance the row itself, or nothing."""
    glanced = 0
    sql("select doorbell.subscribe('worker', 'quiet')")
    (events, _, _, _, head, epoch), (quiet, *_) = sql("select * from doorbell.bell_floors('worker') order by channel")
    ((at_head,),) = sql("select created_at from doorbell.messages_after('events', %s)", head - 1)
    other, elsewhere = sql("select %s::timestamptz - interval '1 s', gen_random_uuid()", at_head)[0]

    def found(floors: list[int], times: list[Any], epochs: list[Any] | None, handle: str = "worker") -> bool:
        arrays = ([handle] * 2, [events, quiet], floors, times)
        nonlocal glanced
        rows = sql(
            "select watch, seq, sender, preview, extract(epoch from created_at)::text from doorbell.peek(%s, %s, %s, %s, 2, %s)",
            *arrays,
            epochs,
        )
        watch = (handle, events, floors[0], times[0], epochs and epochs[0])
        ((glance,),) = sql("select doorbell.glance(%s, %s, %s, extract(epoch from %s::timestamptz), 2, %s)", *watch)
        if glance is not None:
            seq, sender, preview, at = glance
            assert [(1, int(seq), sender, preview, float(at))] == [(*row, float(at)) for *row, at in rows if row[0] == 1]
            glanced += 1
        assert sql("select doorbell.heads_moved(%s, %s)", [events, quiet], floors) == [(floors != [head, 0],)]
        assert sql("select doorbell.head_moved(%s, %s)", events, floors[0]) == [(floors[0] != head,)]
        assert sql("select doorbell.head_moved(%s, %s)", quiet, floors[1]) == [(floors[1] != 0,)]
        assert rows or floors == [head, 0]
        return bool(rows)

    for _ in range(7):  # planned for these values, then once for all
        glanced = 0
        for epochs in (None, [epoch], [epoch, epoch]):
            assert not found([head, 0], [at_head, None], epochs)
            assert not found([head, 0], [None, None], epochs)
            assert found([head, 0], [other, None], epochs)
            assert found([head + 1, 0], [at_head, None], epochs)
            assert found([head - 1, 0], [None, None], epochs)
            assert found([head - 1, 0], [None, None], epochs, "ci")
            assert found([head, 1], [at_head, None], epochs)
        assert found([head, 0], [at_head, None], [elsewhere])
        assert found([head, 0], [at_head, None], [epoch, elsewhere])
        assert found([head, 0], [at_head, None], [elsewhere, epoch])
        assert glanced == 2
    assert sql("select doorbell.heads_moved('{}', '{}')") == [(False,)]
    assert sql("select doorbell.heads_moved(%s, %s)", [events, quiet], [head]) == [(True,)]
    assert sql("select doorbell.head_moved(%s, null)", quiet) == [(True,)]
    sql("select doorbell.prune('0 s', 'events', keep_keys => '0 s', force => true)")
    assert found([head, 0], [at_head, None], [epoch])  # the worker has lost what it had not acked
    assert not found([head, 0], [at_head, None], [epoch], "ci")
    sql("select doorbell.skip_pruned('worker', 'events')")
    assert not found([head, 0], [at_head, None], [epoch])


def test_an_ack_rewrites_its_row_in_place_and_touches_no_index(sql: Sql) -> None:
    moving = sql(
        "select a.attname from pg_index as i"
        " join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)"
        " where i.indrelid = 'doorbell.cursor'::regclass and a.attname in ('acked_seq', 'acked_at')"
    )
    assert not moving
    sql("select doorbell.subscribe('worker', 'events')")
    sql("select doorbell.post_many('events', 'ci', array_fill('b'::text, array[1000]))")
    for seq in range(1, 1001):
        sql("select doorbell.ack('worker', 'events', %s)", seq)
    sql("select pg_stat_force_next_flush()")
    ((updates, hot),) = sql("select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'doorbell.cursor'::regclass")
    assert updates == 1000
    assert hot >= 990


# ---------------------------------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------------------------------

PLANNED = {
    "ack": "select doorbell.ack('worker', 'events', 40000)",
    "acked_seq": "select doorbell.acked_seq('worker', 'events')",
    "ack with time": "select doorbell.ack('worker', 'events', m.seq, m.created_at)"
    " from doorbell.messages_after('events', 40000, 1) as m",
    "backlog_of": "select * from doorbell.backlog_of('worker')",
    "bell_floors": "select * from doorbell.bell_floors('worker')",
    "glance": "select doorbell.glance('worker', f.channel_id, 49000, null, 40, f.epoch) from doorbell.bell_floors('worker') as f",
    "head": "select doorbell.head('events')",
    "head_moved": "select doorbell.head_moved(f.channel_id, 1) from doorbell.bell_floors('worker') as f",
    "heads_moved": "select doorbell.heads_moved(array[f.channel_id], array[1::bigint]) from doorbell.bell_floors('worker') as f",
    "messages_after": "select * from doorbell.messages_after('events', 49990, 5)",
    "peek": "select peek.* from doorbell.bell_floors('worker') as f, doorbell.peek("
    "array['worker'], array[f.channel_id], array[49000::bigint], array[null::timestamptz], 40) as peek",
    "post": "select * from doorbell.post('events', 'b', 's')",
    "post with a new key": "select * from doorbell.post('events', 'b', 's', gen_random_uuid()::text)",
    "post with a known key": "select * from doorbell.post('events', 'b', 's', 'key-25000')",
    "post_many": "select * from doorbell.post_many('events', 's', array['a', 'b'], array['key-25000', gen_random_uuid()::text])",
    "post_many of many": "select count(*) from doorbell.post_many('events', 's', array_fill('b'::text, array[32]))",
    "stage": "select doorbell.stage('events', 'b', 's')",
    "stage with a new key": "select doorbell.stage('events', 'b', 's', gen_random_uuid()::text)",
    "stage with a known key": "select doorbell.stage('events', 'b', 's', 'key-25000')",
    "subscribe at the start": "select doorbell.subscribe(gen_random_uuid()::text, 'events', 'start')",
    "subscriptions": "select * from doorbell.subscriptions('worker')",
    "try_post": "select doorbell.try_post('events', 'b', 's')",
    "try_post with a new key": "select doorbell.try_post('events', 'b', 's', gen_random_uuid()::text)",
    "try_post with a known key": "select doorbell.try_post('events', 'b', 's', 'key-25000')",
    "unacked": "select * from doorbell.unacked('worker', 'events', 49000, 5)",
    "unacked with bytes": "select * from doorbell.unacked('worker', 'events', 49000, 5, 1000)",
    "unacked_count": "select doorbell.unacked_count('events', 'worker')",
}


def test_a_bell_far_behind_in_a_log_of_one_sender_reads_only_the_next_message(sql: Sql, connect: Connect) -> None:
    """Statistics that know one sender only say of the search for another's message that it finds nothing."""
    sql("select doorbell.subscribe('worker', 'events')")
    sql("select count(*) from doorbell.post_many('events', 'ci', array_fill('body'::text, array[20000]))")
    sql("analyze doorbell.message")
    client = connect(autocommit=True)

    def read() -> int:
        client.execute("select pg_stat_force_next_flush()")
        sql("select pg_stat_clear_snapshot()")
        stats = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relid = 'doorbell.message'::regclass"
        return int(sql(stats)[0][0])

    before = read()
    for _ in range(7):  # plpgsql settles on a generic plan after five
        assert client.execute(READERS["peek"]).fetchall()
    assert read() - before < 100


@pytest.mark.parametrize("planned", ["while the log was empty", "while the log was short", "after an analyze"])
def test_no_call_reads_the_whole_log(sql: Sql, connect: Connect, planned: str) -> None:
    """50,000 messages; a plan that a session has cached since there were none, or few and that was known, must not scan them."""
    client = connect(autocommit=True)
    sql("select doorbell.subscribe('worker', 'events')")
    if planned == "while the log was short":
        for n in range(60):
            sql("select doorbell.post(%s, 'b', 's', key) from unnest(array[null, 'key']) as key", f"short-{n}")
            sql("select doorbell.subscribe(%s, %s)", f"short-{n}", f"short-{n}")
        sql("vacuum analyze doorbell.channel, doorbell.cursor, doorbell.message")
    if planned != "after an analyze":
        for n in range(8):  # plpgsql settles on a generic plan after five
            warm = f"'warm-{n}'"
            client.execute(f"select doorbell.subscribe('warm', {warm}), doorbell.post({warm}, 'b', 's')".encode())
            for call in PLANNED.values():
                early = call.replace("'worker'", "'warm'").replace("'events', 40000", f"{warm}, 1").replace("'events'", warm)
                client.execute(early.encode())
    sql(
        "select count(*) from doorbell.post_many('events', 'ci', array_fill('body'::text, array[50000]),"
        " (select array_agg('key-' || n) from generate_series(1, 50000) as n))"
    )
    if planned == "after an analyze":
        sql("analyze doorbell.message")

    def read() -> tuple[int, int]:
        client.execute("select pg_stat_force_next_flush()")
        sql("select pg_stat_clear_snapshot()")
        ((scans, rows),) = sql(
            "select seq_scan, seq_tup_read from pg_stat_user_tables where relid = 'doorbell.message'::regclass"
        )
        return scans, rows

    def probed() -> int:
        return int(sql("select sum(idx_tup_read) from pg_stat_user_indexes where relid = 'doorbell.message'::regclass")[0][0])

    for session in (client, connect(autocommit=True)):  # the new one plans by the statistics of the short log
        client = session
        for name, call in PLANNED.items():
            before, probes = read(), probed()
            client.execute(call.encode())
            assert read() == before, f"{name} reads the whole table"
            assert probed() - probes < 1000, f"{name} reads a whole index"
    client.execute("select count(body) from doorbell.message")
    assert read() != before, "this test would not notice"


@pytest.mark.parametrize("handles", [1, 60])
def test_no_call_reads_all_channels_or_all_cursors(sql: Sql, connect: Connect, handles: int) -> None:
    """20,000 channels, all pruned and all read by one handle; planned when there was one channel, and that was known."""
    client = connect(autocommit=True)
    calls = {
        "ack again": "select doorbell.ack('worker', 'events', 1)",
        "acked_seq": PLANNED["acked_seq"],
        "admit": "select doorbell.admit('worker', 'events', 1)",
        "bell_floors": PLANNED["bell_floors"],
        "peek": PLANNED["peek"],
        "subscribe": "select doorbell.subscribe('worker', 'events')",
        "subscriptions": PLANNED["subscriptions"],
        "unacked": "select * from doorbell.unacked('worker')",
        "unacked behind": "select * from doorbell.unacked('worker', 'events', 1)",
        "unacked_count": PLANNED["unacked_count"],
    }

    def pages(call: str, *args: Any) -> int:
        ((plan,),) = client.execute("explain (analyze, buffers, format json) " + call, args or None).fetchall()
        return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])

    def finish() -> int:
        ((seq,),) = client.execute("select seq from doorbell.post('events', 'b', 'ci')").fetchall()
        admit = "select turn_channel_id, turn_id, attempt from doorbell.admit('all', 'events', %s)"
        return pages("select doorbell.finish_turn(%s, %s, %s)", *client.execute(admit, [seq]).fetchone())

    sql("select doorbell.post('events', 'b', 'ci')")
    for handle in ["worker", *(f"other {n}" for n in range(handles - 1))]:
        sql("select doorbell.subscribe(%s, 'events', 'start')", handle)
    sql("vacuum analyze")
    sql("select doorbell.subscribe('all', 'events', 'start')")
    for _ in range(8):  # plpgsql settles on a generic plan after five
        for call in calls.values():
            pages(call)
        finish()
    sql("""
        insert into doorbell.channel (name) select 'a ' || n from generate_series(1, 20000) as n;
        insert into doorbell.message select id, 1, 'ci', 'b', '{}', null, now() from doorbell.channel where name like 'a %';
        insert into doorbell.pruned (channel_id, up_to) select id, 1 from doorbell.channel where name like 'a %';
        insert into doorbell.cursor (channel_id, handle, acked_seq)
          select id, 'all', 1 from doorbell.channel where name like 'a %';
    """)
    read = {name: pages(call) for name, call in calls.items()} | {"finish": finish()}
    assert max(read.values()) < 300, read
    assert pages("select count(*) from doorbell.unacked('all')") > 20_000, "this test would not notice"
