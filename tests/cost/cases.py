"""Random but legal problems for the property tests."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from hypothesis import strategies as st

from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.legality import legality
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig, Recompute, Strategy
from hp_tool.domain.workload import TrainingWorkload

NODE = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8))
RECOMPUTE = (
    "none",
    "selective",
    "full",
    Recompute(granularity="full", method="block", num_layers=1),
)
COLUMNS = ("step_s", "memory_total_bytes", "layer_activations_bytes", "worst_stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(TrainingCase):
    def costs(self, configs: list[ParallelConfig] | Candidates) -> TrainingCosts:
        candidates = (
            configs if isinstance(configs, Candidates) else Candidates.from_configs(configs)
        )
        assert not np.any(legality(case=self, candidates=candidates))
        return training_costs(case=self, candidates=candidates)


def case_of(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    cluster: ClusterSpec = NODE,
    strategy: Strategy = DEFAULT_STRATEGY,
) -> TrainingCase:
    """A case with the catalogue's constants, for what does not depend on them."""
    profile = efficiency_profile(gpu=cluster.gpu, framework=workload.framework)
    return TrainingCase(
        model=model, cluster=cluster, workload=workload, profile=profile, strategy=strategy
    )


def columns(costs: TrainingCosts) -> dict[str, np.ndarray]:
    """Every array of a result by name."""
    named = {name: getattr(costs, name) for name in COLUMNS}
    return (
        named
        | {f"memory.{k}": v for k, v in costs.memory_parts.items()}
        | {f"time.{k}": v for k, v in costs.parts.items()}
    )


def rows(candidates: Candidates) -> list[tuple[int, ...]]:
    return list(
        zip(*(getattr(candidates, f.name).tolist() for f in fields(candidates)), strict=True)
    )


@st.composite
def models(draw: st.DrawFn, *, layers: int) -> ModelSpec:
    """GPT-like and Llama-like shapes whose heads divide by 8."""
    llama = draw(st.booleans())
    heads = draw(st.sampled_from((8, 16, 32)))
    return ModelSpec(
        num_hidden_layers=layers * draw(st.integers(1, 3)),
        hidden_size=heads * draw(st.sampled_from((64, 128))),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from((2, 4, 8))) if llama else None,
        vocab_size=draw(st.sampled_from((1024, 32000, 128256))),
        gated_mlp=llama,
        normalization="rmsnorm" if llama else "layernorm",
        tie_word_embeddings=draw(st.booleans()),
    )


workload_options = st.fixed_dictionaries(
    {
        "attention": st.sampled_from(("flash", "unfused")),
        "dropout": st.sampled_from((0.0, 0.1)),
        "precision": st.sampled_from(("bf16", "fp16")),
        "cross_entropy": st.sampled_from(("fused", "unfused")),
        "kernel_fusion": st.booleans(),
    }
)


@st.composite
def problems(
    draw: st.DrawFn, *, replicas: int | None = None, gpu: str | None = None
) -> tuple[Problem, ParallelConfig]:
    """A problem and one legal configuration of it; `replicas` fixes the data-parallel size."""
    t, p = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2, 4)))
    v = draw(st.sampled_from((1, 2, 3))) if p > 1 else 1
    d, b = replicas or draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from((1, 2, 4)))
    m = p * draw(st.integers(1, 6))
    machine = cluster(
        ClusterQuery(
            gpu=gpu or draw(st.sampled_from(("v100", "a100-sxm-80gb", "h100-sxm-80gb"))),
            num_gpus=t * p * d,
        )
    )
    options = draw(workload_options)
    if machine.gpu.name.startswith("v100"):
        options["precision"] = "fp16"
    workload = TrainingWorkload(
        sequence_length=draw(st.sampled_from((512, 2048, 4096))),
        global_batch_size=d * b * m,
        **options,
    )
    config = ParallelConfig(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_parallel_size=v,
        data_parallel_size=d,
        micro_batch_size=b,
        sequence_parallel=t > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        zero_stage=draw(st.sampled_from((0, 1))),
    )
    problem = Problem(
        model=draw(models(layers=p * v)),
        cluster=machine,
        workload=workload,
        profile=efficiency_profile(gpu=machine.gpu, framework="megatron-core"),
    )
    return problem, config
