"""Request traces: columns in a query, or a local file in one of three formats.

The formats are CSV with arrival_s, input_tokens, output_tokens and optionally prefix_tokens;
Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens); and JSON lines with the names of the first
format or of Mooncake's (timestamp in ms, input_length, output_length, and hash_ids of blocks of 512
tokens). Blocks of earlier requests are in the prefix cache.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from hp_tool.catalog import documents
from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.domain.fields import bounds_of
from hp_tool.domain.inference import MAX_TRACE_REQUESTS, LogNormalTokens, TraceSpec
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError, NotFoundError

FIELD = "inference.trace"
MAX_FILE_BYTES = 64 * 2**20
SAMPLE_SEED = 5_000
"""Number of requests to draw if both lengths are distributions."""
BLOCK_TOKENS = 512
"""Tokens in each of Mooncake's hashed blocks."""
NAMES = {
    "arrival_s": ("arrival_s", "timestamp", "TIMESTAMP"),
    "input_tokens": ("input_tokens", "input_length", "ContextTokens"),
    "output_tokens": ("output_tokens", "output_length", "GeneratedTokens"),
}
"""Names of each column in hp_tool's format, in Mooncake's and in Azure's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival; each column has shape (n,)."""

    name: str
    input_tokens: IntArray
    output_tokens: IntArray
    prefix_tokens: IntArray
    """Input tokens found in the prefix cache."""
    arrival_s: FloatArray | None = None
    """Arrival times in seconds since the first request; None without arrival times."""

    @property
    def rate_per_second(self) -> float | None:
        """Mean number of requests per second. None if there are no arrival times, or if all
        requests arrive together.
        """
        if self.arrival_s is None or self.arrival_s[-1] <= 0.0:
            return None
        return (len(self.arrival_s) - 1) / float(self.arrival_s[-1])

    @property
    def prefix_share(self) -> float:
        """Fraction of all input tokens that are in the prefix cache, at most 0.99."""
        return min(float(self.prefix_tokens.sum() / self.input_tokens.sum()), 0.99)

    def spec(self) -> TraceSpec:
        """Return the first MAX_TRACE_REQUESTS requests as columns, to pass them to other
        processes.
        """
        columns = {name: getattr(self, name) for name in TraceSpec.__slots__}
        return TraceSpec(
            **{
                name: tuple(column[:MAX_TRACE_REQUESTS].tolist())
                for name, column in _columns(columns)
            }
        )


def request_trace(trace: str | TraceSpec) -> Trace:
    """Return the trace that a query names or contains.

    A string is a path. The file is read only if the path is an OwnFile.

    Raises:
        InputError: The trace is malformed; the field is inference.trace.
    """
    if isinstance(trace, TraceSpec):
        return _check_trace("inline", _draw_requests(trace))
    if not isinstance(trace, OwnFile):
        raise InputError(
            f"Trace {trace[:200]!r} is not registered, and file paths are not accepted "
            "here. Send its columns inline (arrival_s, input_tokens, output_tokens) or "
            "register it.",
            field=FIELD,
        )
    path = Path(trace)
    if not path.exists():
        raise NotFoundError(f"trace {str(trace)[:200]!r} does not exist", field=FIELD)
    try:
        if path.suffix in documents.SUFFIXES:
            return _check_trace(path.name, documents.read(path))
        with path.open(encoding="utf-8", newline="") as stream:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InputError(f"{path} exceeds {MAX_FILE_BYTES:,} bytes")
            rows: Iterable[Mapping[str, Any]] = map(json.loads, filter(str.strip, stream))
            return _trace_from_rows(
                path.name, csv.DictReader(stream) if path.suffix == ".csv" else rows
            )
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is not a trace: {error}", field=FIELD) from None
    except InputError as error:
        raise InputError(error.message, field=FIELD, code=error.code) from None


