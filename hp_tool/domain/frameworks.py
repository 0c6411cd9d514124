"""What training frameworks do that changes bytes and the split of a model: facts from their
sources, nothing fitted.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from hp_tool.domain.parallel import TokenDispatcher
from hp_tool.domain.units import MIB
from hp_tool.domain.workload import StatePrecision

Degree = Literal[
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
]
DEGREES: tuple[Degree, ...] = get_args(Degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkFacts:
    """Defaults are Megatron Core's."""

    fused_activation: bool = True
    """A gated MLP keeps what enters its activation function alone; False: the activated gate as
    well, which the product with the other half needs.
    """
    fuses_queries_keys_values: bool = True
    """One matmul projects queries, keys and values into one storage."""
    loss_copies: float = 1.0
    """fp32 copies of the logits alive at once."""
    keeps_narrow_logits: bool = True
    """The 16-bit logits stay alive beside them."""
    fused_loss_in_place: bool = False
    """A fused loss writes the gradient in 16 bits and makes no fp32 copy."""
    caches_weight_gradients: bool = True
    """Transformer Engine answers autograd with empty weight gradients, the real ones being added to
    the accumulated: one for each shape of a matrix, kept for all layers (get_dummy_wgrad).
    """
    bucket_bytes: float = 0.0
    """Bytes a parameter of the buckets in which replicas reduce gradients, besides the buffer that
    accumulates them.
    """
    bucket_parameters: float = 0.0
    """Parameters in one reduction of gradients and, from ZeRO 1 on, in one all-gather of their
    weights; 0: so many that latency does not matter.
    """
    bucket_parameters_per_rank: float = 0.0
    """The same for each rank that holds the parameters, if that is more: larger groups get larger
    buckets.
    """
    buckets_without_overlap: bool = True
    """Gradients are divided into buckets even if nothing hides their reduction."""
    accumulates_in_fp32: bool = True
    """fp32 gradients are summed over micro-batches in fp32; False: kernels write 16 bits, and only
    their reduction is wider.
    """
    wide_weights: bool = False
    """Weights are kept in fp32 and gathered in 16 bits; no master copy is needed."""
    balances_blocks: bool = False
    """Pipeline stages are filled with layers and the output layer by their number of weights
    (`cost.pipeline_stages`), instead of holding the same number of layers each.
    """
    late_layers: bool = False
    """Where p does not divide L the last stages hold a layer more, instead of the ends holding
    fewer.
    """
    fills_pipeline: bool = False
    """Its 1F1B refuses fewer than p - 1 micro-batches."""
    gradient_precision: StatePrecision = "fp32"
    """Of accumulated gradients unless a query names another."""
    broadcasts_weights: bool = False
    """ZeRO 1 all-reduces every gradient over all replicas, whatever they shard; after the step each
    rank of a shard group broadcasts the weights it updated, one after the other, and nothing hides
    that.
    """
    update_copies: float = 0.0
    """fp32 copies of an optimizer shard that its step alone needs: the gradient, and results on
    their way.
    """
    is_plain: bool = False
    """Measured, and modelled, for dense decoders under tensor, data and plain 1F1B parallelism,
    with layers recomputed whole or not at all.
    """
    dispatchers: tuple[TokenDispatcher, ...] = ("alltoall", "flex")
    """Ways to bring tokens to their experts that a ranking tries where a query names none; none:
    the usual one.
    """
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """The ZeRO stages it has."""
    default_zero_stage: int = 1
    """The one that runs unless a query names another."""
    degrees: tuple[Degree, ...] = DEGREES
    """Degrees of parallelism, beside that of data, that it has."""


