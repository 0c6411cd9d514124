"""The answer of a search in figures: what to run, what is known of it, and what it saves."""

from dataclasses import dataclass, field
from typing import Literal

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.serving import ServingConfig

BaselineSource = Literal["search.baseline", "first run"]
GainSource = Literal["search.baseline", "first run", "slowest run"]
VerdictState = Literal["use", "keep", "tied", "repeat", "unmeasured"]
WIDE_INTERVAL_RATIO = 2.0
"""Ratio of the bounds of a 90% interval from which one run does not settle a step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Runs of one configuration that determine its step time: successful complete runs, or the
    decisive reduced run. For serving, the time of a request under the whole load, with penalties
    for missed targets.
    """

    run_id: str
    """The run that counts."""
    step_s: float
    """Step time. A repeat runs twice the steps and was not selected for being fast, so it counts
    for both.
    """
    num_runs: int
    low_s: float
    """The fastest of them."""
    high_s: float
    reduced: bool
    """Implied by a reduced run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The configuration that the answer is compared with."""

    parallel: ParallelConfig
    source: BaselineSource
    step_s: float
    """As the answer's: by calibration and its own runs."""
    speedup: float
    """The gain's factor."""
    saved_days: float | None = None
    """Of the whole training; None without total_tokens."""
    saved_cost: float | None = None
    """US dollars; None without total_tokens or a price."""
    saved_parts_s: dict[str, float]
    """Seconds of a step that the answer saves (below 0: spends besides), by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Speedup of the answer over another configuration."""

    against: GainSource
    factor: float
    """The other's seconds by the answer's: of a step, of serving of a request."""
    interval: tuple[float, float]
    """90% interval; if it contains 1, the difference may be noise."""
    source: Literal["measured", "predicted"] = "predicted"
    """measured: both ran as a whole, and the factor is that of what was measured. predicted: by the
    estimates that chose it.
    """
    noise_from: Literal["repeats", "assumed"] | None = None
    """Source of a measured gain's interval: repeats of this search's runs, or typical repeats on
    such devices; None for a predicted gain.
    """
    noise_fraction: float | None = None
    """Standard deviation of the logarithm between two runs of one configuration; None for a
    predicted gain.
    """

    @property
    def clear(self) -> bool:
        """Whether the answer is faster beyond doubt."""
        return self.interval[0] > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision of a search, from which titles, warnings and stop reasons are derived."""

    state: VerdictState
    """use: the answer is clearly the best. keep: no configuration is clearly better than the
    query's baseline. tied: others may be as fast. repeat: one run does not determine the step time.
    unmeasured: it did not run.
    """
    parallel: ParallelConfig | ServingConfig
    """The configuration to run: the baseline's under `keep`, else the answer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Prediction of a configuration before its run, and the run's measurement."""

    step_s: float
    step_s_interval: tuple[float, float]
    """90%"""
    known_from_runs: int
    """Measurements that the prediction was calibrated by."""
    off_fraction: float
    """Measured / predicted - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Recommendation of a search; every page, command and client shows these figures."""

    parallel: ParallelConfig
    step_s: float
    step_s_interval: tuple[float, float] | None
    """90%"""
    source: Literal["calibrated", "predicted"]
    """calibrated: by all measured runs, its own above all. predicted: nothing was measured."""
    known_from_runs: int
    """Runs of the search that succeeded."""
    measured: Repeats | None
    """Its own runs; None if it never ran."""
    outside: bool
    """Whether the measured step time is outside `calibrated_step_s_interval`."""
    as_good: int
    """Other configurations with a step time that does not differ significantly."""
    free_memory_bytes: float
    """Of the device on its fullest rank."""
    out_of_memory_probability: float
    baseline: Baseline | None
    gain: Gain | None = None
    """Gain over the baseline; None without a baseline."""
    gains: tuple[Gain, ...] = ()
    """`gain`, then those over the first configuration that ran, unless that is `gain`, and over the
    slowest.
    """
    clearly_better: bool | None = None
    """Whether the gain's interval is above 1; None without a gain."""
    verdict: Verdict | None = None
    """None in results that were stored before there were verdicts."""
    foreseen: Foreseen | None = None
    """Prediction before its first run; None without a successful complete run."""
    calibrated_step_s_interval: tuple[float, float] | None = None
    """90% interval of the step time after calibration with all runs."""
    set: ChosenValues = field(default_factory=dict)
    """Query values that the search chose besides `parallel`, by path; its runs and the baseline
    have the same values.
    """

    @property
    def objective_s(self) -> float:
        """Quantity that the search minimises, in seconds."""
        return self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBaseline:
    """The configuration that the answer of a serving search is compared with."""

    parallel: ServingConfig
    source: BaselineSource
    output_tokens_per_second_per_gpu: float
    """As the answer's: by calibration and its own runs."""
    speedup: float
    """The answer's output tokens per second by its."""
    saved_cost_per_million_output_tokens: float | None = None
    """US dollars; None without a price."""
    saved_parts_s: dict[str, float]
    """Seconds of a request that the answer saves (below 0: spends besides), by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """Recommendation of a serving search under the whole load; every page, command and client shows
    these figures.
    """

    parallel: ServingConfig
    ttft_s: float
    ttft_s_interval: tuple[float, float] | None
    """90%"""
    tpot_s: float
    tpot_s_interval: tuple[float, float] | None
    request_latency_s: float
    output_tokens_per_second_per_gpu: float
    users: int | None
    """Users that produce the load, each with one request at a time."""
    cost_per_million_output_tokens: float | None
    """US dollars; None without a price."""
    source: Literal["measured", "calibrated", "predicted"]
    known_from_runs: int
    """Runs of the search that succeeded."""
    measured: Repeats | None
    """Its own runs; None if it never ran."""
    as_good: int
    """Other configurations with a request latency that does not differ significantly."""
    baseline: ServingBaseline | None
    gain: Gain | None = None
    """Gain over the baseline; None without a baseline."""
    gains: tuple[Gain, ...] = ()
    """`gain`, then those over the first deployment that ran, unless that is `gain`, and over the
    slowest.
    """
    clearly_better: bool | None = None
    """Whether the gain's interval is above 1; None without a gain."""
    verdict: Verdict | None = None
    """None in results that were stored before there were verdicts."""

    @property
    def objective_s(self) -> float:
        """Quantity that the search minimises, in seconds."""
        return self.request_latency_s


