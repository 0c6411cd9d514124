"""What each parameter costs to keep while it is trained: the optimizers and their precisions."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.elementwise import Column
from hp_tool.cost.lowprecision import quantized_bytes
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.domain.frameworks import facts
from hp_tool.domain.workload import StatePrecision, TrainingWorkload

STATE_BYTES: dict[StatePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
MASTER_BYTES = {"fp32": 4.0, "fp16": 2.0, "remainder": 2.0, "none": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Before sharding: 2 + 4 + 12 = 18 by default."""

    weights: float
    gradients: float
    optimizer: float
    """Master copy and states."""
    communicated_weights: float
    """What an all-gather of weights sends: the matmuls' 16 bits even where the shards are kept in fp32."""
    lighter_matrices: float
    """Optimizer bytes that a weight matrix saves against the other parameters: Muon's missing second state."""
    matrix_copies: float = 0.0
    """Bytes that a weight matrix takes beyond the other parameters: quantised by rows and by columns instead of 16 bits."""
    matrix_communicated: float = 0.0
    """The same of an all-gather, which sends one of the two; below 0 where it saves."""

    @property
    def tells_matrices_apart(self) -> bool:
        return bool(self.lighter_matrices or self.matrix_copies or self.matrix_communicated)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What one rank of one stage would keep without sharding; shape (n,)."""

    weights: Column
    trained_weights: Column
    gradients: Column
    optimizer: Column
    communicated_weights: Column
    """What one all-gather of all weights sends."""
    communicated_trained: Column
    """The same of those that an optimizer step changes."""


def bytes_per_parameter(workload: TrainingWorkload) -> BytesPerParameter:
    """Mixed precision as Megatron Core keeps it: 16-bit weights, fp32 gradients, fp32 master copy and Adam states.
    FSDP keeps fp32 shards and gathers 16 bits; no master copy is needed then.

    Adam keeps two states, SGD its momentum, Muon a momentum for the layers' weight matrices and Adam's two for embeddings,
    output layer, norms and biases (Megatron Core's optimizer/muon.py; arXiv 2502.16982 section 2.2). Narrower states and
    master copies are those of Megatron's precision-aware optimizer; one scale per tensor for fp16 and fp8 states is not
    counted. `remainder` keeps of the fp32 master copy the 16 bits that bf16 weights do not hold already.
    """
    wide = workload.precision == "fp32" or facts(workload.framework).wide_weights
    stored = workload.parameter_precision or ("fp32" if wide else "bf16")
    # Megatron's fp8-param-gather quantises the layers' matrices and leaves the rest in 16 bits.
    quantized = quantized_bytes(workload) if stored == "fp8" else None
    weights = STATE_BYTES[stored] if quantized is None else 2.0
    first = STATE_BYTES[workload.optimizer_precision or "fp32"]
    second = STATE_BYTES[workload.exp_avg_sq_precision] if workload.exp_avg_sq_precision else first
    if workload.optimizer == "sgd":
        second = 0.0
    return BytesPerParameter(
        weights=weights,
        gradients=STATE_BYTES[workload.gradient_precision or "fp32"],
        optimizer=first + second + (MASTER_BYTES[workload.master_precision or "fp32"] if weights < 4.0 else 0.0),
        communicated_weights=min(weights, activation_element_bytes(workload)),
        lighter_matrices=second if workload.optimizer == "muon" else 0.0,
        matrix_copies=2.0 * quantized - weights if quantized else 0.0,
        matrix_communicated=quantized - weights if quantized else 0.0,
    )


def stage_bytes(
    parameters: Column,
    *,
    size: BytesPerParameter,
    matrices: Column = 0.0,
    adapters: Column | None = None,
    frozen: Column = 0.0,
) -> StageBytes:
    """Bytes of a stage's `parameters`, of which `matrices` are entries of the layers' weight matrices and `frozen` are not
    trained. Where there are `adapters` (their parameters), they alone are trained.
    """
    trained = parameters - frozen
    if adapters is not None:
        parameters, trained, matrices = parameters + adapters, adapters, adapters
    return StageBytes(
        weights=parameters * size.weights + matrices * size.matrix_copies,
        trained_weights=trained * size.weights,
        gradients=trained * size.gradients,
        optimizer=trained * size.optimizer - matrices * size.lighter_matrices,
        communicated_weights=parameters * size.communicated_weights + matrices * size.matrix_communicated,
        communicated_trained=trained * size.communicated_weights + matrices * size.matrix_communicated,
    )
