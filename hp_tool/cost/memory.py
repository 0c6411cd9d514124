"""Memory of representative pipeline stages in bytes. The fullest stage determines the result."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, column, maximum, minimum, where
from hp_tool.cost.block import LayerBytes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadBytes, head_bytes, waiting_logit_bytes
from hp_tool.cost.matrices import layer_matrices, rank_matrices
from hp_tool.cost.matrix import Matrix
from hp_tool.cost.model_states import StageStates, StateCosts
from hp_tool.cost.optimizer import offload_activations
from hp_tool.cost.pipeline_stages import Pipeline, PipelineStage, StageLayers, pipeline_between
from hp_tool.cost.recomputation import chunk_activations, recomputed_working
from hp_tool.cost.schedules.bubble import chunks_in_flight, waiting_in_flight
from hp_tool.cost.shared import Shared
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec

NEARLY_FULL = 0.9
"""Fraction of device memory in use above which the allocator retries allocations.

All nine nanotron runs above it were slow, by a median factor of five; runs below it were not.
"""
LOGISTIC = 1.702
"""Slope of the logistic function that approximates the normal distribution function within 0.01."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the worst stage of each candidate; shape (n,)."""

    parts: dict[str, Floats]
    """Bytes by the keys of MEMORY_KEYS."""
    layer_activations: Floats
    """Part of `activations` that belongs to the transformer layers."""
    worst_stage: Ints | Floats
    first_stage: Floats
    """Bytes on the first stage, excluding `overhead`."""
    saved_bytes: Floats
    """Activation bytes that one micro-batch saves on all stages together; 0 if allocator retries
    are not modelled.
    """
    total: Floats
    host_bytes: Floats
    """Bytes in host memory of the rank that uses most."""
    offloaded: Floats
    """Activation bytes that one micro-batch copies to the host on one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one stage for all micro-batches in flight."""

    parts: dict[str, Floats]
    """Bytes by the keys of MEMORY_KEYS, excluding `overhead`."""
    layer_activations: Floats
    on_host: Floats
    offloaded: Floats
    """Offloaded bytes of one micro-batch."""


def memory(
    *,
    case: TrainingCase,
    candidates: Candidates,
    pipeline: Pipeline,
    layers: Sequence[LayerBytes],
    states: StateCosts,
    micro_batches: Floats,
    capacity_bytes: float,
) -> Memory:
    """Return the bytes on the fullest stage of each candidate.

    Args:
        layers: Mean layers of the pipeline's representative stages.
        capacity_bytes: Maximum bytes of a configuration that fits.
    """
    profile = case.profile
    # ZeRO 3 gathers the weights of the current layer and of prefetched ones.
    facts = framework_facts(case.workload.framework)
    gathered = states.gathered_layer * minimum(
        1.0 + facts.prefetched_layers, pipeline.critical.count
    )
    cached = cached_gradients(case, candidates)
    head = head_bytes(case=case, candidates=candidates, micro_batches=micro_batches)
    each = [
        stage_memory(
            stage,
            case=case,
            candidates=candidates,
            layer=layer,
            states=stage_states,
            head=head,
            gathered=gathered
            + stage.embedding * states.gathered_end
            + stage.output * states.gathered_end
            + sum(size * has_layer_of_kind(stage.layers, kinds) for kinds, size in cached.items()),
            critical_layers=pipeline.critical.count,
            micro_batches=micro_batches,
            capacity_bytes=capacity_bytes,
        )
        for stage, layer, stage_states in zip(pipeline.stages, layers, states.stages, strict=True)
    ]
    first = each[0]
    first_stage = allocated = sum(first.parts.values())
    parts, layer_activations = first.parts, first.layer_activations
    rank: Ints | Floats = column(pipeline.stages[0].rank, like=candidates.pipeline_parallel_size)
    host = states.stages[0].host + first.on_host  # at most one of them is offloaded
    for place in range(1, len(each)):
        device_bytes, on_host = (
            sum(each[place].parts.values()),
            states.stages[place].host + each[place].on_host,
        )
        fuller = device_bytes > allocated
        if place >= len(pipeline.ends):
            between = pipeline_between(candidates)
            fuller = between & fuller
            on_host = where(between, on_host, 0.0) if anywhere(on_host) else 0.0
        host = maximum(host, on_host)
        if anywhere(fuller):
            parts = {
                name: where(fuller, size, parts[name]) for name, size in each[place].parts.items()
            }
            layer_activations = where(fuller, each[place].layer_activations, layer_activations)
            rank, allocated = (
                where(fuller, pipeline.stages[place].rank, rank),
                where(fuller, device_bytes, allocated),
            )
    overhead = profile.gpu.context_bytes
    return Memory(
        parts=parts | {"overhead": column(overhead, like=allocated)},
        layer_activations=layer_activations,
        worst_stage=rank,
        first_stage=first_stage,
        saved_bytes=_saved_activation_bytes(case, candidates, layer=layers[0]),
        total=allocated + overhead,
        host_bytes=host,
        offloaded=each[len(pipeline.ends) - 1].offloaded,
    )


