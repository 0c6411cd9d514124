"""Find the training or serving command of a script, its arguments and its number of processes."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import NamedTuple

from hp_tool.domain.declared import parse_names
from hp_tool.formats import shell
from hp_tool.formats.reading import Ignored, Read, Reading, describe_unknown_parts
from hp_tool.formats.shell import Command, Script, Word

_COUNT_OPTIONS = {
    "nproc-per-node": "per_node",
    "gpus-per-node": "per_node",
    "ntasks-per-node": "tasks",
    "gres": "per_node",
    "nnodes": "nodes",
    "nodes": "nodes",
    "N": "nodes",
    "n": "all",
    "np": "all",
    "ntasks": "all",
    "num-gpus": "per_node",
    "num-nodes": "nodes",
    "num-processes": "all",
    "num-machines": "machines",
    "gpus-per-task": "per_task",
    "hostfile": "hostfile",
    "H": "hostfile",
}
"""Launcher options that set the number of processes, nodes or hosts."""
SWITCHES = parse_names("""
    standalone no-python run-path use-env multi-gpu use-deepspeed use-fsdp use-megatron-lm
    cpu debug quiet same-network no-local-rank no-ssh force-multi exclusive overlap verbose
    allow-run-as-root unbuffered label no-container-mount-home container-writable
    kill-on-bad-exit l u v use-hostfile oversubscribe
""")
"""Launcher options without a value."""
_TORCH_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
_AGENT_LAUNCHERS = {"torchrun", "accelerate"} | _TORCH_MODULES
"""Launchers that run one agent per node, which spawns the worker processes."""
LAUNCHERS = {"srun", "mpirun", "mpiexec", "deepspeed", "ds", "salloc"} | _AGENT_LAUNCHERS
_OTHER_COMMANDS = parse_names("""
    cat tee echo mkdir cd export printf rm cp ls wait sleep module conda pip grep sed
""")
"""Commands that are never a training or serving command, whatever their arguments."""


_SWIFT_PROGRAM = re.compile(r"\bswift/cli/(_megatron/)?(sft|pt)\.py$")
"""Matches ms-swift's entry points, for scripts that launch them directly."""
_SERVER_IMAGE = re.compile(r"vllm-openai(-rocm|-cpu)?(:|@|$)")
"""Matches container images whose entry point is vLLM's server."""


class Count(NamedTuple):
    """A launcher option for a number of processes, nodes or hosts, and its value."""

    option: str
    """The option in the script's spelling."""
    word: Word


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The command of a script that trains or serves."""

    program: str
    """Entry point, such as pretrain_gpt.py, sglang.launch_server or vllm; empty if there are only
    flags.
    """
    words: tuple[Word, ...]
    """The program's arguments."""
    launchers: tuple[str, ...]
    counts: dict[str, "Count"]
    """Numbers of processes. Keys: nodes, per_node, tasks, all."""
    line: int
    environment: Mapping[str, Word] = field(default_factory=dict)
    """Variables set for the command by `export`, NAME=VALUE, `env`, or docker's -e."""


def find_launch(script: Script, *, reading: Reading) -> Launch | None:
    """Return the training or serving command with the most flags, and ignore the other commands."""
    flags_alone = [command for command in script.commands if command.words[0].text.startswith("--")]
    if flags_alone and len(flags_alone) == len(script.commands):
        words = tuple(word for command in flags_alone for word in command.words)
        return Launch(program="", words=words, launchers=(), counts={}, line=flags_alone[0].line)
    launches = [_parse_launch(command) for command in script.commands]
    ranked = [each for each in launches if each is not None]
    best = max(ranked, key=_launch_priority, default=None)
    for command, launch in zip(script.commands, launches, strict=True):
        if launch is None or launch is not best:
            text = " ".join(word.text for word in command.words)
            reason = "does not train"
            if command.words[0].text.startswith("--"):
                reason = (
                    "bash takes this as a command of its own: the line before it does not end "
                    "in a backslash"
                )
            elif launch is not None:
                reason = "another command; the one with most flags is read"
            reading.ignored.append(Ignored(flag=text[:200], reason=reason, line=command.line))
    reading.absent += [note.text for note in script.notes if note.reason == shell.SOURCED]
    for note in script.notes:
        reading.ignored.append(Ignored(flag=note.text, reason=note.reason, line=note.line))
    return best


