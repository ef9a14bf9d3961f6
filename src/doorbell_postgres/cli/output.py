"""To stdout: lines for people, which are sanitised before they come here, and JSON lines, which are exact.

Both are printable characters only. In JSON the others are written as escapes, which every parser gives back: a terminal
never sees a control character, and no line breaks but at its end.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from doorbell_postgres.contract import Message

_SUSPECT = re.compile(r"[^ -~]+")


def human(text: str) -> None:
    """One line; `text` has been sanitised. What the terminal's encoding lacks is shown as an escape."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    _stdout().write((text + "\n").encode(encoding, "backslashreplace"))


def json_line(value: Mapping[str, Any]) -> None:
    """One JSON object on one line, in UTF-8 whatever the locale."""
    _stdout().write((one_line(json.dumps(value, ensure_ascii=False)) + "\n").encode())


def message(msg: Message) -> Mapping[str, Any]:
    """The message as it is, for `json_line`. `created_at` is in seconds since the epoch."""
    return {
        "channel": msg.channel,
        "seq": msg.seq,
        "sender": msg.sender,
        "body": msg.body,
        "created_at": msg.created_at,
        "headers": dict(msg.headers),
        "idempotency_key": msg.idempotency_key,
    }


def one_line(text: str) -> str:
    r"""JSON text with every character that is not printable as \uXXXX. Such characters occur inside strings only."""
    return text if text.isprintable() else _SUSPECT.sub(lambda run: "".join(map(_escaped, run[0])), text)


def _escaped(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1] if ord(char) > 0x7F else f"\\u{ord(char):04x}"


def flush() -> None:
    """Raises OSError when what was printed did not get out."""
    if sys.stdout is not None:
        sys.stdout.flush()


def forget() -> None:
    """stdout is broken: what is left in its buffer goes nowhere, instead of into a complaint at exit."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _stdout() -> BinaryIO:
    if sys.stdout is None:
        raise OSError("stdout is closed, and there is something to print; redirect it to /dev/null to drop it")
    return sys.stdout.buffer
