"""The calibrations in the user's database, by which commands correct predictions."""

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
        "--calibration/--no-calibration", help="Correct predictions by the database's calibration of the cluster, if any."
    ),
]


@contextmanager
def stored_calibrations(*, wanted: bool) -> Iterator[Calibrations | None]:
    """The newest calibrations of HP_DATABASE_URL, or of the user's own file if it exists; None if there are none.

    If the database does not answer, standard error says so, and answers are not calibrated. One without calibrations takes a
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
