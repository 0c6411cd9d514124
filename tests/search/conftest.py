"""A search's store and engine."""

from __future__ import annotations

import pytest

from tests.search.search_bench import Bench


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**settings):
        made.append(Bench(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.store.close()
