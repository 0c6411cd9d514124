"""Efficiency constants of GPUs and frameworks: the speed of real software relative to the
datasheet.

The values are in the catalogue's data files.
"""

import math
from dataclasses import dataclass, field

from hp_tool.domain.familiarity import NO_RUNS, Index
from hp_tool.domain.fields import Strict
from hp_tool.domain.hardware import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(Strict):
    """t = overhead_s + max(FLOPs / (peak_fraction x peak), bytes / (bandwidth_fraction x
    bandwidth)).
    """

    peak_fraction: float
    """Fraction of the datasheet's dense FLOP/s that large shapes reach."""
    bandwidth_fraction: float
    """Fraction of the datasheet's memory bandwidth that memory-bound shapes reach."""
    overhead_s: float
    """Fixed seconds per call on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinRoofline(Roofline):
    """Roofline of a matmul y[m, n] = x[m, k] w[n, k]^T for any number of rows m: t = overhead_s +
    depth_s k + (A^p + B^p)^(1/p).

    A is the Roofline time of the arithmetic, B that of the memory traffic. A larger p approximates
    the maximum more sharply. For precisions below 16 bits, a separate kernel first quantizes x: t =
    cast_s + cast_passes x (bytes read in 16 bits and written in the narrow format) / memory
    bandwidth.
    """

    depth_s: float = 0.0
    """Seconds per element of the inner dimension k, which each tile processes in steps."""
    sharpness: float = 20.0
    cast_s: float = 0.0
    cast_passes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRoofline(Roofline):
    """Roofline of all routed experts of one layer, including permutation and activation: t =
    overhead_s + (A^p + B^p)^(1/p).

    A is the time of the arithmetic for the token copies plus `tile_rows` extra rows per active
    expert. B is the time to read the weights of the active experts. p is the sharpness.
    """

    tile_rows: float = 16.0
    """Average number of rows added to each expert's batch by rounding up to whole tiles."""
    sharpness: float = 2.0
    arithmetic: Precision | None = None
    """Precision of the kernel's arithmetic; None: that of the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel(GroupedRoofline):
    """Routed-expert kernels for one weight format, engine release and die."""

    few: GroupedRoofline | None = None
    """Kernel for passes with at most `few_tokens` tokens; None: one kernel for all sizes."""
    few_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerRoofline(Roofline):
    """A kernel of a recurrent mixer or of sparse attention.

    For P prompts with n tokens in total, of which the longest has N tokens: t = overhead_s +
    token_s n + ((w n)^p + (w prompt_rows P)^p + (step_s N)^p)^(1/p), where w is the Roofline time
    of one token and p the sharpness. Other kernels use only the Roofline.
    """

    token_s: float = 0.0
    """Seconds per token, independent of the layer's width."""
    step_s: float = 0.0
    """Seconds per token of a single prompt. The chunks of a prompt run in sequence and cannot fill
    the device.
    """
    prompt_rows: float = 0.0
    """Extra time per prompt, in tokens, for reading and writing its state and padding its last
    chunk.
    """
    sharpness: float = 1.0
    log_sd: float = 0.0
    """Standard deviation of log(measured / predicted) on held-out cards, scaled so that 90% of
    their rows lie within the 90% interval of a normal distribution.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Strict):
    """t = latency_s + latency_per_peer_s (n-1) + (W + sqrt(W ramp_bytes)) / (bandwidth_fraction x
    link bandwidth).

    W is the number of bytes on the wire. The square root models the slow rise to full bandwidth
    that NCCL shows between 1 MB and 1 GB.
    """

    bandwidth_fraction: float
    latency_s: float
    latency_per_peer_s: float
    ramp_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency(Strict):
    """Efficiency of kernels and collectives on one GPU, measured in isolation."""

    gpu: str
    """Catalogue name of the GPU that was measured."""
    matmul: dict[Precision, Roofline]
    """Matmul rooflines by input precision. A missing precision uses the bf16 roofline, scaled by
    the datasheet's ratio.
    """
    attention: Roofline
    """Forward pass of fused attention. The times of arithmetic and memory traffic are added, not
    overlapped.
    """
    attention_kernels: dict[str, float] = field(default_factory=dict)
    """Time of each fused attention kernel relative to the kernel timed in `attention`, by name."""
    memory_fraction: float
    """Fraction of memory bandwidth that elementwise kernels reach."""
    kernel_overhead_s: float
    """Fixed seconds per elementwise kernel."""
    context_bytes: float
    """Device memory used outside the framework's allocator: driver context, NCCL, library
    workspaces.
    """
    nvlink: Link
    """Ring collectives inside an NVLink (or PCIe) domain."""
    all_to_all: Link
    fitted_on: str
    """Rows and command that produced these constants."""
    thin_matmul: dict[Precision, ThinRoofline] | None = None
    """Serving: matmuls for any number of rows, from one token; None: use `matmul`."""
    grouped_matmul: dict[str, dict[str, dict[str, ExpertKernel]]] | None = None
    """Serving: routed experts by engine, timed release and weight format; None: use `thin_matmul`
    with typical launch times.
    """
    mixers: dict[str, dict[str, MixerRoofline]] | None = None
    """Serving: recurrent mixers and sparse attention (`sparse`), by kernel; None: not timed on this
    die or a similar one.
    """
    decode_attention: Roofline | None = None
    """Serving: attention of one new token per sequence over the KV cache; None: use `attention`."""
    small_all_reduce: Link | None = None
    """Serving: single-kernel all-reduce for up to a few MiB, which engines use instead of a ring;
    None: use the ring.
    """
    measured: bool = True
    """Whether this GPU was measured. False: the constants come from another GPU, and intervals are
    wider.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks(Strict):
    """Clocks that long training runs sustain under a card's power limit, relative to the boost
    clocks of isolated kernels.
    """

    gpu: str | None = None
    """Card whose power limit applied during the measurements; None: typical values for any card."""
    share: dict[Precision, float]
    """Sustained matmul throughput divided by throughput at boost clocks, by input precision."""
    fitted_on: dict[str, str]
    """Rows and command that produced each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkEfficiency(Strict):
    """Effects of a training framework relative to the sum of isolated kernels."""

    framework: str
    stands_for: str | None = None
    """Framework without its own constants that uses those of `framework`; None if `framework`
    itself is meant.
    """
    matmul_slowdown: float = 1.0
    """Time of the framework's matmuls relative to isolated ones at the same clocks; above 1 for
    slower kernels.
    """
    fp32_accumulation: dict[str, float] = field(default_factory=dict)
    """Time of a 16-bit weight-gradient matmul that accumulates into an fp32 buffer, relative to one
    that writes 16 bits, by die; 1 for other dies.
    """
    elementwise_traffic_factor: float
    """Bytes moved by elementwise kernels, relative to the minimum of a fused implementation."""
    narrow_traffic_factor: float | None = None
    """`elementwise_traffic_factor` for matmuls below 16 bits, where Transformer Engine's fused
    modules replace the framework's own; None: the same factor.
    """
    attention_kernel: str | None = None
    """Fused attention kernel of the measured runs; None: unknown, or a kernel that queries cannot
    name.
    """
    attention_slowdown: float = 1.0
    """Time of fused attention relative to the timed kernel (FlashAttention 2 or later), in both
    passes.
    """
    attention_kernels: dict[str, float] = field(default_factory=dict)
    """`attention_slowdown` by name, for other kernels that were timed in the framework's runs."""
    attention_backward_slowdown: float
    """Fused attention: seconds per FLOP in the backward pass relative to the forward pass."""
    tensor_parallel_overlap: float
    """Fraction of backward collectives that is overlapped, of those that a matmul can hide."""
    tensor_parallel_forward_overlap: float
    """Fraction of forward collectives that is overlapped, of those that a matmul can hide. It is
    above 0 if collectives are split and pipelined with their matmuls, as inside an NVLink domain.
    """
    context_parallel_overlap: float
    """Fraction of the ring exchange of keys and values that is hidden if attention takes long
    enough.
    """
    expert_parallel_overlap: float
    """Fraction of the expert all-to-alls that is hidden by the experts' matmuls."""
    expert_overhead_s: float = 0.0
    """Host seconds per MoE layer, both passes, to dispatch tokens, in addition to kernels and
    links. The host reads the number of tokens per expert before it launches the expert kernels.
    """
    expert_launch_s: float = 0.0
    """Seconds to launch one kernel of a single expert (`cost.moe.kernels_of_expert`), for grouped
    layers that loop over the experts of a rank.
    """
    state_scan_flops_per_second: float | None = None
    """FLOP/s of the forward state-space scan in training (Mamba 2), with FLOPs counted by
    `cost.scans.scan_work`. The Triton kernels gain little from a faster die. None: use the kernels
    timed on the die.
    """
    dispatch_bandwidth_fraction: float | None = None
    """Fraction of NVLink bandwidth that the flex dispatcher's kernels (DeepEP, HybridEP) reach;
    None: as NCCL's all-to-all.
    """
    data_parallel_overlap: float
    """Fraction of gradient reduction and parameter gathering that is hidden by the backward and
    forward passes.
    """
    pipeline_overlap: float
    """Fraction of pipeline stage-to-stage transfers that is hidden."""
    network: Link
    """Ring collectives across nodes, per device and network port."""
    optimizer_traffic_factor: float
    """Bytes moved by the optimizer step, relative to one read and one write of each state."""
    step_overhead_s: float
    """Seconds of host work per step: data loading, logging, synchronisation."""
    time_log_sd: float
    """Standard deviation of log(measured / predicted step time) on held-out dense models, on GPUs
    included in the fit.
    """
    expert_time_log_sd: float | None = None
    """Additional standard deviation for MoE models, added in variance; None: no MoE model was
    measured.
    """
    earlier_expert_time_log_sd: float | None = None
    """Further standard deviation for MoE models with an unnamed release or one before the current
    dispatcher. Such runs took up to twice as long for the same step.
    """
    pair_log_sd: float | None = None
    """Standard deviation of the log ratio of two configurations' step times, for one model on the
    same devices. Errors that both share (model, kernels, devices) cancel. Excludes stalls. None: no
    pairs were measured, so the two are treated as independent.
    """
    expert_pair_log_sd: float | None = None
    """`pair_log_sd` of MoE models; None: as for dense models."""
    tuning_log_sd: float = 0.0
    """Additional standard deviation for fine-tuning, added to `time_log_sd` in variance, because no
    measured run of the framework was a fine-tuning run.
    """
    tuning_memory_log_sd: float = 0.0
    """As `tuning_log_sd`, added to `memory_log_sd`."""
    newest_release: str | None = None
    """Newest release among the measured runs, as year and month of its NeMo container."""
    yearly_gain: float = 0.0
    """Decrease of log(step time) per year of release date. The constants apply to the newest
    release.
    """
    memory_log_sd: float
    """Standard deviation of log(measured / predicted) of allocated memory."""
    reserved_log_sd: float | None = None
    """Standard deviation of the log of reserved memory above the prediction, where reserved memory
    exceeds allocated memory; None: as memory_log_sd.
    """
    fragmentation_fraction: float
    """Reserved memory / allocated memory - 1."""
    fitted_on: str
    host_launch_s: float = 0.0
    """Host seconds to launch one kernel from the framework's code. They limit the step only if the
    device is faster.
    """
    host_tensor_stall_s: float = 0.0
    """Host seconds added to each layer's launches, per rank of a tensor-parallel group that spans
    nodes. Every collective waits for the slowest rank.
    """
    host_pipeline_stall_s: float = 0.0
    """Host seconds added per tensor-parallel rank if pipeline stages are on different nodes."""
    device_log_sd: float = 0.0
    """Standard deviation of the log of device speeds within a job. Each step waits for the slowest
    device (`cost.stragglers`).
    """
    micro_batch_log_sd: float = 0.0
    """Standard deviation of the log of a single device's time per micro-batch."""
    message_stall_s: float = 0.0
    """Seconds of delay of a blocking message between pipeline stages, in jobs of more than
    `message_stall_nodes` nodes.
    """
    message_stall_nodes: int = 0
    retry_bytes_per_second: float | None = None
    """Rate in bytes per second at which the allocator of a nearly full device frees a pipeline's
    activations and allocates them again; None: no measured run was slowed by this.
    """
    temporaries_fraction: float = 0.0
    """Memory of unfused kernels' temporaries and of gaps between the allocator's blocks, relative
    to saved activations and logits.
    """
    workspace_bytes: float = 0.0
    """Bytes that libraries allocate through the framework's allocator."""
    queued_inputs: float = 0.0
    """Number of gathered tensor-parallel inputs that were freed but still wait for the
    communication stream: as many as the host queues ahead of the device. With pipeline messages the
    host waits, so nothing is queued.
    """
    broadcast_ramp_bytes: float = 0.0
    """`network.ramp_bytes` for broadcasts of a rank's weights, in frameworks that broadcast instead
    of all-gather.
    """
    all_reduce_overlap: float | None = None
    """`data_parallel_overlap` for ZeRO 0 without a pipeline, where gradients are all-reduced in
    buckets during the backward pass and no parameters are gathered; None: the same as
    `data_parallel_overlap`.
    """
    untimed_expert_log_sd: float = 0.0
    """Standard deviation added by an expert kernel that no run timed: a longer loop, or grouped
    matmuls in a trainer whose timed runs loop.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts(Strict):
    """Standard deviations of log(measured / predicted), added in variance to a framework's own: one
    for each way in which a query differs from all measured runs.
    """

    trainer_log_sd: float = 0.0
    """Added if the framework has no measured runs."""
    card_log_sd: float = 0.0
    """Added if no run of the framework used this card."""
    silicon_log_sd: float = 0.0
    """Added to `card_log_sd` if no run of the framework used this die."""
    family_log_sd: float = 0.0
    """Added if no run trained a model of this family."""
    model_kind_log_sd: float = 0.0
    """Added if no run trained this kind of model (`familiarity.kind_of_model`)."""
    precision_log_sd: float = 0.0
    """Added if no run used this precision."""
    scale_log_sd: float = 0.0
    """Added if the query has more GPUs than any run."""
    kernels_log_sd: float = 0.0
    """Added if no kernels were timed on the die."""
    lora_log_sd: float = 0.0
    """Added for LoRA adapters, which no fitted run used."""
    lora_pair_log_sd: float = 0.0
    """`lora_log_sd` for the ratio of two configurations' step times (`pair_log_sd`)."""
    release_log_sd: float = 0.0
    """Added if the release is newer than that of any run."""
    unsaid_release_log_sd: float = 0.0
    """Added for dense models if the query names no release. For MoE models,
    `earlier_expert_time_log_sd` is added instead.
    """
    feature_log_sd: float = 0.0
    """Added for each feature without a measured step time."""
    memory_feature_log_sd: float = 0.0
    """As `feature_log_sd`, but for allocated memory; also added for adapters."""
    serving: dict[str, dict[str, float]] = field(default_factory=dict)
    """Serving: additional standard deviation by figure (ttft, tpot, throughput) and dimension."""
    fitted_on: dict[str, str] = field(default_factory=dict)
    """Rows and command that produced each value."""

    @property
    def extras(self) -> dict[str, float]:
        """Return the additional standard deviation by dimension in which a training run differs
        from the measured runs.
        """
        return {
            "trainer": self.trainer_log_sd,
            "die": math.hypot(self.card_log_sd, self.silicon_log_sd),
            "model_kind": self.model_kind_log_sd,
            "task": self.lora_log_sd,
            "scale": self.scale_log_sd,
            "precision": self.precision_log_sd,
            "family": self.family_log_sd,
            "release": self.release_log_sd,
            "gpu": self.card_log_sd,
        }


NO_DOUBTS = Doubts()


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyProfile:
    """Constants of a die and a framework, as input to the cost model."""

    gpu: GpuEfficiency
    framework: FrameworkEfficiency
    doubts: Doubts = NO_DOUBTS
    index: Index = NO_RUNS
    """Index of measured runs from which the familiarity of a query is determined."""
    release_factor: float = 1.0
    """Step time with the query's release divided by that with the framework's newest release."""
    release_log_sd: float = 0.0
    """Part of the framework's time_log_sd that is due to an unnamed release. It is common to all
    runs on one machine.
    """