def get_verdict(answer: Answer | ServingAnswer) -> Verdict:
    """Return the verdict on an answer; decide it if it was stored without one."""
    if answer.verdict is not None:
        return answer.verdict
    state = _decide_state(answer)
    keeps = state == "keep" and answer.baseline is not None
    return Verdict(
        state=state,
        parallel=answer.baseline.parallel if keeps and answer.baseline else answer.parallel,
    )


def _decide_state(answer: Answer | ServingAnswer) -> VerdictState:
    runs, gain = answer.measured, answer.gain
    if runs is None:
        return "unmeasured"
    ran_once = runs.num_runs == 1
    if ran_once and isinstance(answer, Answer) and answer.outside:
        return "repeat"
    compared = gain is not None and gain.against != "slowest run"
    if gain is not None and compared and gain.clear:
        return "use"
    if ran_once and is_wide(answer):
        return "repeat"
    if gain is not None and answer.baseline and answer.baseline.source == "search.baseline":
        return "keep"
    return "tied" if compared or answer.as_good else "use"


def is_wide(answer: Answer | ServingAnswer) -> bool:
    """Return whether the interval of a step time is too wide to settle it."""
    interval = answer.step_s_interval if isinstance(answer, Answer) else None
    return interval is not None and interval[1] >= WIDE_INTERVAL_RATIO * interval[0]