def retry_chance(*, total_bytes: Floats, case: TrainingCase, candidates: Candidates) -> Floats:
    """Return P(n >= f D): the probability that a pipeline rank needs at least the fraction f =
    NEARLY_FULL of its device memory D.

    The need n is log-normal around `total_bytes` with the framework's memory deviation; a logistic
    function approximates its distribution. In a pipeline, overlapping lifetimes of blocks from
    different micro-batches fragment the memory. The allocator then frees its cache and requests
    memory from the driver again, at every micro-batch. Without a pipeline, blocks are freed in the
    order in which they are used.
    """
    framework = case.profile.framework
    if framework.retry_bytes_per_second is None:
        return 0.0
    full = NEARLY_FULL * case.cluster.gpu.memory_bytes
    chance: Floats = 1.0 / (1.0 + (full / total_bytes) ** (LOGISTIC / framework.memory_log_sd))
    return chance * (candidates.pipeline_parallel_size > 1)


def retry_slowdown(
    *, saved_bytes: Floats, step_s: Floats, micro_batches: Floats, case: TrainingCase
) -> Floats:
    """Return 1 + m K / (r step): the ratio of the step time with retries to the step time without.

    K is the number of bytes that one micro-batch saves on all stages together. They are freed and
    allocated again at r bytes per second. Each stage also waits for the allocators of the other
    stages: nanotron's slow runs lost the same time on two, four and eight stages.
    """
    rate = case.profile.framework.retry_bytes_per_second
    return 1.0 if rate is None else 1.0 + micro_batches * saved_bytes / (rate * step_s)


def _saved_activation_bytes(case: TrainingCase, c: Candidates, *, layer: LayerBytes) -> Floats:
    if case.profile.framework.retry_bytes_per_second is None:
        return 0.0
    return chunk_activations(candidates=c, layer=layer, layers=float(case.model.total_layers))


def cached_gradients(
    case: TrainingCase, candidates: Candidates
) -> Mapping[tuple[int, ...], Floats]:
    """Return the bytes of the empty weight gradients that Transformer Engine caches, one for each
    matrix shape. Each key is the set of layer kinds (by index) that have a matrix of this shape.

    The result is empty if the framework does not use Transformer Engine's modules, and under FSDP,
    where every matrix has a separate gradient.
    """
    workload, c = case.workload, candidates
    if workload.lora is not None or not workload.has_transformer_engine:
        return {}
    if not framework_facts(workload.framework).caches_weight_gradients:
        return {}
    if c.is_alone:
        ranks = (c.tensor_parallel_size, c.expert_parallel_size, c.expert_tensor_parallel_size)
        sizes = _shapes.get((case.model,), ranks, lambda: _shape_entries(case.model, c))
    else:
        sizes = _shape_entries(case.model, c)
    e, is_cached = workload.activation_element_bytes, c.zero_stage < 3
    return {kinds: e * size * is_cached for kinds, size in sizes.items()}


