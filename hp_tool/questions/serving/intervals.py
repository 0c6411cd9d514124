"""How sure serving's predictions are: intervals of latencies and throughput, and of what two
layouts differ by.
"""

import math

import numpy as np

from hp_tool.cost.serving.candidates import Pass
from hp_tool.cost.serving.forward import mixers_log_sd
from hp_tool.cost.serving.mixers import mixer_log_sd
from hp_tool.domain.engines import EngineEfficiency, PoolEfficiency
from hp_tool.domain.serving import ServingIntervals
from hp_tool.questions.serving.problem import CostedRows, ServingProblem

CONFIDENCE = 0.9
_Z90 = 1.645
UNMEASURED = 2.0
"""Intervals widen by this if the GPU's or the engine version's constants are borrowed from
another.
"""


def log_sd(
    engine: EngineEfficiency, figure: str, *, own: float, familiar: bool, borrowed: bool
) -> float:
    """Standard deviation of ln(measured / predicted) of `ttft`, `tpot` or `throughput`.

    `own` is that of runs like those fitted on. Beyond it predictions for an unfamiliar model, die
    or precision scatter as the engine's did for those left out of its fit; with borrowed constants
    they scatter UNMEASURED times as far. Variances add up.
    """
    factor = engine.unfamiliar_ttft_factor if figure == "ttft" else engine.unfamiliar_factor
    beyond = 0.0 if familiar else getattr(engine, f"{figure}_log_sd") * math.sqrt(factor**2 - 1.0)
    return math.hypot(own * (UNMEASURED if borrowed else 1.0), beyond)


def intervals(
    ttft: float,
    tpot: float,
    throughput: float,
    problem: ServingProblem,
    *,
    pools: PoolEfficiency | None = None,
    mixers: tuple[float, float] | None = None,
) -> ServingIntervals:
    """The central 90 % around predicted means of a replica, or of pools. `mixers`: as
    `mixers_doubt` says; None: that of the kernels alone, as if nothing else took time.
    """
    engine, gpu, silicon = problem.engine, problem.profile.gpu, problem.cluster.gpu.silicon
    mixture = problem.model.num_experts is not None
    # Deviations of mixtures and pools are those of models, engines and lengths left out.
    left_out = pools or (problem.experts if mixture else None)
    scatter = left_out or engine
    if left_out is not None:
        familiar, measured = silicon in engine.fitted_silicon, gpu.measured
    else:
        familiar = engine.covers(
            model=problem.model.name, silicon=silicon, precision=problem.precision
        )
        measured = engine.measured and gpu.measured

    first, later = mixers or (_whole_doubt(problem),) * 2

    def interval(value: float, figure: str) -> tuple[float, float]:
        own = getattr(scatter, f"{figure}_log_sd")
        if engine.kernels_alone and scatter is not engine:
            own = math.hypot(own, getattr(engine, f"{figure}_log_sd"))
        width = _Z90 * math.hypot(
            log_sd(engine, figure, own=own, familiar=familiar, borrowed=not measured),
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


def ratio_log_sd(problem: ServingProblem, *, figure: str = "throughput") -> float:
    """Standard deviation of ln(measured / predicted) of the ratio of two layouts' `ttft`, `tpot` or
    `throughput`, one load.
    """
    scatter = problem.experts if problem.model.num_experts is not None else problem.engine
    if (
        figure == "throughput"
        and isinstance(scatter, EngineEfficiency)
        and scatter.pair_log_sd is not None
    ):
        return scatter.pair_log_sd
    own: float = getattr(scatter, f"{figure}_log_sd")
    return math.sqrt(2.0) * own


def mixers_doubt(rows: CostedRows, row: int) -> tuple[float, float]:
    """(log_sd of first tokens, of those that follow) for want of served runs with recurrent or
    sparse layers.
    """
    problem = rows.problem
    if not _whole_doubt(problem):
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


def _whole_doubt(problem: ServingProblem) -> float:
    """Return the log_sd of a model of which nothing but such kernels took time."""
    return max(mixer_log_sd(problem.of(kind)) for _, kind in problem.model.kinds)
