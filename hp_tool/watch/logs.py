"""Step times of growing logs, line by line, in bounded memory."""

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
from hp_tool.watch.words import sentences

MOST_FILES = 4096
NEWEST = 8
MAX_WORK = 1e15
"""Samples or tokens of a step; `StepReport` takes no more."""
_HUGGING_FACE = re.compile(r"\{'loss': '?[\d.e+-]+'?, .*'epoch': ")
"""What Hugging Face's Trainer prints of a step: no time."""


@dataclass(slots=True, kw_only=True)
class LogSteps:
    """Reads the steps of one log as its lines come."""

    reader: str | None = None
    """One of READERS; None: the first that recognises a line."""
    workload: TrainingWorkload | None = None
    """Turns rates into seconds; without it a rate gives times in a unit of its own, which tells
    changes all the same.
    """
    num_gpus: int = 1
    in_seconds: bool = True
    """Whether the newest step was a time, and not a rate in a unit of its own."""
    facts: LogFacts = field(default_factory=LogFacts)
    facts_are_rates: bool = False
    """Whether the newest figure was a rate, which counts the work of a step already."""
    hugging_face: bool = False
    """Whether a line was Hugging Face's of a step."""
    seq: int = 0
    unread: int = 0
    """Lines of JSON without a step time, in a log whose steps are lines of JSON."""
    printed: dict[int | None, list[int]] = field(default_factory=dict)
    """The trainer's numbers of the newest steps, by rank. One of them that comes again was printed
    by another rank; any other that goes back follows a restart from a checkpoint.
    """

    def feed(self, line: str) -> tuple[int | None, StepReport] | None:
        """The step that this line completes, and the rank that it names; None for any other
        line.
        """
        self.hugging_face = self.hugging_face or _HUGGING_FACE.search(line[:MAX_LINE]) is not None
        for reader in (self.reader,) if self.reader else READERS:
            read_line(line, self.facts, reader=reader)
            if (step := self._taken()) is not None:
                self.reader = reader
                rank, parts, work = _own_words(line) if reader == "json" else (None, {}, {})
                if reader != "json" and self.facts.samples_per_step and not self.facts_are_rates:
                    work = {"samples": self.facts.samples_per_step}
                printed = self.printed.setdefault(rank, [])
                if step[1] in printed:
                    return None
                if step[1] is not None:
                    self.printed[rank] = [*printed[1 - NEWEST :], step[1]]
                self.seq += 1
                return rank, StepReport(
                    seq=self.seq, step_s=step[0], step=step[1], parts_s=parts, **work
                )
        self.unread += self.reader == "json" and line.lstrip().startswith("{")
        return None

    def _taken(self) -> tuple[float, int | None] | None:
        """The newest figure, as seconds, with its step; the facts forget both."""
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
                values if self.in_seconds else [1.0 / each for each in values],
                facts.ends_at.get(kinds[0], []),
            )
        step = times_s[-1], ends_at[-1] if ends_at else None
        for kind in kinds:
            getattr(facts, kind).clear()
        facts.ends_at.clear()
        facts.losses.clear()
        return step


def _own_words(line: str) -> tuple[int | None, dict[str, float], dict[str, float]]:
    """Return the rank, the parts and the work of a JSON line, if it has them."""
    try:
        words = json.loads(line[line.find("{") :])
    except (ValueError, RecursionError):
        return None, {}, {}
    parts, rank = words.get("parts_s"), words.get("rank")
    own = (
        {
            str(name)[:200]: float(s)
            for name, s in parts.items()
            if isinstance(s, int | float) and s >= 0.0
        }
        if isinstance(parts, dict)
        else {}
    )
    work = {name: float(words[name]) for name in ("samples", "tokens") if _is_work(words.get(name))}
    return (
        rank if isinstance(rank, int) and rank >= 0 else None,
        own,
        work if "step_s" in words else {},
    )


def _is_work(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= MAX_WORK
    )


@dataclass(slots=True, kw_only=True)
class Watched:
    """A job that is read from one or several logs."""

    expected: Expected | None = None
    in_seconds: bool = True
    """False: the steps are in a unit of their own, and no pace is told."""
    job: Job = field(default_factory=Job)
    sources: dict[tuple[int, int | None], Source] = field(default_factory=dict)
    """By number of the log and the rank that its lines name."""

    def add(self, log: int, rank: int | None, report: StepReport) -> bool:
        """Take a step of a log; return whether the job's pace changed. The first process that is
        heard stands for the job.
        """
        key = (log, rank)
        source = self.sources.setdefault(key, Source())
        source.take(
            StepBatch(source=str(log), rank=log if rank is None else rank, reports=(report,))
        )
        return key == next(iter(self.sources)) and self.job.add([report])

    def verdict(self) -> Verdict:
        """What is to be said after the newest step."""
        verdict = self.job.verdict(expected=self.expected, sources=list(self.sources.values()))
        if self.in_seconds:
            return verdict
        verdict = replace(verdict, now=None, was=None)
        return replace(verdict, text=sentences(verdict))


def log_files(places: list[str]) -> list[Path]:
    """The files that the places name, those of folders sorted by path. Raises InputError."""
    files = [file for place in places for file in _files(Path(place))]
    if not files:
        raise InputError(f"no log in {', '.join(places)}", field="LOG")
    if len(files) > MOST_FILES:
        raise InputError(
            f"{len(files):,} files are more than the {MOST_FILES:,} that are read",
            field="LOG",
            code="too_many",
        )
    return files


def _files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from sorted((each for each in place.rglob("*") if each.is_file()), key=_natural)
    elif place.exists():
        yield place
    else:
        raise InputError(f"no log at {place}", field="LOG")


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts rank10 behind rank9."""
    return [
        (int(each), "") if each.isdigit() else (-1, each) for each in re.split(r"(\d+)", str(path))
    ]