_shapes: Shared[Mapping[tuple[int, ...], Floats]] = Shared()


def _shape_entries(model: ModelSpec, c: Candidates) -> Mapping[tuple[int, ...], Floats]:
    """Return {indices of layer kinds: number of matrix entries}. Each shape that these kinds have
    in common is counted once.
    """
    shapes: dict[Any, tuple[Matrix, tuple[int, ...]]] = {}
    for place, (_, kind) in enumerate(model.kinds):
        repeats: Counter[Any] = Counter()
        for matrix, undivided in zip(rank_matrices(kind, c), layer_matrices(kind), strict=True):
            shape = matrix.module, undivided.shape
            repeats[shape] += 1
            if matrix.module != "router":
                _, kinds = shapes.get((shape, repeats[shape]), (matrix, ()))
                shapes[shape, repeats[shape]] = matrix, (*kinds, place)
    entries: dict[tuple[int, ...], Floats] = {}
    for matrix, kinds in shapes.values():
        entries[kinds] = entries.get(kinds, 0.0) + matrix.rows * matrix.inputs
    return entries


def has_layer_of_kind(layers: StageLayers, kinds: Iterable[int]) -> Bools:
    """Return whether a stage has a layer of one of these kinds."""
    has_layer: Bools = sum((layers.kinds[place] for place in kinds), 0.0) > 0.0
    return has_layer


PARTITION_PARAMETERS = 1e9
"""Maximum number of gathered parameters under DeepSpeed's ZeRO 3, and the number of parameters
updated at once.

Source: stage3_max_live_parameters and sub_group_size of deepspeed/runtime/zero/config.py.
"""


def _partition_buffers(c: Candidates, *, weights: Floats) -> tuple[Floats, Floats]:
    """Return the bytes of (gathered parameters, fp32 gradients of the updated group) under
    DeepSpeed's ZeRO 3.

    `weights` are the bytes of the 16-bit parameters.
    """
    sharded = c.zero_stage >= 3
    live = sharded * minimum(2.0 * PARTITION_PARAMETERS, weights * c.data_parallel_size)
    return live, sharded * 4.0 * minimum(PARTITION_PARAMETERS, weights / 2.0)


