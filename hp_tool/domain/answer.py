"""The answer of a search: the recommended configuration, its measurements, and its gain."""

from dataclasses import dataclass, field
from typing import Literal

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.serving import ServingConfig

BaselineSource = Literal["search.baseline", "first run"]
GainSource = Literal["search.baseline", "first run", "slowest run"]
VerdictState = Literal["use", "keep", "tied", "repeat", "unmeasured"]
WIDE_INTERVAL_RATIO = 2.0
"""If the upper bound of a 90% interval divided by the lower bound exceeds this ratio, the step time
needs another run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Runs that determine the step time of a configuration: its successful complete runs or,
    without any, its representative reduced run.

    For serving, the step time is the request latency under the full load, plus penalties for missed
    targets.
    """

    run_id: str
    """Id of the run that represents the configuration."""
    step_s: float
    """Step time in seconds. If there are several runs, it is that of the last one, which measured
    twice as many steps and was not selected for being fast.
    """
    num_runs: int
    low_s: float
    """Step time of the fastest run, in seconds."""
    high_s: float
    reduced: bool
    """Whether the step time is extrapolated from a reduced run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The configuration that the answer is compared with."""

    parallel: ParallelConfig
    source: BaselineSource
    step_s: float
    """Step time in seconds, estimated like the answer's: from the calibration and the baseline's
    runs.
    """
    speedup: float
    """Step time of the baseline divided by the answer's."""
    saved_days: float | None = None
    """Days saved over the whole training run; None without total_tokens."""
    saved_cost: float | None = None
    """US dollars saved over the whole training run; None without total_tokens or a price."""
    saved_parts_s: dict[str, float]
    """Seconds saved per step, by part; negative if the part takes longer in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Speedup of the answer over another configuration."""

    against: GainSource
    factor: float
    """Step time of the other configuration divided by the answer's; for serving, the ratio of
    request latencies.
    """
    interval: tuple[float, float]
    """90% interval. If it contains 1, the difference may be noise."""
    source: Literal["measured", "predicted"] = "predicted"
    """measured: both complete configurations ran, and the factor is the ratio of their measured
    times. predicted: the factor is the ratio of the estimates that selected the answer.
    """
    noise_from: Literal["repeats", "assumed"] | None = None
    """Source of a measured gain's interval: repeats of this search's runs, or typical repeats on
    such devices; None for a predicted gain.
    """
    noise_fraction: float | None = None
    """Standard deviation of the log ratio of two runs of the same configuration; None for a
    predicted gain.
    """

    @property
    def clear(self) -> bool:
        """Whether the whole interval is above 1, so that the answer is clearly faster."""
        return self.interval[0] > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a search. Titles, warnings and stop reasons are derived from it."""

    state: VerdictState
    """use: the answer is clearly the best. keep: no configuration is clearly better than the
    query's baseline. tied: other configurations may be as fast. repeat: one run does not determine
    the step time. unmeasured: the answer has no run.
    """
    parallel: ParallelConfig | ServingConfig
    """The configuration to run: the baseline's if the state is `keep`, else the answer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Prediction of a configuration before its first run, compared with the measurement."""

    step_s: float
    step_s_interval: tuple[float, float]
    """90% interval of the predicted step time, in seconds."""
    known_from_runs: int
    """Number of measurements that calibrated the prediction."""
    off_fraction: float
    """Measured step time / predicted step time - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Recommendation of a search; every page, command and client shows these figures."""

    parallel: ParallelConfig
    step_s: float
    step_s_interval: tuple[float, float] | None
    """90% interval of the step time, in seconds."""
    source: Literal["calibrated", "predicted"]
    """calibrated: the estimate uses all measured runs, mainly those of this configuration.
    predicted: no run was measured.
    """
    known_from_runs: int
    """Number of successful runs of the search."""
    measured: Repeats | None
    """Runs of the recommended configuration; None if it never ran."""
    outside: bool
    """Whether the measured step time is outside `calibrated_step_s_interval`."""
    as_good: int
    """Number of other configurations whose step times do not differ significantly from the
    answer's.
    """
    free_memory_bytes: float
    """Free memory in bytes on the device that uses the most memory."""
    out_of_memory_probability: float
    baseline: Baseline | None
    gain: Gain | None = None
    """Gain over the baseline; None without a baseline."""
    gains: tuple[Gain, ...] = ()
    """`gain`, the gain over the first configuration that ran (unless it is `gain`), and the gain
    over the slowest one.
    """
    clearly_better: bool | None = None
    """Whether the gain's interval is above 1; None without a gain."""
    verdict: Verdict | None = None
    """None in results that were stored before verdicts existed."""
    foreseen: Foreseen | None = None
    """Prediction before the configuration's first run; None without a successful complete run."""
    calibrated_step_s_interval: tuple[float, float] | None = None
    """90% interval of the step time after calibration with all runs."""
    set: ChosenValues = field(default_factory=dict)
    """Query values other than `parallel` that the search chose, by path. The runs and the baseline
    use the same values.
    """

    @property
    def objective_s(self) -> float:
        """Objective value that the search minimizes, in seconds."""
        return self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBaseline:
    """The configuration that the answer of a serving search is compared with."""

    parallel: ServingConfig
    source: BaselineSource
    output_tokens_per_second_per_gpu: float
    """Output tokens per second per GPU, estimated like the answer's: from the calibration and the
    baseline's runs.
    """
    speedup: float
    """Output tokens per second of the answer divided by that of the baseline."""
    saved_cost_per_million_output_tokens: float | None = None
    """US dollars saved per million output tokens; None without a price."""
    saved_parts_s: dict[str, float]
    """Seconds saved per request, by part; negative if the part takes longer in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """Recommendation of a serving search under the full load; every page, command and client shows
    these figures.
    """

    parallel: ServingConfig
    ttft_s: float
    ttft_s_interval: tuple[float, float] | None
    """90% interval of the time to first token, in seconds."""
    tpot_s: float
    tpot_s_interval: tuple[float, float] | None
    request_latency_s: float
    output_tokens_per_second_per_gpu: float
    users: int | None
    """Users that produce the load; each sends one request at a time."""
    cost_per_million_output_tokens: float | None
    """US dollars per million output tokens; None without a price."""
    source: Literal["measured", "calibrated", "predicted"]
    known_from_runs: int
    """Number of successful runs of the search."""
    measured: Repeats | None
    """Runs of the recommended configuration; None if it never ran."""
    as_good: int
    """Number of other configurations whose request latencies do not differ significantly from the
    answer's.
    """
    baseline: ServingBaseline | None
    gain: Gain | None = None
    """Gain over the baseline; None without a baseline."""
    gains: tuple[Gain, ...] = ()
    """`gain`, the gain over the first deployment that ran (unless it is `gain`), and the gain over
    the slowest one.
    """
    clearly_better: bool | None = None
    """Whether the gain's interval is above 1; None without a gain."""
    verdict: Verdict | None = None
    """None in results that were stored before verdicts existed."""

    @property
    def objective_s(self) -> float:
        """Objective value that the search minimizes, in seconds."""
        return self.request_latency_s


def get_verdict(answer: Answer | ServingAnswer) -> Verdict:
    """Return the verdict on an answer. If the answer was stored without one, compute it."""
    if answer.verdict is not None:
        return answer.verdict
    state = _decide_state(answer)
    is_baseline = state == "keep" and answer.baseline is not None
    return Verdict(
        state=state,
        parallel=answer.baseline.parallel if is_baseline and answer.baseline else answer.parallel,
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
    """Return True if the step-time interval is so wide that another run is needed."""
    interval = answer.step_s_interval if isinstance(answer, Answer) else None
    return interval is not None and interval[1] >= WIDE_INTERVAL_RATIO * interval[0]
