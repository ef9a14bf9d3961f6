"""`python -m benchmarks`: run measures on a private, durable server, print a table and JSON. `make bench` runs this."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import growth, machine, peers, posting, profiles, reading, report, ringing, starting
from benchmarks.harness import DURABLE, FULL, TINY, Bench, Measure, Result, Row, Size
from doorbell_postgres import throwaway

DEFAULT: dict[str, Measure] = {
    measure.__name__: measure
    for measure in (
        posting.post,
        posting.post_processes,
        posting.post_many,
        posting.post_concurrent,
        reading.read,
        reading.ack,
        reading.admission,
        ringing.ring,
        ringing.idle_listeners,
        ringing.idle_waits,
        ringing.idle_bells,
        starting.start,
    )
}
PROFILES: dict[str, Measure] = {"profile": profiles.profile}
LONG: dict[str, Measure] = {m.__name__: m for m in (growth.log_length, growth.snapshot_posts, growth.snapshot_acks)}
PEERS: dict[str, Measure] = {m.__name__: m for m in (peers.procrastinate, peers.pgqueuer, peers.redis_streams)}
BLOCKS = {"default": DEFAULT, "profiles": PROFILES, "long": LONG, "peers": PEERS}
MEASURES: dict[str, Measure] = DEFAULT | PROFILES | LONG | PEERS


def chosen(names: Iterable[str], *, long: bool, with_peers: bool) -> list[str]:
    """The measures to run, in their order: those named, else the default ones and the profiles."""
    wanted: set[str] = set()
    for name in names:
        if name == "all":
            wanted |= set(MEASURES)
        elif name in BLOCKS:
            wanted |= set(BLOCKS[name])
        elif name in MEASURES:
            wanted.add(name)
        else:
            raise SystemExit(f"There is no measure {name!r}. There are: {', '.join((*BLOCKS, 'all', *MEASURES))}.")
    wanted |= set(LONG) if long else set()
    wanted |= set(PEERS) if with_peers else set()
    if not wanted or (with_peers and not names and not long):
        wanted |= {*DEFAULT, *PROFILES}
    return [name for name in MEASURES if name in wanted]


def run(bench: Bench, names: Iterable[str]) -> dict[str, list[Result]]:
    """Run the measures; one that fails does not take the others with it, and shows as not ok."""
    results: dict[str, list[Result]] = {}
    for name in names:
        began = time.monotonic()
        print(f"{name}: {(MEASURES[name].__doc__ or '').splitlines()[0]}", file=sys.stderr, flush=True)
        results[name] = []
        try:
            results[name].extend(MEASURES[name](bench))
        except Exception as exc:
            print(f"{name} failed: {exc}", file=sys.stderr, flush=True)
            results[name].append(
                Row(name, note=f"FAILED: {str(exc).strip().splitlines()[-1] if str(exc) else type(exc).__name__}")
            )
        bench.say(f"{time.monotonic() - began:.0f} s")
        bench.clean()
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=_listing(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="measures, or whole blocks: default, profiles, long, peers, all")
    parser.add_argument("--long", action="store_true", help="the long ones: snapshots of a minute, a log of 5,000,000 messages")
    parser.add_argument("--peers", action="store_true", help="others on the same work, where they are installed")
    parser.add_argument("--write", action="store_true", help="put the tables of whole blocks into docs/performance.md")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the JSON there instead of printing it")
    parser.add_argument("--seconds", type=float, help=f"length of one round (default {FULL.seconds:g})")
    parser.add_argument("--rounds", type=int, help=f"rounds of each side (default {FULL.rounds})")
    parser.add_argument("--tiny", action="store_true", help="so little of everything that the figures mean nothing")
    options = parser.parse_args(arguments)

    names = chosen(options.names, long=options.long, with_peers=options.peers)
    size: Size = TINY if options.tiny else FULL
    changes = {name: value for name in ("seconds", "rounds") if (value := getattr(options, name)) is not None}
    size = dataclasses.replace(size, **changes)
    if options.write and size != FULL:
        raise SystemExit("--write is for a run of the full size: without --tiny, --seconds and --rounds.")

    began = time.monotonic()
    with throwaway.Server.start(settings=DURABLE) as server:
        where = machine.describe(server)
        print("\n".join(machine.lines(where)), file=sys.stderr, flush=True)
        results = run(Bench(server, size), names)
    everything = [result for name in names for result in results[name]]
    print()
    print("\n".join(machine.lines(where)))
    print()
    print(report.table(everything))
    print(f"\n{time.monotonic() - began:.0f} s in all")
    text = json.dumps(report.as_json(where, everything), ensure_ascii=False)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)
    if options.write:
        for block, measures in BLOCKS.items():
            if set(measures) <= set(names):
                report.write(block, report.markdown(where, [result for name in measures for result in results[name]]))
    return 1 if any(isinstance(r, Row) and r.note.startswith("FAILED") for r in everything) else 0


def _listing() -> str:
    lines = []
    for block, measures in BLOCKS.items():
        lines.append(f"{block}:")
        lines += [f"  {name:<16} {(measure.__doc__ or '').splitlines()[0]}" for name, measure in measures.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
