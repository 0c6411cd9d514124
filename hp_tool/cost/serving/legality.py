"""Rules that an engine imposes on a configuration: one bit per rule, and explanations of broken
rules.
"""

import numpy as np

from hp_tool.cost.arrays import BoolArray, IntArray
from hp_tool.cost.recurrent import key_heads, value_heads
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.result import Reason
from hp_tool.domain.serving import ServingConfig

REASONS = (
    "heads_not_divisible",
    "hidden_not_divisible",
    "layers_not_divisible",
    "world_size_mismatch",
    "experts_not_divisible",
    "attention_data_parallel_needs_experts",
    "request_too_long",
)
"""Reason codes: bit i of a legality code means REASONS[i]."""


def legality(
    *, model: ModelSpec, num_gpus: int, candidates: ServingCandidates, longest_request: int
) -> IntArray:
    """Return 0 if engines accept a configuration, else a code with one bit set per broken rule;
    shape (n,).

    `longest_request` is the maximum number of tokens of a prompt and its answer. The model's
    max_position_embeddings must not be smaller.
    """
    c = candidates
    t, p, e, d = (
        c.tensor_parallel_size,
        c.pipeline_parallel_size,
        c.expert_parallel_size,
        c.attention_data_parallel_size,
    )
    r = c.redundant_experts
    experts = model.num_experts
    split = np.maximum(t * d // e, 1)
    kinds = [kind for _, kind in model.kinds]
    heads, dense = (
        np.any([rule(kind, t) for kind in kinds], axis=0)
        for rule in (_cannot_split_heads, _cannot_split_width)
    )
    broken = (
        heads,
        dense | ((model.expert_size % split != 0) & (experts is not None)),
        p > model.num_hidden_layers,
        (t * p * c.data_parallel_size != num_gpus) | (c.data_parallel_size % d != 0),
        (e > 1) | (r > 0)
        if experts is None
        else ((experts + r) % e != 0) | (t * d % e != 0) | (r > experts * (e - 1)),
        (d > 1) & (experts is None),
        longest_request > (model.max_position_embeddings or longest_request),
    )
    code: IntArray = sum(
        (np.asarray(rule) * (1 << bit) for bit, rule in enumerate(broken)),
        np.zeros(len(c), dtype=np.int64),
    )
    return code


def _cannot_split_heads(model: ModelSpec, t: IntArray) -> BoolArray:
    if model.is_recurrent:
        heads = (
            key_heads(model),
            value_heads(model),
            model.mamba_num_heads or 0,
            model.mamba_inner_size or 0,
        )
        unequal: BoolArray = np.any([each % t != 0 for each in heads], axis=0)
        return unequal
    if model.mixer == "none":
        return np.zeros(np.shape(t), dtype=bool)
    # Latent attention caches one vector for all heads, and every rank stores it.
    kv = model.kv_heads
    shares_kv = (
        np.zeros(np.shape(t), dtype=bool) if model.kv_lora_rank else (kv % t != 0) & (t % kv != 0)
    )
    broken: BoolArray = np.logical_or(model.num_attention_heads % t != 0, shares_kv)
    return broken


def _cannot_split_width(model: ModelSpec, t: IntArray) -> BoolArray:
    has_dense = model.feed_forward != "none" and model.moe_layers < model.num_hidden_layers
    unequal: BoolArray = (model.ffn_size % t != 0) & has_dense
    return unequal


def rejection_counts(codes: IntArray) -> dict[str, int]:
    """Return the number of candidates that break each rule; a candidate that breaks several rules
    counts for each.
    """
    counts = {name: int(np.count_nonzero(codes >> bit & 1)) for bit, name in enumerate(REASONS)}
    return {name: count for name, count in counts.items() if count}


def explain(
    code: int, *, model: ModelSpec, num_gpus: int, config: ServingConfig, longest_request: int
) -> tuple[Reason, ...]:
    """Return a reason for each rule that one configuration breaks, with numbers and a fix."""
    t, p = config.tensor_parallel_size, config.pipeline_parallel_size
    e, d, r = (
        config.expert_parallel_size,
        config.attention_data_parallel_size,
        config.redundant_experts,
    )
    used = t * p * config.data_parallel_size
    # In the order of REASONS.
    explanations: dict[str, tuple[str, float, float]] = {
        "heads_not_divisible": (
            f"tensor_parallel_size {t} must divide num_attention_heads "
            f"{model.num_attention_heads}, and divide num_key_value_heads {model.kv_heads} or be a "
            "multiple of it",
            t,
            model.num_attention_heads,
        ),
        "hidden_not_divisible": (
            f"tensor_parallel_size {t} must divide the width of dense MLPs, and tensor x attention "
            f"data / expert parallel {max(t * d // e, 1)} that of experts; lower "
            "tensor_parallel_size, or raise expert_parallel_size",
            t,
            model.ffn_size,
        ),
        "layers_not_divisible": (
            f"pipeline_parallel_size {p} exceeds num_hidden_layers {model.num_hidden_layers}",
            p,
            model.num_hidden_layers,
        ),
        "world_size_mismatch": (
            f"tensor {t} x pipeline {p} x attention data {d} must divide cluster.num_gpus "
            f"{num_gpus}",
            used if used != num_gpus else t * p * d,
            num_gpus,
        ),
        "experts_not_divisible": (
            f"{model.name} has no experts to divide; set expert_parallel_size to 1 and remove "
            "redundant_experts"
            if model.num_experts is None
            else f"expert_parallel_size {e} must divide tensor x attention data parallel {t * d}, "
            f"and num_experts {model.num_experts} + redundant_experts {r}, without two copies of "
            "an expert on one rank; remove redundant_experts to use the smallest number",
            e,
            (model.num_experts or 0) + r,
        ),
        "attention_data_parallel_needs_experts": (
            f"attention_data_parallel_size {d} requires experts, which {model.name} does not have; "
            "set it to 1 and use more replicas",
            d,
            1,
        ),
        "request_too_long": (
            f"the longest request has {longest_request:,} tokens (prompt and answer), but "
            f"{model.name} has {model.max_position_embeddings or 0:,} positions "
            "(max_position_embeddings, or inference.max_model_len if lower); shorten it, or set "
            "`model` to a config.json with the RoPE scaling in use",
            longest_request,
            model.max_position_embeddings or 0,
        ),
    }
    return tuple(
        Reason(code=name, message=message, needed=float(needed), available=float(available))
        for bit, (name, (message, needed, available)) in enumerate(explanations.items())
        if code >> bit & 1
    )
