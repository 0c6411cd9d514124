"""The batch script: what stands in it, and that nothing of a query can mean anything to a shell."""

from __future__ import annotations

import getpass
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_tool.cluster.launchers import create, slurm_folder
from hp_tool.cluster.launchers.options import Container, Logs, SlurmOptions
from hp_tool.cluster.launchers.slurm_script import render
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.errors import InputError
from tests.profiler.requests import request

CPU = SlurmOptions(gpu="cpu", gpus_per_node=2, max_nodes=2)
H100 = SlurmOptions(gpu="h100-sxm-80gb", gpus_per_node=8, max_nodes=16)
_TRICKS = (
    *(
        "$(touch pwned)",
        "`touch pwned`",
        "'; touch pwned; '",
        '"; touch pwned; "',
        "${IFS}",
        "\\",
        "-x",
    ),
    "\n#SBATCH --uid=0\ntouch pwned",
)
HOSTILE = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40
) | st.sampled_from(_TRICKS)
_OPTIONS = (
    *(
        "account",
        "comment",
        "partition",
        "qos",
        "gres",
        "modules",
        "sbatch_arguments",
        "srun_arguments",
        "image",
        "mounts",
    ),
    *("name", "env"),
)


def _plan(*command: str, num_gpus: int = 1, timeout_s: float = 300.0) -> LaunchPlan:
    return LaunchPlan(
        job_name="s1.r1.t1",
        command=command,
        environment={},
        files={},
        num_gpus=num_gpus,
        timeout_s=timeout_s,
    )


def _header(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")
    ]


def test_what_slurm_is_asked_for() -> None:
    options = SlurmOptions(
        gpu="h100-sxm-80gb",
        gpus_per_node=8,
        max_nodes=16,
        account="llm",
        partition="gpu",
        qos="high",
        gres="gpu:h100",
        exclusive=True,
        requeue=True,
        sbatch_arguments=("--constraint=nvlink&ib", "--mem=0"),
    )
    assert _header(render(options, plan=_plan("train", num_gpus=32))) == [
        "--job-name=s1.r1.t1",
        "--account=llm",
        "--partition=gpu",
        "--qos=high",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gres=gpu:h100:8",
        "--exclusive",
        "--time=7",
        "--requeue",
        "--output=slurm.log",
        "--open-mode=truncate",
        "--constraint=nvlink&ib",
        "--mem=0",
    ]


def test_processes_of_a_cpu_job_get_a_core_each_and_no_gres() -> None:
    header = _header(render(CPU, plan=_plan("train", num_gpus=4)))
    assert "--cpus-per-task=2" in header and "--nodes=2" in header
    assert not [line for line in header if line.startswith("--gres")]


def test_a_job_smaller_than_a_node_takes_a_part_of_one() -> None:
    header = _header(render(H100, plan=_plan("train", num_gpus=4)))
    assert "--nodes=1" in header and "--gres=gpu:4" in header


def test_the_site_may_ask_for_no_gres_and_for_its_own_wall_time() -> None:
    header = _header(
        render(
            SlurmOptions(gpu="h100-sxm-80gb", gpus_per_node=8, gres="", time_s=3601.0),
            plan=_plan("train"),
        )
    )
    assert not [line for line in header if line.startswith("--gres")]
    assert "--time=61" in header


@pytest.mark.parametrize("num_gpus", [12, 136])
def test_a_job_of_uneven_or_too_many_nodes_is_refused(num_gpus: int) -> None:
    with pytest.raises(InputError, match="does not fit") as refused:
        render(H100, plan=_plan("train", num_gpus=num_gpus))
    assert refused.value.code == "launcher_mismatch"


