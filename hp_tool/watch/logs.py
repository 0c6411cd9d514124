"""Read step times from growing logs, line by line, with bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hp_tool.cluster.logs import MAX_LINE, READERS, LogFacts, read_line
from hp_tool.domain.watch import Expected, StepBatch, StepReport, Verdict
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.watch.job import Job, Source
from hp_tool.watch.words import verdict_sentences

MAX_FILES = 4096
REMEMBERED_STEPS = 8
MAX_WORK = 1e15
"""Maximum number of samples or tokens per step that `StepReport` accepts."""
_HUGGING_FACE = re.compile(r"\{'loss': '?[\d.e+-]+'?, .*'epoch': ")
"""Step line of Hugging Face's Trainer, which contains no step time."""


@dataclass(slots=True, kw_only=True)
class LogSteps:
    """Read the steps of one log, line by line."""

    reader: str | None = None
    """One of READERS. None uses the first one that finds a step in a line."""
    workload: TrainingWorkload | None = None
    """Used to convert rates to seconds. Without it, step times are inverse rates in arbitrary
    units.
    """
    num_gpus: int = 1
    in_seconds: bool = True
    """True if the newest step time is in seconds, False if it is an inverse rate."""
    facts: LogFacts = field(default_factory=LogFacts)
    facts_are_rates: bool = False
    """True if the newest figure is a rate, which already accounts for a step's work."""
    hugging_face: bool = False
    """Whether the log has step lines of Hugging Face's Trainer."""
    seq: int = 0
    unread: int = 0
    """Number of JSON lines without a step time, if the log consists of JSON lines."""
    printed: dict[int | None, list[int]] = field(default_factory=dict)
    """Newest step numbers by rank. A repeated number was printed by another rank; a smaller one
    follows a restart from a checkpoint.
    """

    def feed(self, line: str) -> tuple[int | None, StepReport] | None:
        """Parse a line. Return the rank and report if it completes a step, else None.

        The rank is None if the line does not name it.
        """
        self.hugging_face = self.hugging_face or _HUGGING_FACE.search(line[:MAX_LINE]) is not None
        for reader in (self.reader,) if self.reader else READERS:
            read_line(line, self.facts, reader=reader)
            if (step := self._pop_step()) is not None:
                self.reader = reader
                rank, parts, work = _json_extras(line) if reader == "json" else (None, {}, {})
                if reader != "json" and self.facts.samples_per_step and not self.facts_are_rates:
                    work = {"samples": self.facts.samples_per_step}
                printed = self.printed.setdefault(rank, [])
                if step[1] in printed:
                    return None
                if step[1] is not None:
                    self.printed[rank] = [*printed[1 - REMEMBERED_STEPS :], step[1]]
                self.seq += 1
                return rank, StepReport(
                    seq=self.seq, step_s=step[0], step=step[1], parts_s=parts, **work
                )
        self.unread += self.reader == "json" and line.lstrip().startswith("{")
        return None

    def _pop_step(self) -> tuple[float, int | None] | None:
        """Return the newest step's time and number, and remove it from the facts."""
        facts = self.facts
        kinds = [
            kind
            for kind in ("step_s", "tokens_per_second_per_gpu", "samples_per_second")
            if getattr(facts, kind)
        ]
        if not kinds:
            return None
        self.facts_are_rates = kinds[0] != "step_s"
        if self.workload is not None:
            times_s, ends_at = facts.step_times_s(self.workload, num_gpus=self.num_gpus)
        else:
            values = getattr(facts, kinds[0])
            self.in_seconds = kinds[0] == "step_s"
            times_s, ends_at = (
                values if self.in_seconds else [1.0 / rate for rate in values],
                facts.ends_at.get(kinds[0], []),
            )
        step = times_s[-1], ends_at[-1] if ends_at else None
        for kind in kinds:
            getattr(facts, kind).clear()
        facts.ends_at.clear()
        facts.losses.clear()
        return step


def _json_extras(line: str) -> tuple[int | None, dict[str, float], dict[str, float]]:
    """Return the rank, parts and work in a JSON line; None or empty if missing."""
    try:
        record = json.loads(line[line.find("{") :])
    except (ValueError, RecursionError):
        return None, {}, {}
    parts, rank = record.get("parts_s"), record.get("rank")
    seconds = (
        {
            str(name)[:200]: float(s)
            for name, s in parts.items()
            if isinstance(s, int | float) and s >= 0.0
        }
        if isinstance(parts, dict)
        else {}
    )
    work = {
        name: float(record[name]) for name in ("samples", "tokens") if _is_work(record.get(name))
    }
    return (
        rank if isinstance(rank, int) and rank >= 0 else None,
        seconds,
        work if "step_s" in record else {},
    )


def _is_work(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= MAX_WORK
    )


@dataclass(slots=True, kw_only=True)
class Watched:
    """A watched job that is read from one or more logs."""

    expected: Expected | None = None
    in_seconds: bool = True
    """False if step times are in arbitrary units. Then no pace is reported."""
    job: Job = field(default_factory=Job)
    sources: dict[tuple[int, int | None], Source] = field(default_factory=dict)
    """Processes by (index of the log, rank named in its lines)."""

    def add(self, log: int, rank: int | None, report: StepReport) -> bool:
        """Add a step. Return True if the job's pace changed.

        The process that reports first determines the pace of the job.
        """
        key = (log, rank)
        source = self.sources.setdefault(key, Source())
        source.take(
            StepBatch(source=str(log), rank=log if rank is None else rank, reports=(report,))
        )
        return key == next(iter(self.sources)) and self.job.add([report])

    def verdict(self) -> Verdict:
        """Return the verdict after the newest step."""
        verdict = self.job.verdict(expected=self.expected, sources=list(self.sources.values()))
        if self.in_seconds:
            return verdict
        verdict = replace(verdict, now=None, was=None)
        return replace(verdict, text=verdict_sentences(verdict))


def find_log_files(places: list[str]) -> list[Path]:
    """Return the log files at these paths. Files in folders are in natural order.

    Raises:
        InputError: There are no files, or too many.
    """
    files = [file for place in places for file in _files(Path(place))]
    if not files:
        raise InputError(f"No log files in {', '.join(places)}.", field="LOG")
    if len(files) > MAX_FILES:
        raise InputError(
            f"Found {len(files):,} log files; the limit is {MAX_FILES:,}. Name fewer.",
            field="LOG",
            code="too_many",
        )
    return files


def _files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from sorted((path for path in place.rglob("*") if path.is_file()), key=_natural_order)
    elif place.exists():
        yield place
    else:
        raise InputError(f"No log file at {place}.", field="LOG")


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts rank10 after rank9."""
    return [
        (int(piece), "") if piece.isdigit() else (-1, piece)
        for piece in re.split(r"(\d+)", str(path))
    ]
