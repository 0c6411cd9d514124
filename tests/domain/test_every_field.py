"""Every field of a query changes some answer, or is declared to change none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Interval

from hp_tool.catalog import model as catalogue_model
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import (
    DisaggregationSpec,
    InferenceWorkload,
    LoadSpec,
    SpeculativeSpec,
    TraceSpec,
)
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, Recompute
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.targets import Targets
from hp_tool.domain.workload import LoraSpec, OverlapSpec, ReliabilitySpec, TrainingWorkload
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from hp_tool.questions.problem import problem_of
from hp_tool.questions.serving.disaggregated import rank_pools

CHANGES_NOTHING = {
    "model.left_out": "names what a file describes besides",
    "cluster.name": "names the cluster",
}
"""Fields that change no figure, each with the reason."""

TRAIN = {"sequence_length": 2048, "global_batch_size": 64}
H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 16}
SPLIT = {"tensor_parallel_size": 2, "micro_batch_size": 1}


def training(model: str | dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    query = {"kind": "training", "model": model, "cluster": H100, "training": TRAIN}
    query |= {"parallel": SPLIT}
    return query | {
        name: {**(query[name] if isinstance(query.get(name), dict) else {}), **values}  # type: ignore[dict-item]
        for name, values in sections.items()
    }


def serving(model: str | dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    load = {"input_length": 1000, "output_length": 200, "concurrency": 32}
    query = {"kind": "inference", "model": model, "cluster": H100, "inference": load}
    if "disaggregated" not in sections.get("inference", {}):
        query |= {"parallel": {"tensor_parallel_size": 2}}
    return query | {
        name: {**(query[name] if isinstance(query.get(name), dict) else {}), **values}  # type: ignore[dict-item]
        for name, values in sections.items()
    }


MAMBA = {
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "blocks": [{"mixer": "mamba"}, {"mixer": "attention"}],
    "mamba_inner_size": 2048,
    "mamba_dt_rank": 64,
    "ssm_state_size": 16,
}
EP = {"expert_parallel_size": 8, "tensor_parallel_size": 1}
PIPE = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
PACKED = {"sequence_length": 8192, "packed": True, "sequence_lengths": "synthetic-code"}
DRAFTS = {"num_speculative_tokens": 3, "acceptance_rate": 0.7}
BASES: tuple[dict[str, Any], ...] = (
    training("llama-3-8b"),
    training("mixtral-8x7b", parallel=EP),
    training("deepseek-v2-lite", parallel=EP),
    training("llama-3-8b", training={"framework": "torch-fsdp"}, parallel={"zero_stage": 3}),
    training("llama-3-8b", training={"precision": "fp8"}, parallel=PIPE),
    training("llama-3-8b", parallel={"sequence_parallel": False}),
    training("llama-3-8b", training={"attention": "unfused"}, parallel={"recompute": "none"}),
    training("llama-3-8b", parallel={"context_parallel_size": 4, **SPLIT}),
    training("llama-3-8b", training={"task": "lora", "lora": {"rank": 16}}),
    training("llama-3-8b", training={"offload": "optimizer"}),
    training("llama-3-8b", training={"cuda_graphs": True}),
    training("llama-3-8b", parallel={**PIPE, "zero_stage": 2}),
    training(
        "llama-3-8b",
        cluster={"grid_carbon_kg_per_kwh": 0.3},
        training={"total_tokens": 1e12, "reliability": {}},
    ),
    training("llama-3-8b", training=PACKED, parallel={"context_parallel_size": 4}),
    training(
        "llama-3-8b",
        parallel={"context_parallel_size": 4, "context_parallel_communication": "a2a+p2p"},
    ),
    training("gpt3-6.7b"),
    training("bert-large"),
    training("t5-3b"),
    training("nemotron-3-nano-30b-a3b", parallel=EP),
    training("qwen3.6-35b-a3b", parallel=EP),
    training("deepseek-v3.2", cluster={"num_gpus": 256}, parallel=EP),
    training("gpt-oss-20b", parallel=EP),
    training(
        "llama-3-8b",
        cluster={"num_gpus": 64},
        parallel={"pipeline_parallel_size": 16, "tensor_parallel_size": 4},
    ),
    training("nemotron-3-super-120b-a12b", cluster={"num_gpus": 64}, parallel=EP),
    training(
        MAMBA,
        training={"framework": "torch-fsdp"},
        parallel={"zero_stage": 3, "tensor_parallel_size": 1},
    ),
    training(
        "deepseek-v3",
        cluster={"num_gpus": 256},
        training={"global_batch_size": 256},
        parallel={
            "expert_parallel_size": 64,
            "pipeline_parallel_size": 4,
            "moe_token_dispatcher_type": "flex",
        },
    ),
    training(
        "llama-3-8b",
        cluster={"num_gpus": 64, "nodes_per_leaf": 2, "network_oversubscription": 4.0},
        parallel=PIPE,
    ),
    training(
        "mixtral-8x7b",
        cluster={"gpu": "gb200-nvl72", "num_gpus": 72},
        training={"global_batch_size": 72},
        parallel=EP,
    ),
    serving("llama-3-8b"),
    serving("qwen3-30b-a3b", parallel={"expert_parallel_size": 2}),
    serving("llama-3-8b", inference={"concurrency": None, "request_rate_per_second": 4.0}),
    serving("llama-3-8b", inference={"load": {"arrival": "offline"}, "concurrency": None}),
    serving(
        "llama-3-8b",
        inference={"speculative": DRAFTS},
    ),
    serving(
        "deepseek-v3",
        cluster={"num_gpus": 32},
        inference={"concurrency": 2048},
        parallel={
            "tensor_parallel_size": 1,
            "attention_data_parallel_size": 32,
            "expert_parallel_size": 32,
        },
    ),
    serving("qwen3-30b-a3b", inference={"disaggregated": {}}),
    serving("qwen3.6-27b"),
    serving(MAMBA),
    serving("kimi-k3", cluster={"num_gpus": 64}, parallel={"tensor_parallel_size": 32}),
    serving("deepseek-v3.2", cluster={"num_gpus": 32}, parallel={"tensor_parallel_size": 8}),
    serving(
        "gemma-4-31b",
        cluster={"gpu": "a100-sxm-80gb"},
        inference={"speculative": DRAFTS | {"draft_cost_fraction": 0.1}},
    ),
)
SECTIONS: dict[str, Any] = {
    "model": ModelSpec,
    "cluster": ClusterQuery,
    "training": TrainingWorkload,
    "training.overlap": OverlapSpec,
    "training.lora": LoraSpec,
    "training.reliability": ReliabilitySpec,
    "inference": InferenceWorkload,
    "inference.load": LoadSpec,
    "inference.speculative": SpeculativeSpec,
    "inference.disaggregated": DisaggregationSpec,
    "inference.trace": TraceSpec,
    "parallel": ParallelQuery,
    "parallel.recompute": Recompute,
    "constraints": Constraints,
    "targets": Targets,
}
FIELDS = [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)]
TRACE = {"input_tokens": [500, 4000], "output_tokens": [10, 300]}
POOLS = "inference.disaggregated."
SIZES = [
    f"{side}_{kind}_parallel_size"
    for side in ("prefill", "decode")
    for kind in ("tensor", "expert", "attention_data")
]
VALUES: dict[str, list[Any]] = {
    "model.bidirectional_item_tokens": [4096],
    "model.assistant_parameters": [1_000_000_000],
    "model.blocks": [[{"count": 1}, {"count": 1, "intermediate_size": 2048}]],
    "cluster.node_type": [{"node_type": "aws-p5.48xlarge", "num_gpus": 16}],
    "cluster.gpu": ["a100-sxm-80gb"],
    "cluster.stages": [
        {"stages": [{"gpu": f"{name}-sxm-80gb", "num_gpus": 8} for name in ("h100", "a100")]}
    ],
    "training.sequence_lengths": ["synthetic-code"],
    "training.framework": ["nanotron", "torch-fsdp"],
    "training.framework_version": ["26.02", "0.16"],
    "training.recipe": ["megatron-bridge-26.06"],
    "training.lora": [{"rank": 8}],
    "training.frozen": [["embedding"]],
    "training.overlap": [{"data_parallel": False}],
    "training.reliability": [{}],
    "training.cuda_graph_modules": [["attn"]],
    "training.lora.target_modules": [["linear_qkv"]],
    "parallel.recompute": ["full", "none", "selective"],
    "parallel.pipeline_layout": ["Et*8|t*8|t*8|t*8L"],
    "parallel.rank_order": ["tp-cp-ep-pp-dp", "dp-tp-cp-ep-pp"],
    "parallel.hierarchical_context_parallel_sizes": [[2, 2]],
    "parallel.recompute.method": [{"granularity": "full", "method": "block", "num_layers": 3}],
    "parallel.recompute.num_layers": [{"granularity": "full", "num_layers": 4}],
    "parallel.recompute.modules": [{"granularity": "selective", "modules": ["layernorm"]}],
    "inference.trace": [TRACE],
    "inference.trace.arrival_s": [TRACE | {"arrival_s": [0.0, 9.0]}],
    "inference.trace.input_tokens": [TRACE | {"input_tokens": [5, 9]}],
    "inference.trace.output_tokens": [TRACE | {"output_tokens": [5, 9]}],
    "inference.trace.prefix_tokens": [TRACE | {"prefix_tokens": [100, 100]}],
    "inference.engine": ["sglang", "trtllm"],
    "inference.engine_version": ["0.8", "0.9", "0.10"],
    "inference.speculative": [DRAFTS],
    "inference.disaggregated": [{}],
    **{f"{POOLS}{name}": [2, 4] for name in SIZES},
    **{f"{POOLS}{side}_replicas": [1, 2] for side in ("prefill", "decode")},
    "inference.load": [{"arrival": "offline"}],
    "targets.others": [{"ttft_p95_s": 1e-6}],
}
"""Legal values that do not follow from a field's type."""


