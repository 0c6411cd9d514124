"""Jobs whose folder nobody else sees: their files travel with them, and what they left comes back in what they print.

The job is run by `supervisor --attached`, which prints a marked line for each result and for how it ended.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.ports import LaunchPlan
from hp_tool.launchers import jobs, outcome, supervisor
from hp_tool.launchers.outcome import Ending

JOB = "job.json"
SUPERVISOR = "supervisor.py"
MAX_FILES_BYTES = 900_000
"""Of all files of one job: what an engine's own store takes."""
_LINE = re.compile(r"\n?" + re.escape(supervisor.MARK[0]) + r"(.*)" + re.escape(supervisor.MARK[1]) + r"\n?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """What a job has printed, taken apart."""

    log: str = ""
    """Its own words."""
    files: dict[str, str] = field(default_factory=dict)
    ended: dict[str, Any] | None = None
    """As the supervisor writes it; None where it was ended itself."""


def job_files(plan: LaunchPlan, *, per_node: dict[str, Any] | None = None) -> dict[str, str]:
    """All that the job's folder has to hold where it runs; `per_node` is for whoever starts it there."""
    jobs.check_name(plan.job_name)
    job = {
        "command": list(plan.command),
        "environment": dict(plan.environment),
        "files": sorted(jobs.check_name(name) for name in plan.files),
        "returns": [jobs.check_name(name) for name in plan.returns],
        "timeout_s": plan.timeout_s,
        "num_gpus": plan.num_gpus,
        **(per_node or {}),
    }
    return {**plan.files, JOB: json.dumps(job), SUPERVISOR: Path(supervisor.__file__).read_text()}


def parse(text: str) -> Printed:
    """What stands between the first mark and the others is the job's own; what the engine says around it is left out."""
    files: dict[str, str] = {}
    ended = None
    own: list[str] = []
    position, began = 0, False
    for match in _LINE.finditer(text):
        try:
            said = json.loads(match[1])
        except ValueError:  # cut off
            continue
        if not isinstance(said, dict):
            continue
        if began and len(files) == 0 and ended is None:
            own.append(text[position : match.start()])
        position = match.end()
        if "began" in said:
            began = True
        elif isinstance(said.get("file"), str) and isinstance(said.get("text"), str):
            files[jobs.check_name(said["file"])] = said["text"]
        elif isinstance(said.get("ended"), dict):
            ended = said["ended"]
    if began and ended is None and not files:
        own.append(text[position:])
    return Printed(log="".join(own) if began else text, files=files, ended=ended)


def together(nodes: Sequence[Printed]) -> Printed:
    """One job over several nodes: their words and files, and of their ends the first that is none of a part that went well,
    nor of one that was only ended because of it."""
    files: dict[str, str] = {}
    for node in reversed(nodes):
        files |= node.files
    ends = [node.ended for node in nodes if node.ended is not None]
    bad = [end for end in ends if end.get("reason") != "exited" or end.get("exit_code")]
    own = [end for end in bad if end.get("reason") != "terminated"]
    return Printed(log="\n".join(node.log for node in nodes), files=files, ended=next(iter(own or bad or ends), None))


def by_node(text: str) -> list[str]:
    """The parts of a text in which every node's words stand behind a mark; the text itself where there is none."""
    marks = [match for match in _LINE.finditer(text) if match[1].startswith('{"node":')]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)] if marks else [text]


def measure(printed: Printed, *, ending: Ending, timeout_s: float, hardware: Hardware) -> Measurement:
    """As `outcome.measure`, from what was printed. `ending` is the engine's word, for jobs that could not say it themselves."""
    with tempfile.TemporaryDirectory(prefix="hp-fetched-") as name:
        folder = Path(name)
        (folder / jobs.LOG).write_text(printed.log)
        for file, text in printed.files.items():
            (folder / file).write_text(text)
        return outcome.measure(folder, ending=own_ending(printed) or ending, timeout_s=timeout_s, hardware=hardware)


def own_ending(printed: Printed) -> Ending | None:
    """How the job itself says it ended; None where it could not, or was told to end by the engine, which knows why."""
    ended = printed.ended
    if ended is None or ended.get("reason") in ("terminated", "cancelled"):
        return None
    return outcome.recorded(ended)
