"""Parameters on one rank of the pipeline's first and of its last stage, by what happens to them."""

from __future__ import annotations

from hp_tool.cost.arrays import Floats, maximum
from hp_tool.cost.candidates import ZBV, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lora import layer_adapter_parameters
from hp_tool.cost.matrices import entries, rank_matrices
from hp_tool.cost.parameters import (
    embedding_parameters,
    expert_parameters,
    final_norm_weights,
    layer_parameters,
    moe_shared_parameters,
    norm_weights,
    output_parameters,
    special_parameters,
)
from hp_tool.cost.pipeline_stages import End, Section, Stage, StageLayers
from hp_tool.cost.schedules.bubble import folded_ends
from hp_tool.domain.model import ModelSpec


def end_parameters(case: TrainingCase, candidates: Candidates, *, stages: StageLayers) -> tuple[Floats, Floats]:
    """Parameters besides routed experts on one rank of the first and of the last stage. Tied weights are kept on both
    where those are different stages (Megatron Core), once where they are the same.
    """
    model = case.model
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    alone = p == 1
    dense = layer_parameters(model, tensor_parallel_size=t)
    more = moe_shared_parameters(model, tensor_parallel_size=t) - dense if model.num_experts else 0.0
    first, last = _layers(stages, dense=dense, more=more)
    embedding = embedding_parameters(model, sequence_length=case.workload.sequence_length, tensor_parallel_size=t)
    own_output = ((p > 1) & (candidates.pipeline_schedule < ZBV)) if model.tie_word_embeddings else 1.0
    head = output_parameters(model, tensor_parallel_size=t) * own_output + final_norm_weights(model)
    if model.architecture != "decoder" or model.has_output_bias:
        head = head + special_parameters(model, tensor_parallel_size=t)
    # Each multi-token-prediction layer also has a projection from 2h to h and two norms.
    extra = 2.0 * (model.hidden_size**2 + norm_weights(model))
    if isinstance(candidates, Stage):
        head = candidates.holds_output * head + candidates.extra_layers * extra
        both = first + candidates.embeddings * embedding + head
        return both, both
    head = head + model.num_nextn_predict_layers * extra
    # Multi-token prediction wants an embedding on the last stage too (Megatron Core, gpt_model.py); a tied one is there.
    copied = embedding if model.num_nextn_predict_layers and not model.tie_word_embeddings else 0.0
    if isinstance(candidates, Section):
        alone = candidates.stages == 1
        embedding, head = candidates.holds_embedding * embedding, candidates.holds_output * head
        copied = candidates.holds_output * copied
    ends = first + embedding + alone * head, last + maximum(alone * embedding, copied) + head
    return folded_ends(candidates, plain=ends, layers=(first, last), ends=embedding + head)


def end_frozen(case: TrainingCase, candidates: Candidates) -> tuple[Floats, Floats]:
    """Those of end_parameters that `workload.frozen` names, in plain pipelines (`rules.training` refuses others)."""
    model, workload = case.model, case.workload
    t, p = candidates.tensor_parallel_size, candidates.pipeline_parallel_size
    alone = p == 1
    embedding: Floats = 0.0
    output: Floats = 0.0
    if "embedding" in workload.frozen:
        embedding = embedding_parameters(model, sequence_length=workload.sequence_length, tensor_parallel_size=t)
    if "output_layer" in workload.frozen:
        own = (p > 1) if model.tie_word_embeddings else 1.0
        output = output_parameters(model, tensor_parallel_size=t) * own
    return embedding + alone * output, alone * embedding + output


def end_matrices(model: ModelSpec, candidates: Candidates, *, stages: StageLayers) -> tuple[Floats, Floats]:
    """Entries of the layers' weight matrices besides routed experts' on one rank of the first and of the last stage."""
    dense = _matrix_entries(model, candidates, moe=False)
    more = _matrix_entries(model, candidates, moe=True) - dense if model.num_experts else 0.0
    first, last = _layers(stages, dense=dense, more=more)
    holds_extra = not isinstance(candidates, Section) or candidates.holds_output
    depths = candidates.extra_layers if isinstance(candidates, Stage) else holds_extra * model.num_nextn_predict_layers
    extra = depths * 2.0 * model.hidden_size**2
    first = first + extra if isinstance(candidates, Stage) else first
    return folded_ends(candidates, plain=(first, last + extra), layers=(first, last), ends=extra)


def end_adapters(
    case: TrainingCase, candidates: Candidates, *, stages: StageLayers, routed: bool
) -> tuple[Floats, Floats] | tuple[None, None]:
    """Parameters of LoRA's adapters on one rank of the first and of the last stage: routed experts', or all others'."""
    model, workload = case.model, case.workload
    if workload.lora is None:
        return None, None
    dense, sparse = (
        layer_adapter_parameters(model, workload.lora, candidates, moe=moe, routed=routed)
        for moe in (False, bool(model.num_experts))
    )
    first, last = _layers(stages, dense=dense, more=sparse - dense)
    return folded_ends(candidates, plain=(first, last), layers=(first, last), ends=0.0)


def end_expert_parameters(model: ModelSpec, candidates: Candidates, *, stages: StageLayers) -> tuple[Floats, Floats]:
    """Routed experts on one rank of the first and of the last stage."""

    def on(end: End) -> Floats:
        ranks = candidates.expert_parallel_size * candidates.expert_tensor_parallel_size
        return end.layers * end.moe_fraction * expert_parameters(model) / ranks

    layers = on(stages.first), on(stages.last)
    return folded_ends(candidates, plain=layers, layers=layers, ends=0.0)


def _layers(stages: StageLayers, *, dense: Floats, more: Floats) -> tuple[Floats, Floats]:
    """Of the layers alone: `dense` in each, and `more` in those with experts."""
    first, last = (end.layers * (dense + end.moe_fraction * more) for end in (stages.first, stages.last))
    return first, last


def _matrix_entries(model: ModelSpec, candidates: Candidates, *, moe: bool) -> Floats:
    """Entries of one layer's weight matrices besides routed experts' on one rank."""
    return entries(matrix for matrix in rank_matrices(model, candidates, moe=moe) if not matrix.routed)
