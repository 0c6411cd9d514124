"""Intervals of serving latencies and throughput, and of the ratio of two layouts."""

import math

import numpy as np

from hp_tool.catalog.familiarity import measured_runs
from hp_tool.cost.serving.candidates import Pass
from hp_tool.cost.serving.forward import mixers_log_sd
from hp_tool.cost.serving.mixers import mixer_log_sd
from hp_tool.domain.efficiency import Doubts
from hp_tool.domain.engines import EngineEfficiency, PoolEfficiency
from hp_tool.domain.familiarity import (
    Familiarity,
    Index,
    Nearness,
    Setting,
    arithmetic_precision,
    family_of,
    find_nearest,
    kind_of_model,
)
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.serving import ServingIntervals
from hp_tool.questions.serving.problem import CostedRows, ServingProblem

CONFIDENCE = 0.9
_Z90 = 1.645
MODEL_ATTRIBUTES = ("family", "model_kind")
"""Attributes whose uncertainty is already included in the deviations of MoE models and pools,
because these come from held-out models.
"""


def serving_setting(
    *, engine: str, release: str, gpu: GpuSpec, model: ModelSpec, precision: str, load: str
) -> Setting:
    """Return the attributes by which a serving query is compared with measured runs."""
    return Setting(
        software=engine,
        release=release,
        gpu=gpu.name,
        die=gpu.silicon or "",
        family=family_of(model.name),
        model_kind=kind_of_model(model),
        precision=arithmetic_precision(precision),
        load=load,
    )


def load_kind(problem: ServingProblem) -> str:
    """Return the kind of arrivals, as named in the index of measured runs."""
    if problem.trace is not None:
        return "trace"
    by_rate = problem.unknown is not None and problem.unknown.by_rate
    if by_rate or problem.request_rate_per_second is not None:
        return "poisson"
    if problem.think_time_s > 0.0:
        return "think time"
    return "offline" if problem.offline else "closed"


def nearest_runs(problem: ServingProblem, figure: str = "tpot", *, pools: bool = False) -> Nearness:
    """Return the measured runs that are nearest to the problem, by the attributes that widen the
    interval of one figure.
    """
    engine, gpu, doubts = problem.engine, problem.cluster.gpu, problem.profile.doubts
    setting = serving_setting(
        engine=engine.engine,
        release=problem.engine_version or engine.version,
        gpu=gpu,
        model=problem.model,
        precision=problem.precision,
        load=load_kind(problem),
    )
    return nearest_serving_runs(
        setting,
        measured_runs("serving"),
        doubts,
        figure,
        left_out=pools or problem.model.num_experts is not None,
        kernels_alone=engine.kernels_alone,
    )


def nearest_serving_runs(
    setting: Setting,
    index: Index,
    doubts: Doubts,
    figure: str,
    *,
    left_out: bool,
    kernels_alone: bool,
) -> Nearness:
    """Return the runs in an index that are nearest to a setting.

    Args:
        left_out: Whether the deviation of the constants comes from held-out models.
        kernels_alone: Whether the deviation already includes the use of another release.
    """
    covered = (*(MODEL_ATTRIBUTES if left_out else ()), *(("release",) if kernels_alone else ()))
    added = doubts.serving.get(figure, {})
    extras = {name: value for name, value in added.items() if name not in covered}
    return find_nearest(setting, index, extras, serves=True)


def figure_log_sd(fitted_log_sd: float, near: Nearness, *, kernels: float) -> float:
    """Return the standard deviation of ln(measured / predicted) of a figure.

    It combines the deviation on the fitted runs, the differences from the nearest runs, and
    `kernels`, the deviation of a die without timed kernels.
    """
    return math.hypot(fitted_log_sd, math.sqrt(near.variance), kernels)


def familiarity_of(problem: ServingProblem, *, pools: bool = False) -> Familiarity:
    """Return how similar the nearest measured runs are to the problem."""
    return nearest_runs(problem, pools=pools).answer()


