"""What a training by Megatron Core overlaps and fuses: one table for the command that is exported,
the run that is measured, and the constants of the cost model that stand for it.

What a query leaves open is on, as in the runs that the constants come from.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, TokenDispatcher
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload

Switches: TypeAlias = Mapping[str, bool | str]
"""By field of Megatron Core's configuration classes."""

DEEP_EP_NVLINK = 8
"""GPUs that DeepEP, the flex dispatcher's usual kernels, joins by NVLink (NUM_MAX_NVL_PEERS);
HybridEP joins a domain of 72.
"""
CUDA, ENGINE, APEX, DEEP_EP = "cuda", "transformer-engine", "apex", "deep-ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One kind of communication that may run beside compute."""

    constants: tuple[str, ...]
    """Of FrameworkEfficiency: the share of it that is hidden."""
    switches: tuple[str, ...] = ()
    """Fields of Megatron Core; none: nothing switches it."""


OVERLAPS = {
    "tensor_parallel": Overlap(
        constants=("tensor_parallel_overlap", "tensor_parallel_forward_overlap"),
        switches=("tp_comm_overlap",),
    ),
    "context_parallel": Overlap(constants=("context_parallel_overlap",)),
    "expert_parallel": Overlap(
        constants=("expert_parallel_overlap",), switches=("overlap_moe_expert_parallel_comm",)
    ),
    "pipeline_parallel": Overlap(
        constants=("pipeline_overlap",), switches=("overlap_p2p_comm", "batch_p2p_comm")
    ),
    "data_parallel": Overlap(
        constants=("data_parallel_overlap", "all_reduce_overlap"),
        switches=("overlap_grad_reduce", "overlap_param_gather"),
    ),
}
"""By field of `training.overlap`."""

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
"""What the nodes must have for a field, and its value without. Apex: its kernel adds the output
layer's gradients up, which Transformer Engine does for all other matrices. Graphs draw random
numbers by Transformer Engine's generator.
"""


def megatron_switches(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    parallel: ParallelConfig,
    dispatcher: TokenDispatcher = "alltoall",
    nvlink_domain_size: int | None = None,
) -> Switches:
    """What this configuration overlaps and fuses where nothing is missing. `nvlink_domain_size`:
    None if a tensor-parallel group is known to lie within one.
    """
    overlap, t = workload.overlap or OverlapSpec(), parallel.tensor_parallel_size
    data = overlap.data_parallel is not False
    beside = parallel.virtual_pipeline_parallel_size > 1 and overlap.pipeline_parallel is not False
    # Userbuffers reach as far as NVLink.
    near = parallel.sequence_parallel and 1 < t <= (nvlink_domain_size or t)
    chosen: dict[str, bool | str] = {
        "overlap_grad_reduce": data,
        "overlap_param_gather": data and parallel.zero_stage >= 1,
        "tp_comm_overlap": near and overlap.tensor_parallel is not False,
        "overlap_p2p_comm": beside,
        "batch_p2p_comm": not beside,
        "overlap_moe_expert_parallel_comm": workload.merges_passes,
        # Of latent attention Megatron Core fuses YaRN's rotation alone.
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
    """CUDA_DEVICE_MAX_CONNECTIONS as Megatron Core wants it: one queue orders the collectives of
    tensor and context parallelism before the kernels that they hide behind; merged passes want
    many. None: CUDA's own.
    """
    if training_engine(workload.framework) != "megatron-core":
        return None
    if workload.merges_passes:
        return "32"
    return "1" if parallel.tensor_parallel_size > 1 or parallel.context_parallel_size > 1 else None


def drop_unavailable(
    wanted: Switches, *, lacking: Collection[str]
) -> tuple[Switches, dict[str, tuple[str, ...]]]:
    """(the switches on nodes that lack these, what is missing by field that had to change)."""
    run, differences = dict(wanted), dict[str, tuple[str, ...]]()
    for name, (needed, otherwise) in NEEDS.items():
        missing = tuple(each for each in needed if each in lacking)
        if missing and wanted.get(name, otherwise) != otherwise:
            run[name] = otherwise
            differences[name] = missing
    return run, differences
