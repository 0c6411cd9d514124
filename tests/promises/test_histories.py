"""Simulated histories: every promise holds in each."""

from __future__ import annotations

import pytest

from tests.promises.machine import histories


def test_promises_hold_in_simulated_histories() -> None:
    histories(40)


@pytest.mark.long
def test_promises_hold_in_many_simulated_histories() -> None:
    histories(3000, seed=1)
