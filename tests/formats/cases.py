"""Training setups that formats are tried on: drawn at random, and a few with names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hp_tool.domain.graphs import recorded_modules
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.setups import TrainingSetup
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.questions import schema
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.setup import training_setup


def setup_of(query: dict[str, Any]) -> TrainingSetup:
    """The setup of the one configuration that a query describes."""
    parsed = schema.parse_query(query)
    problem = resolve_training(parsed)
    return training_setup(
        problem, resolve_config(parsed.parallel, num_gpus=problem.cluster.num_gpus)
    )


def llama(**parallel: Any) -> dict[str, Any]:
    """Llama 3 70B on 64 H100."""
    return {
        "kind": "training",
        "model": "llama-3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 8192, "global_batch_size": 128},
        "parallel": {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "micro_batch_size": 1}
        | parallel,
    }


_SIZES = st.sampled_from((1, 2, 4))


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Shapes of dense and mixture-of-experts decoders, with everything said."""
    heads = draw(st.sampled_from((8, 16, 24)))
    gpt = draw(st.booleans())
    bias = draw(st.sampled_from(((True, True), (False, False), (True, False))))
    model: dict[str, Any] = {
        "num_hidden_layers": draw(st.sampled_from((8, 16, 24))),
        "hidden_size": heads * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from((4, 8, heads))),
        "head_dim": draw(st.sampled_from((64, 128))),
        "intermediate_size": draw(st.sampled_from((2048, 4096, 11264))),
        "vocab_size": draw(st.sampled_from((32000, 51200, 128256))),
        "tie_word_embeddings": draw(st.booleans()),
        "gated_mlp": draw(st.booleans()),
        "normalization": "layernorm" if gpt else "rmsnorm",
        "position_embedding": "learned" if gpt else "rotary",
        "attention_bias": bias[0],
        "mlp_bias": bias[1],
        "query_key_norm": draw(st.sampled_from((None, "head"))),
    }
    if draw(st.booleans()):
        model |= {
            "num_experts": 8,
            "num_experts_per_tok": draw(st.sampled_from((1, 2))),
            "moe_intermediate_size": draw(st.sampled_from((1024, 2048))),
            "num_shared_experts": draw(st.sampled_from((0, 1, 2))),
            "first_k_dense_replace": draw(st.sampled_from((0, 1))),
        }
        if model["num_shared_experts"] == 1 and draw(st.booleans()):
            model["shared_expert_intermediate_size"] = 1536
    if draw(st.booleans()):
        model |= {
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": draw(st.sampled_from((None, 1536))),
            # the latents' norms, which are always there, have the only flag
            "query_key_norm": None,
        }
    return {name: value for name, value in model.items() if value is not None}


