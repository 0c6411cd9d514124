"""Write and read the framework or engine release as a comment; tools have no option for it."""

import re

from hp_tool.catalog.releases import has_releases
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.formats.reading import Read, Reading

_RELEASE = r"v?\d+(?:\.\w+)+(?:[.+-]\w+)*"


def release_words(workload: TrainingWorkload | InferenceWorkload) -> str:
    """Return framework or engine with release, such as `megatron-core 0.18`; empty if unknown."""
    if isinstance(workload, TrainingWorkload):
        program, release = workload.framework, workload.framework_version
    else:
        program, release = workload.engine, workload.engine_version
    return f"{program} {release}" if release and re.fullmatch(_RELEASE, release) else ""


def read_release(text: str, reading: Reading) -> None:
    """Read the release in a comment of an exported text into the query."""
    section, program, release = (
        ("training", "framework", "framework_version")
        if reading.query.get("kind") == "training"
        else ("inference", "engine", "engine_version")
    )
    workload = reading.query.get(section, {})
    if not (name := workload.get(program)) or not has_releases(name):
        return
    named = re.compile(rf"#.* on \d+ x \S+, {re.escape(name)} ({_RELEASE})")
    for number, line in enumerate(text.splitlines(), 1):
        if stated := named.match(line):
            workload[release] = stated[1]
            reading.read.append(
                Read(
                    flag="comment",
                    value=f"{name} {stated[1]}",
                    line=number,
                    field=f"{section}.{release}",
                )
            )
            return
