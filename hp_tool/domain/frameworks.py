"""Facts about training frameworks that determine memory and the split of a model, with sources;
none of them is fitted.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from hp_tool.domain.parallel import TokenDispatcher
from hp_tool.domain.units import MIB
from hp_tool.domain.workload import StatePrecision, TrainingWorkload

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
    """Facts about one framework. Defaults are Megatron Core's."""

    fused_activation: bool = True
    """Whether a gated MLP saves only the input of its activation function; False: also the
    activated gate.
    """
    fuses_queries_keys_values: bool = True
    """Whether one matmul projects queries, keys and values into one tensor."""
    loss_copies: float = 1.0
    """Number of fp32 copies of the logits that exist at once."""
    keeps_narrow_logits: bool = True
    """Whether the 16-bit logits are stored next to their fp32 copies."""
    fused_loss_copies: float | None = None
    """`loss_copies` with a fused loss. 0 still implies a gradient as wide as the logits. None: as
    without a fused loss.
    """
    caches_weight_gradients: bool = True
    """Whether Transformer Engine returns empty weight gradients to autograd and accumulates the
    real ones itself: one tensor for each matrix shape, reused by all layers (get_dummy_wgrad).
    """
    bucket_bytes: float = 0.0
    """Bytes per parameter of the buckets in which replicas reduce gradients, in addition to the
    accumulation buffer.
    """
    bucket_parameters: float = 0.0
    """Parameters per gradient reduction and, from ZeRO 1, per all-gather of weights; 0: so many
    that latency is negligible.
    """
    bucket_parameters_per_rank: float = 0.0
    """`bucket_parameters` per rank that holds the parameters; the larger of both applies, so larger
    groups have larger buckets.
    """
    buckets_without_overlap: bool = True
    """Whether gradients are reduced in buckets even if the reduction does not overlap."""
    accumulates_in_fp32: bool = True
    """Whether gradients are summed over micro-batches in fp32 if their precision is fp32. False:
    kernels write 16 bits and only the reduction uses fp32.
    """
    wide_weights: bool = False
    """Whether weights are stored in fp32 and gathered in 16 bits, without a master copy."""
    balances_blocks: bool = False
    """Whether pipeline stages are balanced by the number of weights of layers and output layer
    (`cost.pipeline_stages`), instead of holding equally many layers.
    """
    late_layers: bool = False
    """If p does not divide L: True if the last stages hold one more layer, False if the first and
    last stage hold fewer.
    """
    fills_pipeline: bool = False
    """Whether its 1F1B schedule rejects fewer than p - 1 micro-batches."""
    gradient_precision: StatePrecision = "fp32"
    """Precision of accumulated gradients unless a query sets another."""
    broadcasts_weights: bool = False
    """Whether ZeRO 1 all-reduces each gradient over all replicas and each rank of a shard group
    then broadcasts its updated weights, one rank after another and without overlap.
    """
    update_copies: float = 0.0
    """Copies of an optimizer shard that only the optimizer step needs, each as wide as one state:
    InternEvo's gradient and intermediate results, the square root in torch's foreach Adam.
    """
    pure_states: bool = False
    """Whether torch.optim updates the parameters directly: gradients and optimizer states have the
    parameters' precision, and there is no master copy.
    """
    adapter_precision: StatePrecision = "bf16"
    """Precision of LoRA's adapters, whose gradients and states follow `pure_states`."""
    frozen_precisions: tuple[Literal["fp8", "nf4"], ...] = ("fp8", "nf4")
    """Supported precisions below 16 bits for LoRA's frozen weights, widest first."""
    clears_gradients: bool = False
    """Whether gradients are set to None after each step, so that with one micro-batch they grow
    during the backward pass while activations are freed.
    """
    gathers_ends: bool = False
    """Whether, under ZeRO 3, weights outside the layers stay gathered through both passes: they
    form FSDP's root unit, which is not resharded after the forward pass.
    """
    prefetched_layers: int = 1
    """Under ZeRO 3, number of layers whose weights are gathered ahead of the running layer."""
    wide_residual_with_adapters: bool = False
    """Whether, under ZeRO 3 with adapters, the residual stream and therefore each checkpoint is
    fp32.
    """
    checkpoints: Literal["none", "full", "sharded"] = "none"
    """Layers that are recomputed by default: none, all, or all under ZeRO 3."""
    loads_whole: bool = False
    """Whether, under ZeRO 3, each rank loads all weights before it shards them."""
    hooks_modules: bool = False
    """Whether, under ZeRO 3, every module instead of every layer gathers its weights, which stay
    gathered up to a limit (DeepSpeed).
    """
    loops_experts: bool = False
    """Whether routed experts run one after the other, unless the query sets `expert_kernel:
    grouped`.
    """
    wraps_adapters: bool = False
    """Whether, under ZeRO 3, the A and B of each adapter are separate FSDP units."""
    eager_kernels: bool = False
    """Whether norms, rotary embeddings and activation functions run operator by operator, unless
    the query sets `kernel_fusion`.
    """
    fuses_beside_experts: bool = False
    """Whether models with experts have kernels of their own that fuse what `eager_kernels` does
    not.
    """
    is_plain: bool = False
    """Whether the framework is measured and modelled only for dense decoders with tensor, data and
    plain 1F1B parallelism, with full or no recomputation.
    """
    dispatchers: tuple[TokenDispatcher, ...] = ("alltoall", "flex")
    """Token dispatchers that a ranking tries if the query names none; empty: only the default."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """Supported ZeRO stages."""
    default_zero_stage: int = 1
    """ZeRO stage if the query names none."""
    degrees: tuple[Degree, ...] = DEGREES
    """Supported degrees of parallelism besides data parallelism."""


_PURE_TORCH = FrameworkFacts(
    fused_activation=False,
    fuses_queries_keys_values=False,
    loss_copies=3.0,
    fused_loss_copies=0.0,
    caches_weight_gradients=False,
    accumulates_in_fp32=False,
    pure_states=True,
    update_copies=1.0,
    clears_gradients=True,
    eager_kernels=True,
    prefetched_layers=0,
    dispatchers=(),
    degrees=(),
    frozen_precisions=("nf4",),  # bitsandbytes' or torchao's; fp8 is Transformer Engine's.
)
"""Facts of trainers that run PyTorch's modules, autograd and optimizers unmodified."""
FACTS_BY_FRAMEWORK = {
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
        fused_loss_copies=0.0,
        caches_weight_gradients=False,
        dispatchers=(),
        zero_stages=(2, 3),
        default_zero_stage=3,
        frozen_precisions=("nf4",),
    ),
    # huggingface/transformers, src/transformers/trainer.py: the model is trained as it was loaded,
    # by DistributedDataParallel or FSDP; models/mistral/modeling_mistral.py: eager norms, rotary
    # positions and activation; loss/loss_utils.py: fp32 logits, and a shifted copy of them;
    # torch/optim/adam.py (_multi_tensor_adam): one square root of all second states at once.
    # huggingface/peft, src/peft/tuners/tuners_utils.py (cast_adapter_dtype): adapters in fp32.
    # torch/distributed/fsdp/_runtime_utils.py: the root unit stays gathered; with
    # limit_all_gathers the next layer's weights replace the running one's.
    "hf-trainer": replace(
        _PURE_TORCH,
        adapter_precision="fp32",
        fused_loss_copies=1.5,
        gathers_ends=True,
        wide_residual_with_adapters=True,
        wraps_adapters=True,
        loops_experts=True,
        zero_stages=(0, 2, 3),
        default_zero_stage=0,
    ),
    # deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py and stage3.py: 16-bit weights
    # and gradients, an fp32 copy and states in partitions; the model is the trainer's.
    "deepspeed": replace(
        _PURE_TORCH,
        pure_states=False,
        clears_gradients=False,
        update_copies=0.0,
        gradient_precision="bf16",
        fused_loss_copies=1.5,
        hooks_modules=True,
        loops_experts=True,
    ),
    # meta-pytorch/torchtune, recipes/configs: dtype bf16 for parameters and adapters, torch's fused
    # AdamW, activation checkpointing on; torchtune/training/_distributed.py (shard_model): FSDP2,
    # whose root unit holds the ends.
    "torchtune": replace(
        _PURE_TORCH,
        update_copies=0.0,
        checkpoints="full",
        gathers_ends=True,
        zero_stages=(3,),
        default_zero_stage=3,
    ),
    # Lightning-AI/litgpt, litgpt/finetune/lora.py: precision bf16-true, adapters included;
    # FSDPStrategy with activation checkpoints of each Block on several devices, and
    # load_checkpoint of the whole file; litgpt/utils.py (chunked_cross_entropy): logits in 16 bits.
    "litgpt": replace(
        _PURE_TORCH,
        loss_copies=1.0,
        checkpoints="sharded",
        loads_whole=True,
        gathers_ends=True,
        zero_stages=(0, 3),
        default_zero_stage=3,
    ),
    # NVIDIA-NeMo/Automodel, examples/llm_finetune and llm_pretrain: torch_dtype bf16, FSDP2,
    # loss/masked_ce.py: fp32 logits. Models with experts are its own, with Transformer Engine's
    # attention and rotary positions and compiled norms (components/models/common/utils.py,
    # BackendConfig); dense ones are transformers'.
    "nemo-automodel": replace(
        _PURE_TORCH,
        fuses_beside_experts=True,
        gathers_ends=True,
        zero_stages=(0, 2, 3),
        default_zero_stage=3,
        dispatchers=("alltoall", "flex"),
        degrees=DEGREES,
    ),
    # pytorch/torchtitan, torchtitan/config/job_config.py: parameters in fp32, gathered in bf16
    # (mixed_precision_param), reduced in fp32; torchtitan/components/loss.py: fp32 logits.
    "torchtitan": replace(
        _PURE_TORCH,
        wide_weights=True,
        zero_stages=(2, 3),
        degrees=DEGREES,
        gathers_ends=True,
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


SAME_CODE = {"llm-foundry": "torch-fsdp"}
"""Frameworks that run the code of another framework: torch-fsdp's constants come from llm-foundry's
runs.
"""
FACTS_BY_FRAMEWORK |= {name: FACTS_BY_FRAMEWORK[other] for name, other in SAME_CODE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A framework without its own constants: the framework whose constants it uses, and its own
    limits.
    """

    constants: str
    degrees: tuple[Degree, ...] = ()
    """Supported degrees, as in FrameworkFacts."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    wraps: str | None = None
    """Framework whose code trains the model, with all its features; None: its own code."""


_FORK_DEGREES: tuple[Degree, ...] = tuple(
    degree for degree in DEGREES if degree != "virtual_pipeline_parallel_size"
)
STAND_INS = {
    "llama-factory": StandIn(constants="deepspeed"),
    # axolotl's N-D parallelism: tensor_parallel_size, context_parallel_size, dp_shard_size.
    "axolotl": StandIn(
        constants="deepspeed", degrees=("tensor_parallel_size", "context_parallel_size")
    ),
    # ColossalAI's HybridParallelPlugin (tp_size, pp_size, num_model_chunks, sp_size, zero_stage up
    # to 2) and GeminiPlugin (ZeRO 3).
    "colossalai": StandIn(constants="megatron-core", degrees=DEGREES),
    "ms-swift": StandIn(
        constants="megatron-core", degrees=DEGREES, wraps="megatron-core"
    ),  # its Megatron-SWIFT
    "openrlhf": StandIn(
        constants="deepspeed", degrees=("context_parallel_size",)
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
    "gpt-neox": StandIn(constants="megatron-core", degrees=_FORK_DEGREES),
    "megatron-deepspeed": StandIn(constants="megatron-core", degrees=_FORK_DEGREES),
}
"""Frameworks predicted with the constants of another. Answers state this, and their intervals are
wider.
"""
FRAMEWORKS = (*FACTS_BY_FRAMEWORK, *STAND_INS)
"""Every framework that a query may name."""


def calls_flash_attention(framework: str) -> bool:
    """Return whether the framework calls FlashAttention 2, directly or through torch, on dies where
    it was timed.
    """
    if framework in STAND_INS:
        return STAND_INS[framework].wraps is None
    return framework in FACTS_BY_FRAMEWORK and FACTS_BY_FRAMEWORK[framework].eager_kernels


def loops_experts(workload: TrainingWorkload) -> bool:
    """Return whether routed experts run one after another, as separate modules."""
    if workload.expert_kernel is not None:
        return workload.expert_kernel == "loop"
    return framework_facts(workload.framework).loops_experts


def fuses_kernels(workload: TrainingWorkload) -> bool:
    """Return whether elementwise operations are fused, by the query or the framework's default."""
    if workload.kernel_fusion is not None:
        return workload.kernel_fusion
    return not framework_facts(workload.framework).eager_kernels


def training_engine(framework: str) -> str:
    """Return the framework whose code trains the model: megatron-core for verl's Megatron workers;
    otherwise the framework itself.
    """
    framework = SAME_CODE.get(framework, framework)
    return (framework in STAND_INS and STAND_INS[framework].wraps) or framework


@cache
def framework_facts(framework: str) -> FrameworkFacts:
    """Return the framework's facts; for a stand-in, those of its substitute within its limits; for
    an unknown framework, Megatron Core's.
    """
    if framework in STAND_INS:
        own = STAND_INS[framework]
        return replace(
            FACTS_BY_FRAMEWORK[own.constants],
            degrees=own.degrees,
            zero_stages=own.zero_stages,
            dispatchers=(),
        )
    return FACTS_BY_FRAMEWORK.get(framework) or FACTS_BY_FRAMEWORK["megatron-core"]