def serving_intervals(
    ttft: float,
    tpot: float,
    throughput: float,
    problem: ServingProblem,
    *,
    pools: PoolEfficiency | None = None,
    mixers: tuple[float, float] | None = None,
) -> ServingIntervals:
    """Return the central 90% intervals of the predicted means, for a replica or for pools.

    `mixers` is the result of `mixers_log_sds`. None: assume that recurrent and sparse kernels take
    all the time.
    """
    engine = problem.engine
    has_experts = problem.model.num_experts is not None
    # Deviations of MoE models and pools come from held-out models, engines and lengths.
    left_out = pools or (problem.experts if has_experts else None)
    scatter = left_out or engine

    first, later = mixers or (_kernels_only_log_sd(problem),) * 2

    def interval(value: float, figure: str) -> tuple[float, float]:
        fitted_log_sd = getattr(scatter, f"{figure}_log_sd")
        if engine.kernels_alone and scatter is not engine:
            fitted_log_sd = math.hypot(fitted_log_sd, getattr(engine, f"{figure}_log_sd"))
        near = nearest_runs(problem, figure, pools=pools is not None)
        untimed = 0.0 if problem.profile.gpu.measured else kernels_log_sd(problem, figure)
        width = _Z90 * math.hypot(
            figure_log_sd(fitted_log_sd, near, kernels=untimed),
            first if figure == "ttft" else later,
        )
        return value * math.exp(-width), value * math.exp(width)

    return ServingIntervals(
        confidence=CONFIDENCE,
        ttft_s=interval(ttft, "ttft"),
        tpot_s=interval(tpot, "tpot"),
        output_tokens_per_second_per_gpu=interval(throughput, "throughput"),
        source=scatter.fitted_on,
    )


def kernels_log_sd(problem: ServingProblem, figure: str) -> float:
    """Return the additional deviation of a die without timed kernels. It is the deviation between
    dies, counted a second time.
    """
    return problem.profile.doubts.serving.get(figure, {}).get("die", 0.0)


def ratio_log_sd(problem: ServingProblem, *, figure: str = "throughput") -> float:
    """Return the standard deviation of ln(measured / predicted) of the ratio of two layouts under
    the same load.

    `figure` is `ttft`, `tpot` or `throughput`.
    """
    scatter = problem.experts if problem.model.num_experts is not None else problem.engine
    if (
        figure == "throughput"
        and isinstance(scatter, EngineEfficiency)
        and scatter.pair_log_sd is not None
    ):
        return scatter.pair_log_sd
    fitted_log_sd: float = getattr(scatter, f"{figure}_log_sd")
    return math.sqrt(2.0) * fitted_log_sd


def mixers_log_sds(rows: CostedRows, row: int) -> tuple[float, float]:
    """Return the deviations of the first token and of later tokens caused by recurrent or sparse
    layers that have no measured runs.
    """
    problem = rows.problem
    if not _kernels_only_log_sd(problem):
        return 0.0, 0.0
    one = rows.candidates.take(slice(row, row + 1))
    share, none = rows.costs.running[row : row + 1] / one.pipeline_parallel_size, np.zeros(1)
    length, output = float(problem.input_length), float(problem.output_length)
    prompt = Pass(tokens=none + problem.computed_length, decoding=none, prefill_requests=none + 1.0)
    decode = Pass(tokens=share, decoding=share, prefill_requests=none)
    first, later = (
        mixers_log_sd(problem, one, each, context=length + 0.5 * output)[0]
        for each in (prompt, decode)
    )
    return float(first), float(later)


def _kernels_only_log_sd(problem: ServingProblem) -> float:
    """Return the deviation of a model in which recurrent or sparse kernels take all the time."""
    return max(mixer_log_sd(problem.with_layers(kind)) for _, kind in problem.model.kinds)
