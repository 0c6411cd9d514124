"""`hp-tool`: the command line. Exit codes: 0 ok, 1 internal error, 2 bad input, 3 nothing feasible,
4 watched job is slower.
"""

import atexit
import gc
import io
import json
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

import hp_tool
from hp_tool.cli.batch import batch
from hp_tool.cli.calibrate import calibrate, measurements
from hp_tool.cli.catalog import clusters, fields, gpus, models, recipes, trainers
from hp_tool.cli.db import db, doctor
from hp_tool.cli.exchange import FormatsCommand, export, import_
from hp_tool.cli.explain import explain
from hp_tool.cli.predict import estimate, recommend, size
from hp_tool.cli.printable import escape_control_characters
from hp_tool.cli.tune import tune
from hp_tool.cli.watch import watch
from hp_tool.errors import (
    ConflictError,
    HpToolError,
    InputError,
    LimitError,
    MissingExtraError,
    NotFoundError,
)

_USAGE: type[Exception] = typer.BadParameter.__bases__[0]
"""click's UsageError: an unknown option or command, or a value of the wrong type."""
BAD_INPUT = (InputError, NotFoundError, MissingExtraError, ConflictError, LimitError)


COMMANDS: dict[str, Callable[..., None]] = {
    **{
        command.__name__: command
        for command in (
            estimate,
            recommend,
            explain,
            tune,
            size,
            calibrate,
            measurements,
            batch,
            watch,
        )
    },
    **{
        command.__name__: command
        for command in (models, gpus, clusters, recipes, trainers, fields, doctor)
    },
}


def build(only: str | None = None) -> typer.Typer:
    """Return the application with all commands, including those of other installed packages.

    With `only`, it contains only that command of COMMANDS and starts faster.
    """
    app = typer.Typer(
        name="hp-tool",
        help="Choose the parallel layout of a transformer: predict, measure a few runs, calibrate.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    for name, command in COMMANDS.items():
        if only in (None, name):
            app.command()(command)
    if only is not None:
        return app
    import importlib.metadata

    app.command(cls=FormatsCommand)(export)
    app.command(name="import", cls=FormatsCommand)(import_)
    app.add_typer(db, name="db")
    for entry in importlib.metadata.entry_points(group="hp_tool.commands"):
        entry.load()(app)
    return app


def _version(value: bool) -> None:
    if value:
        typer.echo(hp_tool.__version__)
        raise typer.Exit


def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line and exit."""
    gc.set_threshold(200_000)  # Imports and validators create many long-lived objects.
    atexit.register(gc.freeze)  # Otherwise the interpreter scans all objects at exit.
    try:
        first = sys.argv[1] if len(sys.argv) > 1 else None
        code = build(first if first in COMMANDS else None)(standalone_mode=False)
    except HpToolError as error:
        where = f" ({error.field})" if error.field and error.field not in error.message else ""
        sys.stderr.write(
            f"hp-tool: "
            f"{escape_control_characters(error.message)}{escape_control_characters(where)}\n"
        )
        _print_json_error(error)
        sys.exit(2 if isinstance(error, BAD_INPUT) else 1)
    except _USAGE as error:
        from typer import rich_utils

        rich_utils.rich_format_error(error)  # type: ignore[arg-type]
        message = error.format_message()  # type: ignore[attr-defined]
        _print_json_error(
            InputError(message, field=getattr(error, "option_name", None), code="usage")
        )
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    except SystemExit as stop:
        # When the reader of a pipe exits (`| head`), click raises this and replaces standard
        # output.
        sys.exit(stop.code if isinstance(sys.stdout, io.TextIOBase) else 0)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # A full disk or a lost device. Commands report files that they cannot open themselves.
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"hp-tool: {where}{error.strerror or error}\n")
        sys.stdout = None  # flushing it at exit would fail again  # type: ignore[assignment]
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _print_json_error(error: HpToolError) -> None:
    if "--json" in sys.argv:
        typer.echo(json.dumps({"id": None, "status": "error", "error": error.as_dict()}))
