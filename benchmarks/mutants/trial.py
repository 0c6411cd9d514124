"""Run the tests on one mutant, in a copy of the repository that nothing else uses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.mutants.generate import Mutant

LIKELY = ("golden", "cost", "calibration", "search", "app", "serving", "lengths", "mends", "space", "learning", "anatomy")
"""Folders whose tests see most faults, best first; the one named as the mutant's package goes before them."""
SELECTION = "not long and not slow and not distributed and not postgres and not slurm and not ray"
"""Of the default run, what starts no training job, database or cluster."""
TEST_LIMIT_S = 120
RUN_LIMIT_S = 3600
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
HUNG = re.compile(r'File ".*?/(tests/[^"]*test_\w+\.py)", line \d+ in')


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests made of a mutant."""

    mutant: Mutant
    diff: str
    killed_by: str | None
    """The test that failed, or the file whose test did not end; None where all passed."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the working tree to put faults into."""

    root: Path
    reliable: set[str] = field(default_factory=set)
    """Tests seen to pass without a fault."""
    unreliable: set[str] = field(default_factory=set)
    """Tests that failed without a fault, or not every time with one: left out from then on."""

    @classmethod
    def of(cls, repository: Path, root: Path) -> Copy:
        """Copy the files that git tracks, or would if they were added."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True).stdout.split("\0"):
            if (repository / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, root / name)
        return cls(root)

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests that see most faults, then the others."""
        own = mutant.path.split("/")[1]
        folders = [f"tests/{name}" for name in dict.fromkeys((own, *LIKELY)) if (self.root / "tests" / name).is_dir()]
        killed_by = self._killer(mutant, folders) or self._killer(mutant, ["tests", *(f"--ignore={each}" for each in folders)])
        return Verdict(mutant=mutant, diff=mutant.diff((self.root / mutant.path).read_bytes()), killed_by=killed_by)

    def _killer(self, mutant: Mutant, tests: Sequence[str]) -> str | None:
        """The first test that fails with the fault, fails again, and passes without it."""
        while True:
            with self._applied(mutant):
                failed = self._first_failure(tests)
                repeated = failed is not None and self._first_failure([failed]) is not None
            if failed is None:
                return None
            if repeated and (failed in self.reliable or self._first_failure([failed]) is None):
                self.reliable.add(failed)
                return failed
            self.unreliable.add(failed)

    @contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        """The file with the fault; its time goes back with its text, so that compiled files stay valid."""
        path = self.root / mutant.path
        source, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.apply(source))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _first_failure(self, tests: Sequence[str]) -> str | None:
        """The test that failed first, or the file whose test took longer than any may."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", SELECTION]
        command += ["-o", f"faulthandler_timeout={TEST_LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"]
        command += [*(f"--deselect={test}" for test in self.unreliable), *tests]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
        environment["PYTHONPATH"] = str(self.root)
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # examples that failed with other faults
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return tests[0]
        if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        output = done.stdout + done.stderr
        found = FAILED.search(output) or HUNG.search(output)
        if found is None:
            raise RuntimeError(f"pytest ended with {done.returncode} and named no test:\n{output[-2000:]}")
        return found[1]
