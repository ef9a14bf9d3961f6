"""The views as Prometheus metrics. Each scrape is a handful of queries on a connection of its own; nothing runs in between.

Wants the extra `metrics`. Labels carry names of channels and handles, never a body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg

from doorbell_postgres import operations
from doorbell_postgres.admin import Admin
from doorbell_postgres.errors import DoorbellError

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


class MissingExtra(DoorbellError):
    """An optional dependency is not installed; the message names the extra."""


def text(dsn: str, *, violations: bool = False) -> bytes:
    """All metrics once, in Prometheus's text format. Raises what keeps them from being read."""
    _require()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    families = list(_read(dsn, violations=violations))

    class Once:
        def collect(self) -> Iterator[GaugeMetricFamily]:
            yield from families

    registry.register(Once())
    return generate_latest(registry)


def serve(dsn: str, port: int, *, host: str = "127.0.0.1", violations: bool = False) -> int:
    """Serve them at http://host:port/metrics from a daemon thread, and return the port. While the database cannot be read
    a scrape gives `doorbell_up 0` alone."""
    _require()
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily

    class Scraped:
        def describe(self) -> list[GaugeMetricFamily]:
            return []  # else registering would collect

        def collect(self) -> Iterator[GaugeMetricFamily]:
            try:
                families = list(_read(dsn, violations=violations))
            except (DoorbellError, psycopg.Error):
                yield GaugeMetricFamily("doorbell_up", UP, value=0)
                return
            yield from families

    registry = CollectorRegistry()
    registry.register(Scraped())
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)


def label(value: str) -> str:
    """The name as a label: as it is or, where something in it is not printable, with escapes; never two names as one."""
    return value if value.isprintable() and "\\" not in value else repr(value)[1:-1]


UP = "1 when the database could be read."


def _require() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "prometheus-client is not installed. Run: pip install 'doorbell-postgres[metrics]', or in a checkout '.[metrics]'"
        ) from None


def _read(dsn: str, *, violations: bool) -> Iterator[GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    def gauge(name: str, what: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, what, labels=labels)

    def one(name: str, what: str, value: float) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, what, value=value)

    with Admin(dsn, read_only=True) as admin:
        health = admin.run(operations.health())
        yield one("doorbell_up", UP, 1)
        info = gauge("doorbell_info", "Always 1; what runs is in the labels.", ("schema_revision", "server_version"))
        info.add_metric([health.schema_revision, label(health.server_version)], 1)
        yield info
        yield one("doorbell_replica", "1 on a standby.", health.replica)
        yield one(
            "doorbell_notification_queue_usage_ratio", "Share of the notification queue in use.", health.notification_queue_usage
        )
        yield one("doorbell_waiting_sessions", "Sessions in which bells wait with notifications.", health.waiting_sessions)
        yield one("doorbell_prepared_transactions", "Transactions left prepared.", health.prepared_transactions)
        if health.oldest_transaction != "unknown":  # unknown is no sample, never a 0
            yield one(
                "doorbell_oldest_transaction_seconds", "Age of the oldest open transaction; 0 for none.",
                health.oldest_transaction_seconds or 0,
            )  # fmt: skip
        if health.blocked_session_count is not None:
            yield one("doorbell_blocked_sessions", "Sessions that wait for a lock.", health.blocked_session_count)

        channel = ("channel",)
        head = gauge("doorbell_channel_head", "Number of the newest message.", channel)
        kept = gauge("doorbell_channel_messages", "Messages kept.", channel)
        size = gauge("doorbell_channel_estimated_bytes", "Their estimated size.", channel)
        readers = gauge("doorbell_channel_subscribers", "Handles that are subscribed.", channel)
        for row in admin.run(operations.channels()):
            name = [label(row.channel)]
            head.add_metric(name, row.head)
            kept.add_metric(name, row.messages)
            size.add_metric(name, row.estimated_bytes)
            readers.add_metric(name, row.subscribers)
        yield from (head, kept, size, readers)

        subscription = ("handle", "channel")
        unacked = gauge(
            "doorbell_backlog_messages", "Messages behind the cursor; no sample for a subscription without any.", subscription
        )
        oldest = gauge("doorbell_backlog_oldest_seconds", "Age of the first of them.", subscription)
        lost = gauge("doorbell_backlog_lost_messages", "Those that retention has removed by force.", subscription)
        for b in admin.run(operations.behind()):
            names = [label(b.handle), label(b.channel)]
            unacked.add_metric(names, b.unacked)
            if b.oldest_unacked_seconds is not None:
                oldest.add_metric(names, b.oldest_unacked_seconds)
            if b.lost:
                lost.add_metric(names, b.lost)
        yield from (unacked, oldest, lost)

        turns = gauge("doorbell_turns", "Turns by state; held says that a session that is alive works on it.", ("state", "held"))
        for state, held, number in admin.run(operations.turn_counts()):
            turns.add_metric([state, str(held).lower()], number)
        yield turns

        if violations:
            yield one("doorbell_violations", "Broken invariants; always 0.", len(admin.run(operations.violations())))
