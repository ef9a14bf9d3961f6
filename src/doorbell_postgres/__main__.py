"""Where the command begins: before anything is loaded, Ctrl-C and SIGTERM end the process at once and quietly."""

import os
import signal


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C, and so do we
            signal.signal(number, _leave)
    from doorbell_postgres.cli import main as command

    command()


def _leave(number: int, _: object) -> None:
    # Nothing to tidy up: what a command holds goes with its connection, and an exception would have to pass through
    # whatever is running just now.
    os._exit(128 + number)


if __name__ == "__main__":
    main()
