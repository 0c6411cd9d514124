"""What would mend an infeasible configuration, as a table: each change with what it gives, to look at and to compare."""

from __future__ import annotations

from hp_tool.catalog import cluster
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Mend
from hp_tool.domain.serving import InferenceEstimate, ServingMend
from service.dashboard.configuration.contexts import MendRow, Metric
from service.dashboard.links import compare_href, configuration_href, configuration_text


def mend_rows(query: Query, found: Estimate | InferenceEstimate) -> tuple[MendRow, ...]:
    """The mends of an estimate, the best first."""
    return tuple(_row(query, mend) for mend in found.mends)


def _row(query: Query, mend: Mend | ServingMend) -> MendRow:
    grown = query if mend.num_gpus == cluster(query.cluster).num_gpus else query.with_num_gpus(mend.num_gpus)
    return MendRow(
        change=mend.change,
        href=configuration_href(grown, parallel=mend.parallel),
        compare_href=compare_href(configuration_text(query), configuration_text(grown, parallel=mend.parallel)),
        figures=_of_serving(mend) if isinstance(mend, ServingMend) else _of_training(mend),
        remaining=tuple(reason.message for reason in mend.remaining),
    )


def _of_training(mend: Mend) -> tuple[Metric, ...]:
    return (
        Metric(name="Memory", value=mend.memory_total_bytes, unit="bytes"),
        Metric(name="Step", value=mend.step_s, unit="seconds"),
        Metric(name="Step, change", value=mend.step_change_fraction, unit="change"),
    )


def _of_serving(mend: ServingMend) -> tuple[Metric, ...]:
    return (
        Metric(name="Memory", value=mend.memory_total_bytes, unit="bytes"),
        Metric(name="First token", value=mend.ttft_s, unit="seconds"),
        Metric(name="Each token", value=mend.tpot_s, unit="seconds"),
        Metric(name="Output tokens/s per GPU", value=mend.output_tokens_per_second_per_gpu, unit="rate"),
        Metric(name="Throughput, change", value=mend.throughput_change_fraction, unit="change"),
    )
