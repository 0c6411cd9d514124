"""Slurm jobs whose folder is not shared: their files travel in the batch script, and their results are read from their logs.

Slurm writes a job's output on the job's nodes, so one folder of theirs must be readable here. For each job it has

    NAME.claim        the id of the Slurm job that runs under this name
    NAME.ended.json   how the batch step ended
    NAME.slurm.log    output of the batch step and of Slurm's programs
    NAME.<n>.log      output of the n-th node: the job's log, its results and how it ended (`streamed`)

`bring` writes these into the job's folder here, as a job with a shared folder would have done.
"""

from __future__ import annotations

import json
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

from hp_tool.domain.ports import LaunchPlan
from hp_tool.errors import InputError
from hp_tool.launchers import jobs, streamed, supervisor
from hp_tool.launchers.options import Logs, SlurmOptions
from hp_tool.launchers.slurm_folder import CLAIM, ENDED, JOB, RANK_RESULTS, SLURM_LOG

_END = "HP_TOOL_FILES"
_UNPACK = (
    "import json, pathlib, sys; "
    "[(pathlib.Path(sys.argv[1]) / name).write_text(text) for name, text in json.load(sys.stdin).items()]"
)
# The shell ignores TERM and leaves it to the supervisor, which ends the job's processes before the folder is removed.
_ON_NODE = (
    'export PET_NODE_RANK=$SLURM_NODEID; folder=$(mktemp -d -p /tmp) || exit 1; trap "rm -rf $folder" EXIT; trap : TERM; '
    f'"$1" -c "$2" "$folder" && "$1" "$folder/{streamed.SUPERVISOR}" --attached "$folder"'
)


def path_of(name: str, *, options: Logs, job_name: str) -> str:
    """The path, on the nodes, of a job's file in the folder of logs; srun replaces `%n` in it by a node's number."""
    return f"{options.folder}/{job_name}.{name}"


def step(plan: LaunchPlan, *, srun: str, python: str) -> str:
    """The lines of the batch script that run the job on every node.

    srun passes its input, one line of JSON, to all nodes; ASCII without a line break cannot end the here-document. Raises
    InputError for files that are too large for a batch script.
    """
    payload = json.dumps(streamed.job_files(plan))
    if len(payload) > streamed.MAX_FILES_BYTES:
        limit = f"a batch script should carry at most {streamed.MAX_FILES_BYTES:,}"
        raise InputError(f"the job's files have {len(payload):,} bytes; {limit}", field="trainer.command")
    command = shlex.join(("bash", "-c", _ON_NODE, "node", python, _UNPACK))
    return f"{srun} \\\n  {command} << '{_END}'\n{payload}\n{_END}"


def bring_claim(folder: Path, *, options: SlurmOptions) -> None:
    """Write into the job's folder which Slurm job runs it, once one does."""
    if options.logs is not None and not (folder / CLAIM).exists():
        text = jobs.log_tail(Path(options.logs.seen_here), name=f"{folder.name}.{CLAIM}")
        if text.strip().isdecimal():
            (folder / CLAIM).write_text(text)


def bring(folder: Path, *, options: SlurmOptions) -> None:
    """Write into the job's folder what its logs contain by now; does nothing if the nodes share the folder."""
    request = jobs.read_json(folder / JOB)
    if options.logs is None or request is None:
        return
    bring_claim(folder, options=options)
    far = Path(options.logs.seen_here)
    texts = [_read(far, f"{folder.name}.{node}.log") for node in range(options.num_nodes(num_gpus=request["num_gpus"]))]
    started = [streamed.parse(text) for text in texts if supervisor.MARK[0] in text]
    errors = [text for text in texts if supervisor.MARK[0] not in text]  # why a node could not start
    _write(folder / SLURM_LOG, "".join([*errors, _read(far, f"{folder.name}.{SLURM_LOG}")]))
    if record := jobs.read_json(far / f"{folder.name}.{ENDED}"):
        jobs.write_json(folder / ENDED, record)  # replaced below by the job's own record, which says more
    if not started:
        return
    printed = streamed.join(started)
    _write(folder / jobs.LOG, printed.log)
    for name, text in printed.files.items():
        if name == jobs.RESULT or name in request["returns"] or fnmatchcase(name, RANK_RESULTS):
            _write(folder / name, text)
    if printed.ended is not None and streamed.own_ending(printed) is not None:
        jobs.write_json(folder / ENDED, printed.ended)


def _read(folder: Path, name: str) -> str:
    return jobs.log_tail(folder, name=name, size_bytes=jobs.MAX_OUTPUT_BYTES)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"~{path.name}")
    temporary.write_text(text)
    temporary.replace(path)
