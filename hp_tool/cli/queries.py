"""A query from the command line: a file, or flags for the common cases; both end in the same mapping and parser."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from hp_tool.api import SHORT_KEYS
from hp_tool.domain.query import Query
from hp_tool.errors import InputError

QueryArgument = Annotated[str | None, typer.Argument(metavar="QUERY", help="YAML or JSON file; - reads standard input.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Model = Annotated[str | None, typer.Option(help="Catalogue name or path to a config.json.")]
Gpu = Annotated[str | None, typer.Option(help="Catalogue name, such as h100-sxm-80gb.")]
NumGpus = Annotated[int | None, typer.Option(help="Devices in all.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens a sequence.")]
GlobalBatchSize = Annotated[int | None, typer.Option(help="Sequences per optimizer step.")]
Precision = Annotated[str | None, typer.Option(help="Matmul inputs: bf16, fp16, ...")]
TotalTokens = Annotated[float | None, typer.Option(help="Length of the whole training; adds days and cost.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of a query by its path, such as parallel.micro_batch_size=[1,2]."),
]


def read_query(path: str | None, flags: dict[str, Any], settings: list[str] | None) -> Query:
    """The file's query with flags laid over it, or a training query made of flags alone. Raises InputError."""
    from hp_tool.queries import schema

    given = overrides(flags, settings)
    if path is None:
        if not given:
            raise InputError(
                "no query: name a file, or give at least --model, --gpu, --num-gpus, --sequence-length, --global-batch-size"
            )
        return schema.parse_own_query(schema.lay({"kind": "training"}, given))
    text = read_text(path)
    return schema.parse_own_query(schema.lay(schema.parse_mapping(text), given) if given else text)


def overrides(flags: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """Values by dotted path that flags and --set give. Raises InputError."""
    given = {SHORT_KEYS[name]: value for name, value in flags.items() if value is not None}
    for setting in settings or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise InputError(f"--set {setting}: write KEY=VALUE, such as parallel.zero_stage=1", field="--set")
        given[key] = _value(setting, value)
    return given


def read_text(path: str) -> str | bytes:
    """The file's content, or standard input for `-`; bounded."""
    from hp_tool.documents import MAX_FILE_BYTES
    from hp_tool.documents import read_text as read_file

    return standard_input().read(MAX_FILE_BYTES) if path == "-" else read_file(Path(path))


def standard_input() -> BinaryIO:
    """Raises InputError where it is closed."""
    if sys.stdin is None:
        raise InputError("standard input is closed; name a file in place of -")
    return sys.stdin.buffer


def read_lines(path: str) -> Iterator[bytes]:
    """The lines of a file, or of standard input for `-`, without blank ones. Raises InputError for one that is too long."""
    from hp_tool.documents import MAX_FILE_BYTES

    try:
        with standard_input() if path == "-" else Path(path).open("rb") as stream:
            while line := stream.readline(MAX_FILE_BYTES + 1):
                if len(line) > MAX_FILE_BYTES:
                    raise InputError(f"a line of {path} is longer than {MAX_FILE_BYTES:,} bytes", code="too_large")
                if line.strip():
                    yield line
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _value(setting: str, text: str) -> Any:
    """What stands behind KEY= as YAML reads it: a number, a word, a list."""
    import yaml

    from hp_tool.documents import load_yaml

    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or error
        raise InputError(f"--set {setting}: the value is not YAML: {reason}", field="--set") from None
