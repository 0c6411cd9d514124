"""Model waits for the host: kernels run only after the host has launched them, and blocking
messages stall stages.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

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
    """Return the number of kernels of a layer: those of its mixer, of its second block, and of its
    matmuls.

    Each block has two matmuls in the forward pass and four in the backward pass. Attention adds its
    core to both passes.
    """
    return Kernels(
        forward=mixer.forward + second.forward + 2 * blocks + cores,
        backward=mixer.backward + second.backward + 4 * blocks + cores,
    )


_DENSE = _launches(attention.KERNELS, mlp.KERNELS)
_NO_LAUNCHES = Kernels(forward=0.0, backward=0.0)
_COLLECTIVES = Kernels(forward=4.0, backward=6.0)
"""Collectives in the two tensor-parallel regions of a layer with sequence parallelism."""
DENSE_LAUNCHES = _DENSE.forward + _DENSE.backward
"""Kernels of a dense layer on one rank, forward and backward."""


def without_host(
    framework: FrameworkEfficiency, *, modules: tuple[str, ...] | None = None
) -> FrameworkEfficiency:
    """Return the framework's constants with CUDA graphs, under which devices never wait for their
    host.

    CUDA graphs of single `modules` exclude the experts' kernels, whose shapes depend on the tokens.
    If `modules` does not include attention, most other launches are not captured either, but the
    preparation of the dispatch may be.
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
    second = moe.KERNELS if kind.num_experts else mlp.KERNELS
    second = _NO_LAUNCHES if kind.feed_forward == "none" else second
    blocks = (kind.mixer != "none") + (kind.feed_forward != "none")
    return _launches(mixer, second, blocks=blocks, cores=int(kind.mixer == "attention")), blocks


def launches(
    model: ModelSpec,
    layers: StageLayers,
    *,
    tensor_parallel_size: Ints,
    recorded: bool = False,
    recomputed_fraction: Floats = 0.0,
    added: tuple[Floats, Floats] = (0.0, 0.0),
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) kernels and collectives that one micro-batch launches on a
    stage.

    If a fraction `recomputed_fraction` of the layers is fully recomputed, their forward pass is
    launched again. `added` is the number of additional kernels per layer, by pass. Recurrent layers
    that CUDA graphs capture (`recorded`) launch none.
    """
    spread = tensor_parallel_size > 1
    forward, backward = (layers.count * more for more in added)
    for count, (_, kind) in zip(layers.kinds, model.kinds, strict=True):
        if isinstance(count, float) and count == 0.0:
            continue
        if recorded and kind.is_recurrent and kind.feed_forward == "none":
            continue
        kernels, blocks = kind_launches(kind)
        forward = forward + count * (kernels.forward + 0.5 * blocks * _COLLECTIVES.forward * spread)
        backward = backward + count * (
            kernels.backward + 0.5 * blocks * _COLLECTIVES.backward * spread
        )
    return forward, backward + recomputed_fraction * forward


class HostLoad(NamedTuple):
    """How far a host falls behind its device in one micro-batch of a stage. Proportional to the
    number of layers.
    """

    excess: tuple[Floats, Floats]
    """Launch seconds minus device seconds of (forward, backward); negative if the host is ahead."""
    idle: tuple[Floats, Floats]
    """Seconds of launches during which the device is idle, in a loop over experts."""

    def waits(self) -> tuple[Floats, Floats]:
        """Return the (forward, backward) seconds that the device waits."""
        forward, backward = map(maximum, self.excess, self.idle)
        return forward, backward


def host_load(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: StageLayers,
    recomputed_fraction: Floats,
    forward_s: Floats,
    backward_s: Floats,
) -> HostLoad:
    """Return the load of the host of a stage.

    A launch takes `host_launch_s`, regardless of the size of the kernel, so large kernels hide it.
    If the tensor-parallel group or the pipeline spans nodes, the host also serves the network. The
    resulting stalls are spread over the launches of a layer. They are added for each of the t ranks
    of the tensor-parallel group, whose collectives wait for the slowest rank. Launches of the
    embedding, the output layer and the loss are excluded.
    """
    cluster = case.cluster
    framework = case.profile.framework
    t, domain = candidates.tensor_parallel_size, cluster.nvlink_domain_size
    stall = framework.host_tensor_stall_s * (t > domain)
    if cluster.num_gpus > domain:
        stall = stall + framework.host_pipeline_stall_s * (candidates.pipeline_parallel_size > 1)
    each = framework.host_launch_s + t * stall / DENSE_LAUNCHES
    modules = case.workload.cuda_graph_modules or ()
    forward, backward = launches(
        case.model,
        layers,
        tensor_parallel_size=t,
        recorded=bool(case.workload.cuda_graphs) and "mamba" in modules,
        recomputed_fraction=recomputed_fraction,
        added=_added_launches(case, candidates),
    )
    idle = each * layers.count * layers.expert_share * _launches_after_waits(case, candidates)
    return HostLoad(
        excess=(each * forward - forward_s, each * backward - backward_s),
        idle=(idle, recomputed_fraction * idle),
    )


def _launches_after_waits(case: TrainingCase, c: Candidates) -> Floats:
    """Return the forward-pass launches of a loop over experts during which the device is idle.

    For each expert, the host waits for the number of its tokens. The device then has no queued
    kernels until the expert's first matmul.
    """
    model, workload = case.model, case.workload
    if not model.num_experts or not loops_experts(workload):
        return 0.0
    narrow = workload.frozen_precision in ("nf4", "int4")
    return (
        model.num_experts / c.expert_parallel_size * (WAITING_LAUNCHES + NARROW_LAUNCHES * narrow)
    )


WAITING_LAUNCHES = 6.0
"""Launches between the wait for an expert's token count and the expert's first matmul: the copy of
the count, two indices, the selection of the tokens and its view, the matmul.

