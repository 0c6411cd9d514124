"""Read step times, throughput and memory from training logs in trainers' formats or JSON lines."""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hp_tool.domain.units import GB, GIB, MIB
from hp_tool.domain.workload import TrainingWorkload

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(CUDA|HIP) out of memory|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: "
    r"can't allocate memory"
)
MAX_STEPS = 100_000
MAX_BATCH = 10**12
MAX_LINE = 20_000
"""Maximum line length in characters; longer lines are cut."""


@dataclass(slots=True, kw_only=True)
class LogFacts:
    """Figures from a log, in the order in which they appear.

    Figures that the trainer does not print have empty lists.
    """

    step_s: list[float] = field(default_factory=list)
    """Step times in seconds. A mean over several steps is one entry."""
    tokens_per_second_per_gpu: list[float] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)
    """Throughput in sequences per second, over all devices."""
    ends_at: dict[str, list[int]] = field(default_factory=dict)
    """For each list above, by name: the optimizer step at which each figure ends, in increasing
    order. A list is shorter than its values if the trainer does not number its steps.
    """
    losses: list[float] = field(default_factory=list)
    samples_per_step: float | None = None
    """Global batch size in sequences, as last printed."""
    allocated_bytes: float | None = None
    """Highest printed peak of the memory allocated by torch, in bytes."""
    reserved_bytes: float | None = None
    out_of_memory: bool = False
    out_of_memory_line: str | None = None
    """First line that reports an out-of-memory error."""

    @property
    def has_times(self) -> bool:
        """True if step times can be computed from the log."""
        return bool(self.step_s or self.tokens_per_second_per_gpu or self.samples_per_second)

    def add(self, kind: str, value: float, *, step: int | None) -> None:
        """Append a positive value to the list `kind`.

        Several ranks may print the same step, which counts once.
        """
        figures: list[float] = getattr(self, kind)
        ends_at = self.ends_at.setdefault(kind, [])
        is_repeated = step is not None and bool(ends_at) and step <= ends_at[-1]
        if not 0.0 < value < math.inf or len(figures) >= MAX_STEPS or is_repeated:
            return
        figures.append(value)
        if step is not None:
            ends_at.append(step)

    def peak(self, kind: str, value: float | None, unit: float = 1.0) -> None:
        """Raise the peak `kind` to `value`, which is in units of `unit` bytes, if it is higher."""
        if value is not None and 0.0 <= value * unit < math.inf:
            setattr(self, kind, max(getattr(self, kind) or 0.0, value * unit))

    def step_times_s(
        self, workload: TrainingWorkload, *, num_gpus: int
    ) -> tuple[list[float], list[int]]:
        """Return the step times in seconds, and the step numbers at which they end.

        If the log has no step times, they are computed for B sequences of s tokens on n devices: B
        s / (n tps) from tokens per second per device, or B / sps from sequences per second.
        """
        sequences = workload.global_batch_size
        tokens = sequences * workload.sequence_length / num_gpus
        kinds = {
            "step_s": self.step_s,
            "tokens_per_second_per_gpu": [tokens / rate for rate in self.tokens_per_second_per_gpu],
            "samples_per_second": [sequences / rate for rate in self.samples_per_second],
        }
        return next(
            ((times_s, self.ends_at.get(kind, [])) for kind, times_s in kinds.items() if times_s),
            ([], []),
        )

    def loss(self, value: float | None) -> None:
        """Append a step's loss if it is finite; JSON has no NaN."""
        if value is not None and math.isfinite(value) and len(self.losses) < MAX_STEPS:
            self.losses.append(value)


_NUMBER = r"([-+]?[\d,]{0,30}\.?\d{1,30}(?:[eE][-+]?\d{1,3})?)"


