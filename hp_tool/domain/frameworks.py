"""Facts about training frameworks that determine memory use and how a model is split, with sources.
None of them is fitted.
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
    """Whether a gated MLP saves only the input of its activation function. False: it also saves the
    activated gate.
    """
    fuses_queries_keys_values: bool = True
    """Whether one matmul projects queries, keys and values into one tensor."""
    loss_copies: float = 1.0
    """Number of fp32 copies of the logits that exist at once."""
    keeps_narrow_logits: bool = True
    """Whether the 16-bit logits stay in memory together with their fp32 copies."""
    fused_loss_copies: float | None = None
    """`loss_copies` with a fused loss; None: as without a fused loss. Even with 0, there is a
    gradient of the same size as the logits.
    """
    caches_weight_gradients: bool = True
    """Whether Transformer Engine accumulates weight gradients itself and returns dummy gradients to
    autograd: one tensor per matrix shape, reused by all layers (get_dummy_wgrad).
    """
    bucket_bytes: float = 0.0
    """Bytes per parameter of the gradient reduction buckets, in addition to the accumulation
    buffer.
    """
    bucket_parameters: float = 0.0
    """Parameters per bucket of the gradient reduction and, from ZeRO 1 on, of the weight
    all-gather; 0: buckets are so large that latency is negligible.
    """
    bucket_parameters_per_rank: float = 0.0
    """Parameters per bucket, per rank of the data-parallel group. The larger of this times the
    group size and `bucket_parameters` applies.
    """
    buckets_without_overlap: bool = True
    """Whether gradients are reduced in buckets even without overlap."""
    accumulates_in_fp32: bool = True
    """Whether gradients with precision fp32 are accumulated over micro-batches in fp32. False:
    kernels write 16 bits, and only the reduction uses fp32.
    """
    wide_weights: bool = False
    """Whether weights are stored in fp32 and gathered in 16 bits, without a separate master
    copy.
    """
    balances_blocks: bool = False
    """Whether pipeline stages are balanced by the weights of layers and output layer
    (`cost.pipeline_stages`), instead of having equal numbers of layers.
    """
    late_layers: bool = False
    """If p does not divide L. True: the last stages have one more layer; False: the first and the
    last stage have fewer layers.
    """
    fills_pipeline: bool = False
    """Whether the framework's 1F1B schedule rejects fewer than p - 1 micro-batches."""
    gradient_precision: StatePrecision = "fp32"
    """Default precision of accumulated gradients."""
    broadcasts_weights: bool = False
    """Whether, with ZeRO 1, each gradient is all-reduced over all replicas, after which the ranks
    of a shard group broadcast their updated weights, one rank after another and without overlap.
    """
    update_copies: float = 0.0
    """Number of optimizer-shard copies, each the size of one state, that exist only during the
    optimizer step: InternEvo's gradient and intermediate results, the square root in torch's
    foreach Adam.
    """
    pure_states: bool = False
    """Whether torch.optim updates the parameters directly. Gradients and optimizer states then have
    the parameters' precision, and there is no master copy.
    """
    adapter_precision: StatePrecision = "bf16"
    """Precision of LoRA adapters. `pure_states` also applies to their gradients and states."""
    frozen_precisions: tuple[Literal["fp8", "nf4"], ...] = ("fp8", "nf4")
    """Supported precisions below 16 bits for the frozen weights of LoRA, widest first."""
    clears_gradients: bool = False
    """Whether gradients are set to None after each step. With one micro-batch, gradients then grow
    during the backward pass while activations are freed.
    """
    gathers_ends: bool = False
    """Whether, with ZeRO 3, the embedding and output layer stay gathered through both passes. They
    belong to FSDP's root unit, which is not resharded after the forward pass.
    """
    prefetched_layers: int = 1
    """Number of layers whose weights are prefetched with ZeRO 3."""
    wide_residual_with_adapters: bool = False
    """Whether the residual stream, and therefore each activation checkpoint, is fp32 with ZeRO 3
    and adapters.
    """
    checkpoints: Literal["none", "full", "sharded"] = "none"
    """Layers recomputed by default: none, all, or all with ZeRO 3."""
    loads_whole: bool = False
    """Whether, with ZeRO 3, each rank loads all weights before sharding them."""
    hooks_modules: bool = False
    """Whether, with ZeRO 3, weights are gathered per module instead of per layer and stay gathered
    up to a limit (DeepSpeed).
    """
    loops_experts: bool = False
    """Whether routed experts run one after another, unless the query sets `expert_kernel:
    grouped`.
    """
    wraps_adapters: bool = False
    """Whether, with ZeRO 3, the matrices A and B of each adapter are separate FSDP units."""
    eager_kernels: bool = False
    """Whether norms, rotary embeddings and activation functions run as unfused eager operations,
    unless the query sets `kernel_fusion`.
    """
    fuses_beside_experts: bool = False
    """Whether MoE models have their own fused kernels for the operations that `eager_kernels`
    leaves unfused.
    """
    is_plain: bool = False
    """Whether the framework is measured and modelled only for dense decoders with tensor, data and
    plain 1F1B pipeline parallelism, and full or no recomputation.
    """
    dispatchers: tuple[TokenDispatcher, ...] = ("alltoall", "flex")
    """Token dispatchers that a ranking tries by default; empty: only the default dispatcher."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """Supported ZeRO stages."""
    default_zero_stage: int = 1
    """Default ZeRO stage."""
    degrees: tuple[Degree, ...] = DEGREES
    """Supported kinds of parallelism other than data parallelism."""


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
    # NVIDIA/Megatron-LM, megatron/core/distributed/distributed_data_parallel.py: bucket_size. It is
    # not used on pipeline ranks after the first, nor without overlap_grad_reduce.
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
    # huggingface/transformers, src/transformers/trainer.py: the model is trained in the precision
    # in which it was loaded, by DistributedDataParallel or FSDP;
    # models/mistral/modeling_mistral.py: eager norms, rotary embeddings and activation;
    # loss/loss_utils.py: fp32 logits and a shifted copy; torch/optim/adam.py (_multi_tensor_adam):
    # the square roots of all second moments at once. huggingface/peft,
    # src/peft/tuners/tuners_utils.py (cast_adapter_dtype): adapters in fp32.
    # torch/distributed/fsdp/_runtime_utils.py: the root unit stays gathered; with
    # limit_all_gathers, the next layer's weights replace those of the running layer.
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
    # whose root unit contains the embedding and output layer.
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
    # all-reduce with rank None; broadcast_params; step: fp32 gradients are created for the shard),
    # fsdp_optimizer.py (zero_stage 3: torch's FSDP over bf16 parameters with an fp32 copy);
    # train/training_internlm.py: torch.optim.AdamW, which copies the root and the quotient;
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
"""Frameworks that run the code of another framework. The constants of torch-fsdp come from
llm-foundry's runs.
"""
FACTS_BY_FRAMEWORK |= {name: FACTS_BY_FRAMEWORK[other] for name, other in SAME_CODE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A framework without its own constants. It uses the constants of another framework and has its
    own limits.
    """

    constants: str
    degrees: tuple[Degree, ...] = ()
    """Supported kinds of parallelism, as in FrameworkFacts."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    wraps: str | None = None
    """Framework whose code trains the model and whose features are all supported; None: the
    framework's own code.
    """


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
    # Forks of Megatron-LM with DeepSpeed's engine and pipeline; neither has interleaved chunks.
    "gpt-neox": StandIn(constants="megatron-core", degrees=_FORK_DEGREES),
    "megatron-deepspeed": StandIn(constants="megatron-core", degrees=_FORK_DEGREES),
}
"""Frameworks that are predicted with the constants of another framework. Answers state this, and
their intervals are wider.
"""
FRAMEWORKS = (*FACTS_BY_FRAMEWORK, *STAND_INS)
"""Every framework that a query may name."""


def calls_flash_attention(framework: str) -> bool:
    """Return whether the framework uses FlashAttention 2, directly or through torch, on dies where
    it was timed.
    """
    if framework in STAND_INS:
        return STAND_INS[framework].wraps is None
    return framework in FACTS_BY_FRAMEWORK and FACTS_BY_FRAMEWORK[framework].eager_kernels


def loops_experts(workload: TrainingWorkload) -> bool:
    """Return whether routed experts run one after another as separate modules."""
    if workload.expert_kernel is not None:
        return workload.expert_kernel == "loop"
    return framework_facts(workload.framework).loops_experts


def fuses_kernels(workload: TrainingWorkload) -> bool:
    """Return whether elementwise operations are fused, as set by the query or by default."""
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
    """Return the framework's facts. A stand-in has those of its substitute, within its own limits.
    An unknown framework has Megatron Core's.
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
