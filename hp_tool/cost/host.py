"""Waits for the host: kernels run only after the host has launched them, and blocking messages
stall stages.
"""

from __future__ import annotations

import dataclasses

from hp_tool.cost import attention, mlp, moe, recurrent_block
from hp_tool.cost.arrays import Bools, Floats, Ints, maximum, minimum
from hp_tool.cost.block import Kernels, eager_launches
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lora import added_launches, num_adapters
from hp_tool.cost.matrices import rank_matrices
from hp_tool.cost.pipeline_stages import StageLayers
from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.frameworks import framework_facts, fuses_kernels, loops_experts
from hp_tool.domain.model import ModelSpec


def _launches(mixer: Kernels, second: Kernels, *, blocks: int = 2, cores: int = 1) -> Kernels:
    """Return the number of all kernels in a layer with this number of blocks.

    Each block has two matmuls, and two more per matmul in the backward pass, plus the attention
    core.
    """
    return Kernels(
        forward=mixer.forward + second.forward + 2 * blocks + cores,
        backward=mixer.backward + second.backward + 4 * blocks + cores,
    )


_DENSE, _EXPERTS = (
    _launches(attention.KERNELS, mlp.KERNELS),
    _launches(attention.KERNELS, moe.KERNELS),
)
_NO_LAUNCHES = Kernels(forward=0.0, backward=0.0)
_COLLECTIVES = Kernels(forward=4.0, backward=6.0)
"""Collectives of a layer's two tensor-parallel regions with sequence parallelism."""
DENSE_LAUNCHES = _DENSE.forward + _DENSE.backward
"""Kernels of a dense layer on one rank, both passes."""


def without_host(
    framework: FrameworkEfficiency, *, modules: tuple[str, ...] | None = None
) -> FrameworkEfficiency:
    """Return the constants with CUDA graphs, under which devices never wait for their host.

    Graphs of single `modules` exclude the experts' kernels, whose shapes depend on the tokens.
    Without attention's graph, they also exclude most other launches, but not the preparation of the
    dispatch.
    """
    if modules is not None and "attn" not in modules:
        prepared = "moe_preprocess" in modules
        return dataclasses.replace(
            framework, expert_overhead_s=0.0 if prepared else framework.expert_overhead_s
        )
    return dataclasses.replace(
        framework,
        host_launch_s=0.0,
        host_tensor_stall_s=0.0,
        host_pipeline_stall_s=0.0,
        expert_overhead_s=0.0,
        expert_launch_s=0.0 if modules is None else framework.expert_launch_s,
    )


def kind_launches(kind: ModelSpec) -> tuple[Kernels, int]:
    """Return (number of kernels, number of blocks) of a layer of one kind."""
    mixer = recurrent_block.KERNELS if kind.is_recurrent else attention.KERNELS
    mixer = _NO_LAUNCHES if kind.mixer == "none" else mixer
    second = {"none": _NO_LAUNCHES, "experts": moe.KERNELS}.get(
        kind.feed_forward or "", mlp.KERNELS
    )
    blocks = (kind.mixer != "none") + (kind.feed_forward != "none")
    return _launches(mixer, second, blocks=blocks, cores=int(kind.mixer == "attention")), blocks


def _mean_launches(case: TrainingCase, layers: StageLayers, spread: Bools) -> tuple[Floats, Floats]:
    """Return the (forward, backward) kernels and collectives of a stage's mean layer, for layers of
    different kinds.

    Kernels of recurrent layers that are part of CUDA graphs are not counted.
    """
    model, recorded = (
        case.model,
        case.workload.cuda_graphs and "mamba" in (case.workload.cuda_graph_modules or ()),
    )
    forward: Floats = 0.0
    backward: Floats = 0.0
    for count, (_, kind) in zip(layers.kinds, model.kinds, strict=True):
        if recorded and kind.is_recurrent and kind.feed_forward == "none":
            continue
        kernels, blocks = kind_launches(kind)
        share = count / layers.count
        forward = forward + share * (kernels.forward + 0.5 * blocks * _COLLECTIVES.forward * spread)
        backward = backward + share * (
            kernels.backward + 0.5 * blocks * _COLLECTIVES.backward * spread
        )
    return forward, backward