def _coexisting_bytes(
    activations: Floats, logits: Floats, buffers: Floats, *, last: Floats, gradients: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the bytes of activations, logits and buffers that coexist with gradients at the peak
    of a step with a single micro-batch.

    The micro-batch starts without `gradients`. The gradients of a layer are allocated after its
    activations are freed. At the loss there are none. During the last layer's backward pass, all of
    them exist, together with that layer's buffers `last`.
    """
    peak = maximum(activations + logits + buffers - gradients, last)
    remaining = minimum(activations, peak)
    loss = minimum(logits, peak - remaining)
    return remaining, loss, peak - remaining - loss


def queued_input_bytes(
    case: TrainingCase, candidates: Candidates, *, layers: Floats, micro_batches: Floats
) -> Floats:
    """Return min(queued inputs, k L) T h e (t - 1) / t bytes without a pipeline, else 0.

    PyTorch's allocator reuses a freed block only after the other streams that used it have
    finished. Each of L layers gathers k = 2 inputs in the forward pass. It gathers as many in the
    backward pass of the previous micro-batch, if there is one.
    """
    c, workload = candidates, case.workload
    tokens = c.micro_batch_size * workload.sequence_length / c.context_parallel_size
    gathered = (
        tokens
        * case.model.hidden_size
        * workload.activation_element_bytes
        * (1.0 - 1.0 / c.tensor_parallel_size)
    )
    passes = where(micro_batches > 1, 2.0, 1.0)
    queued = minimum(case.profile.framework.queued_inputs, 2.0 * passes * layers)
    waiting: Floats = queued * gathered * c.sequence_parallel * (c.pipeline_parallel_size == 1)
    return waiting


def stage_memory(
    stage: PipelineStage,
    *,
    case: TrainingCase,
    candidates: Candidates,
    layer: LayerBytes,
    states: StageStates,
    head: HeadBytes,
    gathered: Floats,
    critical_layers: Floats,
    micro_batches: Floats,
    capacity_bytes: float,
) -> StageMemory:
    """Return the bytes on a stage: states, micro-batches in flight, and the layer that is running.

    `critical_layers` is the number of layers on the critical stage.
    """
    workload, framework = case.workload, case.profile.framework
    c, chunks = candidates, candidates.virtual_pipeline_parallel_size
    from_end = c.pipeline_parallel_size - 1 - stage.rank
    chunk = chunk_activations(candidates=c, layer=layer, layers=stage.chunk_layers)
    saved = chunk * chunks_in_flight(c, from_end=from_end, micro_batches=micro_batches)
    logits = stage.output * head.logits
    if c.names_schedules:
        # Kept until the weight gradients are computed: matmul inputs and output gradients of the
        # layers, and the logits' gradient.
        waiting = waiting_in_flight(c, from_end=from_end)
        saved = saved + waiting * stage.layers.count * layer.waiting
        logits = logits + stage.output * waiting_logit_bytes(case, c, micro_batches=waiting)
    on_host: Floats = 0.0
    offloaded: Floats = 0.0
    if workload.offload == "activations":
        per_layer = chunk * chunks / stage.layers.count
        saved, on_host = offload_activations(
            saved, layer_bytes=per_layer, layers=stage.layers.count, workload=workload
        )
        offloaded = workload.offloaded_share * per_layer * critical_layers
    activations = saved + stage.output * head.inputs + stage.embedding * head.dropout_mask
    working = layer.backward_working + recomputed_working(
        candidates=c, layer=layer, layers=stage.layers.count / chunks
    )
    # The memory of the loss is freed before the backward pass reaches the layers.
    buffers = maximum(working - logits, 0.0) + gathered
    if framework.temporaries_fraction or framework.workspace_bytes:
        buffers = buffers + (
            framework.workspace_bytes + framework.temporaries_fraction * (activations + logits)
        )
    facts = framework_facts(workload.framework)
    if facts.clears_gradients:
        activations, logits, buffers = _coexisting_bytes(
            activations,
            logits,
            buffers,
            last=working + gathered,
            gradients=states.gradients * (micro_batches == 1),
        )
    if facts.hooks_modules:
        live, step = _partition_buffers(c, weights=states.weights)
        buffers = maximum(buffers + live, live + step - (activations + logits))
    if facts.loads_whole:
        sharded = (c.zero_stage >= 3) & (c.data_parallel_size > 1)
        unsharded_weights = sharded * c.data_parallel_size * states.weights
        buffers = maximum(
            buffers,
            unsharded_weights - states.gradients - states.optimizer - (activations + logits),
        )
    if facts.update_copies:
        # The optimizer step begins after activations and logits are freed.
        buffers = maximum(buffers, facts.update_copies * states.state - (activations + logits))
    state_parts = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
    }
    if framework.queued_inputs:
        needed = (
            sum(state_parts.values())
            + activations
            + logits
            + buffers
            + case.profile.gpu.context_bytes
        )
        queued = queued_input_bytes(
            case, candidates, layers=stage.layers.count, micro_batches=micro_batches
        )
        surely = (c.tensor_parallel_size <= case.cluster.nvlink_domain_size) & (micro_batches > 1)
        buffers = buffers + where(
            surely, queued, minimum(queued, maximum(capacity_bytes - needed, 0.0))
        )
    return StageMemory(
        parts=state_parts | {"activations": activations, "logits": logits, "buffers": buffers},
        layer_activations=saved,
        on_host=on_host,
        offloaded=offloaded,
    )
