"""Options shared by several commands, and the query that they describe: a file, flags and --set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError, InputError
from hp_tool.extras import require
from hp_tool.questions.short_names import COMMON

if TYPE_CHECKING:
    from hp_tool.questions.training.calibrated import Calibrations

QueryArgument = Annotated[
    str | None, typer.Argument(metavar="QUERY", help="YAML or JSON file; - reads standard input.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output.")
]
Model = Annotated[str | None, typer.Option(help="Catalogue name or path to a config.json.")]
Gpu = Annotated[str | None, typer.Option(help="Catalogue name, such as h100-sxm-80gb.")]
NumGpus = Annotated[int | None, typer.Option(help="Total number of devices.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
GlobalBatchSize = Annotated[int | None, typer.Option(help="Sequences per optimizer step.")]
Precision = Annotated[
    str | None, typer.Option(help="Precision of matmul inputs: bf16, fp16, fp8, ...")
]
TotalTokens = Annotated[
    float | None, typer.Option(help="Length of the training in tokens; adds days and cost.")
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the query by its path, such as parallel.micro_batch_size=[1,2].",
    ),
]
CalibrationOption = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration",
        help="Correct predictions with the stored calibration of the cluster, if any.",
    ),
]


def read_query(path: str | None, flags: dict[str, Any], settings: list[str] | None) -> Query:
    """Return the query in the file, with flags and --set applied. Without a file, return a training
    query from flags and --set.

    Raises:
        InputError: The query is invalid.
    """
    from hp_tool.questions import schema

    changes = query_overrides(flags, settings)
    if path is None:
        if not changes:
            raise InputError(
                "no query given; pass a file, or at least --model, --gpu, --num-gpus, "
                "--sequence-length, --global-batch-size"
            )
        return schema.parse_own_query(schema.set_paths({"kind": "training"}, changes))
    text = read_text(path)
    return schema.parse_own_query(
        schema.set_paths(schema.parse_mapping(text), changes) if changes else text
    )


def query_flags(context: typer.Context) -> dict[str, Any]:
    """Return the command's flags that set query keys, such as --model."""
    return {name: value for name, value in context.params.items() if name in COMMON}


def query_overrides(flags: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """Return the values of flags and --set, by the dotted path of the key.

    Raises:
        InputError: A value is invalid.
    """
    changes = {COMMON[name]: value for name, value in flags.items() if value is not None}
    for setting in settings or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise InputError(
                f"--set {setting}: write KEY=VALUE, such as parallel.zero_stage=1", field="--set"
            )
        changes[key] = read_yaml(
            value, refusal=f"--set {setting}: the value is not YAML", field="--set"
        )
    return changes


def read_text(path: str) -> str | bytes:
    """Return the content of a file. For `-`, read at most MAX_FILE_BYTES from standard input."""
    from hp_tool.catalog.documents import MAX_FILE_BYTES
    from hp_tool.catalog.documents import read_text as read_file

    return standard_input().read(MAX_FILE_BYTES) if path == "-" else read_file(Path(path))


def read_mapping(path: str) -> dict[str, Any]:
    """Return the YAML or JSON mapping in a file or standard input. Its keys are not validated."""
    from hp_tool.questions import schema

    return schema.parse_mapping(read_text(path))


def standard_input() -> BinaryIO:
    """Return standard input.

    Raises:
        InputError: Standard input is closed.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed; name a file instead of -")
    return sys.stdin.buffer


def read_lines(path: str) -> Iterator[bytes]:
    """Yield the non-blank lines of a file; for `-`, those of standard input.

    Raises:
        InputError: A line is too long.
    """
    from hp_tool.catalog.documents import MAX_FILE_BYTES

    try:
        with standard_input() if path == "-" else Path(path).open("rb") as stream:
            while line := stream.readline(MAX_FILE_BYTES + 1):
                if len(line) > MAX_FILE_BYTES:
                    raise InputError(
                        f"a line of {path} is longer than {MAX_FILE_BYTES:,} bytes",
                        code="too_large",
                    )
                if line.strip():
                    yield line
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def stored_calibrations(*, wanted: bool) -> Iterator[Calibrations | None]:
    """Return the newest calibrations in HP_DATABASE_URL or in the user's database file; None if
    there are none.

    If the database does not respond or the extra `search` is missing, print a warning and return
    None. Whether a SQLite file contains calibrations is checked without SQLAlchemy, which is slow
    to import.
    """
    from hp_tool import store

    if not wanted or not store.may_hold_calibrations(store.database_url()):
        yield None
        return
    from hp_tool.loop.learning import StoredCalibrations

    try:
        require("search", by="a stored calibration")
        opened = store.open_store(store.database_url())
    except HpToolError as error:
        sys.stderr.write(f"not calibrated: {error.message}\n")
        yield None
        return
    with closing(opened):
        yield StoredCalibrations(store=opened)


def read_yaml(text: str, *, refusal: str, field: str | None = None, code: str | None = None) -> Any:
    """Return the value of a YAML text, such as a number, a word or a list.

    Raises:
        InputError: The text is not YAML. The message is `refusal` with the reason.
    """
    import yaml

    from hp_tool.catalog.documents import load_yaml

    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(
            f"{refusal}: {getattr(error, 'problem', None) or error}", field=field, code=code
        ) from None