def launches(
    layers: Floats,
    *,
    tensor_parallel_size: Ints,
    moe_fraction: Floats = 0.0,
    recomputed_fraction: Floats = 0.0,
    added: tuple[Floats, Floats] = (0.0, 0.0),
    mean: tuple[Floats, Floats] | None = None,
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) kernels and collectives that one micro-batch launches on
    `layers` layers.

    The fraction `moe_fraction` of these layers has experts. The fraction `recomputed_fraction` is
    fully recomputed, which launches the forward pass again. `added` are further kernels per layer
    by pass; `mean` are all other kernels of the mean layer, for layers of different kinds.
    """
    spread = tensor_parallel_size > 1
    if mean is not None:
        forward = layers * (added[0] + mean[0])
        return forward, layers * (added[1] + mean[1]) + recomputed_fraction * forward

    def of_layer(dense: float, experts: float, collectives: float) -> Floats:
        return dense + (experts - dense) * moe_fraction + collectives * spread

    forward = layers * (added[0] + of_layer(_DENSE.forward, _EXPERTS.forward, _COLLECTIVES.forward))
    backward = layers * (
        added[1] + of_layer(_DENSE.backward, _EXPERTS.backward, _COLLECTIVES.backward)
    )
    return forward, backward + recomputed_fraction * forward


def host_waits(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: StageLayers,
    recomputed_fraction: Floats,
    forward_s: Floats,
    backward_s: Floats,
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds per micro-batch that a device waits for its host.

    max(launches x seconds each - pass, those of launches that a loop over experts queues on an idle
    device). A launch takes `host_launch_s` for any kernel, so large
    kernels hide it. If hosts also serve a network (the tensor-parallel group or the pipeline spans
    nodes), stalls of a layer, spread over its launches, are added for each of the t ranks of a
    tensor-parallel group, whose collectives wait for the slowest rank. Excludes launches of the
    embedding, the output layer and the loss.
    """
    cluster = case.cluster
    framework = case.profile.framework
    t, domain = candidates.tensor_parallel_size, cluster.nvlink_domain_size
    stall = framework.host_tensor_stall_s * (t > domain)
    if cluster.num_gpus > domain:
        stall = stall + framework.host_pipeline_stall_s * (candidates.pipeline_parallel_size > 1)
    each = framework.host_launch_s + t * stall / DENSE_LAUNCHES
    forward, backward = launches(
        layers.count,
        tensor_parallel_size=t,
        moe_fraction=layers.expert_share,
        recomputed_fraction=recomputed_fraction,
        added=_added_launches(case, candidates),
        mean=_mean_launches(case, layers, t > 1) if layers.kinds else None,
    )
    idle = each * layers.count * layers.expert_share * _launches_after_waits(case, candidates)
    return (
        maximum(each * forward - forward_s, idle),
        maximum(each * backward - backward_s, recomputed_fraction * idle),
    )


def _launches_after_waits(case: TrainingCase, c: Candidates) -> Floats:
    """Return launches of a forward pass through a layer's experts in a loop, during which the
    device is idle.

    The host waits for the number of each expert's tokens. The device has nothing queued then, until
    the expert's first matmul.
    """
    model, workload = case.model, case.workload
    if not model.num_experts or not loops_experts(workload):
        return 0.0
    narrow = workload.frozen_precision in ("nf4", "int4")
    return (
        model.num_experts / c.expert_parallel_size * (WAITING_LAUNCHES + NARROW_LAUNCHES * narrow)
    )


WAITING_LAUNCHES = 6.0
"""Launches between an expert's wait for its tokens and its first matmul: the copy of their number,
two indices, the selection of the tokens and its view, the matmul.

Source: huggingface/transformers 4, MixtralSparseMoeBlock.forward (torch.where).
"""
UNIT_LAUNCHES = 40.0
"""Equivalent number of launches for the hooks of one FSDP unit in one pass: 1.2 ms.

Chosen to match QLoRA of Mistral-7B with FSDP on 2 A100, where a step of 2 x 290 tokens takes as
long as one of 4 x 440.
"""
NARROW_LAUNCHES = 12.0
"""Equivalent number of launches for widening a 4-bit matrix, with quantised scales, before its
matmul.

Chosen to match Qwen-7B with and without GPTQ at 256 tokens.
"""