def test_modules_and_set_up_come_before_the_job_and_a_container_around_it() -> None:
    container = Container(image="nvcr.io#nvidia/pytorch:26.01-py3", mounts=("/data:/data:ro",))
    options = SlurmOptions(
        gpu="cpu",
        gpus_per_node=1,
        modules=("cuda/13.0",),
        setup=("source ~/env/bin/activate",),
        container=container,
    )
    lines = render(options, plan=_plan("train")).splitlines()
    assert lines.index("module load cuda/13.0") < lines.index("source ~/env/bin/activate")
    (srun,) = (line for line in lines if line.startswith("timeout"))
    arguments = shlex.split(srun.rstrip("\\"))
    assert "--container-image=nvcr.io#nvidia/pytorch:26.01-py3" in arguments
    assert "--container-mounts=$PWD:$PWD,/data:/data:ro" in arguments
    # The run's own time begins inside, when the image has been imported.
    assert arguments[:3] == ["timeout", "--kill-after=60", "2100"]
    inside = lines[lines.index(srun) + 1]
    assert 'exec timeout --kill-after=60 300 "$@"' in inside
    assert "#SBATCH --time=37" in lines


def test_the_plan_is_torchrun_on_every_node_and_touches_nothing(tmp_path: Path) -> None:
    launcher = create(
        "slurm",
        options={"gpu": "cpu", "gpus_per_node": 1, "max_nodes": 2, "python": "/opt/python"},
        root=tmp_path,
    )
    planned = launcher.plan(
        request(parallel={"tensor_parallel_size": 2, "sequence_parallel": True}), job_name="job"
    )
    assert planned.command == (
        *("/opt/python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("-m", "hp_tool.cluster.profiler", "request.json", "result.json"),
    )
    assert "GLOO_SOCKET_IFNAME" not in planned.environment  # loopback reaches no other node
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"gpu": "h100-sxm-80gb"}, {"num_gpus": 3}])
def test_a_request_for_other_hardware_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        create("slurm", options={"gpu": "cpu", "gpus_per_node": 2}, root=tmp_path).plan(
            request(**wrong), job_name="job"
        )
    assert refused.value.code == "launcher_mismatch"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(arguments=st.lists(HOSTILE, max_size=4))
def test_the_program_gets_its_arguments_byte_for_byte(arguments: list[str]) -> None:
    """The rendered script under a real bash; srun stands for itself by running what follows its
    options.
    """
    program = (
        "import json, os, sys; json.dump([sys.argv[1:], os.environ['PET_NODE_RANK']], "
        "open('seen.json', 'w'))"
    )
    script = render(CPU, plan=_plan(sys.executable, "-c", program, *arguments))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "bin" / "srun").write_text(
            '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
        )
        (folder / "bin" / "srun").chmod(0o755)
        environment = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_NODEID": "0",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((folder / "seen.json").read_text()) == [arguments, "0"]
        assert json.loads((folder / "ended.json").read_text())["exit_code"] == 0
        assert not (folder / "pwned").exists()


@given(
    value=HOSTILE,
    name=st.sampled_from(_OPTIONS),
)
def test_an_option_is_a_plain_word_or_refused(value: str, name: str) -> None:
    changes: dict[str, Any] = {
        name: (value,) if name in ("modules", "sbatch_arguments", "srun_arguments") else value
    }
    if name in ("image", "mounts", "name", "env"):
        changes = {
            "container": {"image": "x"} | {name: value if name in ("image", "name") else (value,)}
        }
    try:
        options = SlurmOptions.parse(
            {"gpu": "h100-sxm-80gb", "gpus_per_node": 8, **changes}, origin="test"
        )
    except InputError:
        return
    script = render(options, plan=_plan("train"))
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert len(script.splitlines()) <= 35
    assert not set(value) & set("$`\"'\\\n\r;<>") or name.endswith("_arguments")


@given(command=st.lists(HOSTILE, min_size=1, max_size=3), text=HOSTILE)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_files_that_travel_in_the_script_arrive_as_they_were(command: list[str], text: str) -> None:
    """What stands between the script and the node is played by `cat`: the here-document's text
    reaches it unchanged.
    """
    plan = LaunchPlan(
        job_name="s1",
        command=tuple(command),
        environment={"A": text},
        files={"f": text},
        num_gpus=4,
        timeout_s=9.0,
    )
    step = slurm_folder.render_step(plan, srun="played() { cat; }; played", python="python3")
    arrived = subprocess.run(
        ["bash", "-c", step], capture_output=True, text=True, check=True
    ).stdout
    files = json.loads(arrived)
    assert files["f"] == text
    assert json.loads(files["job.json"])["command"] == command and json.loads(files["job.json"])[
        "environment"
    ] == {"A": text}


