"""What all commands share: how they end, how they are given a database, and what they take for a number of seconds.

Exit codes: 0 done, 1 refused (one line on stderr), 2 usage or no DSN, 3 idle timeout, 4 unreachable; 130 Ctrl-C,
143 SIGTERM (both in `__main__`) and 141 when nobody reads the output any more: at once and quietly. A command returns its
code; None is 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import psycopg

from doorbell_postgres import __version__, calls, wire
from doorbell_postgres.cli import output
from doorbell_postgres.errors import DatabaseUnavailable, DoorbellError, InvalidInput
from doorbell_postgres.wakeline import sanitize

F = TypeVar("F", bound=Callable[..., Any])

DONE, REFUSED, USAGE, IDLE, UNREACHABLE = 0, 1, 2, 3, 4
INTERRUPTED, UNREAD, TERMINATED = 130, 141, 143

MOST_SECONDS = 10_000_000.0
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class _Doorbell(click.Group):
    """Turns whatever a command ends with into at most one line on stderr and an exit code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _log_to_stderr()  # in a process of our own, so not where `main.main` is called
        return self.main(*args, **kwargs)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        def run() -> Any:
            return super(_Doorbell, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        return sys.exit(_ended(run)) if standalone_mode else run()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            output.flush()  # done is what has been written
            return code
        except BrokenPipeError:  # here, since click would end with 1
            output.forget()
            return UNREAD


def _ended(run: Callable[[], Any]) -> int:
    try:
        code = run()
        return code if isinstance(code, int) else DONE
    except click.UsageError as exc:
        if exc.ctx is not None:
            click.echo(exc.ctx.get_usage(), err=True)
        hint = " An argument that begins with - goes behind --." if isinstance(exc, click.NoSuchOption) else ""
        return complain(f"{exc.format_message()}{hint} Help: {exc.ctx.command_path if exc.ctx else 'doorbell'} --help", USAGE)
    except click.ClickException as exc:
        return complain(exc.format_message(), exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except DatabaseUnavailable as exc:
        return complain(str(exc), UNREACHABLE)
    except DoorbellError as exc:
        return complain(str(exc), REFUSED)
    except psycopg.Error as exc:  # what the server said of it, such as a permission that is missing
        return complain(wire.why(exc), REFUSED)
    except OSError as exc:  # a full disk behind stdout, say
        output.forget()
        return complain(f"Input or output failed: {exc.strerror or exc}.", REFUSED)


def complain(text: str, code: int) -> int:
    """One printable line on stderr; returns the code."""
    with contextlib.suppress(OSError):  # nobody reads stderr: the code says it too
        click.echo(f"doorbell: {sanitize(text, max_len=1_000)}", err=True)
    return code


def _log_to_stderr() -> None:
    """Our warnings, such as a lost connection, a line each; what other packages log would only repeat them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("doorbell: %(message)s"))
    logging.getLogger("doorbell_postgres").addHandler(handler)
    logging.getLogger("doorbell_postgres").propagate = False
    logging.getLogger().addHandler(logging.NullHandler())


def with_units(text: str) -> int | None:
    """The seconds of a length of time such as 30d or 1d12h; None for anything else."""
    if re.fullmatch(r"(?:\d{1,9}[smhdw])+", text, re.A) is None:
        return None
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhdw])", text))


def seconds_option(name: str, *, default: float, zero: bool = False, help: str) -> Callable[[F], F]:
    """An option that is a number of seconds, or a length of time; bounded, because what waits here is to end."""

    def check(_: click.Context, __: click.Parameter, text: str) -> float:
        try:
            value = float(text if (found := with_units(text)) is None else found)
            calls.seconds("the value", value, zero=zero)
        except InvalidInput as exc:
            raise click.BadParameter(str(exc)) from None
        except ValueError:
            raise click.BadParameter(f"{text!r} is no number of seconds, and no length of time such as 90s or 1h30m.") from None
        if value > MOST_SECONDS:
            raise click.BadParameter(f"the value is {value:g} s; at most {MOST_SECONDS:,.0f} s are allowed.")
        return value

    return click.option(name, type=str, callback=check, default=default, show_default=True, metavar="SECONDS", help=help)


def dsn_of(given: str | None) -> str:
    """The command never starts a throwaway server: what it would read or write there nobody else could see."""
    named = given if given is not None else os.environ.get("DOORBELL_DSN")
    if named and named != wire.MEMORY:
        return wire.resolve(named)
    if named:
        why = "':memory:' is private to one process: nobody else would see what a command does there"
    elif given is not None:
        why = "--dsn is empty"
    else:
        why = "no database given" if named is None else "DOORBELL_DSN is set and empty"
    raise click.UsageError(f"{why}. Pass --dsn, or set DOORBELL_DSN: {wire.A_DSN}.")


dsn_option = click.option("--dsn", metavar="DSN", help="The database; default: the environment's DOORBELL_DSN.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, in UTF-8.")


@click.group(
    cls=_Doorbell,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "Exit codes: 0 done, 1 refused, 2 usage or no database given, 3 idle timeout, 4 database unreachable, "
        "130 Ctrl-C, 143 SIGTERM, 141 output not read to its end."
    ),
)
@click.version_option(__version__, prog_name="doorbell")
@click.pass_context
def main(ctx: click.Context) -> int | None:
    """Messages for agent sessions that crash: durable, on one Postgres, from any number of hosts.

    The database is named by --dsn or DOORBELL_DSN.

    \b
    Example: doorbell subscribe worker events
             doorbell wait worker && doorbell catch-up worker
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        return USAGE
    return None