@st.composite
def queries(draw: st.DrawFn) -> dict[str, Any]:
    """Legal training queries of one configuration each, for Megatron Core."""
    model = draw(models())
    t, p, c = draw(_SIZES), draw(_SIZES), draw(st.sampled_from((1, 2)))
    d = draw(_SIZES)
    recompute: list[Any] = [
        "none",
        "selective",
        "full",
        {"granularity": "full", "method": "block", "num_layers": 1},
    ]
    parallel: dict[str, Any] = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_parallel_size": 2 if p > 1 and draw(st.booleans()) else 1,
        "context_parallel_size": c,
        "micro_batch_size": draw(st.sampled_from((1, 2))),
        "sequence_parallel": t > 1 and draw(st.booleans()),
        "recompute": draw(st.sampled_from(recompute)),
        "zero_stage": draw(st.sampled_from((0, 1, 2, 3) if p == 1 else (0, 1))),
    }
    if c > 1:
        parallel["context_parallel_communication"] = draw(
            st.sampled_from(("p2p", "all_gather", "a2a"))
        )
    if model.get("num_experts"):
        parallel["expert_parallel_size"] = draw(
            st.sampled_from([e for e in (1, 2, 4) if t * c * d % e == 0])
        )
        parallel["expert_tensor_parallel_size"] = 1
        parallel["moe_token_dispatcher_type"] = draw(
            st.sampled_from(("alltoall", "flex", "allgather"))
        )
    training: dict[str, Any] = {
        "sequence_length": 4096,
        "global_batch_size": 64,
        "precision": draw(st.sampled_from(("bf16", "fp16", "fp8"))),
        "attention": draw(st.sampled_from(("flash", "unfused"))),
        "dropout": draw(st.sampled_from((0.0, 0.1))),
        "cross_entropy": draw(st.sampled_from(("fused", "unfused", "in_place"))),
    }
    if training["precision"] == "fp8":
        training |= {"fp8_recipe": draw(st.sampled_from((None, "tensorwise", "blockwise")))}
        training |= {"parameter_precision": draw(st.sampled_from((None, "fp8")))}
    if draw(st.booleans()):
        training["cuda_graphs"] = True
        of_experts = (["attn", "moe_router", "moe_preprocess"],) if model.get("num_experts") else ()
        modules = draw(st.sampled_from((None, ["attn"], *of_experts)))
        training |= {"cuda_graph_modules": modules} if modules else {}
    if draw(st.booleans()):
        training |= {
            "optimizer_precision": "bf16",
            "exp_avg_sq_precision": draw(st.sampled_from(("fp32", "fp8"))),
        }
    hidden = {name: False for name in ("pipeline_parallel", "data_parallel") if draw(st.booleans())}
    if parallel["sequence_parallel"] and draw(st.booleans()):
        hidden["tensor_parallel"] = False
    if hidden:
        training["overlap"] = hidden
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": t * p * c * d},
        "training": training,
        "parallel": parallel,
    }


def same_work(one: TrainingSetup, other: TrainingSetup) -> None:
    """Assert that two setups are the same but for what their models are called and read derived
    sizes as.
    """
    assert _config(one.parallel) == _config(other.parallel)
    assert _recorded(one) == _recorded(other)
    assert one.strategy == other.strategy
    for name in (
        "kv_heads",
        "head_size",
        "ffn_size",
        "positions",
        "has_attention_bias",
        "has_mlp_bias",
    ):
        assert getattr(one.model, name) == getattr(other.model, name)
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "num_experts",
        "num_experts_per_tok",
        "num_shared_experts",
        "shared_expert_size",
        "query_key_norm",
        "first_k_dense_replace",
        "tie_word_embeddings",
        "gated_mlp",
        "normalization",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_nextn_predict_layers",
    ):
        assert getattr(one.model, name) == getattr(other.model, name), name


def _recorded(setup: TrainingSetup) -> TrainingWorkload:
    """Return the workload with the values that a script always sets: recorded modules, precisions,
    the fp8 recipe, offload and the overlap of experts' tokens.
    """
    w = setup.workload
    overlap = w.overlap or OverlapSpec()
    if setup.model.num_experts:
        overlap = replace(overlap, expert_parallel=bool(overlap.expert_parallel))
    eight_bit = w.precision in ("fp8", "mxfp8", "nvfp4")
    return replace(
        w,
        cuda_graph_modules=recorded_modules(w, setup.model),
        cuda_graphs=bool(w.cuda_graphs),
        gradient_precision=w.gradient_precision or "fp32",
        optimizer_precision=w.optimizer_precision or "fp32",
        offload=w.offload or "none",
        fp8_recipe=w.fp8_recipe or ("delayed" if w.precision == "fp8" else None),
        parameter_precision=w.parameter_precision or ("bf16" if eight_bit else None),
        overlap=overlap,
    )


def _config(config: ParallelConfig) -> Any:
    """Without what flags always name, and the strategy has."""
    return schema.to_dict(
        replace(config, moe_token_dispatcher_type=None, context_parallel_communication=None)
    )