def test_the_sites_books_name_the_search_and_its_owner() -> None:
    options = SlurmOptions(
        gpu="cpu",
        gpus_per_node=1,
        account="llm-{owner}",
        comment="hp search {search} of {owner}",
        sbatch_arguments=("--mail-user=a@b", "--reservation=my nodes"),
        srun_arguments=("--mpi=pmix", "--container-remap-root"),
    )
    plan = replace(_plan("train"), search="0123abc", owner="Ada L. <ada@x>\n#SBATCH --uid=0")
    script = render(options, plan=plan)
    assert {"--account=llm-Ada-L.-ada-x-SBATCH---uid-0", '--reservation="my nodes"'} <= set(
        _header(script)
    )
    assert '--comment="hp search 0123abc of Ada-L.-ada-x-SBATCH---uid-0"' in _header(script)
    (srun,) = (line for line in script.splitlines() if line.startswith("timeout"))
    assert srun.endswith("--mpi=none --input=none --mpi=pmix --container-remap-root \\")
    assert f"--account=llm-{getpass.getuser()}" in _header(render(options, plan=_plan("train")))
    with pytest.raises(InputError, match=r"Cannot fill \{owner\} in llm-"):
        render(options, plan=replace(_plan("train"), owner="日本"))
    with pytest.raises(InputError, match="comment: must be letters"):
        SlurmOptions.parse({"gpu": "cpu", "gpus_per_node": 1, "comment": "{user}"}, origin="test")


def test_containers_of_both_kinds() -> None:
    image = {
        "image": "/images/my torch.sqsh",
        "mounts": ["/my data:/data"],
        "env": ["NCCL_DEBUG"],
        "writable": True,
    }
    asked = {"gpu": "h100-sxm-80gb", "gpus_per_node": 8}
    pyxis = SlurmOptions.parse(
        {**asked, "container": {**image, "name": "torch", "mount_home": True}}, origin="test"
    )
    (srun,) = (
        line
        for line in render(pyxis, plan=_plan("train")).splitlines()
        if line.startswith("timeout")
    )
    words = shlex.split(srun.rstrip("\\"))
    for word in (
        "image=/images/my torch.sqsh",
        "mounts=$PWD:$PWD,/my data:/data",
        "name=torch",
        "env=NCCL_DEBUG",
        "writable",
    ):
        assert f"--container-{word}" in words
    assert "--container-mount-home" in words
    other = {**image, "runtime": "apptainer", "mount_home": False}
    apptainer = SlurmOptions.parse({**asked, "container": other}, origin="test")
    script = render(apptainer, plan=_plan("train", "--it's"))
    assert "--container" not in script and "timeout --kill-after=60 2100 srun" in script
    (line,) = (line for line in script.splitlines() if "apptainer exec" in line)
    words = shlex.split(line.rstrip("\\"))
    assert words[:9] == [
        "apptainer",
        "exec",
        "--nv",
        "--bind",
        "$PWD:$PWD",
        "--pwd",
        "$PWD",
        "--bind",
        "/my data:/data",
    ]
    assert words[9:14] == [
        "--env",
        "NCCL_DEBUG=$NCCL_DEBUG",
        "--writable-tmpfs",
        "--no-home",
        "/images/my torch.sqsh",
    ]
    assert words[14:] == ["timeout", "--kill-after=60", "300", "train", "--it's"]
    logs = replace(apptainer, logs=Logs(folder="/far/logs"))
    assert "  apptainer exec --nv --bind" in render(logs, plan=_plan("train"))
    with pytest.raises(InputError, match="name is for the pyxis runtime only"):
        SlurmOptions.parse(
            {**asked, "container": {"image": "x", "name": "y", "runtime": "apptainer"}},
            origin="test",
        )


