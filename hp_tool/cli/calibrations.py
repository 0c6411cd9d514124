"""What a command knows from earlier measurements: the calibrations of the user's database, where there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hp_tool.training.calibrated import Calibrations

CalibrationOption = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration", help="Correct predictions by what the database knows of the cluster, if anything."
    ),
]


@contextmanager
def stored_calibrations(*, wanted: bool) -> Iterator[Calibrations | None]:
    """The newest calibrations of HP_DATABASE_URL, or of the user's own file if a search ever made it; else None.

    If the database does not answer, standard error says so, and answers are not calibrated. One that holds none yet costs a
    millisecond: loading SQLAlchemy would take longer than the answer.
    """
    from hp_tool.errors import HpToolError
    from hp_tool.places import default_database_path
    from hp_tool.store import may_hold_calibrations

    url = os.environ.get("HP_DATABASE_URL") or f"sqlite:///{default_database_path()}"
    if not wanted or not may_hold_calibrations(url):
        yield None
        return
    from hp_tool.learning import StoredCalibrations
    from hp_tool.store import open_store

    try:
        store = open_store(url)
    except HpToolError as error:
        sys.stderr.write(f"not calibrated: {error.message}\n")
        yield None
        return
    try:
        yield StoredCalibrations(store=store)
    finally:
        store.close()
