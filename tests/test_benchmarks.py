"""The benchmarks: that each measure runs, and that what it counts has happened. Their figures are nobody's business here."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.floor import Writer
from benchmarks.growth import old_snapshot
from benchmarks.harness import (
    DURABLE,
    TINY,
    ActorFailed,
    Bench,
    Breakdown,
    Crew,
    Row,
    Sample,
    Size,
    Target,
    alternate,
    at_least,
    at_most,
    compared,
    fill,
    keys_held,
    percentile,
    rates,
    skipped,
    within,
)
from benchmarks.posting import Batcher, Poster
from benchmarks.reading import Acker
from benchmarks.ringing import Sessions, rings

from doorbell_postgres import MessageBus, throwaway

NEEDED = [name for block in ("default", "profiles", "long") for name in command.BLOCKS[block]]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A server of its own, as the benchmarks have it. It does not flush: here nothing is measured."""
    try:
        server = throwaway.Server.start(settings=DURABLE | {"fsync": "off"})
    except throwaway.NoServerBinaries as exc:
        pytest.skip(str(exc))
    with server:
        yield Bench(server, TINY)


@pytest.fixture
def dsn(bench: Bench) -> Iterator[str]:
    yield bench.database()
    bench.clean()


# -- every measure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEEDED)
def test_a_measure_runs_and_yields_figures(bench: Bench, name: str) -> None:
    results = list(command.MEASURES[name](bench))
    bench.clean()
    assert results
    for result in results:
        if isinstance(result, Breakdown):
            assert sum(spent for _, spent in result.parts) == pytest.approx(result.whole)
        elif result.ours is None:
            assert result.note.startswith("not measured: ")
        else:
            assert result.ours >= 0
            assert result.floor is None or result.floor > 0
    assert all(line in report.table(results) for line in (r.name for r in results))