def _megatron(line: str, facts: LogFacts) -> None:
    """Parse `iteration 10/ 100 | ... elapsed time per iteration (ms): 18130.0 |` and memory lines.

    Memory lines are `memory (MB) | ... max allocated: 45678.2 |`.
    """
    if (
        elapsed := _parse_figure(line, rf"elapsed time per iteration \(ms\):\s*{_NUMBER}")
    ) is not None:
        facts.add("step_s", elapsed / 1e3, step=_parse_count(line, r"iteration\s+(\d+)/"))
        facts.loss(_parse_figure(line, rf"lm loss:\s*{_NUMBER}"))
        batch = _parse_count(line, r"global batch size:\s*(\d+)")
        facts.samples_per_step = (
            float(batch) if batch and batch <= MAX_BATCH else facts.samples_per_step
        )
    if "memory (MB)" in line:
        facts.peak("allocated_bytes", _parse_figure(line, rf"max allocated:\s*{_NUMBER}"), MIB)
        facts.peak("reserved_bytes", _parse_figure(line, rf"max reserved:\s*{_NUMBER}"), MIB)


def _bridge(line: str, facts: LogFacts) -> None:
    """Parse step lines, which have Megatron-LM's format, and Bridge's memory lines.

    Memory lines are `(after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 153.4 | ...`.
    """
    _megatron(line, facts)
    if "memory (GB)" in line:
        facts.peak(
            "allocated_bytes", _parse_figure(line, rf"mem-max-allocated-gigabytes:\s*{_NUMBER}"), GB
        )
        facts.peak(
            "reserved_bytes", _parse_figure(line, rf"mem-max-reserved-gigabytes:\s*{_NUMBER}"), GB
        )


def _nemo_rl(line: str, facts: LogFacts) -> None:
    """Parse `Loss: 0.1234; Total step time: 35.70s; policy_training: 10.97s (30.7%)`.

    `policy_training` is the time of the training step.
    """
    facts.loss(_parse_figure(line, rf"\u2022 Loss:\s*{_NUMBER}"))
    if (total := _parse_figure(line, rf"Total step time:\s*{_NUMBER}s")) is not None:
        facts.add("step_s", total, step=None)
    elif facts.step_s and (
        trained := _parse_figure(line, rf"\u2022 policy_training:\s*{_NUMBER}s")
    ):
        facts.step_s[-1] = trained


def _verl(line: str, facts: LogFacts) -> None:
    """Parse `step:1 - actor/pg_loss:0.1 - perf/max_memory_allocated_gb:20.7 - ...`.

    The step time is that of the actor update (timing_s/update_actor), or train/time(s) in
    supervised fine-tuning. Numbers may be written as np.float64(20.7).
    """
    step = _parse_count(line, r"\bstep:(\d+) - ")
    if step is None:
        return
    number = rf"(?:np\.float\d+\()?{_NUMBER}"
    if (
        seconds := _parse_figure(line, rf"(?:timing_s/update_actor|train/time\(s\)):{number}")
    ) is not None:
        facts.add("step_s", seconds, step=step)
        facts.loss(_parse_figure(line, rf"(?:actor/pg_loss|train/loss):{number}"))
    for kind in ("allocated", "reserved"):
        facts.peak(
            f"{kind}_bytes", _parse_figure(line, rf"perf/max_memory_{kind}_gb:{number}"), GIB
        )


def _torchtitan(line: str, facts: LogFacts) -> None:
    """Parse `step: 10 loss: 7.85 ... memory: 40.34GiB(42.45%) tps: 7,043 ...`.

    `tps` is per device.
    """
    step = re.search(r"step:\s*(\d+)", line)
    if step and (rate := _parse_figure(line[step.end() :], rf"\btps:\s*{_NUMBER}")) is not None:
        facts.add("tokens_per_second_per_gpu", rate, step=_parse_count(step[0], r"(\d+)"))
        facts.loss(_parse_figure(line, rf"\bloss:\s*{_NUMBER}"))
        facts.peak("reserved_bytes", _parse_figure(line, rf"memory:\s*{_NUMBER}GiB"), GIB)


