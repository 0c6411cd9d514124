"""Describe the measurements that a configuration's predictions are based on.

They are those of a search or of the newest calibration.
"""

from datetime import datetime
from typing import Annotated, Any

from fastapi import Query as QueryParameter

from hp_tool.domain.query import Query
from hp_tool.domain.records import SearchRecord
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.questions import schema
from hp_tool.questions.configuration import SEARCH_KEYS, Configuration
from service.api.search_results import complete_rows
from service.dashboard import formats
from service.dashboard.page import Fact

ALONE = "the cost model alone"
SearchId = Annotated[
    str | None,
    QueryParameter(max_length=64, description="Search whose measurements the figures use"),
]


def estimate_of_search(
    record: SearchRecord, *, query: Query
) -> Estimate | InferenceEstimate | None:
    """Return a search's calibrated estimate for a query's configuration.

    Return None if the search has no result, or its result does not contain the configuration.
    """
    of_search, this = schema.parse_query(record.query), _configuration_fields(query)
    for row in complete_rows(record):
        if _configuration_fields(Configuration.from_row(row, query=of_search).query) == this:
            return row.calibrated_estimate
    return None


def _configuration_fields(query: Query) -> dict[str, Any]:
    """Return the query without its search settings."""
    return {
        name: value
        for name, value in schema.query_mapping(query).items()
        if name not in SEARCH_KEYS
    }


def calibration_words(calibrated: Estimate | None) -> str:
    """Describe the source of an estimate. `calibrated` is None without a calibration."""
    calibration = None if calibrated is None else calibrated.provenance.get("calibration")
    if not isinstance(calibration, dict):
        return ALONE
    version, cluster = calibration.get("version"), calibration.get("cluster_key")
    return f"the newest calibration of {cluster} (version {version})"


def search_evidence_words(record: SearchRecord) -> str:
    """Describe the source of a search's estimates."""
    return f"the runs of search {record.label.name or record.id} and earlier runs"


def calibration_in_words(value: Any) -> str:
    """Describe a stored calibration: its version, measurements and factors."""
    if not isinstance(value, dict):
        return formats.in_words(value)
    shown_elsewhere = (
        "version",
        "measurements",
        "cluster_key",
        "created_at",
        "id",
        "framework",
        "model_family",
    )
    factors = {name: factor for name, factor in value.items() if name not in shown_elsewhere}
    version, runs, cluster_key, created_at = map(value.get, shown_elsewhere[:4])
    when = (
        f" of {formats.moment(datetime.fromisoformat(created_at))}"
        if isinstance(created_at, str)
        else ""
    )
    return (
        f"version {version}{when}, from {runs} runs on {cluster_key}; {formats.in_words(factors)}"
    )


def list_sources(
    estimate: Estimate | InferenceEstimate, calibrated: Estimate | None
) -> tuple[Fact, ...]:
    """Return the sources of an estimate's numbers by name, with those of its calibration."""
    added = calibrated.provenance if calibrated else {}
    known = {
        **estimate.provenance,
        **{name: value for name, value in added.items() if name not in estimate.provenance},
    }
    if estimate.intervals is not None and estimate.intervals.source:
        known["intervals"] = estimate.intervals.source
    known.pop("stalls", None)  # These are shown with the figures.
    special = {"calibration": calibration_in_words, "assumed": _assumption_words}
    texts = {name: special.get(name, formats.in_words)(value) for name, value in known.items()}
    return tuple(Fact(name=formats.words(name), value=text) for name, text in texts.items() if text)


def _assumption_words(value: Any) -> str:
    """Describe the assumed values of keys that the query does not set."""
    if not isinstance(value, dict):
        return formats.in_words(value)
    return ", ".join(
        f"{formats.field_label(path)} {formats.in_words(assumption)}"
        for path, assumption in value.items()
    )