WHOLE = ("node_type", "stages", "others", "parallel.recompute", "inference.trace")
"""Fields that replace their section, and sections that are replaced."""


def values_of(path: str) -> Iterator[Any]:
    section, _, name = path.rpartition(".")
    if path in VALUES:
        yield from VALUES[path]
        return
    yield from typed_values(get_type_hints(SECTIONS[section], include_extras=True)[name], (0, 1e9))


def typed_values(hint: Any, bounds: tuple[float, float]) -> Iterator[Any]:
    """Values of a type within its bounds."""
    own = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Interval)]
    bounds = (own[0].ge, own[0].le) if own else bounds  # type: ignore[assignment]
    if hint is bool:
        yield from (True, False)
    elif hint in (int, float):
        numbers = (1, 2, 3, 4, 8, 16, 64, 512, 1024, 4096, 100_000, 3e6, 1e10)
        parts = () if hint is int else (1e-6, 0.3, 0.9, 1.5)
        yield from (hint(n) for n in (*parts, *numbers) if bounds[0] <= n <= bounds[1])
    elif hint is str:
        yield "other"
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) is not tuple:
        for inner in get_args(hint):
            if inner not in (NoneType, Interval):
                yield from typed_values(inner, bounds)


@functools.cache
def base(number: int) -> tuple[dict[str, Any], Any]:
    query = BASES[number]
    if isinstance(query["model"], str):
        shape = schema.to_dict(catalogue_model(query["model"]))
        written = {
            f.name: shape[f.name]
            for f in dataclasses.fields(ModelSpec)
            if f.name in shape and shape[f.name] != f.default
        }
        query = query | {"model": written}
    return query, answer(query)


