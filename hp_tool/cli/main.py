"""`hp-tool`: the command line. Thin: parse, call, print. Exit 0 ok, 1 our fault, 2 bad input, 3 nothing feasible."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import NoReturn

import typer

import hp_tool
from hp_tool.cli import batch, calibrate, catalog, db, doctor, estimate, export, import_, recommend, size, tune
from hp_tool.errors import ConflictError, HpToolError, InputError, LimitError, MissingExtraError, NotFoundError

BAD_INPUT = (InputError, NotFoundError, MissingExtraError, ConflictError, LimitError)


def build() -> typer.Typer:
    """The application with our commands and those that installed packages add."""
    app = typer.Typer(
        name="hp-tool",
        help="Choose the parallelism of large transformers: predict, run little, measure, calibrate.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for module in (estimate, recommend, tune, size, calibrate, batch, catalog, db, doctor, export, import_):
        module.register(app)
    for entry in importlib.metadata.entry_points(group="hp_tool.commands"):
        entry.load()(app)
    return app


def _version(value: bool) -> None:
    if value:
        typer.echo(hp_tool.__version__)
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> NoReturn:
    """Entry point of the console script."""
    try:
        build()()
    except HpToolError as error:
        where = f" ({error.field})" if error.field and error.field not in error.message else ""
        sys.stderr.write(f"hp-tool: {error.message}{where}\n")
        sys.exit(2 if isinstance(error, BAD_INPUT) else 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a full disk, a device that is gone; what commands open they name themselves
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"hp-tool: {where}{error.strerror or error}\n")
        sys.stdout = None  # what is left in it would fail again at the end  # type: ignore[assignment]
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
