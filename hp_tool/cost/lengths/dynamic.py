"""Dynamic context parallelism: each packed micro-batch uses as many ranks as its sequences need.

Modelled on the dynamic (hybrid) context parallelism of Megatron Core. A rank has at most s/c
tokens, and a sequence is assigned to the smallest group of ranks with enough room. The
data-parallel x context-parallel ranks are regrouped for every micro-batch. The schedule balances
the work of the ranks instead of their number of micro-batches. Static context parallelism packs
rows of s tokens and splits every sequence of a row into c chunks, so short sequences have too
little attention to overlap with the ring exchange.

Gains are upper bounds: gathering lengths, moving sequences between ranks and switching
communicators take no time here. Megatron Core may also assign more ranks to a sequence than it
needs; that is not modelled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import cast

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import head_time
from hp_tool.cost.layer import layer_time
from hp_tool.cost.lengths.sequences import SEED, LengthDistribution, best_fit
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.parts import ONCE_A_STEP
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError

STEPS = 8
"""Number of optimizer steps whose data is sampled and scheduled."""
MAX_SEQUENCES = 1 << 18
"""Maximum number of sequences per step that are scheduled individually."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextComparison:
    """Mean seconds per step of the same sequences under three schedules."""

    packed_s: float
    """Static context-parallel size, with packed rows assigned to replicas in order of arrival."""
    balanced_s: float
    """Static context-parallel size, with the same rows balanced over the replicas by predicted
    seconds.
    """
    dynamic_s: float
    """Balanced schedule with a separate context-parallel size for each micro-batch."""
    token_share: dict[int, float]
    """Fraction of the tokens that run at each context-parallel size in the dynamic schedule."""

    @property
    def gain(self) -> float:
        """Return the speedup from dynamic sizes alone: balanced static seconds / dynamic seconds,
        at least 1.
        """
        return self.balanced_s / self.dynamic_s

    @property
    def gain_over_packing(self) -> float:
        """Return the speedup from balancing and dynamic sizes together, as in published
        speedups.
        """
        return self.packed_s / self.dynamic_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatches:
    """The micro-batches of one step; arrays of shape (n,)."""

    sizes: IntArray
    """Number of context-parallel ranks."""
    tokens: FloatArray
    seconds: FloatArray
    """Seconds on the critical stage."""
    between_s: FloatArray
    """Seconds on a stage between the first and the last. They determine how long it takes to fill
    and drain the pipeline.
    """


def compare_context_parallelism(
    *, clock: MicroBatchClock, distribution: LengthDistribution
) -> ContextComparison:
    """Return the mean seconds per step of the same sampled sequences with static and dynamic
    context-parallel sizes.

    A static step is global_batch_size packed rows of sequence_length tokens. Dynamic sizes are c,
    c/2, c/4, ... down to a smallest size. Each step uses the smallest size with the fastest
    schedule, or the static schedule if no dynamic one is faster.

    Raises:
        InputError: micro_batch_size is not 1 (a packed row is a micro-batch), replicas do not
            divide the rows, or there are too many sequences to schedule.
    """
    if clock.case.workload.global_batch_size % clock.config.data_parallel_size:
        raise InputError(
            f"data_parallel_size {clock.config.data_parallel_size} does not divide "
            f"global_batch_size {clock.case.workload.global_batch_size}; change "
            "data_parallel_size or global_batch_size",
            field="parallel.data_parallel_size",
        )
    if clock.config.micro_batch_size != 1:
        raise InputError(
            "dynamic_context_parallel uses one packed row per micro-batch; set "
            "micro_batch_size to 1",
            field="parallel.micro_batch_size",
        )
    short = distribution.cut(clock.case.workload.sequence_length)
    totals = np.zeros(3)
    tokens_by_size: dict[int, float] = {}
    for step in range(STEPS):
        lengths, rows = _step_sequences(short, clock=clock, seed=SEED + step)
        static = _time_rows(lengths, rows, size=clock.config.context_parallel_size, clock=clock)
        arrival = _static_seconds(static, clock=clock)
        balanced = min(arrival, _balanced_seconds(static, clock=clock))
        best, best_s = static, balanced
        for smallest in _sizes(clock)[1:]:
            groups = _smallest_groups(lengths, smallest=smallest, clock=clock)
            if (seconds := _balanced_seconds(groups, clock=clock)) < best_s:
                best, best_s = groups, seconds
        totals += arrival, balanced, best_s
        for size, tokens in zip(best.sizes.tolist(), best.tokens.tolist(), strict=True):
            tokens_by_size[size] = tokens_by_size.get(size, 0.0) + tokens
    totals *= 1.0 + clock.waits_per_second()
    packed_s, balanced_s, dynamic_s = (totals / STEPS + clock.once_a_step_s()).tolist()
    shares = {
        size: tokens_by_size[size] / sum(tokens_by_size.values()) for size in sorted(tokens_by_size)
    }
    return ContextComparison(
        packed_s=packed_s, balanced_s=balanced_s, dynamic_s=dynamic_s, token_share=shares
    )


