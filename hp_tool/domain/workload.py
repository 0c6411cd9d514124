"""Training section of a query: batch, precision and software. It is independent of the
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, Self

from annotated_types import Interval

from hp_tool.domain.fields import Choice, Count, Fraction, Release, Shown, Strict, choice_fields
from hp_tool.domain.hardware import Precision

StatePrecision = Literal["fp32", "bf16", "fp16", "fp8"]
AttentionKind = Literal["flash", "unfused"]
AttentionKernel = Literal["auto", "fa2", "fa3", "cudnn", "triton"]
FrozenPart = Literal["embedding", "output_layer"]
FrozenPrecision = Literal["bf16", "fp8", "nf4", "int4"]
Optimizer = Literal["adam", "sgd", "muon"]
CrossEntropy = Literal["unfused", "fused", "in_place", "chunked"]
GraphModule = Literal["attn", "mamba", "mlp", "moe_router", "moe_preprocess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec(Strict):
    """LoRA: only low-rank adapters on frozen weights are trained."""

    rank: Annotated[
        Annotated[int, Interval(ge=1, le=65_536)], Shown("LoRA rank", "Fine-tuning", example="16")
    ]
    """Inner width of an adapter (r)."""
    target_modules: tuple[str, ...] | None = None
    """Matrices that get an adapter, in Megatron Core's names (of latent attention
    linear_q_down_proj and so on) or Hugging Face's (q_proj, gate_proj, ...), which name parts of
    the fused ones; None: linear_qkv, linear_proj, linear_fc1, linear_fc2, under torch-fsdp each
    part of them with an adapter of its own.
    """
    dropout: Annotated[Fraction, Shown("LoRA dropout", "Fine-tuning")] = 0.0
    """Dropout probability before an adapter; above zero each adapter saves a dropped copy of its
    input and the mask.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSpec(Strict):
    """Which communication overlaps compute; None: as in the runs that the framework's constants
    were fitted on.
    """

    tensor_parallel: bool | None = None
    """Forward collectives pipelined with their matmuls (Megatron's tp-comm-overlap), backward ones
    behind weight gradients.
    """
    context_parallel: bool | None = None
    """The ring's keys and values are sent during the attention of the step before."""
    expert_parallel: Annotated[
        bool | None, Shown("Tokens travel behind other passes", "Experts", unset="recipe's or no")
    ] = None
    """Overlap the experts' all-to-alls of one micro-batch with the opposite pass of another
    (overlap-moe-expert-parallel-comm); requires experts on several ranks and, with a pipeline,
    interleaving.
    """
    pipeline_parallel: bool | None = None
    """Stage-to-stage transfers behind other micro-batches (overlap-p2p-communication)."""
    data_parallel: bool | None = None
    """Gradient reduction and weight gathering (overlap-grad-reduce, overlap-param-gather)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilitySpec(Strict):
    """How often devices fail, and the time that failures and checkpoints take. Omitted fields have
    published values.
    """

    mtbf_per_gpu_hours: Annotated[float, Interval(ge=1e-3, le=1e12)] | None = None
    """Mean hours between failures of one device that stop the job; None: 50,677, published for
    Llama 3.
    """
    checkpoint_s: Annotated[float, Interval(ge=1e-3, le=1e7)] | None = None
    """Seconds that saving a checkpoint stops training; None: its bytes at the published rate of
    Megatron-LM's nodes.
    """
    checkpoint_interval_s: Annotated[float, Interval(ge=1e-3, le=1e9)] | None = None
    """Seconds of training between two checkpoints; None: the interval that loses least."""
    restart_s: Annotated[float, Interval(ge=0.0, le=1e7)] | None = None
    """Seconds from a failure to training again; None: ten minutes, and the time to load the
    checkpoint.
    """


@dataclass(frozen=True, kw_only=True)
class TrainingWorkload(Strict):
    """One training run's batch, precision and software."""

    sequence_length: Annotated[Count, Shown("Sequence length", "Training", example="8192")]
    """Tokens per sequence (s)."""
    decoder_sequence_length: Count | None = None
    """Encoder-decoder models: tokens per decoder row; None: sequence_length, which is the
    encoder's.
    """
    sequence_lengths: str | None = None
    """Name of a distribution of sequence lengths (command line and Python: or a file); None: all
    are equal.
    """
    global_batch_size: Annotated[
        Choice[Count], Shown("Global batch size", "Training", example="128")
    ]
    """Sequences per optimizer step (B)."""
    precision: Annotated[Choice[Precision], Shown("Precision", "Training")] = "bf16"
    """Precision of matmul inputs; MFU divides by the dense peak of this precision."""
    fp8_recipe: Choice[Literal["delayed", "tensorwise", "blockwise"] | None] = None
    """How precision fp8 is scaled (Megatron's fp8-recipe): by earlier steps' magnitudes, by each
    tensor's own, or by blocks of 128; None: delayed. mxfp8 and nvfp4 are precisions of their own.
    """
    parameter_precision: Annotated[
        Choice[StatePrecision | None],
        Shown("Parameter precision", "Precision and kernels", unset="framework's own"),
    ] = None
    """Precision of stored parameters; None: 16 bits (32 bits if precision is fp32). fp8: layers'
    weight matrices are stored quantised by rows and by columns (once if matmuls accept either) and
    gathered in 8 bits (Megatron's fp8-param-gather); all others in 16 bits.
    """
    gradient_precision: Annotated[
        Choice[StatePrecision | None],
        Shown("Gradient precision", "Precision and kernels", unset="framework's own"),
    ] = None
    """Precision of accumulated gradients; None: fp32."""
    optimizer_precision: Choice[StatePrecision | None] = None
    """Precision of the optimizer's states; None: fp32."""
    exp_avg_sq_precision: Choice[StatePrecision | None] = None
    """Precision of Adam's second moment; None: optimizer_precision."""
    master_precision: Choice[Literal["fp32", "fp16", "remainder", "none"] | None] = None
    """Master copy of parameters narrower than fp32; None: fp32. remainder: only the 16 bits that
    bf16 parameters lack, as Megatron's precision-aware optimizer stores it
    (store_param_remainders).
    """
    framework: Annotated[str, Shown("Framework", "Training", unset="megatron-core")] = (
        "megatron-core"
    )
    """Training framework: megatron-core, torch-fsdp, llm-foundry, nanotron, internevo, hf-trainer
    (Trainer, TRL, Accelerate; zero_stage 3 is FSDP), deepspeed, torchtune, torchtitan, litgpt or
    nemo-automodel; or one that the constants of another stand in for: llama-factory, axolotl,
    colossalai, ms-swift (its Megatron-SWIFT), openrlhf, verl (verl-fsdp under FSDP), gpt-neox,
    megatron-deepspeed.
    """
    framework_version: Annotated[
        Release | None, Shown("Framework version", "Precision and kernels", unset="any")
    ] = None
    """Release of the framework, as text: 26.10 without quotes would be read as 26.1."""
    recipe: Annotated[str | None, Shown("Recipe", "Training", unset="none")] = None
    """Named set of settings (`hp-tool recipes`) that apply unless the query sets them."""
    task: Annotated[Literal["pretrain", "sft", "lora"], Shown("Task", "Fine-tuning")] = "pretrain"
    """pretrain, sft or lora. sft costs as much as pretrain, because a loss on the answers alone
    runs the same passes over the same rows.
    """
    lora: LoraSpec | None = None
    """Adapters of task lora."""
    frozen_precision: Annotated[
        FrozenPrecision | None, Shown("Frozen weights", "Fine-tuning", unset="as all parameters")
    ] = None
    """Under lora, precision of the layers' frozen weight matrices; None: parameter_precision's,
    else 16 bits. fp8: stored once; nf4: QLoRA's 4 bits with doubly quantised scales; int4: GPTQ's
    and AWQ's 4 bits with a scale and a zero point per 128 weights. Embedding and output layer are
    unchanged.
    """
    frozen: tuple[FrozenPart, ...] = ()
    """Parts that are not trained: no gradient, optimizer state or weight-gradient matmul. Tied
    parts freeze together.
    """
    packed: bool = False
    """Whether short sequences share a row."""
    activation_func_fp8_input_store: Annotated[
        bool | None,
        Shown("Activation input in fp8", "Precision and kernels", unset="with fp8 frozen weights"),
    ] = None
    """Whether the MLP's activation function saves its input in 8 bits (Megatron Core); None: if
    frozen_precision is fp8, as in NVIDIA's audited LoRA runs.
    """
    gated_product: Annotated[
        Literal["kept", "recomputed"] | None,
        Shown("Gated MLP's product", "Precision and kernels", unset="kept"),
    ] = None
    """Input of a gated MLP's last matmul: saved for the backward pass (None), or recomputed by the
    activation's backward kernel (recomputed; xformers' fused SwiGLU).
    """
    attention: Annotated[AttentionKind, Shown("Attention", "Precision and kernels")] = "flash"
    """flash keeps no s^2 term; unfused stores softmax and dropout as arXiv 2205.05198 does."""
    attention_kernel: Annotated[
        AttentionKernel | None,
        Shown("Attention kernel", "Precision and kernels", unset="recipe's or own"),
    ] = None
    """Fused attention kernel: FlashAttention 2 or 3, cuDNN's, or one in Triton; None, auto: the
    framework's default.
    """
    dropout: Fraction = 0.0
    """Probability of dropout; above zero the masks are stored, one byte per element."""
    optimizer: Optimizer = "adam"
    """adam; sgd with momentum; muon for the layers' weight matrices and Adam for the rest."""
    offload: Literal["none", "optimizer", "activations"] | None = None
    """What is kept in host memory: the optimizer's states and master copy, which the host updates,
    or saved activations.
    """
    offload_fraction: Annotated[float, Interval(ge=1e-3, le=1.0)] | None = None
    """Fraction of the parameters, or of the layers, that is offloaded; None: all."""
    cross_entropy: Annotated[
        CrossEntropy | None,
        Shown("Cross-entropy loss", "Precision and kernels", unset="recipe's or unfused"),
    ] = None
    """Loss kernel; None: unfused. fused reads the logits fewer times, but Megatron Core's still
    stores an fp32 copy. in_place writes the gradient over the 16-bit logits (Transformer Engine).
    chunked computes 256 tokens at a time and recomputes them in the backward pass (TRL).
    """
    attention_mask_flops: Literal["full", "causal"] = "full"
    """How reported model FLOPs count attention: in full (72BLsh^2(1+s/6h+V/12hL)), or the causal
    half.
    """
    expert_precision: Annotated[
        Choice[Precision | None], Shown("Experts' matmuls", "Experts", unset="as all matmuls")
    ] = None
    """MoE: precision of the routed experts' matmul inputs; None: as `precision`."""
    expert_kernel: Annotated[
        Literal["loop", "grouped"] | None, Shown("Experts run", "Experts", unset="framework's own")
    ] = None
    """MoE: routed experts run one after the other (loop: transformers before 5) or in grouped
    matmuls (grouped: transformers from 5, ScatterMoE). None: the framework's default; hf-trainer
    and deepspeed loop.
    """
    dispatch_precision: Annotated[
        Choice[Literal["bf16", "fp8"] | None],
        Shown("Tokens sent to experts", "Experts", unset="16 bits"),
    ] = None
    """MoE: precision in which tokens, and in the backward pass the gradients of the experts'
    outputs, are sent to the experts; what experts return is sent in 16 bits. None: 16 bits.
    """
    expert_imbalance: Annotated[
        Annotated[float, Interval(ge=1.0, le=1e6)], Shown("Expert imbalance", "Experts")
    ] = 1.0
    """MoE: load of the busiest expert-parallel rank divided by the mean; near 1 with a balancing
    loss.
    """
    expert_capacity_factor: Annotated[
        Choice[Annotated[float, Interval(ge=1e-3, le=1e6)] | None],
        Shown("Expert capacity", "Experts", unset="no token is dropped"),
    ] = None
    """MoE: tokens above this multiple of the mean load are dropped; None: dropless."""
    overlap: OverlapSpec | None = None
    """Which communication overlaps compute; None: as in the framework's measured runs."""
    gradient_reduction: Annotated[
        Literal["micro_batch", "run"] | None,
        Shown("ZeRO 2 reduces after each", "Precision and kernels", unset="micro_batch"),
    ] = None
    """ZeRO 2 in an interleaved pipeline: reduce gradients in every backward pass (None; Megatron
    FSDP), or after the p consecutive micro-batches of a model chunk, as in the training of Llama 3.
    """
    cuda_graphs: Annotated[
        bool | None, Shown("CUDA graphs", "Precision and kernels", unset="recipe's or no")
    ] = None
    """Launch kernels as CUDA graphs, so that devices never wait for their host; None: false."""
    cuda_graph_modules: tuple[GraphModule, ...] | None = None
    """Parts of a layer that are recorded as graphs, in Megatron Core's names; what works on the
    experts' tokens is launched as without graphs then. None: with cuda_graphs the whole iteration;
    before framework_version 26.06 (NeMo) or 0.18 (Megatron Core) all but that.
    """
    kernel_fusion: Annotated[
        bool | None, Shown("Fused kernels", "Precision and kernels", unset="framework's own")
    ] = None
    """Whether a norm, rotary embeddings, the activation function, the softmax of unfused attention,
    and bias, dropout and residual addition are one kernel each. False: each operation reads and
    writes memory, as in eager PyTorch. None: the framework's default (false for PyTorch trainers
    without torch.compile or Liger kernels).
    """
    total_tokens: Annotated[
        Annotated[float, Interval(ge=1.0, le=1e18)] | None,
        Shown("Total tokens", "Training", example="15e12"),
    ] = None
    """Tokens of the whole training; adds days, GPU-hours and cost to the answer."""
    reliability: ReliabilitySpec | None = None
    """Failures and checkpoints: adds goodput and effective_days, counted by max_days and max_cost.
    {}: published rates.
    """

    @property
    def choices(self) -> dict[str, tuple[object, ...]]:
        """Keys for which the query lists values from which a ranking chooses."""
        several = {name: getattr(self, name) for name in choice_fields(TrainingWorkload)}
        return {name: values for name, values in several.items() if isinstance(values, tuple)}

    def with_open_knobs(self) -> Self:
        """Return the workload with `cross_entropy: unfused` and `cuda_graphs: false` replaced by
        None, which does not change the training.
        """
        if self.cross_entropy != "unfused" and self.cuda_graphs is not False:
            return self
        loss = None if self.cross_entropy == "unfused" else self.cross_entropy
        return replace(self, cross_entropy=loss, cuda_graphs=self.cuda_graphs or None)

    @cached_property
    def loss(self) -> CrossEntropy:
        """Loss kernel. It determines how much of the logits is in memory at once."""
        return self.cross_entropy or "unfused"

    @property
    def offloaded_share(self) -> float:
        """Fraction of the states or activations that is offloaded."""
        return self.offload_fraction or 1.0

    @cached_property
    def activation_element_bytes(self) -> float:
        """Bytes of one activation element: 2, or 4 if precision is fp32."""
        return 4.0 if self.precision == "fp32" else 2.0

    @cached_property
    def of_experts(self) -> TrainingWorkload:
        """Return the workload with the precision of the routed experts."""
        return (
            self
            if self.expert_precision is None
            else replace(self, precision=self.expert_precision, expert_precision=None)
        )

    @property
    def records_layers(self) -> bool:
        """Whether CUDA graphs capture attention, and therefore keep a layer's input and output."""
        modules = self.cuda_graph_modules
        return bool(self.cuda_graphs) and (modules is None or "attn" in modules)

    @property
    def narrow_optimizer(self) -> bool:
        """Whether any of Adam's states has fewer than 32 bits."""
        return any(
            each not in (None, "fp32")
            for each in (self.optimizer_precision, self.exp_avg_sq_precision)
        )

    @property
    def merges_passes(self) -> bool:
        """Whether the experts' all-to-alls overlap the opposite pass of another micro-batch
        (overlap.expert_parallel).
        """
        return self.overlap is not None and bool(self.overlap.expert_parallel)

    @cached_property
    def activation_input_bytes(self) -> float:
        """Bytes per element that the MLP's activation function saves."""
        store = self.activation_func_fp8_input_store
        return (
            1.0
            if (self.frozen_precision == "fp8" if store is None else store)
            else self.activation_element_bytes
        )

    @cached_property
    def freezes_embedding(self) -> bool:
        """Whether the embedding is frozen, by name or because only adapters are trained."""
        return self.lora is not None or "embedding" in self.frozen

    @property
    def has_transformer_engine(self) -> bool:
        """Whether layers are Transformer Engine modules. Unfused attention implies Megatron Core's
        local modules instead.
        """
        return self.attention == "flash"

    @cached_property
    def freezes_output_layer(self) -> bool:
        """Whether the output layer is frozen, by name or because only adapters are trained."""
        return self.lora is not None or "output_layer" in self.frozen

    @cached_property
    def tokens_per_row(self) -> float:
        """Tokens per batch row, without padding; for an encoder-decoder model, the sum of both
        sides. A batch has global_batch_size rows.
        """
        return float(self.sequence_length + (self.decoder_sequence_length or 0))

    @cached_property
    def attended_length(self) -> float:
        """Mean sequence length over all tokens, to which the model FLOPs of attention are
        proportional.
        """
        return float(self.sequence_length)

    @cached_property
    def computed_attention_length(self) -> float:
        """Attention scores that fused attention computes per position of a row, before halving for
        causal attention.
        """
        return float(self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class VariableLengthWorkload(TrainingWorkload):
    """A workload with resolved sequence_lengths. Each row has one padded sequence or several packed
    ones.
    """

    row_tokens: float
    """Tokens of a row without padding, averaged over rows."""
    row_squares: float
    """Sum of l^2 over the sequences of a row, averaged over rows."""

    @cached_property
    def tokens_per_row(self) -> float:
        return self.row_tokens

    @cached_property
    def attended_length(self) -> float:
        return self.row_squares / self.row_tokens

    @cached_property
    def computed_attention_length(self) -> float:
        # Padding is computed like other tokens; tokens of packed sequences attend only to their
        # sequence.
        return (
            self.row_squares / self.sequence_length if self.packed else float(self.sequence_length)
        )