FACTS = {
    # NVIDIA/Megatron-LM, megatron/core/distributed/distributed_data_parallel.py: bucket_size, which
    # pipeline ranks after the first do without, as do all without overlap_grad_reduce.
    "megatron-core": FrameworkFacts(
        bucket_parameters=4e7, bucket_parameters_per_rank=1e6, buckets_without_overlap=False
    ),
    "torch-fsdp": FrameworkFacts(
        accumulates_in_fp32=False,
        wide_weights=True,
        fused_activation=False,
        fuses_queries_keys_values=False,
        loss_copies=3.0,
        fused_loss_in_place=True,
        caches_weight_gradients=False,
        dispatchers=(),
        zero_stages=(2, 3),
        default_zero_stage=3,
    ),
    # huggingface/nanotron, src/nanotron: models/llama.py (GLUActivation, cast_to_fp32),
    # parallel/tensor_parallel/functional.py (_ShardedCrossEntropy), models/base.py (build_model),
    # parallel/pipeline_parallel/engine.py (OneForwardOneBackwardPipelineEngine); DDP's buckets hold
    # bf16 gradients beside optim/gradient_accumulator.py's fp32 buffer, from which each is reduced
    # (get_fp32_accum_hook), in 25 MiB (config/config.py, ddp_bucket_cap_mb).
    "nanotron": FrameworkFacts(
        fused_activation=False,
        loss_copies=2.0,
        keeps_narrow_logits=False,
        caches_weight_gradients=False,
        bucket_bytes=2.0,
        bucket_parameters=12.5 * MIB,
        balances_blocks=True,
        fills_pipeline=True,
        is_plain=True,
        zero_stages=(0, 1),
    ),
    # InternLM/InternEvo, internlm/solver/optimizer: hybrid_zero_optim.py (reduce_grad_hook:
    # all-reduce with rank None; broadcast_params; step: fp32 gradients made for the shard),
    # fsdp_optimizer.py (zero_stage 3: torch's FSDP over bf16 parameters with an fp32 copy);
    # train/training_internlm.py: torch.optim.AdamW, whose root and quotient are copies;
    # configs/7B_sft.py: overlap_sync_grad, not overlap_sync_param; pipeline_utils.py:
    # partition_uniform.
    "internevo": FrameworkFacts(
        accumulates_in_fp32=False,
        loss_copies=1.0,
        caches_weight_gradients=False,
        gradient_precision="bf16",
        broadcasts_weights=True,
        update_copies=3.0,
        late_layers=True,
        is_plain=True,
        zero_stages=(1, 3),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A framework without constants of its own: whose constants and facts stand for it, and what it
    can run.
    """

    constants: str
    degrees: tuple[Degree, ...] = ()
    """As FrameworkFacts'."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    wraps: str | None = None
    """The framework whose code trains the model, with all that it can do; None: code of its own."""

    @property
    def attention_kernel(self) -> str | None:
        """FlashAttention 2, by its package or torch's attention, on dies where it was timed; None:
        the wrapped framework's.
        """
        return None if self.wraps else "fa2"


_FORKS: tuple[Degree, ...] = tuple(
    each for each in DEGREES if each != "virtual_pipeline_parallel_size"
)
STAND_INS = {
    "deepspeed": StandIn(
        constants="megatron-core"
    ),  # its pipeline and tensor parallelism are the program's, not its file's
    "hf-trainer": StandIn(constants="megatron-core"),
    "llama-factory": StandIn(constants="megatron-core"),
    # axolotl's N-D parallelism: tensor_parallel_size, context_parallel_size, dp_shard_size.
    "axolotl": StandIn(
        constants="megatron-core", degrees=("tensor_parallel_size", "context_parallel_size")
    ),
    # ColossalAI's HybridParallelPlugin: tp_size, pp_size, num_model_chunks, sp_size, zero_stage to
    # 2, GeminiPlugin: 3.
    "colossalai": StandIn(constants="megatron-core", degrees=DEGREES),
    "litgpt": StandIn(constants="torch-fsdp", zero_stages=(2, 3)),
    "ms-swift": StandIn(
        constants="megatron-core", degrees=DEGREES, wraps="megatron-core"
    ),  # its Megatron-SWIFT
    "openrlhf": StandIn(
        constants="megatron-core", degrees=("context_parallel_size",)
    ),  # DeepSpeed, and ring attention
    "verl": StandIn(constants="megatron-core", degrees=DEGREES, wraps="megatron-core"),
    # actor.strategy fsdp and fsdp2; Ulysses splits sequences.
    "verl-fsdp": StandIn(
        constants="torch-fsdp",
        degrees=("context_parallel_size",),
        zero_stages=(2, 3),
        wraps="torch-fsdp",
    ),
    # Forks of Megatron-LM under DeepSpeed's engine and pipeline; neither interleaves chunks.
    "gpt-neox": StandIn(constants="megatron-core", degrees=_FORKS),
    "megatron-deepspeed": StandIn(constants="megatron-core", degrees=_FORKS),
}
"""Predicted with another's constants: every answer says so, and its interval is wider."""
FRAMEWORKS = (*FACTS, *STAND_INS)
"""Every framework that a query may name."""


def wrapped(framework: str) -> str:
    """Return the framework whose code trains the model: verl's Megatron workers run megatron-core;
    any other runs itself.
    """
    return (framework in STAND_INS and STAND_INS[framework].wraps) or framework


@cache
def facts(framework: str) -> FrameworkFacts:
    """The framework's facts, or those of its stand-in within what it can run; Megatron Core's where
    nothing else is known.
    """
    if framework in STAND_INS:
        own = STAND_INS[framework]
        return replace(
            FACTS[own.constants], degrees=own.degrees, zero_stages=own.zero_stages, dispatchers=()
        )
    return FACTS.get(framework) or FACTS["megatron-core"]