def test_a_job_whose_folder_is_not_shared_names_only_its_logs(tmp_path: Path) -> None:
    options = SlurmOptions(
        gpu="cpu", gpus_per_node=2, max_nodes=2, logs=Logs(folder="/far/logs", here=str(tmp_path))
    )
    script = render(options, plan=_plan("train", num_gpus=4))
    assert "--output=/far/logs/s1.r1.t1.slurm.log" in _header(script)
    assert "--output=/far/logs/s1.r1.t1.%n.log" in script
    assert str(tmp_path) not in script and "result.json" not in script.split("<<")[0]
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    with pytest.raises(InputError, match="limit of a batch script"):
        render(options, plan=replace(_plan("train"), files={"data": "x" * 10**6}))


def test_the_options_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slurm.yaml"
    path.write_text(
        "gpu: cpu\ngpus_per_node: 2\nmax_nodes: 2\ncontainer: {image: a/b, mounts: "
        "['/x:/y']}\nenvironment: {A: b c}\n"
    )
    monkeypatch.setenv("HP_SLURM_CONFIG", str(path))
    options = SlurmOptions.load()
    assert (options.num_gpus, options.container) == (4, Container(image="a/b", mounts=("/x:/y",)))
    assert create("slurm", root=tmp_path).hardware().num_gpus == 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpu: cpu\n", "gpus_per_node"),
        ("gpu: cpu\ngpus_per_node: '2'\n", "gpus_per_node"),
        ("gpu: cpu\ngpus_per_node: 2\npartion: x\n", "partion"),
        (
            "gpu: cpu\ngpus_per_node: 0\n",
            "gpus_per_node: Input should be greater than or equal to 1",
        ),
        ("gpu: cpu\ngpus_per_node: 2\npoll_s: .nan\n", "poll_s"),
        ('gpu: cpu\ngpus_per_node: 2\nsetup: ["a\\nb"]\n', "setup: must be a single line"),
        ("gpu: cpu\ngpus_per_node: 2\nenvironment: {'A=B': c}\n", "environment"),
        ("gpu: cpu\ngpus_per_node: 2\nfolder: relative\n", "folder: must be an absolute path"),
        (
            "gpu: cpu\ngpus_per_node: 2\nlogs: {folder: /logs/%j}\n",
            "logs.folder: must be an absolute path",
        ),
        (
            "gpu: cpu\ngpus_per_node: 2\nlogs: {folder: /logs, here: logs}\n",
            "logs.here: must be an absolute path",
        ),
        ("[", "not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    (tmp_path / "slurm.yaml").write_text(text)
    monkeypatch.setenv("HP_SLURM_CONFIG", str(tmp_path / "slurm.yaml"))
    with pytest.raises(InputError, match=complaint):
        SlurmOptions.load()


def test_without_a_file_the_message_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_SLURM_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="Create it with gpu, gpus_per_node") as refused:
        create("slurm")
    assert refused.value.field == "search.launcher"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"--exclusive", "--mem=0"}),
        ({"sbatch_arguments": ("--mem=900G",)}, {"--exclusive", "--mem=900G"}),
        ({"exclusive": False}, set()),
        (
            {"cpus_per_gpu": 12, "memory_per_gpu": "120G"},
            {"--cpus-per-gpu=12", "--mem-per-gpu=120G"},
        ),
    ],
)
def test_gpu_jobs_have_whole_nodes_or_their_share_of_one(
    options: dict[str, Any], expected: set[str]
) -> None:
    header = _header(
        render(
            SlurmOptions(gpu="h100-sxm-80gb", gpus_per_node=8, **options),
            plan=_plan("train", num_gpus=8),
        )
    )
    said = {line for line in header if line.startswith(("--exclusive", "--mem", "--cpus-per-gpu"))}
    assert said == expected


def test_nodes_to_avoid_are_named() -> None:
    planned = replace(_plan("train"), excluded_hosts=("n1", "n7"))
    assert "--exclude=n1,n7" in _header(
        render(SlurmOptions(gpu="cpu", gpus_per_node=1), plan=planned)
    )
