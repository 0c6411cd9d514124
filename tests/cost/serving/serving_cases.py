"""Random but legal serving problems for the property tests."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import engine_profiles
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import ServingCosts, serving_costs
from hp_tool.cost.serving.legality import legality
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.serving.problem import serving_case

MODELS = ("llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
GPUS = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb")


@dataclass(frozen=True, kw_only=True)
class Serving:
    case: ServingCase
    config: ServingConfig

    def costs(self, *, concurrency: list[int]) -> ServingCosts:
        """The configuration under each load."""
        rows = ServingCandidates.from_configs(
            [self.config] * len(concurrency), concurrency=concurrency
        )
        return serving_costs(case=self.case, candidates=rows)


def serving(**changes: Any) -> Serving:
    """One fixed setup, where nothing random is needed; keywords change its workload."""
    engine = next(profile for profile in engine_profiles() if profile.engine == "vllm")
    workload = replace(InferenceWorkload(input_length=1024, output_length=512), **changes)
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=2))
    case = serving_case(model=model("qwen3-32b"), cluster=machine, workload=workload, engine=engine)
    return Serving(case=case, config=ServingConfig(tensor_parallel_size=2))


@st.composite
def servings(draw: st.DrawFn) -> Serving:
    """Any model, GPU, engine, precision and load, on a configuration that is legal and fits."""
    shape = model(draw(st.sampled_from(MODELS)))
    t, p = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2, 4)))
    d = draw(st.sampled_from((1, 2, 4))) if shape.num_experts else 1
    e = (
        draw(st.sampled_from([k for k in (1, 2, 4, 8) if t * d % k == 0]))
        if shape.num_experts
        else 1
    )
    replicas = draw(st.sampled_from((1, 2)))
    machine = cluster(ClusterQuery(gpu=draw(st.sampled_from(GPUS)), num_gpus=t * p * d * replicas))
    workload = InferenceWorkload(
        input_length=draw(st.sampled_from((16, 512, 4096, 20_000))),
        output_length=draw(st.sampled_from((1, 2, 128, 2048))),
        precision=draw(st.sampled_from(("bf16", "fp8", "int8", "int4"))),
        kv_cache_precision=draw(st.sampled_from((None, "bf16", "fp8"))),
        prefix_cache_hit_rate=draw(st.sampled_from((0.0, 0.5))),
    )
    engine = draw(st.sampled_from(engine_profiles()))
    config = ServingConfig(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        expert_parallel_size=e,
        attention_data_parallel_size=d,
        data_parallel_size=d * replicas,
        max_num_seqs=draw(st.sampled_from((1, 8, 256))),
        max_num_batched_tokens=draw(st.sampled_from((512, 8192))),
    )
    setup = Serving(
        case=serving_case(model=shape, cluster=machine, workload=workload, engine=engine),
        config=config,
    )
    row = ServingCandidates.from_configs([config], concurrency=[1])
    legal = not legality(model=shape, num_gpus=machine.num_gpus, candidates=row, longest_request=1)[
        0
    ]
    if not legal or not setup.costs(concurrency=[1]).fits[0]:
        from hypothesis import assume

        assume(False)
    return setup


def columns(costs: ServingCosts) -> dict[str, np.ndarray]:
    """Every array of a result by name."""
    named = {
        f.name: getattr(costs, f.name) for f in fields(costs) if f.name not in ("parts", "bytes")
    }
    return named | {f"parts.{name}": value for name, value in costs.parts.items()}
