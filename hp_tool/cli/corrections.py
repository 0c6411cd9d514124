"""What a command knows from earlier measurements: the calibrations of the user's database, where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hp_tool.training.calibrated import Corrections

CalibrationOption = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration", help="Correct predictions by what the database knows of the cluster, if anything."
    ),
]


@contextmanager
def stored_corrections(*, wanted: bool) -> Iterator[Corrections]:
    """The newest calibrations of HP_DATABASE_URL, or of the user's own file if a search ever made it; else the model alone.

    A database that does not answer is said on standard error and costs the correction, not the answer. One that knows nothing
    yet costs a millisecond: SQLAlchemy would take longer to load than the answer takes to find.
    """
    from hp_tool.answers import uncalibrated
    from hp_tool.errors import HpToolError
    from hp_tool.places import default_database_path
    from hp_tool.store import may_hold_calibrations

    url = os.environ.get("HP_DATABASE_URL") or f"sqlite:///{default_database_path()}"
    if not wanted or not may_hold_calibrations(url):
        yield uncalibrated
        return
    from hp_tool.learning import StoredCalibrations
    from hp_tool.store import open_store

    try:
        store = open_store(url)
    except HpToolError as error:
        sys.stderr.write(f"not calibrated: {error.message}\n")
        yield uncalibrated
        return
    try:
        yield StoredCalibrations(store=store)
    finally:
        store.close()