def _launch_priority(launch: Launch) -> tuple[int, int]:
    flags = sum(word.text.startswith("-") or "=" in word.text for word in launch.words)
    return (int(bool(launch.launchers)) + int(flags > 3), flags)


def _parse_launch(command: Command) -> Launch | None:
    words = list(command.words)
    texts = [word.text for word in words]
    names = [PurePosixPath(text).name for text in texts]
    if names[0] in _OTHER_COMMANDS:
        return None
    if names[0] == "trl" and len(words) > 1:  # `trl` launches its script through Accelerate.
        counts, program = _read_counts(words), f"trl.scripts.{texts[1]}"
        return Launch(
            program=program,
            words=tuple(words[2:]),
            launchers=("accelerate",),
            counts=counts,
            line=command.line,
        )
    if names[0] in ("swift", "megatron") and texts[1:2] and texts[1] in ("sft", "pt"):
        return Launch(
            program=" ".join(texts[:2]),
            words=tuple(words[2:]),
            launchers=(),
            counts={},
            line=command.line,
        )
    if names[0] == "llamafactory-cli" and texts[1:2] == ["train"]:
        return Launch(
            program="llamafactory-cli",
            words=tuple(words[2:]),
            launchers=(),
            counts={},
            line=command.line,
        )
    if names[0] == "train.sh" and {"--recipe", "--model"} & set(texts):
        return Launch(
            program="train.sh",
            words=tuple(words[1:]),
            launchers=(),
            counts={},
            line=command.line,
        )
    start = _program_index(texts, names)
    if start is None:
        return None
    program = names[start] if texts[start].endswith((".py", ".sh")) else texts[start]
    if swift := _SWIFT_PROGRAM.search(texts[start]):
        program = f"{'megatron' if swift[1] else 'swift'} {swift[2]}"
    launchers = tuple(
        name for name in (*names[: start + 1], *texts[: start + 1]) if name in LAUNCHERS
    )
    after = start + 1
    if program in ("vllm", "sglang"):
        after += 1
    return Launch(
        program=program,
        words=tuple(words[after:]),
        launchers=launchers,
        counts=_read_counts(words[:start]),
        line=command.line,
        environment={**command.environment, **_assigned_variables(words[:start])},
    )


def _assigned_variables(words: list[Word]) -> dict[str, Word]:
    """Return the NAME=VALUE words before a program, as in `env NAME=VALUE program`."""
    matches = ((word, re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word.text)) for word in words)
    return {match[1]: word._replace(text=match[2]) for word, match in matches if match}


def _program_index(texts: list[str], names: list[str]) -> int | None:
    """Return the index of the program in a command: vllm, a Python file, or the module after -m."""
    for number, text in enumerate(texts):
        if names[number] in ("vllm", "sglang", "trtllm-serve") and texts[
            number + 1 : number + 2
        ] not in (["-m"], ["bench"]):
            return number
        if names[0] in ("docker", "podman") and _SERVER_IMAGE.match(names[number]):
            return number if texts[1] == "run" else None
        if text == "-m" and number + 1 < len(texts) and texts[number + 1] not in LAUNCHERS:
            return number + 1
        alone = number == 0 or not texts[number - 1].startswith("--")
        if text.endswith(".py") and alone:
            return number
    for number, name in enumerate(names):
        if name in ("torchrun", "deepspeed") or texts[number] in _TORCH_MODULES:
            place = number + 1
            while place < len(texts) and texts[place].startswith("-"):
                alone = (
                    "=" in texts[place] or texts[place].lstrip("-").replace("_", "-") in SWITCHES
                )
                place += 1 if alone else 2
            return place if place < len(texts) else None
    return None


def _read_counts(words: list[Word]) -> dict[str, Count]:
    counts: dict[str, Count] = {}
    for number, word in enumerate(words):
        name, separator, value = word.text.lstrip("-").partition("=")
        if glued := re.fullmatch(r"-([Nn])(\d.*)", word.text):
            name, separator, value = glued[1], "=", glued[2]
        kind = _COUNT_OPTIONS.get(name.replace("_", "-")) if word.text.startswith("-") else None
        if kind is None:
            continue
        value_word = (
            word._replace(text=value) if separator else words[min(number + 1, len(words) - 1)]
        )
        counts[kind] = Count(
            word.text[: len(word.text) - len(value)].rstrip("=") if separator else word.text,
            value_word,
        )
    return counts | _count_included_devices(words)