MODULE_LAUNCHES, MODULES = 6.5, 13.0
"""Equivalent number of launches for the hooks of one module under DeepSpeed's ZeRO 3, and number of
modules in a layer without experts.

The modules are seven matrices, two norms, the activation, both blocks, and the layer. Chosen to
match full fine-tuning of Qwen-1.8B and 7B at 256 tokens.
"""
FETCHED_EXPERT = 150.0
"""Equivalent number of launches for gathering one expert's three matrices in one pass under
DeepSpeed's ZeRO 3.

The tokens determine which experts run, so none is prefetched and each waits for its gather. Chosen
to match the only published step of Qwen3-30B-A3B (91 s on 16 A800); answers report that this is not
validated.
"""
LOOPED_EXPERT = Kernels(forward=14.0, backward=20.0)
"""Kernels of one expert in a loop over experts.

They select and copy its tokens, run three matmuls, the activation, the product and the weighting,
and add the result (MixtralSparseMoeBlock of huggingface/transformers 4).
"""


def _expert_launches(case: TrainingCase, c: Candidates) -> tuple[Floats, Floats]:
    """Return the (forward, backward) launches of a layer's experts that run in a loop."""
    model, known = case.model, framework_facts(case.workload.framework)
    if not model.num_experts or not loops_experts(case.workload):
        return 0.0, 0.0
    experts = model.num_experts / c.expert_parallel_size
    hooks = FETCHED_EXPERT * known.hooks_modules * _gathers_parameters(c)
    return experts * (LOOPED_EXPERT.forward + hooks), experts * (LOOPED_EXPERT.backward + hooks)


def _gathers_parameters(c: Candidates) -> Bools:
    gathers: Bools = (c.zero_stage >= 3) & (c.data_parallel_size > 1)
    return gathers


def _sharded_launches(case: TrainingCase, c: Candidates) -> tuple[Floats, Floats]:
    """Return the (forward, backward) launches for a layer's FSDP units.

    The units are the layer and, if PEFT's policy wraps modules with trained weights
    (fsdp_auto_wrap_policy), the A and B of each adapter.
    """
    workload = case.workload
    if framework_facts(workload.framework).hooks_modules:
        hooks = MODULE_LAUNCHES * MODULES * (c.zero_stage >= 3)
        return hooks, hooks
    if not framework_facts(workload.framework).gathers_ends:
        return 0.0, 0.0
    units = 1.0
    if workload.lora is not None and framework_facts(workload.framework).wraps_adapters:
        units += 2.0 * num_adapters(case.model, workload.lora, c)
    each = UNIT_LAUNCHES * units * _gathers_parameters(c)
    return each, each


def _added_launches(case: TrainingCase, candidates: Candidates) -> tuple[Floats, Floats]:
    """Return the (forward, backward) kernels of a layer that only some workloads launch."""
    workload = case.workload
    forward: Floats = 0.0
    backward: Floats = 0.0
    if workload.lora is not None:
        forward, backward = added_launches(case.model, workload.lora, candidates)
    sharded, sharded_backward = _sharded_launches(case, candidates)
    looped, looped_backward = _expert_launches(case, candidates)
    forward, backward = forward + sharded + looped, backward + sharded_backward + looped_backward
    if workload.frozen_precision in ("nf4", "int4"):
        narrow = NARROW_LAUNCHES * len(rank_matrices(case.model.without_experts, candidates))
        forward, backward = forward + narrow, backward + narrow
    if fuses_kernels(workload):
        return forward, backward
    core = float(workload.attention == "unfused")
    eager, eager_backward = eager_launches(case.model)
    biases = 6.0 * case.model.has_mlp_bias
    return forward + biases + 6.0 * core + eager, backward + 5.0 * core + eager_backward


def message_stalls(*, case: TrainingCase, candidates: Candidates) -> tuple[Floats, Floats]:
    """Return the seconds of blocking messages between stages in large jobs: (per micro-batch, per
    step).

    A stage between two others receives and sends in each direction, four messages per micro-batch;
    with two stages there are two. Filling and draining the pipeline adds two for each further
    stage.
    """
    cluster = case.cluster
    framework = case.profile.framework
    if (
        not framework.message_stall_s
        or cluster.num_gpus <= framework.message_stall_nodes * cluster.gpus_per_node
    ):
        return 0.0, 0.0
    others = candidates.pipeline_parallel_size - 1
    return 2.0 * framework.message_stall_s * minimum(
        others, 2
    ), 2.0 * framework.message_stall_s * others
