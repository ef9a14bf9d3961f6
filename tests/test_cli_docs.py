"""docs/cli.md is what the commands say of themselves, and each of them says enough."""

from __future__ import annotations

import re

import click
import pytest

import cli_docs
from doorbell_postgres.cli import main


def test_the_page_is_what_the_commands_say() -> None:
    assert cli_docs.PAGE.read_text(encoding="utf-8") == cli_docs.page(), "run: python tests/cli_docs.py --write"


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help_with_an_example_and_a_word_on_each_option(name: str) -> None:
    text = cli_docs.help_of([name])
    assert re.search(rf"Example: .*doorbell {name}\b", text), text
    assert max(map(len, text.splitlines())) <= cli_docs.WIDTH
    for parameter in main.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"