def _count_included_devices(words: list[Word]) -> dict[str, Count]:
    """Return the number of devices in deepspeed's `--include host:0,1@other:0,1`."""
    for word, after in itertools.pairwise(words):
        if word.text in ("--include", "-i"):
            slots = [each.partition(":")[2] for each in after.text.split("@")]
            if all(slots):
                return {
                    "all": Count(
                        word.text,
                        after._replace(text=str(sum(len(slot.split(",")) for slot in slots))),
                    )
                }
    return {}


def world_size(launch: Launch, script: Script, *, reading: Reading) -> int | None:
    """Return the number of processes of the launch; None if the script does not set it."""
    header = {
        _COUNT_OPTIONS[name]: Count(
            f"#SBATCH --{name}", Word(value, 0, unknown=(value,) if "$" in value else ())
        )
        # Slurm does not expand variables in #SBATCH lines.
        for name, value in script.header.items()
        if name in _COUNT_OPTIONS
    }
    counts = dict(launch.counts)
    agents = not _AGENT_LAUNCHERS.isdisjoint(launch.launchers)
    if "hostfile" in counts and not counts.keys() & {"nodes", "all"}:
        reading.hints["cluster.num_gpus"] = f"the hosts are those in {counts['hostfile'].word.text}"
        return None
    # accelerate's count includes the processes of all machines.
    if "machines" in counts and "all" in counts:
        return _count_value(counts["all"], reading)
    nodes = _count_value(counts.get("nodes"), reading)
    if nodes is None:
        nodes = _count_value(header.get("nodes"), reading)
    per_node = _count_value(counts.get("per_node"), reading)
    if per_node is None and not agents:
        tasks = _count_value(counts.get("tasks", header.get("tasks")), reading)
        per_node = tasks if tasks is not None and tasks > 1 else None
    if per_node is None and "all" in counts:
        return _count_value(counts["all"], reading)
    if per_node is None:
        per_node = _count_value(header.get("per_node"), reading)
    if per_node is None:
        num_processes = _count_value(header.get("all"), reading)
        return num_processes if num_processes is not None and num_processes > 1 else None
    if nodes is None and ("nodes" in counts or "nodes" in header):
        return None
    return per_node * (nodes or 1)


def _count_value(count: Count | None, reading: Reading) -> int | None:
    if count is None:
        return None
    option, word = count
    text = word.text.rsplit(":", 1)[-1]
    if text.isdecimal() and len(text) < 8:
        reading.read.append(
            Read(flag=option, value=word.text, line=word.line or None, field="cluster.num_gpus")
        )
        return int(text)
    if word.unknown:  # Report an unknown count as missing, even if another option has a number.
        reading.add_missing(
            "cluster.num_gpus",
            f"{option} is {describe_unknown_parts(word.unknown)}; add",
            example="",
        )
    elif text:
        reading.hints["cluster.num_gpus"] = f"{option} is {text}, which the machine decides"
    return None


def read_launch(
    text: str, *, reading: Reading, variables: dict[str, str], files: dict[str, str]
) -> tuple[Launch | None, Script]:
    """Return the launch command of a script, and the script with line numbers for its words."""
    script = shell.read_script(text, variables=variables, files=files)
    launch = find_launch(script, reading=reading)
    if launch is None:
        return None, script
    lines = text.splitlines()
    rows = {
        row.split()[0]: number for number, row in reversed(list(enumerate(lines, 1))) if row.split()
    }

    def add_line_number(word: Word) -> Word:
        name = word.text.partition("=")[0]
        if not word.text.startswith("--") or (
            0 < word.line <= len(lines) and name in lines[word.line - 1]
        ):
            return word
        inside = rows.get(name) or next(
            (number for number, row in enumerate(lines, 1) if name in row.split()), word.line
        )
        return word._replace(line=inside)

    words = tuple(add_line_number(word) for word in launch.words[:500]) + launch.words[500:]
    return replace(launch, words=words), script
