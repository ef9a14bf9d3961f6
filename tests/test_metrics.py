"""What Prometheus and Grafana get."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from doorbell_postgres import cli, metrics
from support import TestServer
from support.processes import plain_environment

Sql = Callable[..., list[tuple[Any, ...]]]

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

DASHBOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "doorbell.json"


@pytest.fixture
def filled(sql: Sql) -> None:
    sql("select doorbell.subscribe('worker', 'events'), doorbell.subscribe('auditor', 'events')")
    sql("select doorbell.post_many('events', 'ci', array['1', '2', '3'])")
    sql("select doorbell.ack('auditor', 'events', 3), doorbell.admit('worker', 'events', 1)")


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


@pytest.mark.usefixtures("filled")
def test_metrics_once(dsn: str) -> None:
    done = CliRunner().invoke(cli.main, ["metrics", "--violations", "--dsn", dsn])
    assert done.exit_code == 0
    found = samples(done.output)
    events, worker = (("channel", "events"),), (("channel", "events"), ("handle", "worker"))
    assert found["doorbell_up", ()] == 1
    assert found["doorbell_violations", ()] == 0
    assert found["doorbell_channel_head", events] == found["doorbell_channel_messages", events] == 3
    assert found["doorbell_channel_subscribers", events] == 2
    assert found["doorbell_backlog_messages", worker] == 3
    assert found["doorbell_backlog_oldest_seconds", worker] >= 0
    assert found["doorbell_turns", (("held", "false"), ("state", "unfinished"))] == 1
    assert ("doorbell_backlog_messages", (("channel", "events"), ("handle", "auditor"))) not in found


def test_names_that_look_alike_stay_two(dsn: str, sql: Sql) -> None:
    names = ["a\nb", "a b", "a\\nb", 'a"b', "a\x1bb", "ä"]
    for name in names:
        sql("select doorbell.post(%s, 'x', 'ci')", name)
    text = metrics.text(dsn).decode()
    heads = [labels for name, labels in samples(text) if name == "doorbell_channel_head"]
    assert len(set(heads)) == len(names)
    assert "\x1b" not in text


@pytest.mark.usefixtures("filled")
def test_metrics_served_and_down_while_the_database_cannot_be_read(dsn: str, sql: Sql) -> None:
    port = metrics.serve(dsn, 0)

    def scrape() -> dict[Any, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            return samples(answer.read().decode())

    assert scrape()["doorbell_channel_head", (("channel", "events"),)] == 3
    sql("select doorbell.post('events', '4', 'ci')")
    assert scrape()["doorbell_channel_head", (("channel", "events"),)] == 4
    sql("alter table doorbell.message rename to gone")
    sql("alter view doorbell.health rename to gone_too")
    assert scrape() == {("doorbell_up", ()): 0}


def test_the_command_serves_until_it_is_ended(dsn: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "doorbell_postgres", "metrics", "--serve", "127.0.0.1:0", "--dsn", dsn],
        env=plain_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        address = re.search(r"serving (http://\S+) ", process.stderr.readline())
        assert address is not None
        with urllib.request.urlopen(address[1], timeout=20) as answer:
            assert b"doorbell_up 1.0" in answer.read()
        process.terminate()
    assert process.returncode == 143


@pytest.mark.parametrize("address", ["", "x", "host:", "host:x", "70000", "1.2.3.4:99999", "-1"])
def test_an_address_that_is_none_is_a_usage_error(dsn: str, address: str) -> None:
    assert CliRunner().invoke(cli.main, ["metrics", "--serve", address, "--dsn", dsn]).exit_code == 2


def test_metrics_where_nothing_answers(server: TestServer) -> None:
    assert CliRunner().invoke(cli.main, ["metrics", "--dsn", server.dsn("no_such_database")]).exit_code == 4


def test_a_port_that_cannot_be_served_is_named(dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(cli.main, ["metrics", "--serve", str(port), "--dsn", dsn])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"doorbell: Port {port} of 127.0.0.1 cannot be served: ")
    assert "--serve 9187" in done.stderr


def test_without_the_extra_the_error_names_it(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = CliRunner().invoke(cli.main, ["metrics", "--dsn", dsn])
    assert done.exit_code == 1
    assert "Run: pip install 'doorbell-postgres[metrics]', or in a checkout '.[metrics]'\n" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Grafana
# ---------------------------------------------------------------------------------------------------------------------

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
QUERIES = {panel["title"]: target["rawSql"] for panel in BOARD["panels"] for target in panel.get("targets", ())}


def test_the_dashboard_is_whole() -> None:
    assert {panel["datasource"]["type"] for panel in BOARD["panels"] if "targets" in panel} == {"grafana-postgresql-datasource"}
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"] if "targets" in panel} == {"${datasource}"}
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource"]
    assert len(QUERIES) == len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    covered = " ".join(QUERIES.values())
    for view in ("backlog", "channels", "turns", "violations", "health"):
        assert f"doorbell.{view}" in covered


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("title", QUERIES)
def test_each_query_of_the_dashboard_runs_for_an_operator(sql: Sql, dbname: str, title: str) -> None:
    sql("create role grafana_test")
    try:
        sql("select doorbell.grant_role('grafana_test', true)")
        sql("set role grafana_test")
        rows = sql(QUERIES[title])
        assert rows or "violations" in QUERIES[title]
    finally:
        sql("reset role")
        sql("drop owned by grafana_test; drop role grafana_test")
