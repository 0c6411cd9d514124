"""Run the tests on one mutant, in a private copy of the repository."""

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
"""Folders of tests that are not run, because they observe predictions and locks only through files,
servers and jobs.
"""
LOCKING = ("launchers", "store")
"""Folders of tests that observe locks but no predictions. They run only if a lock was removed."""
SELECTION = "not components and not long"
"""Marks of the tests that run: those of the default run that start no training job or cluster."""
FIRST_FILES = 4
TEST_LIMIT_S = 300
RUN_LIMIT_S = 3600
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
CANNOT_IMPORT = re.compile(r"ImportError while loading conftest '.*?/(tests/[^']+)'")
HUNG = re.compile(r'File ".*?/(tests/[^"]*test_\w+\.py)", line \d+ in')


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the tests on a mutant."""

    mutant: Mutant
    diff: str
    killed_by: str | None
    """The test that failed, or the file whose test did not end; None if all tests passed."""
    reached: bool
    """True if any test runs the function."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the working tree into which faults are inserted."""

    root: Path
    reliable: set[str] = field(default_factory=set)
    """Tests that passed without a fault."""
    unreliable: set[str] = field(default_factory=set)
    """Tests that failed without a fault, or only sometimes with a fault. They are excluded."""
    killers: Counter[str] = field(default_factory=Counter)
    """Number of faults that each test file detected."""

    @classmethod
    def create(cls, repository: Path, root: Path) -> Copy:
        """Return a copy of the files that git tracks or would track."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(
            listed, cwd=repository, capture_output=True, text=True, check=True
        ).stdout.split("\0"):
            if (repository / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, root / name)
        return cls(root)

    def record(self, output: Path, *, locks: bool = True) -> None:
        """Run all tests once without a fault, and record which functions each test file reaches."""
        folders = [
            f"--ignore=tests/{name}" for name in (STRANGERS if locks else STRANGERS + LOCKING)
        ]
        self._pytest(
            ["-p", "benchmarks.mutants.reached", "--reached", str(output), *folders, "tests"]
        )

    def judge(
        self, mutant: Mutant, *, reached: Mapping[str, Reach], limit_s: float = math.inf
    ) -> Verdict:
        """Run the test files that reach the function, or all files if none does, because the
        function may run on import.

        Files that detected most faults run first, then the fastest. A fault that the tests of
        `limit_s` recorded seconds do not detect counts as survived.
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
        """Return the first test that fails because of the fault: it must fail again, and pass
        without the fault.
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
        """Write the mutated file, and restore its text and modification time afterwards, so that
        compiled files stay valid.
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
        """Return the first test that failed. Test files are added step by step, because most faults
        are detected by the first ones.
        """
        start, size = 0, FIRST_FILES
        while start < len(tests):
            if failed := self._failure(tests[start : start + size]):
                return failed
            start, size = start + size, 4 * size
        return None

    def _failure(self, tests: Sequence[str]) -> str | None:
        """Return the test that failed first, or the file whose test exceeded the time limit."""
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
        """Return exit code and output of pytest in the copy, without reference data and
        settings.
        """
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
        # Examples that failed with other faults.
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
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