def _deepspeed(line: str, facts: LogFacts) -> None:
    """Parse the step lines of DeepSpeed and Megatron-DeepSpeed.

    They are `global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.1,
    MemAllocated=10.2GB, MaxMemAllocated=20.5GB`, or `steps: 10 loss: 2.3 iter time (s): 1.234
    samples/sec: 103.7`.
    """
    if (rate := _parse_figure(line, rf"CurrSamplesPerSec={_NUMBER}")) is not None:
        facts.add("samples_per_second", rate, step=_parse_count(line, r"global_step=(\d+)"))
        facts.peak("allocated_bytes", _parse_figure(line, rf"MaxMemAllocated={_NUMBER}GB"), GIB)
    if (seconds := _parse_figure(line, rf"iter time \(s\):\s*{_NUMBER}")) is not None:
        facts.add("step_s", seconds, step=_parse_count(line, r"steps?:\s*(\d+)"))
        facts.loss(_parse_figure(line, rf"\bloss:\s*{_NUMBER}"))


def _trainer(line: str, facts: LogFacts) -> None:
    """Parse the final lines and the state file of Hugging Face's Trainer, and ms-swift's log lines.

    Trainer prints {'train_samples_per_second': 1.147, 'train_steps_per_second': 0.005, ...}.
    ms-swift prints {'loss': 1.6, 'global_step/max_steps': '15/94', 'memory(GiB)': 5.64,
    'train_speed(iter/s)': 0.49}, whose speed is the mean since the start.
    """

    def entry(name: str) -> float | None:
        return _parse_figure(line, rf"['\"]{re.escape(name)}['\"]:\s*['\"]?{_NUMBER}")

    step = _parse_count(line, r"['\"]global_step/max_steps['\"]:\s*['\"](\d+)/")
    if (rate := entry("train_speed(iter/s)")) is not None and rate > 0.0:
        facts.add("step_s", 1.0 / rate, step=step)
    elif (seconds := entry("train_speed(s/it)")) is not None:
        facts.add("step_s", seconds, step=step)
    if (steps := entry("train_steps_per_second")) is not None and steps >= MIN_PRINTED_RATE:
        facts.add("step_s", 1.0 / steps, step=None)
    if (rate := entry("train_samples_per_second")) is not None:
        facts.add("samples_per_second", rate, step=None)
    facts.peak("reserved_bytes", entry("memory(GiB)"), GIB)
    facts.loss(entry("loss"))


MIN_PRINTED_RATE = 0.1
"""Steps per second below which the rate, printed with three decimals, is less precise than the
samples per second.
"""


def _torchtune(line: str, facts: LogFacts) -> None:
    """Parse `Step 10 | loss:1.57 lr:2e-05 tokens_per_second_per_gpu:5123.4 peak_memory_alloc:12.3`.

    Memory values (`peak_memory_alloc`, `peak_memory_reserved`) are in GiB.
    """
    step = re.match(r"Step (\d+) \|", line)
    if step is None:
        return
    rate = _parse_figure(line, rf"\btokens_per_second_per_gpu:{_NUMBER}")
    if rate is not None:
        facts.add("tokens_per_second_per_gpu", rate, step=_parse_count(step[0], r"(\d+)"))
        facts.loss(_parse_figure(line, rf"\bloss:{_NUMBER}"))
    facts.peak("allocated_bytes", _parse_figure(line, rf"\bpeak_memory_alloc:{_NUMBER}"), GIB)
    facts.peak("reserved_bytes", _parse_figure(line, rf"\bpeak_memory_reserved:{_NUMBER}"), GIB)


def _json(line: str, facts: LogFacts) -> None:
    """Parse `{"step": 10, "step_s": 1.25, "loss": 2.3, "peak_allocated_bytes": 2.1e10}`.

    Other keys and lines are ignored.
    """
    start = line.find("{")
    if start < 0:
        return
    try:
        figures = json.loads(line[start:])
    except (ValueError, RecursionError):
        return
    if not isinstance(figures, dict):
        return
    step = figures.get("step")
    for kind in ("step_s", "tokens_per_second_per_gpu", "samples_per_second"):
        if (value := _parse_real(figures.get(kind))) is not None:
            facts.add(
                kind,
                value,
                step=step if isinstance(step, int) and not isinstance(step, bool) else None,
            )
    facts.loss(_parse_real(figures.get("loss")))
    for kind in ("allocated_bytes", "reserved_bytes"):
        facts.peak(kind, _parse_real(figures.get(f"peak_{kind}")))