def with_dynamic_context(
    costs: TrainingCosts, *, case: TrainingCase, candidates: Candidates, lengths: LengthDistribution
) -> TrainingCosts:
    """Return the costs of rows, or of one row, after a speedup of the step by `gain_over_packing`.
    Only the stages' seconds change.

    Candidates without context parallelism or with larger micro-batches are unchanged.
    """
    alone = candidates.is_alone
    values = {f.name: getattr(case.workload, f.name) for f in fields(TrainingWorkload)}
    # Micro-batches are timed one by one, so the workload itself has full rows.
    full = dataclasses.replace(
        case, workload=TrainingWorkload(**values | {"sequence_lengths": None, "packed": False})
    )
    rows = [candidates] if alone else [candidates.row(index) for index in range(len(candidates))]
    gains = np.array([_gain(row.only_config(), case=full, lengths=lengths) for row in rows])
    gain: Floats = float(gains[0]) if alone else gains
    fixed = set(ONCE_A_STEP) - {"pipeline_bubble"}
    once = sum(costs.parts[name] for name in sorted(fixed))
    remaining = (costs.step_s / gain - once) / (costs.step_s - once)
    parts = {
        name: part if name in fixed else part * remaining for name, part in costs.parts.items()
    }
    return dataclasses.replace(costs, parts=parts, step_s=cast(FloatArray, sum(parts.values())))


def _gain(config: ParallelConfig, *, case: TrainingCase, lengths: LengthDistribution) -> float:
    if config.context_parallel_size == 1 or config.micro_batch_size > 1:
        return 1.0
    clock = MicroBatchClock(case=case, config=config)
    return compare_context_parallelism(clock=clock, distribution=lengths).gain_over_packing


def _sizes(clock: MicroBatchClock) -> list[int]:
    """Return c and its successive halves. Groups of these sizes are nested, so ranks can be
    regrouped without moving data.
    """
    sizes = [clock.config.context_parallel_size]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes


def _step_sequences(
    short: LengthDistribution, *, clock: MicroBatchClock, seed: int
) -> tuple[IntArray, IntArray]:
    """Return (length, row) of each sequence in the first global_batch_size packed rows."""
    batch, capacity = clock.case.workload.global_batch_size, clock.case.workload.sequence_length
    expected = batch * capacity / short.mean
    if expected > MAX_SEQUENCES:
        raise InputError(
            f"a step has about {expected:,.0f} sequences, but dynamic_context_parallel schedules "
            f"at most {MAX_SEQUENCES:,}; lower global_batch_size",
            field="training.global_batch_size",
        )
    count = int(1.1 * expected) + 16
    while True:
        lengths = short.sample(count, seed=seed)
        packed = best_fit(lengths, capacity=capacity)
        if len(packed.tokens) > batch:
            in_step = packed.row_of < batch
            return lengths[in_step], packed.row_of[in_step]
        count *= 2


