"""Installations from the package index: how large one is, which Pythons it runs under, and what it
stands beside.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

pytestmark = pytest.mark.long

LARGEST_BYTES = 130e6
"""Of an installation that answers, all of Python's packages but pip and setuptools."""
RECOMMEND = (
    *("recommend", "--model=llama-3-70b", "--gpu=h100-sxm-80gb", "--num-gpus=64"),
    *("--sequence-length=8192", "--global-batch-size=128", "--json"),
)
"""README's first."""
BRIDGE = (
    *(
        "fastapi<0.139.2",
        "transformers>=5.15,<5.18",
        "mistral-common>=1.10",
        "datasets>=2.20",
        "peft>=0.20,<=0.21",
    ),
    *(
        "accelerate",
        "einops",
        "megatron-core",
        "mlflow>=3.17.2",
        "tensorboard>=2.19",
        "torch",
        "wandb>=0.29",
    ),
)
"""Requirements of Megatron Bridge 0.6.2 that have wheels for a machine without CUDA's compiler, and
its lock's fastapi.
"""
SUITE, MIRROR = "trixie", "http://deb.debian.org/debian"


@pytest.fixture(scope="module", autouse=True)
def _index() -> None:
    try:
        urllib.request.urlopen("https://pypi.org/simple/numpy/", timeout=20).close()
    except (urllib.error.URLError, OSError) as error:
        skip_or_fail(component="INDEX", reason=f"the package index does not answer: {error}")


def environment_with(folder: Path, *packages: str) -> Path:
    """Return the folder of programs of a fresh virtual environment with the packages, of which pip
    finds no fault.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    programs = folder / "bin"
    for arguments in (("install", "--quiet", *packages), ("check",)):
        done = subprocess.run(
            [programs / "pip", *arguments], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return programs


def outside() -> dict[str, str]:
    """Return an environment in which nothing of this checkout or its user's data is found."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("HP_", "PYTHON"))
    }


def test_a_fresh_installation_is_small_and_answers(wheel: Path, tmp_path: Path) -> None:
    programs = environment_with(tmp_path / "environment", str(wheel))
    answer = subprocess.run(
        [programs / "hp-tool", *RECOMMEND],
        cwd=tmp_path,
        env=outside(),
        capture_output=True,
        check=True,
    )
    assert json.loads(answer.stdout)["recommendations"]
    (packages,) = (tmp_path / "environment/lib").glob("python*/site-packages")
    installers = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    files = (
        path
        for path in packages.rglob("*")
        if path.relative_to(packages).parts[0].split("-")[0] not in installers
    )
    size = sum(path.stat().st_size for path in files if path.is_file())
    assert 50e6 < size < LARGEST_BYTES


def test_search_and_service_resolve_beside_a_training_framework(
    wheel: Path, tmp_path: Path
) -> None:
    """Megatron Bridge asks for Python 3.12, whose wheels are chosen here; nothing is installed."""
    report = tmp_path / "report.json"
    for_python = (
        "--python-version=3.12",
        "--only-binary=:all:",
        "--dry-run",
        f"--target={tmp_path / 'nowhere'}",
        f"--report={report}",
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        *for_python,
        f"{wheel}[search,service]",
        *BRIDGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = {
        each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]
    }
    assert {"hp-tool", "optuna", "fastapi", "mlflow", "megatron-core"} <= chosen


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a Debian whose Python is newer than this one's."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or shutil.which("chroot") is None:
        skip_or_fail(
            component="DEBOOTSTRAP", reason="debootstrap is not installed, or this user is not root"
        )
    root = tmp_path_factory.mktemp("debian") / "root"
    include = "--include=python3,python3-venv,ca-certificates"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", include, SUITE, root, MIRROR],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    return root


SERVE = """
export HP_DATABASE_URL=sqlite:////tmp/hp.sqlite3
/opt/hp/bin/hp-tool db upgrade
touch /tmp/serve.log
/opt/hp/bin/hp-tool serve --port 0 > /tmp/serve.log 2>&1 &
server=$!
trap 'kill $server' EXIT
for _ in $(seq 120); do
  kill -0 $server || { cat /tmp/serve.log; exit 1; }
  url=$(grep -o 'http://127.0.0.1:[0-9]*' /tmp/serve.log || true)
  [ -n "$url" ] && break
  sleep 0.5
done
/opt/hp/bin/python - ${url%% *} <<'END'
import sys
from service.client import Client
with Client(server=sys.argv[1]) as client:
    print(client.estimate(query={
        "model": "llama-3-8b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}, "parallel": {"tensor_parallel_size": 8},
        "kind": "training", "training": {"sequence_length": 2048, "global_batch_size": 16},
    })["estimate"]["feasible"])
END
"""  # noqa: E501


def test_it_answers_and_serves_under_the_python_of_debian_trixie(wheel: Path, debian: Path) -> None:
    shutil.copy(wheel, debian / "tmp")
    certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(certificates, debian / "tmp/certificates.crt")

    def inside(script: str) -> str:
        command = ["chroot", debian, "/bin/bash", "-euc", script]
        variables = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PIP_CERT": "/tmp/certificates.crt",
            "HOME": "/root",
        }
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert inside("python3 --version").startswith("Python 3.13")
    inside(f"python3 -m venv /opt/hp && /opt/hp/bin/pip install --quiet /tmp/{wheel.name}")
    answer = json.loads(inside(f"/opt/hp/bin/hp-tool {' '.join(RECOMMEND)}"))
    assert answer["recommendations"]
    inside(f"/opt/hp/bin/pip install --quiet '/tmp/{wheel.name}[service]' && /opt/hp/bin/pip check")
    assert inside(SERVE).splitlines()[-1] == "True"