def test_peers_that_are_not_installed_are_left_out_with_a_word(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    for name, measure in command.PEERS.items():
        [row] = measure(bench)
        assert isinstance(row, Row), name
        assert "install" in row.note


def test_the_server_of_a_benchmark_is_durable() -> None:
    assert {DURABLE[name] for name in ("fsync", "synchronous_commit", "full_page_writes")} == {"on"}


# -- what is counted has happened -------------------------------------------------------------------------------------


def test_every_post_that_is_counted_is_in_the_log(dsn: str) -> None:
    with Crew(Poster, dsn, 2) as crew:
        own, shared, inserted = crew.run("own", 0.1), crew.run("shared", 0.1), crew.run("floor", 0.1)
    with MessageBus(dsn) as bus, psycopg.connect(dsn) as connection:
        assert own.count == bus.store.head("own-0") + bus.store.head("own-1") > 0
        assert shared.count == bus.store.head("shared") > 0
        assert (inserted.count,) == connection.execute("select count(*) from floor").fetchone()
        same = "select min(octet_length(body)), max(octet_length(body)) from"
        assert connection.execute(f"{same} floor").fetchone() == connection.execute(f"{same} doorbell.message").fetchone()


def test_both_sides_of_a_batch_write_the_same_rows(dsn: str) -> None:
    with Crew(Batcher, dsn, batch=7) as crew:
        copied, posted = crew.run("floor", 0.1), crew.run("ours", 0.1)
    with psycopg.connect(dsn) as connection:
        assert (7 * copied.count,) == connection.execute("select count(*) from floor").fetchone()
        assert (7 * posted.count,) == connection.execute("select count(*) from doorbell.message").fetchone()


def test_every_ack_that_is_counted_moves_the_cursor(dsn: str) -> None:
    fill(dsn, "log", 5_000, handle="worker")
    with Crew(Acker, dsn) as crew:
        crew.call("read")
        assert [crew.run("ours", 0.1).count] == crew.call("acked")


@pytest.mark.timing
def test_rings_are_matched_with_their_posts(dsn: str) -> None:
    for which, from_begin, from_end in rings(dsn, TINY):
        assert len(from_begin) == TINY.rings, which
        # A ring may come before the post has returned: its announcement is a part of the call.
        assert all(0 < before > after for before, after in zip(from_begin, from_end, strict=True)) or which == "floor"


def test_idle_listeners_listen_and_hold_their_keys(dsn: str) -> None:
    with Crew(Sessions, dsn) as sessions, psycopg.connect(dsn, autocommit=True) as connection:
        for count in (3, 1, 0):
            assert sessions.call("hold", count) == [count]
            assert keys_held(connection) == count


def test_a_snapshot_that_nothing_was_written_beside_proves_nothing(dsn: str) -> None:
    with pytest.raises(AssertionError, match="nothing was written"), old_snapshot(dsn):
        pass
    writer = Writer(dsn)
    with writer.connection, old_snapshot(dsn):
        writer.insert()


# -- the harness ------------------------------------------------------------------------------------------------------


class Slow:
    """Ours takes ten times as long as the floor."""

    def __init__(self, dsn: str, index: int) -> None:
        self.index = index

    def floor(self) -> None:
        time.sleep(0.002)

    def ours(self) -> None:
        time.sleep(0.02)

    def who(self) -> tuple[int, int]:
        return self.index, os.getpid()

    def broken(self) -> None:
        raise LookupError("what went wrong")


def test_a_slow_side_shows_in_the_ratio_and_misses_its_target() -> None:
    with Crew(Slow, "") as crew:
        samples = alternate(crew, ["floor", "ours"], Size(seconds=0.1, rounds=3, warm=0.01))
    row = compared("slow", "calls/s", rates(samples["floor"]), rates(samples["ours"]), at_least(0.5))
    assert row.ratio is not None
    assert row.ratio < 0.3
    assert row.ok is False
    assert "NO" in report.table([row])


def test_a_machine_that_changes_between_rounds_changes_no_ratio() -> None:
    row = compared("", "", floor=[100, 40, 80], ours=[50, 20, 60], target=at_least(0.5))
    assert (row.floor, row.ours, row.ratio) == (80, 50, 0.5)
    assert compared("", "", [1, 2, 3], [3, 2, 1], None, each=1_000).floor == 2_000


def test_actors_live_in_processes_of_their_own() -> None:
    with Crew(Slow, "", 3) as crew:
        indexes, pids = zip(*crew.call("who"), strict=True)
    assert indexes == (0, 1, 2)
    assert len({*pids, os.getpid()}) == 4


def test_what_an_actor_raises_is_told_with_its_traceback() -> None:
    with Crew(Slow, "") as crew, pytest.raises(ActorFailed, match="what went wrong"):
        crew.call("broken")


def test_a_rate_is_of_all_processes() -> None:
    sample = Sample([array("d", [0.1] * 10), array("d", [0.1] * 5 + [0.5])])
    assert sample.rate == pytest.approx(10 + 6)
    assert sample.percentile(0.99) == pytest.approx(500)
    assert percentile([3, 1, 2], 0.5) == 2


@pytest.mark.parametrize(
    ("target", "floor", "ours", "ok"),
    [
        (at_least(0.8), 100, 80, True),
        (at_least(0.8), 100, 79, False),
        (at_most(3), 1, 3, True),
        (at_most(3), 1, 3.1, False),
        (within(0.15), 0.05, 0.15, True),
        (within(0.15), None, 0.2, False),
        (None, 1, 2, None),
        (at_least(0.8), None, 80, False),
    ],
)
def test_a_target_is_of_the_ratio_or_of_ours(target: Target | None, floor: float | None, ours: float, ok: bool | None) -> None:
    assert Row("row", "", floor, ours, target).ok is ok


def test_what_was_not_measured_is_neither_good_nor_bad() -> None:
    row = skipped("turns", "there is no admission here")
    assert row.ok is None
    assert report.cells(row) == ("turns", "", "", "", "", "")


def test_names_choose_measures_and_whole_blocks() -> None:
    assert command.chosen([], long=False, with_peers=False) == [*command.DEFAULT, *command.PROFILES]
    assert command.chosen(["ack", "post"], long=False, with_peers=False) == ["post", "ack"]
    assert command.chosen(["long"], long=False, with_peers=False) == list(command.LONG)
    assert command.chosen([], long=True, with_peers=False) == list(command.LONG)
    assert command.chosen([], long=False, with_peers=True) == [*command.DEFAULT, *command.PROFILES, *command.PEERS]
    with pytest.raises(SystemExit, match="no measure 'psot'"):
        command.chosen(["psot"], long=False, with_peers=False)


def test_tables_are_written_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("above\n<!-- begin long: old -->\nold\n<!-- end long -->\nbelow\n")
    report.write("long", "| new |", page)
    report.write("long", "| newer \\1 |", page)
    assert page.read_text() == "above\n<!-- begin long: old -->\n| newer \\1 |\n<!-- end long -->\nbelow\n"
    with pytest.raises(SystemExit, match="0 places marked 'peers'"):
        report.write("peers", "", page)


def test_the_page_has_a_place_for_every_block() -> None:
    text = report.PAGE.read_text()
    for block in command.BLOCKS:
        assert text.count(f"<!-- begin {block}") == text.count(f"<!-- end {block} -->") == 1
