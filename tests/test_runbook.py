"""docs/runbook.md: each query is run on a database in the state that its section is about, and answers as it is shown."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from doorbell_postgres import MessageBus
from support import background, waiting_in_database
from support.cluster import Cluster

Sql = Callable[..., list[tuple[Any, ...]]]

RUNBOOK = Path(__file__).resolve().parents[1] / "docs" / "runbook.md"
TEXT = RUNBOOK.read_text(encoding="utf-8")
SECTION = re.compile(r"^##+ (.+)$", re.M)
# A query and, right behind it, its answer.
QUESTION = re.compile(r"^```sql\n(.*?)^```\n\n```text\n(.*?)^```$", re.M | re.S)
# What an operator may not do: the runbook says so there.
FOR_THE_OWNER = re.compile(r"doorbell\.(prune|unsubscribe|skip_pruned|new_epoch|prune_all)\(|\bcron\.|pg_terminate_backend")


def sections() -> dict[str, str]:
    titles = list(SECTION.finditer(TEXT))
    ends = [match.start() for match in titles[1:]] + [len(TEXT)]
    return {match[1]: TEXT[match.end() : end] for match, end in zip(titles, ends, strict=True)}


SECTIONS = sections()
QUESTIONS = {title: QUESTION.findall(text) for title, text in SECTIONS.items() if "```sql" in text}


@dataclass
class Stage:
    """What a state is built with."""

    sql: Sql
    dsn: str
    connect: Callable[..., psycopg.Connection[Any]]

    def post(self, channel: str, count: int, *, days_old: int = 0) -> None:
        self.sql("select doorbell.post_many(%s, 'ci', array(select 'x' from generate_series(1, %s)))", channel, count)
        if days_old:
            self.sql(
                "update doorbell.message as m set created_at = m.created_at - make_interval(days => %s)"
                " where m.channel_id = (select id from doorbell.channel where name = %s)",
                days_old,
                channel,
            )

    def subscribe(self, handle: str, channel: str, acked: int = 0) -> None:
        self.sql("select doorbell.subscribe(%s, %s, 'start')", handle, channel)
        if acked:
            self.sql("select doorbell.ack(%s, %s, %s)", handle, channel, acked)


State = Callable[[Stage], Any]
STATES: dict[str, State] = {}


def state(title: str) -> Callable[[State], State]:
    def register(build: State) -> State:
        STATES[title] = build
        return build

    return register


@state("Who is behind")
def behind(stage: Stage) -> None:
    stage.post("events", 5)
    stage.post("reviews", 1)
    stage.subscribe("worker", "events", 2)
    stage.subscribe("worker", "reviews")
    stage.subscribe("auditor", "events", 5)


@state("A handle that nobody serves")
def unserved(stage: Stage) -> None:
    behind(stage)
    stage.subscribe("retired", "events", 1)
    stage.subscribe("retired", "reviews")
    stage.sql("update doorbell.cursor set acked_at = acked_at - interval '3 days' where handle = 'retired'")


@state("A turn is stuck")
def stuck(stage: Stage) -> None:
    stage.post("events", 3)
    stage.subscribe("worker", "events", 1)
    for _ in range(3):
        stage.sql(
            "select doorbell.release_turn(t.turn_channel_id, t.turn_id, t.attempt, 'the model was offline')"
            " from doorbell.admit('worker', 'events', 2) as t"
        )
    stage.sql("update doorbell.turn set admitted_at = admitted_at - interval '2 hours'")


@state("A channel grows")
def grows(stage: Stage) -> None:
    stage.post("events", 4, days_old=31)
    stage.post("events", 2)
    stage.post("reviews", 1, days_old=31)
    stage.post("reviews", 1)
    stage.subscribe("fast", "events", 6)
    stage.subscribe("slow", "events", 2)


@state("On a schedule")
def scheduled(stage: Stage) -> Callable[[], None]:
    """The extension's one function, which keeps what it is given; then that is run."""
    grows(stage)
    stage.sql("create schema cron")
    stage.sql("create table cron.job (id bigint generated always as identity, name text, schedule text, command text)")
    stage.sql(
        "create function cron.schedule(text, text, text) returns bigint language sql"
        " as $$ insert into cron.job (name, schedule, command) values ($1, $2, $3) returning id $$"
    )

    def then() -> None:
        (command,) = stage.sql("select command from cron.job")[0]
        assert stage.sql(command) == [(3,)]

    return then


@state("A reader was passed")
def passed(stage: Stage) -> None:
    stage.post("events", 5, days_old=31)
    stage.post("events", 1)
    stage.subscribe("slow", "events", 2)
    stage.sql("select doorbell.prune('30 days', 'events', force => true)")


@contextmanager
def _held(stage: Stage) -> Iterator[None]:
    holder = stage.connect(application_name="nightly job")
    holder.execute("select doorbell.post('events', 'held', 'job')")
    waiter = stage.connect(autocommit=True)
    running = background(waiter.execute, "select doorbell.post('events', 'waits', 'ci', lock_timeout_ms => 60000)")
    waiting_in_database(stage.sql)
    yield
    assert running.result(30), "the post went on once the holder was gone"


@state("A post waits")
def waits(stage: Stage) -> Any:
    return _held(stage)


@state("Notifications are off")
def off(stage: Stage) -> None:
    behind(stage)


@state("The notification queue fills")
def filling(stage: Stage) -> None:
    listening = stage.connect(application_name="forgotten")
    listening.execute("listen something")
    listening.commit()
    listening.execute("select 1")


@state("Old transactions")
def old(stage: Stage) -> None:
    stage.connect().execute("select 1")