Source: huggingface/transformers 4, MixtralSparseMoeBlock.forward (torch.where).
"""
UNIT_LAUNCHES = 40.0
"""Cost of the hooks of one FSDP unit in one pass (1.2 ms), in kernel launches.

Chosen to match QLoRA of Mistral-7B with FSDP on 2 A100, where a step of 2 x 290 tokens takes as
long as one of 4 x 440.
"""
NARROW_LAUNCHES = 12.0
"""Cost of dequantising a 4-bit matrix with quantised scales before its matmul, in kernel launches.

Chosen to match Qwen-7B with and without GPTQ at 256 tokens.
"""


MODULE_LAUNCHES, MODULES = 6.5, 13.0
"""Cost of the hooks of one module under DeepSpeed's ZeRO 3, in kernel launches, and the number of
modules in a dense layer.

The modules are seven matrices, two norms, the activation, both blocks, and the layer. Chosen to
match full fine-tuning of Qwen-1.8B and 7B at 256 tokens.
"""
FETCHED_EXPERT = 150.0
"""Cost of gathering one expert's three matrices in one pass under DeepSpeed's ZeRO 3, in kernel
launches.

The tokens determine which experts run, so no expert is prefetched and each one waits for its
gather. Chosen to match the only published step of Qwen3-30B-A3B (91 s on 16 A800). Estimates report
that this value is not validated.
"""
LOOPED_EXPERT = Kernels(forward=14.0, backward=20.0)
"""Kernels of one expert in a loop over experts.

They select and copy its tokens, run three matmuls, the activation, the product and the weighting,
and add the result (MixtralSparseMoeBlock of huggingface/transformers 4).
"""


def _expert_launches(case: TrainingCase, c: Candidates) -> tuple[Floats, Floats]:
    model, facts = case.model, framework_facts(case.workload.framework)
    if not model.num_experts or not loops_experts(case.workload):
        return 0.0, 0.0
    experts = model.num_experts / c.expert_parallel_size
    hooks = FETCHED_EXPERT * facts.hooks_modules * _gathers_parameters(c)
    return experts * (LOOPED_EXPERT.forward + hooks), experts * (LOOPED_EXPERT.backward + hooks)


def _gathers_parameters(c: Candidates) -> Bools:
    gathers: Bools = (c.zero_stage >= 3) & (c.data_parallel_size > 1)
    return gathers


def _sharded_launches(case: TrainingCase, c: Candidates) -> tuple[Floats, Floats]:
    """Return the (forward, backward) launches for the FSDP units of a layer.

    Each layer is a unit. If PEFT's policy (fsdp_auto_wrap_policy) wraps modules with trained
    weights, the A and B of each adapter are units too.
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
    """Return the (forward, backward) kernels of a layer that depend on the workload: adapters,
    sharding, loops over experts, 4-bit weights and eager operators.
    """
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
    """Return the time of blocking messages between stages in large jobs, in seconds: (per
    micro-batch, per step).

    A stage between two others receives and sends in each direction: four messages per micro-batch.
    With two stages, there are two. Filling and draining the pipeline adds two messages for each
    further stage.
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
