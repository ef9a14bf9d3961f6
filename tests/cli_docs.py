"""docs/cli.md: the help text of every command, as the command prints it.

python tests/cli_docs.py            print the page
python tests/cli_docs.py --write    write it
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.testing import CliRunner

from doorbell_postgres.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
WIDTH = 100

# Who needs which: every command is in one of these.
GROUPS = {
    "For agents": ("subscribe", "wait", "catch-up", "ack", "skip", "unsubscribe", "post", "tail"),
    "For operators": ("status", "doctor", "metrics", "channels", "handles", "turns"),
    "For the owner of the schema": ("migrate", "grant", "prune", "import"),
    "To try it": ("demo",),
}


def page() -> str:
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(main.commands):
        raise ValueError(f"in no group, or gone: {sorted(set(grouped) ^ set(main.commands))}")
    parts = [
        "# The command",
        "<!-- Written from the help texts: python tests/cli_docs.py --write -->",
        "What each command does, in the words of its `--help`.",
        block([]),
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += [f"### doorbell {name}", block([name])]
    return "\n\n".join(parts) + "\n"


def block(arguments: list[str]) -> str:
    return f"```text\n{help_of(arguments)}\n```"


def help_of(arguments: list[str]) -> str:
    done = CliRunner().invoke(main, [*arguments, "--help"], prog_name="doorbell", terminal_width=WIDTH)
    if done.exit_code != 0:
        raise click.ClickException(done.output)
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