def _smallest_groups(lengths: IntArray, *, smallest: int, clock: MicroBatchClock) -> _MicroBatches:
    """Assign every sequence to the smallest group with enough room and at least `smallest` ranks,
    and return the micro-batches.

    Sequences are packed separately for each group size.
    """
    share = clock.case.workload.sequence_length // clock.config.context_parallel_size
    allowed = np.array([size for size in _sizes(clock)[::-1] if size >= smallest])
    needed = allowed[np.searchsorted(allowed * share, lengths)]
    parts = []
    for size in allowed.tolist():
        mine = lengths[needed == size]
        if len(mine):
            parts.append(
                _time_rows(
                    mine, best_fit(mine, capacity=size * share).row_of, size=size, clock=clock
                )
            )
    names = [field.name for field in fields(_MicroBatches)]
    return _MicroBatches(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def _time_rows(
    lengths: IntArray, rows: IntArray, *, size: int, clock: MicroBatchClock
) -> _MicroBatches:
    wide = lengths.astype(np.float64)
    tokens, squares = (
        np.bincount(rows, weights=wide**power).astype(np.float64) for power in (1, 2)
    )
    sizes = np.full(len(tokens), size, dtype=np.int64)
    seconds, between = clock.seconds(sizes=sizes, tokens=tokens, squares=squares)
    return _MicroBatches(sizes=sizes, tokens=tokens, seconds=seconds, between_s=between)


def _static_seconds(rows: _MicroBatches, *, clock: MicroBatchClock) -> float:
    seconds, between = (
        column.reshape(-1, clock.config.data_parallel_size)
        for column in (rows.seconds, rows.between_s)
    )
    return float((seconds.sum(axis=0) + clock.fill * between.max(axis=0)).max())


def _balanced_seconds(work: _MicroBatches, *, clock: MicroBatchClock) -> float:
    """Return the seconds until the last rank finishes under longest-processing-time-first
    scheduling.

    Larger groups are scheduled first, then longer micro-batches. Each micro-batch is assigned to
    the group that finishes earliest. Groups are nested, so all ranks of a group finish together and
    none waits inside a group.
    """
    ranks = clock.config.data_parallel_size * clock.config.context_parallel_size
    load, longest = np.zeros(ranks), np.zeros(ranks)
    for index in np.lexsort((-work.seconds, -work.sizes)).tolist():
        size, between = int(work.sizes[index]), work.between_s[index]
        ends = (load + clock.fill * np.maximum(longest, between))[::size]
        first = int(ends.argmin()) * size
        group = slice(first, first + size)
        load[group] += work.seconds[index]
        longest[group] = np.maximum(longest[group], between)
    return float((load + clock.fill * longest).max())


# Seconds of individual micro-batches that differ in tokens, attention and context-parallel size.


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchClock:
    """Predict the time of packed micro-batches on a configuration's stages, in seconds.

    workload.sequence_length is the length of a static row.
    """

    case: TrainingCase
    config: ParallelConfig

    def __post_init__(self) -> None:
        if self.case.model.num_experts:
            raise UnsupportedError(
                "micro-batches of unequal size are modelled for dense models only; remove "
                "dynamic_context_parallel",
                field="model",
            )
        if self.case.workload.attention == "unfused":
            raise UnsupportedError(
                "packed rows need fused attention; set training.attention to flash",
                field="training.attention",
            )

    def seconds(
        self, *, sizes: IntArray, tokens: FloatArray, squares: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the time in seconds of each micro-batch on the critical stage, and on a stage
        between the first and the last; each has shape (n,).

        Includes forward, backward and recomputation. Embedding and output layer scale with the
        tokens.

        Args:
            sizes: Context-parallel size of each micro-batch.
            tokens: Tokens of each micro-batch over all its ranks.
            squares: Sum of l^2 over the sequences of each micro-batch.
        """
        columns = {
            name: np.full(len(sizes), value)
            for name, value in dataclasses.asdict(self._alone).items()
        }
        candidates = Candidates(**columns | {"context_parallel_size": sizes})
        s = shapes(
            case=self.case, candidates=candidates, tokens=tokens / sizes, attended=squares / tokens
        )
        layer = layer_time(case=self.case, candidates=candidates, s=s)
        layers = self.case.model.num_hidden_layers / candidates.pipeline_parallel_size
        full_fraction = recomputed_layer_fraction(
            candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size
        )
        forward = layer.forward + layer.tensor + layer.context
        again = recomputed_seconds(
            candidates, layer=layer, forward=forward, full_fraction=full_fraction
        )
        passes = (
            layer.forward
            + layer.backward
            + layer.tensor
            + layer.tensor_backward
            + layer.context
            + layer.context_backward
        )
        between = np.asarray(layers * (passes + again))
        return between + self._end_seconds_per_token() * s.tokens, between

    @property
    def fill(self) -> float:
        """Return (p-1)/v: how many extra times the longest micro-batch counts while the pipeline
        fills and drains.
        """
        return (self.config.pipeline_parallel_size - 1) / self.config.virtual_pipeline_parallel_size

    def once_a_step_s(self) -> float:
        """Return the seconds per step that do not depend on the order of sequences.

        They include the share of the bubble due to the embedding, the output layer and the
        transfers.
        """
        parts, (_, between) = self._parts_without_waits(), self._full_row()
        return sum(parts[name] for name in ONCE_A_STEP) - self.fill * between

    def waits_per_second(self) -> float:
        """Return the seconds spent waiting for stragglers per second of work, for full
        rows.

        Waits grow with the work of a step (`cost.stragglers`).
        """
        waits = self._parts(self.case)["data_parallel"]
        waits -= self._parts_without_waits()["data_parallel"]
        row, between = self._full_row()
        replicas = self.config.data_parallel_size
        runs = self.case.workload.global_batch_size / replicas * row + self.fill * between
        return waits / runs

    def _full_row(self) -> tuple[float, float]:
        """Return the result of `seconds` for a full row that is one sequence."""
        row = float(self.case.workload.sequence_length)
        seconds, between = self.seconds(
            sizes=np.array([self.config.context_parallel_size]),
            tokens=np.array([row]),
            squares=np.array([row**2]),
        )
        return float(seconds[0]), float(between[0])

    def _parts(self, case: TrainingCase) -> dict[str, float]:
        parts = training_costs(case=case, candidates=self._alone).parts
        return {name: float(part) for name, part in parts.items()}

    def _parts_without_waits(self) -> dict[str, float]:
        profile = self.case.profile
        alike = dataclasses.replace(profile.framework, device_log_sd=0.0, micro_batch_log_sd=0.0)
        profile = dataclasses.replace(profile, framework=alike)
        return self._parts(dataclasses.replace(self.case, profile=profile))

    @property
    def _alone(self) -> Candidates:
        return Candidates.alone(self.config)

    def _end_seconds_per_token(self) -> float:
        head = head_time(case=self.case, candidates=self._alone)
        ends = (float(head.embedding), float(head.output + head.output_communication))
        seconds = max(ends) if self.config.pipeline_parallel_size > 1 else sum(ends)
        return (
            seconds
            * self.config.context_parallel_size
            / self.case.workload.sequence_length
            / self.config.micro_batch_size
        )