@state("A violation")
def violated(stage: Stage) -> None:
    stage.post("events", 5)
    stage.sql("delete from doorbell.message where seq in (2, 3)")


@state("Failover")
def failed_over(stage: Stage) -> None:
    behind(stage)


@state("Restore")
def restored(stage: Stage) -> None:
    behind(stage)
    stuck_turns = "select doorbell.admit('worker', 'events', 3)"
    stage.sql(stuck_turns)


@state("Upgrade")
def upgraded(stage: Stage) -> Callable[[], None]:
    stage.sql("create role agents")
    stage.sql("select doorbell.grant_role('agents')")

    def then() -> None:
        stage.sql("drop owned by agents; drop role agents")

    return then


@state("A pooler")
def pooled(stage: Stage) -> None:
    for _ in range(2):
        stage.connect(application_name="doorbell", autocommit=True).execute("select 1")


@state("Scaling out")
def busy(stage: Stage) -> None:
    stage.post("events", 6)
    stage.post("reviews", 2)


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def operator(dbname: str, server: Any, sql: Sql, title: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of an operator's role that was let in by the command."""
    role = "watchers" if title == "Upgrade" else f"operator_{secrets.token_hex(4)}"
    sql(f"create role {role} login")
    sql("select doorbell.grant_role(%s, true)", role)
    sql(f"grant pg_read_all_stats to {role}")
    with psycopg.connect(server.dsn(dbname), autocommit=True, application_name="operator") as connection:
        connection.execute(f"set role {role}".encode())
        yield connection
    with psycopg.connect(server.dsn(dbname), autocommit=True) as admin:
        admin.execute(f"drop owned by {role}; drop role {role}".encode())


def shown(answer: str) -> tuple[list[str], list[list[str]]]:
    """The column names and the cells of a table as psql prints it."""
    lines = answer.rstrip("\n").split("\n")
    assert re.fullmatch(r"-+(\+-+)*", lines[1]), answer
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[2:-1]]
    assert lines[-1] == f"({len(rows)} row{'s' if len(rows) != 1 else ''})", answer
    return [cell.strip() for cell in lines[0].split("|")], rows


def printed(value: Any) -> str:
    return "" if value is None else {True: "t", False: "f"}[value] if isinstance(value, bool) else str(value)


def same(expected: str, found: str) -> bool:
    return re.fullmatch(".+".join(map(re.escape, expected.split("…"))), found.strip()) is not None


def ask(connection: psycopg.Connection[Any], query: str, answer: str) -> None:
    names, rows = shown(answer)
    cursor = connection.execute(query.encode())
    assert cursor.description is not None
    assert [column.name for column in cursor.description] == names
    found = [[printed(value) for value in row] for row in cursor.fetchall()]
    assert len(found) == len(rows), (query, found)
    for expected_row, found_row in zip(rows, found, strict=True):
        for name, expected, value in zip(names, expected_row, found_row, strict=True):
            assert same(expected, value), f"{name}: the runbook shows {expected!r}, this is {value!r}\n{query}"


def test_every_query_of_the_runbook_has_its_answer_and_its_state() -> None:
    assert len(re.findall(r"^```sql$", TEXT, re.M)) == sum(map(len, QUESTIONS.values()))
    assert QUESTIONS.keys() == STATES.keys()


def test_every_section_says_what_is_seen_what_it_means_and_what_to_do() -> None:
    for title, text in SECTIONS.items():
        if title == "On a schedule":
            continue
        for word in ("**Seen:**", "**Means:**", "**Do"):
            assert word in text, (title, word)


@pytest.mark.failure_mode
@pytest.mark.parametrize("title", STATES)
def test_runbook_queries_answer_as_shown(
    title: str, sql: Sql, direct_dsn: str, connect: Callable[..., psycopg.Connection[Any]], operator: psycopg.Connection[Any]
) -> None:
    """A runbook's query fails on the night that it is needed, or answers something else than the page says.

    Each is run here, by a role that may do no more than the page says, on a database in that state, and compared.
    """
    then = STATES[title](Stage(sql, direct_dsn, connect))
    with then if hasattr(then, "__enter__") else nullcontext():
        for query, answer in QUESTIONS[title]:
            if FOR_THE_OWNER.search(query):
                with psycopg.connect(direct_dsn, autocommit=True, application_name="owner") as owner:
                    ask(owner, query, answer)
            else:
                ask(operator, query, answer)
    if callable(then) and not hasattr(then, "__enter__"):
        then()


@pytest.mark.slow
def test_failover_as_the_runbook_says() -> None:
    """The query on a standby, and on the same server once it is promoted; the DSN of the page finds it."""
    from doorbell_postgres import migrate

    ((query, answer),) = QUESTIONS["Failover"]
    with Cluster() as cluster:
        migrate.upgrade(cluster.dsn())
        standby = cluster.add_standby(synchronous=True)
        with MessageBus(cluster.dsn()) as bus:
            bus.subscribe("worker", "events")
            bus.post("events", "before", sender="ci", idempotency_key="k1")
            with psycopg.connect(f"host={standby.directory} user=doorbell dbname=postgres", autocommit=True) as there:
                with pytest.raises(AssertionError, match="replica: the runbook shows 'f', this is 't'"):
                    ask(there, query, answer)
                cluster.primary.stop("QUIT")
                there.execute("select pg_promote()")
                ask(there, query, answer)
            assert bus.post("events", "after", sender="ci", idempotency_key="k2").seq == 2
            assert [m.body for m in bus.catch_up("worker")] == ["before", "after"]
