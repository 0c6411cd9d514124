"""Overlaps and fusions of a Megatron Core training run, for exported commands, profile runs and the
constants of the cost model.

Settings that a query omits are on, as in the runs to which the constants were fitted.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, TokenDispatcher
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload

Switches: TypeAlias = Mapping[str, bool | str]
"""Settings by field name in Megatron Core's configuration classes."""

DEEP_EP_NVLINK = 8
"""Maximum number of GPUs that DeepEP, the flex dispatcher's usual implementation, connects by
NVLink (NUM_MAX_NVL_PEERS). HybridEP connects a domain of 72.
"""
CUDA, ENGINE, APEX, DEEP_EP = "cuda", "transformer-engine", "apex", "deep-ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One kind of communication that can overlap compute."""

    part: str
    """Part of a step that is hidden."""
    constants: tuple[str, ...]
    """Fields of FrameworkEfficiency with the hidden fraction."""
    switches: tuple[str, ...] = ()
    """Megatron Core fields that enable the overlap; empty if there are none."""


OVERLAPS = {
    "tensor_parallel": Overlap(
        part="tensor_parallel",
        constants=("tensor_parallel_overlap", "tensor_parallel_forward_overlap"),
        switches=("tp_comm_overlap",),
    ),
    "context_parallel": Overlap(part="context_parallel", constants=("context_parallel_overlap",)),
    "expert_parallel": Overlap(
        part="expert_parallel",
        constants=("expert_parallel_overlap",),
        switches=("overlap_moe_expert_parallel_comm",),
    ),
    "pipeline_parallel": Overlap(
        part="pipeline_p2p",
        constants=("pipeline_overlap",),
        switches=("overlap_p2p_comm", "batch_p2p_comm"),
    ),
    "data_parallel": Overlap(
        part="data_parallel",
        constants=("data_parallel_overlap", "all_reduce_overlap"),
        switches=("overlap_grad_reduce", "overlap_param_gather"),
    ),
}
"""Overlaps by field of `training.overlap`."""

NEEDS: Mapping[str, tuple[tuple[str, ...], bool | str]] = {
    "tp_comm_overlap": ((ENGINE,), False),
    "overlap_moe_expert_parallel_comm": ((ENGINE,), False),
    "apply_rope_fusion": ((ENGINE,), False),
    "bias_activation_fusion": ((CUDA,), False),
    "bias_dropout_fusion": ((CUDA,), False),
    "masked_softmax_fusion": ((ENGINE,), False),
    "gradient_accumulation_fusion": ((ENGINE, APEX), False),
    "cross_entropy_fusion_impl": ((ENGINE,), "native"),
    "moe_grouped_gemm": ((ENGINE,), False),
    "moe_permute_fusion": ((ENGINE,), False),
    "moe_token_dispatcher_type": ((DEEP_EP,), "alltoall"),
    "cuda_graph_impl": ((CUDA, ENGINE), "none"),
}
"""For each field, the components that nodes must have, and the value of the field if one is
missing. Apex's kernel accumulates the gradients of the output layer; Transformer Engine does so for
all other matrices. CUDA graphs require Transformer Engine's random number generator.
"""


def megatron_switches(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    parallel: ParallelConfig,
    dispatcher: TokenDispatcher = "alltoall",
    nvlink_domain_size: int | None = None,
) -> Switches:
    """Return the overlaps and fusions of a configuration on nodes that have all components.

    `nvlink_domain_size` is None if each tensor-parallel group is inside one NVLink domain.
    """
    overlap, t = workload.overlap or OverlapSpec(), parallel.tensor_parallel_size
    data = overlap.data_parallel is not False
    beside = parallel.virtual_pipeline_parallel_size > 1 and overlap.pipeline_parallel is not False
    # Userbuffers require NVLink.
    near = parallel.sequence_parallel and 1 < t <= (nvlink_domain_size or t)
    chosen: dict[str, bool | str] = {
        "overlap_grad_reduce": data,
        "overlap_param_gather": data and parallel.zero_stage >= 1,
        "tp_comm_overlap": near and overlap.tensor_parallel is not False,
        "overlap_p2p_comm": beside,
        "batch_p2p_comm": not beside,
        "overlap_moe_expert_parallel_comm": workload.merges_passes,
        # For latent attention, Megatron Core fuses only YaRN's rotation.
        "apply_rope_fusion": model.positions == "rotary" and model.kv_lora_rank is None,
        "bias_activation_fusion": model.gated_mlp or model.has_mlp_bias,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "gradient_accumulation_fusion": parallel.zero_stage < 2,
        "cross_entropy_loss_fusion": workload.loss != "unfused",
        "cross_entropy_fusion_impl": "te" if workload.loss == "in_place" else "native",
        "cuda_graph_impl": "local" if workload.cuda_graphs else "none",
    }
    if model.num_experts:
        chosen |= {
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_token_dispatcher_type": dispatcher,
        }
        if dispatcher == "flex" and (nvlink_domain_size or 0) > DEEP_EP_NVLINK:
            chosen["moe_flex_dispatcher_backend"] = "hybridep"
    return chosen


def device_connections(*, workload: TrainingWorkload, parallel: ParallelConfig) -> str | None:
    """Return the CUDA_DEVICE_MAX_CONNECTIONS that Megatron Core needs; None for CUDA's default.

    With one queue, tensor- and context-parallel collectives start before the kernels that hide
    them. Merged passes need many queues.
    """
    if training_engine(workload.framework) != "megatron-core":
        return None
    if workload.merges_passes:
        return "32"
    return "1" if parallel.tensor_parallel_size > 1 or parallel.context_parallel_size > 1 else None


def drop_unavailable(
    wanted: Switches, *, lacking: Collection[str]
) -> tuple[Switches, dict[str, tuple[str, ...]]]:
    """Return (settings on nodes that lack these components, missing components by changed
    field).
    """
    run, differences = dict(wanted), dict[str, tuple[str, ...]]()
    for name, (needed, otherwise) in NEEDS.items():
        missing = tuple(each for each in needed if each in lacking)
        if missing and wanted.get(name, otherwise) != otherwise:
            run[name] = otherwise
            differences[name] = missing
    return run, differences
