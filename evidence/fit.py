"""Fit the catalog's constants to the published measurements.

    python -m evidence.fit                    refit everything; write the catalog, the ledger
                                              and docs/accuracy.md
    python -m evidence.fit --check            compare the catalog with the refitted constants
    python -m evidence.fit --only NAME        run one fit; repeat the flag for several
    python -m evidence.fit --kernels DIR      also run the fits that need kernel timings

Fits run in the order of FITS, each in a separate process, because later fits read constants of
earlier fits from the catalog. --check writes nothing and runs each fit with the current catalog.
Without a folder of kernel timings, --check compares the constants that depend on them with the
digests that the last fit stored in evidence/kernels.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import add_data_argument, data_folder
from evidence.fitted_file import FittedFile

DIGESTS = Path(__file__).with_name("kernels.json")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fit: a function that takes a folder and yields catalog files."""

    name: str
    function: str = ""
    """`module.function` in benchmarks.accuracy; fit_NAME.fitted by default."""
    needs_kernels: bool = False
    """Whether the fit reads timings of single kernels, which are not in the repository."""

    def files(self, folder: Path) -> list[FittedFile]:
        """Run the fit on a folder of measurements and return the catalog files that it
        determines.
        """
        module, _, function = (self.function or f"fit_{self.name}.fitted").partition(".")
        found = getattr(importlib.import_module(f"benchmarks.accuracy.{module}"), function)
        return list(found(folder))


FITS = (
    Fit(name="gpus", needs_kernels=True),
    Fit(name="mixers", needs_kernels=True),
    Fit(name="frameworks"),
    Fit(name="training_experts", function="fit_frameworks.fitted_experts"),
    Fit(name="training_mixers", function="fit_frameworks.fitted_mixers"),
    Fit(name="fsdp"),
    Fit(name="trainers"),
    Fit(name="internevo"),
    Fit(name="nanotron"),
    Fit(name="engines"),
    Fit(name="releases", needs_kernels=True),
    Fit(name="experts"),
    Fit(name="defaults"),
    Fit(name="pools", function="fit_defaults.fitted_pools"),
    Fit(name="familiarity"),
    Fit(name="intervals"),
    Fit(name="serving_intervals", function="fit_intervals.fitted_serving"),
)


@contextlib.contextmanager
def _folder(data: Path, kernels: Path | None) -> Iterator[Path]:
    """Yield a folder that contains the measurements and, as `ops`, the kernel timings."""
    if kernels is None or kernels == data / "ops":
        yield data
        return
    with tempfile.TemporaryDirectory() as name:
        joined = Path(name)
        for path in data.iterdir():
            if path.name != "ops":
                (joined / path.name).symlink_to(path.resolve())
        (joined / "ops").symlink_to(kernels.resolve())
        yield joined


def _write(fit: Fit, folder: Path) -> list[str]:
    files = fit.files(folder)
    for each in files:
        each.write()
    if fit.needs_kernels:
        digests = _digests_left()
        digests["files"] = _digests(folder / "ops")
        digests["fits"][fit.name] = {
            each.file: {
                "fields": sorted(each.fields),
                "sha256": _stored_digest(each.file, each.fields),
            }
            for each in files
        }
        DIGESTS.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    return [each.file for each in files]


def _check(fit: Fit, folder: Path) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        files = fit.files(folder)
    return [line for each in files for line in each.differences()]


def _check_digests(fit: Fit) -> list[str]:
    """Compare the constants of a fit with their stored digests, without running the fit."""
    left = _digests_left()["fits"][fit.name]
    return [
        f"{file}: changed since the last fit on kernel timings"
        for file, each in left.items()
        if _stored_digest(file, each["fields"]) != each["sha256"]
    ]


def _digests_left() -> dict[str, Any]:
    if not DIGESTS.is_file():
        return {"files": {}, "fits": {}}
    left: dict[str, Any] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return left


def _stored_digest(file: str, fields: Iterable[str]) -> str:
    stored = FittedFile(file=file, fields={}).stored()
    chosen: dict[str, Any] = {name: stored.get(name) for name in sorted(fields)}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _digests(kernels: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(kernels.glob("*.csv"))
    }


def _fresh_processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        max_workers=count, mp_context=get_context("spawn"), max_tasks_per_child=1
    )


def fit(chosen: Iterable[Fit], folder: Path) -> None:
    """Run the fits in order and write their constants to the catalog."""
    for each in chosen:
        with _fresh_processes(1) as pool:
            written = pool.submit(_write, each, folder).result()
        print(f"{each.name}: wrote {', '.join(written)}", flush=True)


def check(chosen: Iterable[Fit], folder: Path) -> dict[str, list[str]]:
    """Return {fit: descriptions of the differences between the catalog and the refitted
    constants}.
    """
    if has_kernels := (folder / "ops").is_dir():
        timed = _digests(folder / "ops")
        left = _digests_left()["files"]
        if changed := [name for name, digest in left.items() if digest != timed.get(name)]:
            names = ", ".join(changed)
            print(f"kernel timings changed since the last fit: {names}", file=sys.stderr)
    with _fresh_processes(os.cpu_count() or 1) as pool:
        pending = {
            each.name: (
                pool.submit(_check, each, folder)
                if has_kernels or not each.needs_kernels
                else pool.submit(_check_digests, each)
            )
            for each in chosen
        }
        differences = {}
        for name, future in pending.items():
            differences[name] = future.result()
            print(f"{name}: {'; '.join(differences[name]) or 'reproduced'}", flush=True)
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evidence.fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data_argument(parser)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument(
        "--only",
        action="append",
        choices=[each.name for each in FITS],
        metavar="NAME",
        help=f"run only this fit: {', '.join(each.name for each in FITS)}",
    )
    parser.add_argument(
        "--reason",
        metavar="TEXT",
        default="all constants fitted anew",
        help="why figures of the ledger moved (default: %(default)s)",
    )
    parser.add_argument("--kernels", metavar="DIR", type=Path, help="folder of kernel timings")
    arguments = parser.parse_args()
    data = data_folder(arguments)
    kernels = arguments.kernels or (data / "ops" if (data / "ops").is_dir() else None)
    chosen = [each for each in FITS if not arguments.only or each.name in arguments.only]
    with _folder(data, kernels) as folder:
        if arguments.check:
            sys.exit(any(check(chosen, folder).values()))
        lacking = [each.name for each in chosen if each.needs_kernels and kernels is None]
        if lacking:
            parser.error(f"{', '.join(lacking)}: give --kernels DIR, or name other fits by --only")
        fit(chosen, folder)
    if not arguments.only:
        # Imported now: they read the constants that were just written.
        from benchmarks.accuracy import ledger, page

        ledger.record(ledger.compute(data), arguments.reason)
        page.main()
        print(f"wrote {ledger.PATH.name} and {', '.join(path.name for path in page.PAGES)}")


if __name__ == "__main__":
    main()