FIGURELESS = ("provenance", "fixes", "fit", "parallel")


def answer(query: dict[str, Any]) -> Any:
    """The figures of an answer, or its error."""
    try:
        parsed = schema.parse_query(query)
        if parsed.inference is not None and parsed.inference.disaggregated is not None:
            return {"pools": schema.to_dict(rank_pools(query=parsed, top=1))}
        estimate, _ = problem_of(parsed).estimate(with_fixes=False)
    except HpToolError as error:
        return error
    return {
        name: value for name, value in schema.to_dict(estimate).items() if name not in FIGURELESS
    }


def changed(query: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The query with another value of a field."""
    section, _, name = path.rpartition(".")
    if name in WHOLE or section in WHOLE:
        path, value = section, value if isinstance(value, dict) else {name: value}
    parts = path.split(".")
    copied = dict(query)
    where = copied
    for part in parts[:-1]:
        where[part] = dict(where.get(part) or {})
        where = where[part]
    where[parts[-1]] = value
    return copied


def likely_first(path: str) -> list[tuple[int, dict[str, Any]]]:
    """The base queries by number, those that give a value to the field's own name first: most of a
    search's time would go to models that lack what the field describes.
    """
    section, _, name = path.rpartition(".")

    def names_it(number: int) -> bool:
        where: Any = base(number)[0]
        for part in section.split("."):
            where = where.get(part) if isinstance(where, dict) else None
        return isinstance(where, dict) and name in where

    return sorted(enumerate(BASES), key=lambda each: not names_it(each[0]))


def effect(path: str) -> str | None:
    """What the first base query that a field changes shows: figures, an error of the field or
    None.
    """
    section = path.split(".")[0]
    refusal = None
    for number, raw in likely_first(path):
        if section in ("training", "inference") and section != raw["kind"]:
            continue
        if path.startswith(POOLS) != ("disaggregated" in raw.get("inference", ())):
            continue
        query, before = base(number)
        for value in values_of(path):
            after = answer(changed(query, path, value))
            if isinstance(after, HpToolError):
                if (after.field or "").startswith(path) or path.rpartition(".")[2] in str(after):
                    refusal = f"error in {number}: {after}"
            elif not isinstance(before, HpToolError) and after != before:
                names = [name for name in after if after[name] != before.get(name)]
                return f"base {number}, {value!r}: {', '.join(names)}"
    return refusal


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_changes_an_answer_or_is_declared_to_change_none(path: str) -> None:
    found = effect(path)
    assert (found is None) == (path in CHANGES_NOTHING), found


def test_every_section_of_a_query_is_covered() -> None:
    """A ranking's order depends on the objective and on rank_by; runs on search and trainer."""
    others = {"id", "kind", "objective", "rank_by", "search", "trainer"}
    assert {each.name for each in dataclasses.fields(Query)} == others | {
        name for name in SECTIONS if "." not in name
    }
    assert CHANGES_NOTHING.keys() <= {*FIELDS}
