"""The command that a missing extra is answered with: it installs from where this installation came
from.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ASK = "from hp_tool.extras import install_command; print(install_command('import'))"


def asked(folder: Path) -> str:
    """The command that a package in this folder prints."""
    ran = subprocess.run(
        [sys.executable, "-S", "-c", ASK],
        cwd=folder.parent,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def installed(folder: Path, origin: dict[str, Any] | None) -> Path:
    """A folder as site-packages has the package, with what pip records of its origin."""
    site = folder / "site-packages"
    (site / "hp_tool-1.0.dist-info").mkdir(parents=True)
    (site / "hp_tool").symlink_to(ROOT / "hp_tool")
    (site / "hp_tool-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.4\nName: hp-tool\nVersion: 1.0\n"
    )
    if origin is not None:
        (site / "hp_tool-1.0.dist-info/direct_url.json").write_text(json.dumps(origin))
    return site


COMMIT = "0123456789abcdef0123456789abcdef01234567"
ORIGINS: list[tuple[dict[str, Any] | None, str]] = [
    (
        {"url": "file:///src/hp%20tool", "dir_info": {"editable": True}},
        "pip install -e '/src/hp tool[import]'",
    ),
    ({"url": "file:///src/hp-tool", "dir_info": {}}, "pip install '/src/hp-tool[import]'"),
    (
        {"url": "file:///dist/hp_tool-1.0-py3-none-any.whl", "archive_info": {}},
        "pip install 'hp-tool[import] @ file:///dist/hp_tool-1.0-py3-none-any.whl'",
    ),
    (
        {
            "url": "https://git.example/hp-tool.git",
            "vcs_info": {"vcs": "git", "commit_id": COMMIT},
            "subdirectory": "tool",
        },
        "pip install 'hp-tool[import] @ "
        f"git+https://git.example/hp-tool.git@{COMMIT}#subdirectory=tool'",
    ),
    (None, "pip install 'hp-tool[import]'"),
]


@pytest.mark.parametrize(("origin", "command"), ORIGINS)
def test_an_extra_is_installed_from_where_the_package_came_from(
    tmp_path: Path, origin: dict[str, Any] | None, command: str
) -> None:
    assert asked(installed(tmp_path, origin)) == command


def test_a_checkout_is_installed_as_one() -> None:
    assert asked(ROOT) == f"pip install -e {shlex.quote(f'{ROOT}[import]')}"


def test_another_projects_file_beside_the_package_is_no_checkout(tmp_path: Path) -> None:
    site = installed(tmp_path, None)
    (site / "pyproject.toml").write_text('[project]\nname = "left-by-another-wheel"\n')
    assert asked(site) == "pip install 'hp-tool[import]'"
