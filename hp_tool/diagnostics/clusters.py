"""Whether the clusters that the catalogue and the launchers' files name would take a run from this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hp_tool import launchers
from hp_tool.catalog import library
from hp_tool.catalog.hardware import RUNS
from hp_tool.diagnostics.host import Check
from hp_tool.domain.ports import Launcher
from hp_tool.errors import HpToolError, InputError, MissingExtraError
from hp_tool.launchers.options import config_path
from hp_tool.tuning.clusters import cluster_launcher

_WITH_FILES = ("slurm", "ray", "kubernetes")


def clusters() -> Iterator[Check]:
    """Each cluster whose entry says how runs reach it, and each launcher that has a file of options."""
    for entry in library.entries("clusters"):
        if RUNS in entry.fields:
            yield _checked(f"cluster {entry.name}", partial(cluster_launcher, entry.name))
    for name in _WITH_FILES:
        if config_path(name).is_file():
            yield _checked(name, partial(launchers.create, name))


def _checked(name: str, launcher: Callable[[], Launcher]) -> Check:
    """One that is down now may be up when a run needs it: a warning. A mistake in what describes it fails."""
    try:
        return Check(name=name, status="ok", detail=launcher().answers())
    except MissingExtraError as error:
        return Check(name=name, status="warning", detail=error.message, mend="install it where searches on this cluster run")
    except InputError as error:
        return Check(name=name, status="failed", detail=error.message, mend=f"correct {error.field or 'its entry'}")
    except HpToolError as error:
        mend = "see that it runs, that this host reaches it, and that its address and this user's rights are right"
        return Check(name=name, status="warning", detail=error.message, mend=mend)
