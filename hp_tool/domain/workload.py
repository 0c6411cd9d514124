"""What work is asked for: a training run's or a serving load's figures, independent of how it is parallelised."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hp_tool.domain.hardware import Precision
from hp_tool.domain.reliability import ReliabilitySpec

StatePrecision = Literal["fp32", "bf16", "fp16", "fp8"]
AttentionKind = Literal["flash", "unfused"]
FrozenPart = Literal["embedding", "output_layer"]
Optimizer = Literal["adam", "sgd", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters on frozen weights: nothing else is trained."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    rank: int
    """Inner width (r)."""
    target_modules: tuple[str, ...] | None = None
    """Matrices that get one, in Megatron Core's names (linear_qkv, linear_proj, linear_fc1, linear_fc2, of latent attention
    linear_q_down_proj and so on) or Hugging Face's (q_proj, gate_proj, ...), which name parts of the fused ones; None:
    linear_qkv, linear_proj, linear_fc1, linear_fc2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSpec:
    """Communication that runs beside compute, switch by switch; None: as in the runs the framework's constants come from."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    tensor_parallel: bool | None = None
    """Forward collectives pipelined with their matmuls (Megatron's tp-comm-overlap), backward ones behind weight gradients."""
    context_parallel: bool | None = None
    """The ring's keys and values behind the attention of the step before."""
    expert_parallel: bool | None = None
    """The experts' all-to-alls of one micro-batch behind the opposite pass of another (overlap-moe-expert-parallel-comm):
    a bound, never fitted; needs experts on several ranks and, with a pipeline, interleaving."""
    pipeline_parallel: bool | None = None
    """Stage-to-stage transfers behind other micro-batches (overlap-p2p-communication)."""
    data_parallel: bool | None = None
    """Gradient reduction and weight gathering (overlap-grad-reduce, overlap-param-gather)."""


@dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """One training run's batch, precision and software."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    sequence_length: int
    """Tokens a sequence (s)."""
    decoder_sequence_length: int | None = None
    """Encoder-decoder models: tokens a row of the decoder, sequence_length being the encoder's; None: as many."""
    sequence_lengths: str | None = None
    """A named distribution of lengths, instead of all equal; from the command line and Python also a file."""
    global_batch_size: int
    """Sequences per optimizer step (B)."""
    precision: Precision = "bf16"
    """Matmul inputs; MFU divides by the dense peak of this precision."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] | None = None
    """How precision fp8 is scaled (Megatron's fp8-recipe): by earlier steps' magnitudes, by each tensor's own, or by blocks of
    128; None: delayed. mxfp8 and nvfp4 are precisions of their own."""
    parameter_precision: StatePrecision | None = None
    """Stored parameters; None: 16 bit (32 bit where precision is fp32). fp8: the layers' weight matrices as quantised for the
    matmuls, by rows and by columns, and 8 bits on the wire (Megatron's fp8-param-gather); the rest in 16 bits."""
    gradient_precision: StatePrecision | None = None
    """Accumulated gradients; None: fp32."""
    optimizer_precision: StatePrecision | None = None
    """The optimizer's states; None: fp32."""
    exp_avg_sq_precision: StatePrecision | None = None
    """Adam's second state, where it differs from the first; None: optimizer_precision."""
    master_precision: Literal["fp32", "fp16", "remainder", "none"] | None = None
    """Master copy of parameters narrower than fp32; None: fp32. remainder: only the 16 bits that bf16 parameters lack, as
    Megatron's precision-aware optimizer stores it (store_param_remainders)."""
    framework: str = "megatron-core"
    """Whose memory behaviour and efficiency profile: megatron-core, torch-fsdp, nanotron."""
    framework_version: str | None = None
    """Release, where it matters."""
    task: Literal["pretrain", "sft", "lora"] = "pretrain"
    """sft costs what pretraining does: a loss on the answers alone runs the same passes over the same rows."""
    lora: LoraSpec | None = None
    frozen: tuple[FrozenPart, ...] = ()
    """Parts that are not trained: no gradient, no optimizer state, no weight-gradient matmul. Tied ones freeze together."""
    packed: bool = False
    """Short sequences share a row."""
    attention: AttentionKind = "flash"
    """flash keeps no s^2 term; unfused stores softmax and dropout as arXiv 2205.05198 does."""
    dropout: float = 0.0
    """Probability; above zero the masks are stored, one byte an element."""
    optimizer: Optimizer = "adam"
    """adam; sgd with momentum; muon for the layers' weight matrices and Adam for the rest."""
    offload: Literal["none", "optimizer", "activations"] | None = None
    """What lives in host memory: the optimizer's states and master copy, which the host then updates, or saved activations."""
    offload_fraction: float = 1.0
    """Share of the parameters, or of the layers, that is offloaded."""
    cross_entropy: Literal["fused", "unfused"] = "unfused"
    """fused passes over the logits less often; Megatron Core's keeps their fp32 copy all the same."""
    attention_mask_flops: Literal["full", "causal"] = "full"
    """Convention of reported model FLOPs: full attention (72BLsh^2(1+s/6h+V/12hL)), or its causal half."""
    expert_imbalance: float = 1.0
    """MoE: load of the busiest expert-parallel rank over the mean; routers trained with a balancing loss stay near 1."""
    expert_capacity_factor: float | None = None
    """MoE: tokens above this multiple of the mean load are dropped; None: dropless."""
    overlap: OverlapSpec | None = None
    """Which communication is hidden, where that is known; None: as the framework's measured runs hid it."""
    cuda_graphs: bool = False
    """Kernels are launched as recorded CUDA graphs: devices never wait for their host."""
    total_tokens: float | None = None
    """Length of the whole training; adds days, GPU-hours, cost."""
    reliability: ReliabilitySpec | None = None
    """Failures: adds goodput and effective_days, and max_days and max_cost then count the calendar's time. {}: as published."""

    @cached_property
    def activation_element_bytes(self) -> float:
        """Bytes of one activation element: 2, or 4 if precision is fp32."""
        return 4.0 if self.precision == "fp32" else 2.0

    @cached_property
    def freezes_embedding(self) -> bool:
        """Whether the embedding is not trained: frozen by name, or with all other weights under adapters."""
        return self.lora is not None or "embedding" in self.frozen

    @cached_property
    def freezes_output_layer(self) -> bool:
        """The same for the output layer."""
        return self.lora is not None or "output_layer" in self.frozen

    @cached_property
    def tokens_per_row(self) -> float:
        """Tokens in one of the batch's global_batch_size rows that are no padding; of both sides where there are two."""
        return float(self.sequence_length + (self.decoder_sequence_length or 0))

    @cached_property
    def attended_length(self) -> float:
        """Tokens of the sequence that a token belongs to, mean over tokens: model FLOPs of attention grow with it."""
        return float(self.sequence_length)

    @cached_property
    def computed_attention_length(self) -> float:
        """Scores that fused attention computes for each place of a row, before the causal half."""
        return float(self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class VariableLengthWorkload(TrainingWorkload):
    """A workload whose sequence_lengths were looked up; rows hold one sequence and padding, or are packed."""

    row_tokens: float
    """Tokens of a row that are no padding, mean over rows."""
    row_squares: float
    """Sum of l^2 over the sequences of a row, mean over rows."""

    @cached_property
    def tokens_per_row(self) -> float:
        return self.row_tokens

    @cached_property
    def attended_length(self) -> float:
        return self.row_squares / self.row_tokens

    @cached_property
    def computed_attention_length(self) -> float:
        # Padding is computed like anything else; packed sequences attend to themselves alone.
        return self.row_squares / self.sequence_length if self.packed else float(self.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """How requests arrive."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    arrival: Literal["closed", "burst", "poisson"] = "closed"
    num_prompts: int | None = None
    warmup: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSpec:
    """Speculative decoding: tokens are drafted, and verified together in one pass of the model (arXiv 2211.17192)."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    num_speculative_tokens: int
    """Tokens drafted for each pass (k)."""
    acceptance_rate: float
    """Chance that a drafted token is accepted, given that those before it were (a)."""
    draft_cost_fraction: float = 0.0
    """Seconds of one draft token by those of a decoding pass of the model (c): 0 for n-grams, about the ratio of the weights
    read for a draft model or multi-token prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationSpec:
    """Pools of their own for prefill and for decoding; what is left out is chosen. With two kinds of GPU (cluster.stages) the
    first prefills."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    prefill_tensor_parallel_size: int | tuple[int, ...] | None = None
    """Devices of a replica that prefills; a value or a list."""
    decode_tensor_parallel_size: int | tuple[int, ...] | None = None
    """Devices of a replica that decodes; a value or a list."""
    prefill_replicas: int | None = None
    decode_replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceWorkload:
    """A serving load."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    input_length: int
    output_length: int
    concurrency: int | None = None
    """Requests in flight over all GPUs."""
    request_rate_per_second: float | None = None
    precision: Precision | Literal["int8", "int4"] = "bf16"
    kv_cache_precision: Precision | None = None
    """None: the engine's choice for a checkpoint of this precision."""
    prefix_cache_hit_rate: float = 0.0
    """Share of prompt tokens found in the engine's prefix cache: not computed again. Each request still holds its own copy."""
    speculative: SpeculativeSpec | None = None
    disaggregated: DisaggregationSpec | None = None
    """recommend only: {} also answers with pools of their own for prefill and decoding, ranked beside the shared replicas."""
    engine: str = "vllm"
    engine_version: str | None = None
    load: LoadSpec | None = None