def _draw_requests(trace: TraceSpec) -> dict[str, Any]:
    """Return the columns, with each distribution replaced by one length per request.

    The lengths are quantiles of the distribution, in shuffled order.
    """
    columns = {name: getattr(trace, name) for name in TraceSpec.__slots__}
    lengths = [len(column) for column in columns.values() if isinstance(column, tuple)]
    n = max(lengths, default=SAMPLE_SEED)
    z = np.array([NormalDist().inv_cdf((place + 0.5) / n) for place in range(n)])
    for seed, (name, column) in enumerate(columns.items()):
        if isinstance(column, LogNormalTokens):
            tokens = np.rint(column.median * np.exp(column.sigma * z))
            columns[name] = np.random.default_rng(seed).permutation(
                np.clip(tokens, 1, column.longest)
            )
    return columns


def _trace_from_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Trace:
    """Return the trace in the rows of a file. The column names in the first row determine the
    format.
    """
    columns: dict[str, list[Any]] = {column: [] for column in (*NAMES, "prefix_tokens")}
    keys: dict[str, str] = {}
    seen: set[Any] = set()
    for row in rows:
        if not keys:
            keys = {
                column: next((each for each in known if each in row), "")
                for column, known in NAMES.items()
            }
            if missing := [column for column, key in keys.items() if not key]:
                raise InputError(
                    f"{name}: missing column {' or '.join(missing)}; its columns are "
                    f"{', '.join(map(str, row))[:200]}"
                )
        columns["arrival_s"].append(_seconds(row[keys["arrival_s"]], unit=keys["arrival_s"]))
        columns["input_tokens"].append(int(row[keys["input_tokens"]]))
        columns["output_tokens"].append(int(row[keys["output_tokens"]]))
        columns["prefix_tokens"].append(
            int(row.get("prefix_tokens") or 0)
            + _count_cached_tokens(row.get("hash_ids") or (), seen)
        )
    return _check_trace(name, columns)


def _seconds(value: Any, *, unit: str) -> float:
    if unit == "TIMESTAMP" and not str(value).replace(".", "", 1).isdigit():
        date, _, fraction = str(value).strip().partition(".")
        return datetime.fromisoformat(f"{date}+00:00").timestamp() + float(
            f"0.{fraction.rstrip('Z') or 0}"
        )
    return float(value) * (1e-3 if unit == "timestamp" else 1.0)


def _count_cached_tokens(blocks: Iterable[Any], seen: set[Any]) -> int:
    known, ahead = 0, True
    for block in blocks:
        ahead = ahead and block in seen
        known += ahead
        seen.add(block)
    return known * BLOCK_TOKENS


def _check_trace(name: str, columns: Mapping[str, Any]) -> Trace:
    """Return the columns as arrays, in order of arrival and within TraceSpec's bounds."""
    lengths = {column: len(values) for column, values in _columns(columns)}
    if (
        not lengths.get("input_tokens")
        or len(set(lengths.values())) != 1
        or "output_tokens" not in lengths
    ):
        counts = ", ".join(f"{column} has {count}" for column, count in lengths.items())
        raise InputError(
            f"{name}: input_tokens and output_tokens must have equal length: "
            f"{counts or 'the trace is empty'}",
            field=FIELD,
        )
    bounds = bounds_of(TraceSpec)
    arrays = {}
    for column, values in _columns(columns):
        low, high = bounds[column]
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or not np.all(
            (array >= (low if column != "arrival_s" else -high)) & (array <= high)
        ):
            raise InputError(f"{name}: {column} must be from {low:g} to {high:g}", field=FIELD)
        arrays[column] = array
    order = (
        np.argsort(arrays["arrival_s"], kind="stable")
        if "arrival_s" in arrays
        else np.arange(lengths["input_tokens"])
    )
    inputs, outputs = (
        arrays[column][order].astype(np.int64) for column in ("input_tokens", "output_tokens")
    )
    prefix = arrays.get("prefix_tokens", np.zeros(len(inputs)))[order].astype(np.int64)
    arrival = (
        arrays["arrival_s"][order] - arrays["arrival_s"].min() if "arrival_s" in arrays else None
    )
    return Trace(
        name=name,
        input_tokens=inputs,
        output_tokens=outputs,
        prefix_tokens=np.minimum(prefix, inputs - 1),
        arrival_s=arrival,
    )


def _columns(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return (
        (column, columns[column])
        for column in TraceSpec.__slots__
        if columns.get(column) is not None
    )
