"""From the controls to the explorer's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from hp_tool import training
from hp_tool.catalog import gpu as catalogue_gpu
from hp_tool.domain.parallel import ParallelConfig, RecomputeName, recompute_name
from hp_tool.domain.query import Query
from hp_tool.domain.result import Ranking, Recommendation
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.training import config_query
from hp_tool.training.calibrated import Calibrations
from hp_tool.training.evaluate import resolve_configuration
from hp_tool.training.problem import resolve_training
from service.dashboard import formats
from service.dashboard.configuration.building import configuration_view
from service.dashboard.explorer.contexts import ExplorerPage, FastRow, Settings
from service.dashboard.explorer.controls import controls
from service.dashboard.figures import Row, Stack, stack
from service.dashboard.links import configuration_href

FASTEST = 5
"""Rows; each the fastest of its layout."""
WEIGHED = 120
"""Best configurations among which layouts are looked for."""
EFFECTS: tuple[tuple[str, bool, RecomputeName], ...] = (
    ("Neither", False, "none"),
    ("Sequence parallel", True, "none"),
    ("Selective recomputation", False, "selective"),
    ("Both", True, "selective"),
    ("Full recomputation", False, "full"),
)
"""The switches of arXiv 2205.05198's figures 7 and 8: (name, sequence parallel, recompute)."""

Resolve = Callable[[Query], Query]
"""Lays registered names in, and refuses what is not for strangers."""


def explorer_page(
    settings: Settings, *, models: Sequence[str], gpus: Sequence[str], resolve: Resolve, calibrations: Calibrations | None
) -> ExplorerPage:
    """The page; what cannot be answered stands in its `error`, with the controls as far as they are known."""
    page = ExplorerPage(
        title="Explorer",
        json_href=f"/explorer.json?{_address(settings)}",
        settings=settings,
        models=tuple(models),
        gpus=tuple(gpus),
        precisions=_precisions(settings.gpu),
        controls=(),
        view=None,
        configuration_href=None,
        fastest=(),
        nothing_fits=False,
        legal=0,
        feasible=0,
        effect_memory=None,
        effect_time=None,
        error=None,
    )
    try:
        return _filled(page, settings, resolve=resolve, calibrations=calibrations)
    except HpToolError as error:
        return replace(page, error=error.as_dict())


def _filled(page: ExplorerPage, settings: Settings, *, resolve: Resolve, calibrations: Calibrations | None) -> ExplorerPage:
    free = resolve(schema.parse_query(settings.workload()))
    known = None if calibrations is None else calibrations(resolve_training(free))
    identity = str(known.provenance.get("id")) if known is not None else None
    found = _fastest(schema.to_json(free), _Learnt(calibration=identity, calibrations=calibrations))
    asked = settings.parallel()
    if not asked and (best := found.recommendations or found.nearest_misses):
        asked = schema.to_dict(config_query(best[0].parallel))
    query = resolve(schema.parse_query(settings.workload() | {"parallel": asked}))
    configuration = resolve_configuration(query)
    shown = configuration.config
    view, _ = configuration_view(query, calibrations=calibrations)
    memory, time = _effects(query, shown, settings)
    rows = _of_each_layout(found.recommendations) or found.nearest_misses
    return replace(
        page,
        json_href=f"/explorer.json?{_address(_at(settings, shown))}",
        settings=_at(settings, shown),
        controls=controls(settings, model=configuration.problem.model, shown=shown),
        view=view,
        configuration_href=configuration_href(query, parallel=shown),
        fastest=tuple(_row(row, query, settings, shown) for row in rows),
        nothing_fits=not found.recommendations,
        legal=found.space.legal,
        feasible=found.space.feasible,
        effect_memory=memory,
        effect_time=time,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learnt:
    """What is known of the cluster; the same wherever it is the same stored calibration."""

    calibration: str | None
    calibrations: Calibrations | None = field(compare=False)


@lru_cache(maxsize=64)
def _fastest(query: str, learnt: _Learnt) -> Ranking[Recommendation]:
    """Moving a slider asks the same again and again."""
    return training.recommend(query=schema.parse_query(query), top=WEIGHED, calibrations=learnt.calibrations)


def _of_each_layout(rows: Sequence[Recommendation]) -> list[Recommendation]:
    """The first of every way to divide the devices: what else may vary hardly tells the first places apart."""
    first: dict[tuple[int, ...], Recommendation] = {}
    for row in rows:
        c = row.parallel
        layout = (c.tensor_parallel_size, c.pipeline_parallel_size, c.context_parallel_size, c.expert_parallel_size)
        first.setdefault(layout, row)
    return list(first.values())[:FASTEST]


def _row(row: Recommendation, query: Query, settings: Settings, shown: ParallelConfig) -> FastRow:
    found = row.calibrated_estimate or row.estimate
    return FastRow(
        rank=row.rank,
        arithmetic=formats.arithmetic(row.parallel),
        details=formats.details(row.parallel),
        chosen=row.parallel == shown,
        step_s=found.time.step_s if found.time else None,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
        mfu=found.mfu,
        memory_total_bytes=found.memory.total_bytes if found.memory else None,
        reasons=tuple(reason.message for reason in found.reasons),
        parallel=row.parallel,
        href=f"/explorer?{_address(_at(settings, row.parallel))}",
        configuration_href=configuration_href(query, parallel=row.parallel),
    )


def _effects(query: Query, shown: ParallelConfig, settings: Settings) -> tuple[Stack | None, Stack | None]:
    """The configuration with sequence parallelism and recomputation switched on and off; nothing where it is illegal."""
    sizes, times = [], []
    for label, sharded, recompute in EFFECTS:
        if sharded and shown.tensor_parallel_size == 1:
            continue  # there is nothing to share norms and dropout with
        changed = replace(shown, sequence_parallel=sharded, recompute=recompute)
        found = training.estimate(query=replace(query, parallel=config_query(changed)), with_fixes=False)
        if found.memory is None or found.time is None:
            continue
        href = f"/explorer?{_address(_at(settings, changed))}"
        sizes.append(Row(label=label, parts=found.memory.parts_bytes, limit=found.memory.capacity_bytes, href=href))
        times.append(Row(label=label, parts=found.time.parts_s, href=href))
    return (stack(sizes, unit="bytes"), stack(times, unit="seconds")) if sizes else (None, None)


def _at(settings: Settings, config: ParallelConfig) -> Settings:
    """The controls at this configuration."""
    word: Any = recompute_name(config.recompute).split()[0]
    return replace(
        settings,
        tp=config.tensor_parallel_size,
        pp=config.pipeline_parallel_size,
        vpp=config.virtual_pipeline_parallel_size,
        cp=config.context_parallel_size,
        ep=config.expert_parallel_size,
        mbs=config.micro_batch_size,
        recompute=word,
        sp="on" if config.sequence_parallel else "off",
        zero=config.zero_stage,
    )


def _address(settings: Settings) -> str:
    return urlencode({name: value for name, value in asdict(settings).items() if value is not None})


def _precisions(gpu: str) -> tuple[str, ...]:
    try:
        return tuple(catalogue_gpu(gpu).peak_flops_per_second)
    except HpToolError:
        return ("bf16",)
