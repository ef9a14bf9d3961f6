"""Untrusted text to one safe line.

What this removes is mechanical: escape sequences, control and format characters, line breaks. Repr-quoting keeps a body
from forging the line's own skeleton. It does not make the words trustworthy: a sentence that reads like an order
passes, and whoever acts on wake lines has to take everything behind `[untrusted]` for data.
"""

from __future__ import annotations

import re
import unicodedata

from doorbell_postgres.contract import Message
from doorbell_postgres.errors import InvalidInput

FIELD_LEN = 64
WAKE_LEN = 160

# Text that is no longer is looked at as a whole: a ring waits for it, and a character at a time takes ten times as long.
PLAIN = 4_096
# CSI, OSC and two-character escapes in their 7-bit forms. An OSC without its end is left to the control-character rule.
_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: parameters, intermediates, final
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC … BEL or ST
    r"|[@-Z\\^_]"
    r")"
)


def sanitize(text: str, *, max_len: int = WAKE_LEN) -> str:
    """`text` as one printable line of at most `max_len` characters; longer text ends in "...".

    Takes any str, lone surrogates included. Raises InvalidInput when `max_len` is under 4: no room for a cut.
    """
    if max_len < 4:
        raise InvalidInput(f"max_len is {max_len}; it must be at least 4, room for one character and '...'.")
    if len(text) <= PLAIN and text.isprintable():  # so its only white space is the blank
        plain = " ".join(text.split())
        return plain if len(plain) <= max_len else plain[: max_len - 3].rstrip() + "..."
    shown: list[str] = []
    gap = False
    for char in _ESCAPE.sub("", text):
        if char.isspace() or unicodedata.category(char)[0] == "C":
            gap = bool(shown)
            continue
        if gap:
            shown.append(" ")
            gap = False
        shown.append(char)
        if len(shown) > max_len:  # stops here whatever follows: a body may have millions of characters
            return "".join(shown[: max_len - 3]).rstrip() + "..."
    return "".join(shown)


def wake_line(msg: Message, *, max_len: int = WAKE_LEN) -> str:
    """The line a harness shows for `msg`: where, from whom, and at most `max_len` characters of the body, quoted.

    `'events'#1 from 'ci': [untrusted] 'deploy finished'`
    """
    return line(msg.channel, msg.seq, msg.sender, msg.body, max_len=max_len)


def line(channel: str, seq: int, sender: str, body: str, *, max_len: int = WAKE_LEN) -> str:
    channel = sanitize(channel, max_len=FIELD_LEN)
    sender = sanitize(sender, max_len=FIELD_LEN)
    return f"{channel!r}#{seq} from {sender!r}: [untrusted] {sanitize(body, max_len=max_len)!r}"
