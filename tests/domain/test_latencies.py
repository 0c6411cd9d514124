"""Latencies: one object carries what targets, tables and pages know of each."""

import pytest

from hp_tool.domain.latencies import LATENCIES, LATENCIES_BY_QUANTILE_KEY, Latency
from hp_tool.domain.targets import parse_target
from hp_tool.loop.search.serving import TARGETS
from hp_tool.wording.figures import MEASURED, SERVED_MEASURED, SERVING
from hp_tool.wording.words import missed_words

QUEUE = Latency(
    key="queue_s", quantile_key="queue", head="queue", label="Time in queue", per="in the queue"
)


def test_a_new_latency_is_worded_from_its_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LATENCIES, QUEUE.key, QUEUE)
    words = missed_words("queue_s", value=0.2, limit=0.1)
    assert words == "200.0 ms in the queue is 2.0 times the target of 100.0 ms"


def test_targets_name_each_latency_and_its_quantiles() -> None:
    assert tuple(LATENCIES) == TARGETS
    for key, latency in LATENCIES.items():
        assert parse_target(f"{latency.quantile_key}_p999_s") == (key, "p99.9")
    assert len(LATENCIES_BY_QUANTILE_KEY) == len(LATENCIES)


def test_each_latency_is_a_figure_predicted_and_measured() -> None:
    predicted = {figure.name: figure for figure in SERVING}
    measured = {figure.name: figure for figure in (*MEASURED, *SERVED_MEASURED)}
    for key, latency in LATENCIES.items():
        assert predicted[key].label == measured[key].label == latency.label
        assert (predicted[key].head, measured[key].path) == (latency.head, f"load.{key}")
