"""How far real software stays below a datasheet: few constants per GPU and framework, read from the
catalogue's data files.
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
    """Share of the datasheet's dense FLOP/s that large shapes reach."""
    bandwidth_fraction: float
    """Share of the datasheet's memory bandwidth that memory-bound shapes reach."""
    overhead_s: float
    """One call's fixed cost on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinRoofline(Roofline):
    """A matmul y[m, n] = x[m, k] w[n, k]^T of any number of rows: t = overhead_s + depth_s k + (A^p
    + B^p)^(1/p).

    A and B are a Roofline's times of arithmetic and memory, and p how sharply the longer one
    decides. Below 16 bits a kernel before it quantises x: t = cast_s + cast_passes x (its bytes
    read wide and written narrow) / memory bandwidth.
    """

    depth_s: float = 0.0
    """Seconds per element of the inner dimension, which each tile processes in steps."""
    sharpness: float = 20.0
    cast_s: float = 0.0
    cast_passes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRoofline(Roofline):
    """All routed experts of one layer with what an engine puts around them, permutation and
    activation: t = overhead_s + (A^p + B^p)^(1/p), A the arithmetic of the copies and of
    `tile_rows` more for each expert hit, B its weights' bytes, p the sharpness.
    """

    tile_rows: float = 16.0
    """Rows that an expert's tiles are rounded up by, on average."""
    sharpness: float = 2.0
    arithmetic: Precision | None = None
    """Precision of the kernel's arithmetic; None: the case's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel(GroupedRoofline):
    """Kernels for routed experts of one weight format, of one engine release on one die."""

    few: GroupedRoofline | None = None
    """The kernel for passes of at most `few_tokens` tokens; None: the same for all."""
    few_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerRoofline(Roofline):
    """A kernel of a recurrent mixer or of sparse attention. Over prompts of n tokens in all, P
    prompts, the longest of them N tokens: t = overhead_s + token_s n + ((w n)^p + (w prompt_rows
    P)^p + (step_s N)^p)^(1/p), w a token's roofline and p the sharpness. Other kernels are
    rooflines alone.
    """

    token_s: float = 0.0
    """Seconds a token that do not depend on the layer's width."""
    step_s: float = 0.0
    """Seconds a token that one prompt takes however few of the device's units it keeps busy: its
    chunks follow each other.
    """
    prompt_rows: float = 0.0
    """Tokens whose time each prompt takes besides: its state is read and written, its last chunk
    filled up.
    """
    sharpness: float = 1.0
    log_sd: float = 0.0
    """Standard deviation of log(measured / predicted) on a card that was not fitted on, such that
    90% of its rows lie within a normal's 90%.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Strict):
    """t = latency_s + latency_per_peer_s (n-1) + (W + sqrt(W ramp_bytes)) / (bandwidth_fraction x
    link bandwidth).

    W are the bytes on the wire. The root term is the slow approach to full bandwidth that NCCL
    shows between 1 MB and 1 GB.
    """

    bandwidth_fraction: float
    latency_s: float
    latency_per_peer_s: float
    ramp_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency(Strict):
    """Efficiency of kernels and collectives on one GPU, measured in isolation."""

    gpu: str
    """Catalogue name it was measured on."""
    matmul: dict[Precision, Roofline]
    """By input precision; a missing precision uses bf16's, scaled by the datasheet."""
    attention: Roofline
    """Fused attention, forward; its arithmetic and memory traffic add up instead of overlapping."""
    attention_kernels: dict[str, float] = field(default_factory=dict)
    """By name: seconds of a fused attention kernel relative to the timed one."""
    memory_fraction: float
    """Share of memory bandwidth that elementwise kernels reach."""
    kernel_overhead_s: float
    """Fixed seconds per elementwise kernel."""
    context_bytes: float
    """Device memory outside the framework's allocator: driver context, NCCL, library workspaces."""
    nvlink: Link
    """Ring collectives inside an NVLink (or PCIe) domain."""
    all_to_all: Link
    fitted_on: str
    """Rows and command that gave these numbers."""
    thin_matmul: dict[Precision, ThinRoofline] | None = None
    """Serving: matmuls of any number of rows, from one token up; None: `matmul`."""
    grouped_matmul: dict[str, dict[str, dict[str, ExpertKernel]]] | None = None
    """Serving: routed experts by engine, by timed release and by weight format; None: by
    `thin_matmul`, with usual launches.
    """
    mixers: dict[str, dict[str, MixerRoofline]] | None = None
    """Serving: recurrent mixers and sparse attention (`sparse`), by kernel; None: not timed on a
    similar die.
    """
    decode_attention: Roofline | None = None
    """Serving: attention of one new token per sequence over its KV cache; None: `attention`."""
    small_all_reduce: Link | None = None
    """Serving: single-kernel all-reduce for up to a few MiB, which engines use instead of a ring;
    None: the ring.
    """
    measured: bool = True
    """False: borrowed from another GPU; results carry wider intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks(Strict):
    """Clocks that long trainings sustain under a card's power limit, against the boost clocks of
    isolated kernels.
    """

    gpu: str | None = None
    """Card with the power limit of the measured fractions; None: typical values for any card."""
    share: dict[Precision, float]
    """Matmul arithmetic sustained over that at boost, by input precision."""
    fitted_on: dict[str, str]
    """Rows and command that gave each share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkEfficiency(Strict):
    """Effects of a training framework relative to the sum of isolated kernels."""

    framework: str
    stands_for: str | None = None
    """Framework without own constants that these are used for."""
    matmul_slowdown: float = 1.0
    """Time of the framework's matmuls relative to isolated ones at the same clocks; above 1 for
    slower kernels.
    """
    fp32_accumulation: dict[str, float] = field(default_factory=dict)
    """By die: seconds of a 16-bit weight gradient that is added to an fp32 buffer, against one
    written in 16 bits; 1 where it names none.
    """
    elementwise_traffic_factor: float
    """Bytes moved by elementwise kernels against the least a fused implementation needs."""
    narrow_traffic_factor: float | None = None
    """The same where matmuls take less than 16 bits: Transformer Engine's fused modules then stand
    in for the framework's own. None: no different.
    """
    attention_kernel: str | None = None
    """The kernel for fused attention that its runs called; None: unknown, or none of those that a
    query may name.
    """
    attention_slowdown: float = 1.0
    """Time of fused attention relative to the timed kernel (FlashAttention 2 or later), both
    passes.
    """
    attention_kernels: dict[str, float] = field(default_factory=dict)
    """The same of other kernels that its runs timed, by name."""
    attention_backward_slowdown: float
    """Fused attention: seconds a FLOP in the backward pass against the forward pass."""
    tensor_parallel_overlap: float
    """Share of the backward collectives that can hide behind a matmul and do."""
    tensor_parallel_forward_overlap: float
    """The same of the forward collectives: above 0 where they are split into pieces and pipelined
    with their matmuls, as they are inside an NVLink domain.
    """
    context_parallel_overlap: float
    """Fraction of the ring's exchange of keys and values that long enough attention hides."""
    expert_parallel_overlap: float
    """Share of the experts' all-to-alls hidden behind the experts' matmuls."""
    expert_overhead_s: float = 0.0
    """Seconds per layer of dispatching tokens besides kernels and links, both passes: the host
    reads the number of tokens per expert before it launches their kernels.
    """
    expert_launch_s: float = 0.0
    """Launching one kernel for one expert alone (`cost.moe.kernels_of_expert`), where grouped
    layers go through a rank's experts one by one.
    """
    state_scan_flops_per_second: float | None = None
    """Of the state-space scan that it trains with (Mamba 2), forward, by the FLOPs of
    `cost.scans.scan_work`: kernels in Triton that gain little from a faster die. None: as of the
    kernels timed on the die.
    """
    dispatch_bandwidth_fraction: float | None = None
    """Share of NVLink that the flex dispatcher's kernels reach (DeepEP, HybridEP); None: as NCCL's
    all-to-all.
    """
    data_parallel_overlap: float
    """Share of gradient reduction and parameter gathering hidden behind the backward and forward
    pass.
    """
    pipeline_overlap: float
    """Share of the stage-to-stage transfers hidden."""
    network: Link
    """Ring collectives across nodes, per device and network port."""
    optimizer_traffic_factor: float
    """Bytes moved by the optimizer step relative to one read and write of each state."""
    step_overhead_s: float
    """Host work once a step: data loading, logging, synchronisation."""
    time_log_sd: float
    """Standard deviation of log(measured / predicted step time) of dense models that were not
    fitted on, on GPUs that were.
    """
    expert_time_log_sd: float | None = None
    """What models with experts add to it, in variance; None: nobody measured any."""
    earlier_expert_time_log_sd: float | None = None
    """What they add besides under releases before today's dispatcher, or one that nobody named:
    these took up to twice as long for the same step.
    """
    pair_log_sd: float | None = None
    """The same of the ratio of two configurations' step times, of one model on the same devices:
    what is wrong with the model, the kernels or the devices cancels. Stalls are not in it. None:
    nobody measured pairs; as of two that share nothing.
    """
    expert_pair_log_sd: float | None = None
    """The same of models with experts; None: as of dense ones."""
    tuning_log_sd: float = 0.0
    """What fine-tuning adds to `time_log_sd`, in variance: none of the framework's runs did it, and
    the trainers that do differ.
    """
    tuning_memory_log_sd: float = 0.0
    """The same for `memory_log_sd`."""
    newest_release: str | None = None
    """Newest release among the runs behind the constants, as year and month of its NeMo container.
    """
    yearly_gain: float = 0.0
    """By how much of a logarithm a step gets shorter with each year of the software's release; the
    constants are those of the newest one.
    """
    memory_log_sd: float
    """Standard deviation of log(measured / predicted) of allocated memory."""
    reserved_log_sd: float | None = None
    """The same for what the allocator holds, which is more than what is in use: how far above the
    prediction it may be. None: as memory_log_sd.
    """
    fragmentation_fraction: float
    """Reserved over allocated memory, minus one."""
    fitted_on: str
    host_launch_s: float = 0.0
    """Host seconds to launch one kernel with the framework's code; counts if devices finish
    earlier.
    """
    host_tensor_stall_s: float = 0.0
    """Host: added to a layer's launches for each rank of a tensor-parallel group that spans nodes:
    every collective waits for the slowest.
    """
    host_pipeline_stall_s: float = 0.0
    """The same, added for each tensor-parallel rank where pipeline stages are on different
    nodes.
    """
    device_log_sd: float = 0.0
    """Standard deviation of the logarithm of devices' speeds within a job: each step waits for the
    slowest (`cost.stragglers`).
    """
    micro_batch_log_sd: float = 0.0
    """The same of one device's passes through single micro-batches."""
    message_stall_s: float = 0.0
    """Seconds by which a blocking message between pipeline stages is delayed in jobs of more than
    `message_stall_nodes` nodes.
    """
    message_stall_nodes: int = 0
    retry_bytes_per_second: float | None = None
    """At which a nearly full device's allocator frees a pipeline's activations and asks the driver
    for them again; None: no run was slow there.
    """
    temporaries_fraction: float = 0.0
    """Unfused kernels' results on their way, and holes between the allocator's blocks, against
    saved activations and logits.
    """
    workspace_bytes: float = 0.0
    """Bytes that libraries allocate in the framework's allocator."""
    queued_inputs: float = 0.0
    """Inputs gathered over tensor-parallel ranks that are freed, but wait for the communication
    stream: as many as the host queues ahead of its device. A pipeline's messages make the host
    wait, so nothing is queued.
    """
    broadcast_ramp_bytes: float = 0.0
    """`network.ramp_bytes` of a rank's broadcast of its weights, where the framework has those in
    place of a gather.
    """
    all_reduce_overlap: float | None = None
    """`data_parallel_overlap` of replicated optimizers (ZeRO 0) without a pipeline, whose gradients
    are all-reduced bucket by bucket in the backward pass and whose parameters need no gathering;
    None: the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts(Strict):
    """Standard deviations of log(measured / predicted) that add to a framework's own in variance,
    one for each thing that its measured runs do not tell.
    """

    trainer_log_sd: float = 0.0
    """A framework of which no run was measured."""
    card_log_sd: float = 0.0
    """A card that no run of the framework was on."""
    silicon_log_sd: float = 0.0
    """A die that none was on, besides."""
    family_log_sd: float = 0.0
    """A model of a family that none trained."""
    model_kind_log_sd: float = 0.0
    """A kind of model that none trained (`familiarity.kind_of_model`)."""
    precision_log_sd: float = 0.0
    """A precision that none had."""
    scale_log_sd: float = 0.0
    """More GPUs than any had."""
    kernels_log_sd: float = 0.0
    """For a die without timed kernels."""
    lora_log_sd: float = 0.0
    """For adapters, which no run behind the constants has."""
    lora_pair_log_sd: float = 0.0
    """The same of the ratio of two configurations' step times (`pair_log_sd`)."""
    release_log_sd: float = 0.0
    """A release after the newest of the runs."""
    unsaid_release_log_sd: float = 0.0
    """A release that the query does not name, of a model without experts: those have
    `earlier_expert_time_log_sd`.
    """
    feature_log_sd: float = 0.0
    """Each feature without a measured step time."""
    memory_feature_log_sd: float = 0.0
    """The same for allocated memory, and for adapters."""
    serving: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of serving: by figure (ttft, tpot, throughput), what a difference in each dimension adds."""
    fitted_on: dict[str, str] = field(default_factory=dict)
    """Rows and command that gave each."""

    @property
    def extras(self) -> dict[str, float]:
        """Return the additional standard deviation of each dimension in which a training differs
        from measured runs.
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
    """Constants of a die and of a framework, the cost model's input."""

    gpu: GpuEfficiency
    framework: FrameworkEfficiency
    doubts: Doubts = NO_DOUBTS
    index: Index = NO_RUNS
    """Measured runs that determine the familiarity of a question."""
    release_factor: float = 1.0
    """Step time under the query's release relative to the framework's newest release."""
    release_log_sd: float = 0.0
    """Of the framework's time_log_sd, what a release that nobody named adds: all runs of a machine
    have it in common.
    """