def _parse_real(value: Any) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        else None
    )


def _parse_figure(line: str, pattern: str) -> float | None:
    match = re.search(pattern, line)
    return None if match is None else float(match[1].replace(",", ""))


def _parse_count(line: str, pattern: str) -> int | None:
    match = re.search(pattern, line)
    return None if match is None or len(match[1]) > 18 else int(match[1])


READERS: dict[str, Callable[[str, LogFacts], None]] = {
    "megatron-lm": _megatron,
    "megatron-bridge": _bridge,
    "nemo-rl": _nemo_rl,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "verl": _verl,
    "trainer": _trainer,
    "torchtune": _torchtune,
    "json": _json,
}
"""Line parsers by format name, as in `trainer.reader` and `--format`."""


def read_line(line: str, facts: LogFacts, *, reader: str) -> None:
    """Parse a line with one of READERS and add its values to `facts`."""
    plain = _COLOUR.sub("", line[:MAX_LINE])
    if not facts.out_of_memory and _OUT_OF_MEMORY.search(plain):
        facts.out_of_memory, facts.out_of_memory_line = True, plain.strip()[:300]
    READERS[reader](plain, facts)


def read_log(lines: Iterable[str], *, reader: str) -> LogFacts:
    """Parse a log with one of READERS and return its values."""
    facts = LogFacts()
    for line in lines:
        read_line(line, facts, reader=reader)
    return facts


@dataclass(slots=True, kw_only=True)
class ServerStart:
    """Memory of one device, as an inference engine reports it at startup."""

    weights_bytes: float | None = None
    kv_cache_bytes: float | None = None
    """KV cache size in bytes. SGLang reports keys and values separately; this is their sum."""
    kv_cache_tokens: int | None = None
    """KV cache capacity of one replica in tokens."""
    graphs_bytes: float | None = None
    """Memory of CUDA graphs in bytes."""


_STARTS: tuple[tuple[str, str, float], ...] = (
    ("weights_bytes", rf"Model loading took {_NUMBER} (?:GiB|GB)", GIB),
    ("kv_cache_bytes", rf"Available KV cache memory: {_NUMBER} GiB", GIB),
    ("kv_cache_tokens", r"GPU KV cache size: ([\d,]{1,20}) tokens", 1.0),
    ("graphs_bytes", rf"Graph capturing finished in .*? took {_NUMBER} GiB", GIB),
    ("weights_bytes", rf"Load weight end\..*?mem usage={_NUMBER} GB", GIB),
    ("kv_cache_tokens", r"KV Cache is allocated\..*?#tokens: ([\d,]{1,20})", 1.0),
    ("kv_cache_bytes", rf"KV Cache is allocated\..*?KV size: {_NUMBER} GB", GIB),
    ("graphs_bytes", rf"Capture cuda graph end\..*?mem usage={_NUMBER} GB", GIB),
)
"""Patterns of startup lines of vLLM (v1) and SGLang. Their GB are 2**30 bytes."""
_HALVES = re.compile(rf"KV Cache is allocated\..*?K size: {_NUMBER} GB, V size: {_NUMBER} GB")


def read_server_start(lines: Iterable[str]) -> ServerStart:
    """Return the memory values of the first device that vLLM or SGLang prints at startup."""
    start = ServerStart()
    for raw in lines:
        line = _COLOUR.sub("", raw[:MAX_LINE])
        for name, pattern, unit in _STARTS:
            figure = _parse_figure(line, pattern)
            if figure is not None and getattr(start, name) is None:
                value = figure * unit
                setattr(start, name, int(value) if name.endswith("tokens") else value)
        if start.kv_cache_bytes is None and (halves := _HALVES.search(line)):
            sizes = (float(each.replace(",", "")) for each in halves.groups())
            start.kv_cache_bytes = sum(sizes) * GIB
    return start
