"""The Slurm launcher on a real Slurm: the contract, and what only it promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hp_tool.domain.ports import Launcher
from tests.launchers.contract import LauncherContract
from tests.launchers.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm


class TestSlurmLauncher(LauncherContract):
    @pytest.fixture
    def new_launcher(self, slurm: SlurmCluster, tmp_path: Path) -> Callable[[], Launcher]:
        return lambda: slurm.launcher(root=tmp_path)
