"""/searches/ID/compare: the configurations of two runs side by side, measured beside predicted."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter

from hp_tool.domain.records import RunRecord
from hp_tool.errors import HpToolError
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.queries import read_query
from service.dashboard.configuration.comparing import compare_page, failed_comparison
from service.dashboard.configuration.contexts import ComparedRun, ComparePage, Metric
from service.dashboard.links import configuration_text
from service.dashboard.trials import TONES
from service.dashboard.twins import answered, page_at

router = APIRouter(tags=["dashboard"])


@page_at(router, "/searches/{search_id}/compare", template="compare.html", section="Searches", status=answered)
def compare_runs_context(
    search_id: str, a: str, b: str, store: StoreDep, calibrations: CalibrationsDep, find: FindDep
) -> ComparePage:
    """Two runs of a search side by side, as their page shows them; one that the caller may not see is not found."""
    query = store.get_search(search_id=search_id).query
    runs = [store.get_run(search_id=search_id, run_id=run_id) for run_id in (a, b)]
    json_href = f"/searches/{search_id}/compare.json?{urlencode({'a': a, 'b': b})}"
    try:
        texts = [configuration_text(query, parallel=run.parallel) for run in runs]
        first, second = (read_query(text.encode(), find=find) for text in texts)
        one, two = (compared_run(run) for run in runs)
        return compare_page(
            first,
            second,
            calibrations=calibrations,
            runs=(one, two),
            search_href=f"/searches/{search_id}",
            json_href=json_href,
        )
    except HpToolError as error:  # a query of another version
        return failed_comparison(error, json_href=json_href)


def compared_run(run: RunRecord) -> ComparedRun:
    """What a stored run showed."""
    found = run.measurement
    state = found.status if found else str(run.state)
    return ComparedRun(
        number=run.number,
        state=state,
        tone=TONES.get(state, ""),
        cause=run.cause or (found.cause if found else None),
        reduced=not run.fidelity.is_whole,
        metrics=_measured(run),
    )


def _measured(run: RunRecord) -> tuple[Metric, ...]:
    found = run.measurement
    if found is None or found.status != "ok":
        return ()
    if found.load is not None:
        rows = [
            Metric(name="Time to first token", value=found.load.ttft_s, unit="seconds"),
            Metric(name="Time per output token", value=found.load.tpot_s, unit="seconds"),
            Metric(name="Request latency", value=found.load.request_latency_s, unit="seconds"),
            Metric(name="Output tokens/s per GPU", value=found.tokens_per_second_per_gpu, unit="rate"),
        ]
    else:
        rows = [
            Metric(name="Step time", value=found.objective_s, unit="seconds"),
            Metric(name="Tokens/s per GPU", value=found.tokens_per_second_per_gpu, unit="rate"),
        ]
    if run.fidelity.is_whole:  # a reduced run's memory is another configuration's
        rows.append(Metric(name="Peak memory allocated", value=found.peak_memory_bytes, unit="bytes"))
    return tuple(row for row in rows if row.value is not None)
