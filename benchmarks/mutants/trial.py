"""Run the tests on one mutant, in a copy of the repository that nothing else uses."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.mutants.generate import Mutant
from benchmarks.mutants.reached import Reach

ROOT = Path(__file__).parents[2]
STRANGERS = ("formats", "packaging", "profiler", "service", "trainers")
"""Folders whose tests see predictions and locks only through files, servers and jobs, if at all:
they are not run.
"""
LOCKING = ("launchers", "store")
"""Folders whose tests see locks, and no predictions: they are run where a lock may be lost."""
SELECTION = "not components and not long"
"""Of the default run, what starts no training job or cluster."""
FIRST_FILES = 4
TEST_LIMIT_S = 300
RUN_LIMIT_S = 3600
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
CANNOT_IMPORT = re.compile(r"ImportError while loading conftest '.*?/(tests/[^']+)'")
HUNG = re.compile(r'File ".*?/(tests/[^"]*test_\w+\.py)", line \d+ in')


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests made of a mutant."""

    mutant: Mutant
    diff: str
    killed_by: str | None
    """The test that failed, or the file whose test did not end; None where all passed."""
    reached: bool
    """Whether any test runs the function."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the working tree to put faults into."""

    root: Path
    reliable: set[str] = field(default_factory=set)
    """Tests seen to pass without a fault."""
    unreliable: set[str] = field(default_factory=set)
    """Tests that failed without a fault, or not every time with one: left out from then on."""
    killers: Counter[str] = field(default_factory=Counter)
    """Faults that each test file saw."""

    @classmethod
    def of(cls, repository: Path, root: Path) -> Copy:
        """Copy the files that git tracks, or would if they were added."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(
            listed, cwd=repository, capture_output=True, text=True, check=True
        ).stdout.split("\0"):
            if (repository / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, root / name)
        return cls(root)

    def record(self, output: Path, *, locks: bool = True) -> None:
        """Run all tests once without a fault, and write which functions each file of them
        reaches.
        """
        folders = [
            f"--ignore=tests/{name}" for name in (STRANGERS if locks else STRANGERS + LOCKING)
        ]
        self._pytest(
            ["-p", "benchmarks.mutants.reached", "--reached", str(output), *folders, "tests"]
        )

    def judge(
        self, mutant: Mutant, *, reached: Mapping[str, Reach], limit_s: float = math.inf
    ) -> Verdict:
        """Run the test files that reach the function; all, where none was seen to, since it may run
        on import.

        Those that saw most faults so far go first, then the shortest. What tests of `limit_s`
        recorded seconds do not see counts as survived.
        """
        running = [name for name, one in reached.items() if mutant.function in one.functions]
        seeing = sorted(
            running or reached, key=lambda name: (-self.killers[name], reached[name].seconds)
        )
        ends = accumulate(reached[name].seconds for name in seeing)
        tests = [
            name for name, end_s in zip(seeing, ends, strict=True) if end_s <= limit_s
        ] or seeing[:1]
        killed_by = self._killer(mutant, tests) if tests else None
        if killed_by:
            self.killers[killed_by.partition("::")[0]] += 1
        diff = mutant.diff((self.root / mutant.path).read_bytes())
        return Verdict(
            mutant=mutant,
            diff=diff,
            killed_by=killed_by,
            reached=bool(running or not mutant.function),
        )

    def _killer(self, mutant: Mutant, tests: Sequence[str]) -> str | None:
        """The first test that fails with the fault. A test's first failure counts if it repeats,
        and goes without the fault.
        """
        while True:
            with self._applied(mutant):
                failed = self._first_failure(tests)
                if failed is None or failed in self.reliable:
                    return failed
                repeated = self._first_failure([failed]) is not None
            if repeated and self._first_failure([failed]) is None:
                self.reliable.add(failed)
                return failed
            self.unreliable.add(failed)

    @contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        """The file with the fault; its time goes back with its text, so that compiled files stay
        valid.
        """
        path = self.root / mutant.path
        source, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.apply(source))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _first_failure(self, tests: Sequence[str]) -> str | None:
        """The test that failed first, in processes of ever more files: most faults are seen before
        the last are imported.
        """
        start, size = 0, FIRST_FILES
        while start < len(tests):
            if failed := self._failure(tests[start : start + size]):
                return failed
            start, size = start + size, 4 * size
        return None

    def _failure(self, tests: Sequence[str]) -> str | None:
        """The test that failed first, or the file whose test took longer than any may."""
        left_out = [
            f"--deselect={test}" if "::" in test else f"--ignore={test}"
            for test in sorted(self.unreliable)
        ]
        try:
            code, output = self._pytest(["-x", *left_out, *tests])
        except subprocess.TimeoutExpired:
            return tests[0]
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        failure = FAILED.search(output) or CANNOT_IMPORT.search(output) or HUNG.search(output)
        if failure is None:
            raise RuntimeError(f"pytest ended with {code} and named no test:\n{output[-2000:]}")
        return failure[1]

    def _pytest(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of a run in the copy, without reference data and settings."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            "--hypothesis-seed=0",
            "-m",
            SELECTION,
        ]
        command += [
            "-o",
            f"faulthandler_timeout={TEST_LIMIT_S}",
            "-o",
            "faulthandler_exit_on_timeout=true",
            *arguments,
        ]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HP_")
        }
        environment["PYTHONPATH"] = f"{self.root}{os.pathsep}{ROOT}"
        shutil.rmtree(
            self.root / ".hypothesis", ignore_errors=True
        )  # examples that failed with other faults
        done = subprocess.run(
            command,
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_LIMIT_S,
        )
        return done.returncode, done.stdout + done.stderr
