"""Optimizers: bytes per parameter, Muon's update, and offloading to the host."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hp_tool.cost.arrays import Floats, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import Machine, TrainingCase
from hp_tool.cost.matrices import rank_matrices
from hp_tool.cost.matrix import Matrix
from hp_tool.cost.network import group_ring
from hp_tool.cost.pipeline_stages import StageLayers
from hp_tool.cost.precision import frozen_bytes, quantized_bytes
from hp_tool.cost.roofline import matmul_seconds
from hp_tool.cost.zero import Sharding
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.workload import StatePrecision, TrainingWorkload

STATE_BYTES: dict[StatePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
MASTER_BYTES = {"fp32": 4.0, "fp16": 2.0, "remainder": 2.0, "none": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Bytes per parameter before sharding; 2 + 4 + 12 = 18 by default."""

    weights: float
    gradients: float
    optimizer: float
    """Master copy and optimizer states."""
    state: float
    """Bytes of the first of the optimizer's states."""
    communicated_weights: float
    """Bytes that an all-gather of weights sends: 16 bits, as the matmuls need, even if the shards
    are fp32.
    """
    lighter_matrices: float
    """Optimizer bytes that a weight-matrix parameter needs less than other parameters. Muon has no
    second moment for matrices.
    """
    matrix_copies: float = 0.0
    """Additional bytes per entry of a weight matrix that is stored in two quantised copies
    (row-wise and column-wise) instead of in 16 bits.
    """
    matrix_communicated: float = 0.0
    """Additional bytes per entry that an all-gather of such a matrix sends. Only one of the two
    copies is sent, so the value may be negative.
    """
    frozen_matrices: float | None = None
    """Bytes per entry of a frozen weight matrix under adapters, for storage and for communication.
    None if they equal `weights` and `communicated_weights`.
    """

    @property
    def tells_matrices_apart(self) -> bool:
        return (
            bool(self.lighter_matrices or self.matrix_copies or self.matrix_communicated)
            or self.frozen_matrices is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes on one rank of a stage before sharding; shape (n,)."""

    weights: Floats
    trained_weights: Floats
    gradients: Floats
    optimizer: Floats
    communicated_weights: Floats
    """Bytes of one all-gather of all weights."""
    communicated_trained: Floats
    """Bytes of one all-gather of the weights that an optimizer step changes."""


def stored_precision(workload: TrainingWorkload) -> StatePrecision:
    """Return the precision of stored parameters.

    The query's value takes precedence. Otherwise it is fp32 if shards or matmuls are fp32, else 16
    bits. Under adapters, frozen weights are loaded in 16 bits, because they are never updated
    (torchtune's recipes/configs set dtype bf16; litgpt's finetune/lora.py runs in bf16-true).
    """
    if workload.parameter_precision is not None:
        return workload.parameter_precision
    wide = framework_facts(workload.framework).wide_weights and workload.lora is None
    if workload.precision == "fp32" or wide:
        return "fp32"
    return "fp16" if workload.precision == "fp16" else "bf16"


def gradient_precision(workload: TrainingWorkload) -> StatePrecision:
    """Return the precision of accumulated gradients: the query's, else the framework's default."""
    framework = framework_facts(workload.framework)
    if workload.gradient_precision is not None:
        return workload.gradient_precision
    if not framework.pure_states:
        return framework.gradient_precision
    return stored_precision(workload) if workload.lora is None else framework.adapter_precision


def optimizer_precision(workload: TrainingWorkload) -> StatePrecision:
    """Return the precision of the optimizer's states: the query's, else the framework's default."""
    if workload.optimizer_precision is not None:
        return workload.optimizer_precision
    return (
        gradient_precision(workload) if framework_facts(workload.framework).pure_states else "fp32"
    )


def bytes_per_parameter(
    workload: TrainingWorkload, *, weight_copies: float = 2.0
) -> BytesPerParameter:
    """Return the bytes per parameter in mixed precision.

    Megatron Core stores 16-bit weights, fp32 gradients, an fp32 master copy and Adam states. FSDP
    stores fp32 shards, gathers 16 bits, and needs no master copy.

    Adam has two states (first and second moment) and SGD has its momentum. Muon has a momentum for
    the layers' weight matrices, and Adam's two states for embeddings, output layer, norms and
    biases (Megatron Core's optimizer/muon.py; arXiv 2502.16982 section 2.2). States and master
    copies below fp32 are those of Megatron's precision-aware optimizer; the per-tensor scales of
    fp16 and fp8 states are not counted. If torch.optim updates the parameters directly, gradients
    and states have the parameters' precision. With adapters they have the adapters' precision, and
    the adapters' wider weights count as states. `remainder` stores the 16 bits of the fp32 master
    copy that bf16 weights lack. `weight_copies` is the number of copies of a weight stored in 8
    bits.
    """
    stored = stored_precision(workload)
    # Megatron's fp8-param-gather quantises the layers' matrices and leaves the rest in 16 bits.
    quantized = quantized_bytes(workload) if stored == "fp8" else None
    weights = STATE_BYTES[stored] if quantized is None else 2.0
    first = STATE_BYTES[optimizer_precision(workload)]
    master = MASTER_BYTES[workload.master_precision or "fp32"] if weights < 4.0 else 0.0
    framework = framework_facts(workload.framework)
    if framework.pure_states and workload.master_precision is None:
        adapters = 0.0 if workload.lora is None else STATE_BYTES[framework.adapter_precision]
        master = max(adapters - weights, 0.0)
    second = STATE_BYTES[workload.exp_avg_sq_precision] if workload.exp_avg_sq_precision else first
    if workload.optimizer == "sgd":
        second = 0.0
    return BytesPerParameter(
        weights=weights,
        gradients=STATE_BYTES[gradient_precision(workload)],
        optimizer=first + second + master,
        state=first,
        communicated_weights=min(weights, workload.activation_element_bytes),
        lighter_matrices=second if workload.optimizer == "muon" else 0.0,
        matrix_copies=weight_copies * quantized - weights if quantized else 0.0,
        matrix_communicated=quantized - weights if quantized else 0.0,
        frozen_matrices=frozen_bytes(workload) if workload.frozen_precision else None,
    )


def stage_bytes(
    parameters: Floats,
    *,
    size: BytesPerParameter,
    matrices: Floats = 0.0,
    adapters: Floats | None = None,
    frozen: Floats = 0.0,
) -> StageBytes:
    """Return the bytes of a stage with the given number of `parameters`.

    Of these, `matrices` are entries of weight matrices, and `frozen` are not trained. If `adapters`
    (the number of adapter parameters) is positive, only adapters are trained.
    """
    trained = parameters - frozen
    quantized: Floats = 0.0
    if adapters is not None:
        quantized = matrices if size.frozen_matrices is not None else 0.0
        parameters, trained, matrices = parameters + adapters - quantized, adapters, adapters
    base = quantized * (size.frozen_matrices or 0.0)
    return StageBytes(
        weights=parameters * size.weights + matrices * size.matrix_copies + base,
        trained_weights=trained * size.weights,
        gradients=trained * size.gradients,
        optimizer=trained * size.optimizer - matrices * size.lighter_matrices,
        communicated_weights=parameters * size.communicated_weights
        + matrices * size.matrix_communicated
        + base,
        communicated_trained=trained * size.communicated_weights
        + matrices * size.matrix_communicated,
    )


# Muon's update: Newton-Schulz iterations orthogonalise the momentum of every weight matrix.


NEWTON_SCHULZ_ITERATIONS = 5
"""Newton-Schulz steps (arXiv 2502.16982 section 2.1; Megatron's muon_num_ns_steps)."""


def newton_schulz_flops(rows: Floats, columns: Floats) -> Floats:
    """Return the FLOPs of Newton-Schulz for one matrix with the smaller dimension r and the larger
    dimension q.

    One iteration is A = X X^T, A^2 and (b A + c A^2) X: 2 r^2 q + 2 r^3 + 2 r^2 q FLOPs.
    """
    r, q = minimum(rows, columns), maximum(rows, columns)
    return NEWTON_SCHULZ_ITERATIONS * (4.0 * r * r * q + 2.0 * r * r * r)


def newton_schulz_seconds(rows: Floats, columns: Floats, *, machine: Machine) -> Floats:
    """Return the time in seconds of Newton-Schulz for one matrix: three matmuls per iteration, in
    bf16 if the GPU supports it.

    Source: Megatron's muon_fp32_matmul_prec medium. The elementwise sums over r^2 and r q elements
    are negligible and not counted.
    """
    cluster = machine.cluster
    r, q = minimum(rows, columns), maximum(rows, columns)
    precision = next(
        name for name in ("bf16", "fp16", "fp32") if name in cluster.gpu.peak_flops_per_second
    )
    return NEWTON_SCHULZ_ITERATIONS * (
        matmul_seconds(r, r, q, machine=machine, precision=precision)
        + matmul_seconds(r, r, r, machine=machine, precision=precision)
        + matmul_seconds(r, q, r, machine=machine, precision=precision)
    )


def muon_seconds(
    *,
    case: TrainingCase,
    candidates: Candidates,
    division: Sharding,
    expert_division: Sharding,
    stages: Sequence[StageLayers],
    matrices: Floats,
) -> Floats:
    """Return the seconds that Muon adds to the optimizer step: orthogonalisation and the exchange
    of momenta.

    Under ZeRO 2 and 3, every rank has a shard of every matrix. One exchange gathers the 16-bit
    momenta and another returns the updates (arXiv 2502.16982 algorithm 1). The exchanges of
    experts, whose groups are small, are not counted. With ZeRO 0, every rank processes all
    matrices. `stages` are the stages that may be slowest, and `matrices` is the number of entries
    on the largest of them.
    """
    zero = candidates.zero_stage
    shards, expert_shards = (
        where(zero >= 1, one.shards, 1.0) for one in (division, expert_division)
    )
    each = [
        orthogonalize_seconds(
            case=case,
            candidates=candidates,
            layers=layers,
            shards=shards,
            expert_shards=expert_shards,
        )
        for layers in stages
    ]
    seconds = functools.reduce(maximum, each)
    if not anywhere(zero >= 2):
        return seconds
    wire = 2.0 * 2.0 * matrices / division.shards * (1.0 - 1.0 / division.shards)
    group = group_ring(machine=case, group=division.shard_group)
    return seconds + where(zero >= 2, group.seconds(wire), 0.0)


def orthogonalize_seconds(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: StageLayers,
    shards: Floats,
    expert_shards: Floats,
) -> Floats:
    """Return the seconds to orthogonalise the matrices that one rank of the largest stage
    processes.

    Tensor-parallel ranks process their own slices (Megatron's muon_tp_mode blockwise). Queries,
    keys and values are processed separately (muon_split_qkv). Complete matrices are distributed
    over the `shards` ranks that shard the states (LayerWiseDistributedOptimizer), so each rank has
    at least one.
    """
    seconds: Floats = 0.0
    for count, (_, kind) in zip(layers.kinds, case.model.kinds, strict=True):
        matrices = rank_matrices(kind, candidates)
        for routed, divided in ((False, shards), (True, expert_shards)):
            same_group = [matrix for matrix in matrices if matrix.routed == routed]
            busiest = _busiest_rank_seconds(same_group, count, divided, machine=case)
            seconds = seconds + busiest * (count > 0)
    return seconds


def _busiest_rank_seconds(
    matrices: Iterable[Matrix], layers: Floats, shards: Floats, *, machine: Machine
) -> Floats:
    """Return the time in seconds of the busiest rank if the matrices of all `layers` layers are
    distributed over `shards` ranks.
    """
    work: Floats = 0.0
    longest: Floats = 0.0
    for matrix in matrices:
        parts = matrix.outputs if matrix.module == "linear_qkv" else (matrix.rows,)
        for rows in parts:
            seconds = newton_schulz_seconds(rows, matrix.inputs, machine=machine)
            work = work + matrix.count * seconds
            longest = maximum(longest, seconds)
    return maximum(layers * work / shards, longest)


# Offloading to host memory: bytes on both sides, and seconds of the copies.
#
# Nothing here is fitted on training runs: copies between pinned host memory and device reach
# PCIE_FRACTION of the link, and the host's update HOST_MEMORY_FRACTION of its memory bandwidth.


PCIE_FRACTION = 0.8
"""Fraction of the link's datasheet rate that pinned copies of many MB reach: 25 of 32 GB/s on PCIe
4, 52 of 64 on PCIe 5.
"""
HOST_MEMORY_FRACTION = 0.45
"""Fraction of the host's memory bandwidth that the optimizer update reaches.

PyTorch's fused AdamW moves its 28 bytes per parameter on a CPU at 0.55 times the rate of a copy
(torch 2.13, one thread, 2026-11-21), and a copy reaches about 0.8 of the memory's datasheet rate.
"""
HOST_STATES = {"adam": 2, "sgd": 1}
"""Number of fp32 states of an optimizer that runs on the host."""
TRANSFER_OVERLAP = 1.0
"""Fraction of the activation copies that can overlap with compute. The GPU has copy engines."""
LAYERS_ON_DEVICE = 2.0
"""Number of layers whose offloaded activations are on the device at the same time: one being copied
and one in use.
"""


def link_rate(gpu: GpuSpec) -> float:
    """Return the bytes per second between device and host, per direction."""
    return PCIE_FRACTION * gpu.pcie_bandwidth_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedUpdate:
    """The host's part of the optimizer step."""

    update_s: Floats
    copy_s: Floats
    host_bytes_per_parameter: float


def offloaded_update(
    parameters: Floats, *, workload: TrainingWorkload, gpu: GpuSpec, size: BytesPerParameter
) -> OffloadedUpdate:
    """Return the seconds and host bytes for updating `parameters` on the host (Megatron's
    HybridDeviceOptimizer).

    The host stores fp32 parameters, gradients and states in pinned memory. By default, three steps
    run in sequence: gradients are copied to the host in fp32; the host updates its parameters (it
    reads and writes parameters and states, and reads gradients); and 16-bit weights are copied
    back. The device updates its share concurrently.
    """
    states = HOST_STATES[workload.optimizer]
    host_rate = HOST_MEMORY_FRACTION * (gpu.host_memory_bandwidth_bytes_per_second or 0.0)
    return OffloadedUpdate(
        update_s=parameters * (8.0 * (1 + states) + 4.0) / host_rate,
        copy_s=parameters * (4.0 + size.communicated_weights) / link_rate(gpu),
        host_bytes_per_parameter=4.0 * (1 + states) + 4.0,
    )


def offload_activations(
    saved: Floats, *, layer_bytes: Floats, layers: Floats, workload: TrainingWorkload
) -> tuple[Floats, Floats]:
    """Return (bytes on the device, bytes on the host) for a stage that saves `saved` bytes.

    In the first fraction f of the `layers`, each layer copies its saved `layer_bytes` per
    micro-batch to the host in the forward pass and back in the backward pass (Transformer Engine's
    CPU offload; with full recomputation DeepSpeed's cpu_checkpointing). Bytes in transit reuse the
    memory of the micro-batch's other layers, which have not started or have already finished.
    """
    offloaded = workload.offloaded_share * saved
    others = (1.0 - workload.offloaded_share) * layers * layer_bytes
    return saved - offloaded + maximum(
        minimum(offloaded, LAYERS_ON_DEVICE * layer_bytes) - others, 0.0
    ), offloaded


def activation_seconds(
    stage_bytes: Floats, *, forward: Floats, backward: Floats, gpu: GpuSpec
) -> Floats:
    """Return the exposed seconds per micro-batch to copy `stage_bytes` to the host and back.

    The copies overlap with the forward and the backward pass.
    """
    each = stage_bytes / link_rate(gpu)
    return 2.0 * each - TRANSFER_OVERLAP * (minimum(each, forward) + minimum(each, backward))
