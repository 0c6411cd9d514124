"""`hp-tool`: the command line. Exit codes: 0 ok, 1 internal error, 2 bad input, 3 nothing feasible."""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

import hp_tool
from hp_tool.cli.batch import batch
from hp_tool.cli.calibrate import calibrate, measurements
from hp_tool.cli.catalog import clusters, gpus, models, recipes, trainers
from hp_tool.cli.db import db, doctor
from hp_tool.cli.exchange import export, import_
from hp_tool.cli.predict import estimate, recommend, size
from hp_tool.cli.tune import tune
from hp_tool.errors import ConflictError, HpToolError, InputError, LimitError, MissingExtraError, NotFoundError

BAD_INPUT = (InputError, NotFoundError, MissingExtraError, ConflictError, LimitError)


def build() -> typer.Typer:
    """The application, with our commands and those of installed packages."""
    app = typer.Typer(
        name="hp-tool",
        help="Choose the parallelism of large transformers: predict, run little, measure, calibrate.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    commands: tuple[Callable[..., None], ...] = (
        *(estimate, recommend, tune, size, calibrate, measurements, batch),
        *(models, gpus, clusters, recipes, trainers, doctor, export),
    )
    for command in commands:
        app.command()(command)
    app.command(name="import")(import_)
    app.add_typer(db, name="db")
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
        if "--json" in sys.argv:  # whoever parses standard output finds there what an answer's status says
            typer.echo(json.dumps({"id": None, "status": "error", "error": error.as_dict()}))
        sys.exit(2 if isinstance(error, BAD_INPUT) else 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a full disk or a lost device; commands report files that they cannot open themselves
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"hp-tool: {where}{error.strerror or error}\n")
        sys.stdout = None  # flushing it at exit would fail again  # type: ignore[assignment]
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
