"""Slurm jobs whose folder is not shared: their files travel in the batch script, and what they left is read from their logs.

Slurm keeps what a job prints on the job's nodes, so one folder of theirs has to be readable here. For each job it holds

    NAME.claim        the id of the Slurm job that runs under this name
    NAME.ended.json   how the batch step ended
    NAME.slurm.log    what the batch step and Slurm's own programs say
    NAME.<n>.log      what the n-th node prints: the job's words, its results and how it ended (`streamed`)

What is read is written into the job's folder here, as a job with a shared folder would have done it.
"""

from __future__ import annotations

import json
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

from hp_tool.domain.ports import LaunchPlan
from hp_tool.errors import InputError
from hp_tool.launchers import jobs, streamed, supervisor
from hp_tool.launchers.slurm_folder import CLAIM, ENDED, JOB, RANK_RESULTS, SLURM_LOG
from hp_tool.launchers.slurm_options import SlurmOptions

_END = "HP_TOOL_FILES"
_UNPACK = (
    "import json, pathlib, sys; "
    "[(pathlib.Path(sys.argv[1]) / name).write_text(text) for name, text in json.load(sys.stdin).items()]"
)
# A trapped TERM is the supervisor's to obey: it ends the job's processes, and then the folder can go.
_ON_NODE = (
    'export PET_NODE_RANK=$SLURM_NODEID; folder=$(mktemp -d -p /tmp) || exit 1; trap "rm -rf $folder" EXIT; trap : TERM; '
    f'"$1" -c "$2" "$folder" && "$1" "$folder/{streamed.SUPERVISOR}" --attached "$folder"'
)


def claim(folder: str, job_name: str) -> str:
    return f"{folder}/{job_name}.{CLAIM}"


def ended(folder: str, job_name: str) -> str:
    return f"{folder}/{job_name}.{ENDED}"


def slurm_log(folder: str, job_name: str) -> str:
    return f"{folder}/{job_name}.{SLURM_LOG}"


def node_log(folder: str, job_name: str, node: int | str) -> str:
    """`%n` in place of a number is srun's word for it."""
    return f"{folder}/{job_name}.{node}.log"


def step(plan: LaunchPlan, *, srun: str, python: str) -> str:
    """The lines of the batch script that run the job on every node.

    srun hands its input, one line of JSON, to all nodes. ASCII without a line break cannot end the here-document. Raises
    InputError for more than a batch script should carry.
    """
    payload = json.dumps(streamed.job_files(plan))
    if len(payload) > streamed.MAX_FILES_BYTES:
        most = streamed.MAX_FILES_BYTES
        message = f"the job's files have {len(payload):,} bytes; a batch script should carry {most:,} of them at most"
        raise InputError(message, field="trainer.command")
    command = shlex.join(("bash", "-c", _ON_NODE, "node", python, _UNPACK))
    return f"{srun} \\\n  {command} << '{_END}'\n{payload}\n{_END}"


def bring_claim(folder: Path, *, options: SlurmOptions) -> None:
    """Which Slurm job runs the folder's job, once one does."""
    if options.logs is not None and not (folder / CLAIM).exists():
        text = jobs.log_tail(Path(options.logs.seen_here), name=Path(claim("", folder.name)).name)
        if text.strip().isdecimal():
            (folder / CLAIM).write_text(text)


def bring(folder: Path, *, options: SlurmOptions) -> None:
    """Write into the job's folder what its logs tell by now. Nothing to do where the nodes share it."""
    asked = jobs.read_json(folder / JOB)
    if options.logs is None or asked is None:
        return
    bring_claim(folder, options=options)
    nodes = jobs.nodes_for(asked["num_gpus"], gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
    here = options.logs.seen_here
    texts = [_read(node_log(here, folder.name, node)) for node in range(nodes)]
    begun = [streamed.parse(text) for text in texts if supervisor.MARK[0] in text]
    before = [text for text in texts if supervisor.MARK[0] not in text]  # why a node could not begin
    _write(folder / SLURM_LOG, "".join([*before, _read(slurm_log(here, folder.name))]))
    if record := jobs.read_json(Path(ended(here, folder.name))):
        jobs.write_json(folder / ENDED, record)  # the job's own, below, knows better
    if not begun:
        return
    printed = streamed.together(begun)
    _write(folder / jobs.LOG, printed.log)
    for name, text in printed.files.items():
        if name == jobs.RESULT or name in asked["returns"] or fnmatchcase(name, RANK_RESULTS):
            _write(folder / name, text)
    if printed.ended is not None and streamed.own_ending(printed) is not None:
        jobs.write_json(folder / ENDED, printed.ended)


def _read(path: str) -> str:
    return jobs.log_tail(Path(path).parent, name=Path(path).name, size_bytes=jobs.MAX_OUTPUT_BYTES)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"~{path.name}")
    temporary.write_text(text)
    temporary.replace(path)
