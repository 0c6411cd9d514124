"""The cache that an engine has after it started, against what engines printed."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import kv_cache
from hp_tool.catalog import gpu
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.questions import schema, serving
from hp_tool.wording.words import assumption_sentences, cache_words

GIB = 1 << 30
EVIDENCE = Path(__file__).parents[2] / "evidence"


def estimated(
    model: Any, gpu: str, num_gpus: int = 1, *, layout: dict[str, int] | None = None, **load: Any
) -> InferenceEstimate:
    query = {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": gpu, "num_gpus": num_gpus},
        "inference": {"input_length": 4000, "output_length": 1000, "concurrency": 1, **load},
        "parallel": {"tensor_parallel_size": num_gpus, **(layout or {})},
    }
    return serving.estimate(query=schema.parse_query(query))


def test_vllm_reserves_what_its_profile_run_measured() -> None:
    """vLLM 0.11 on one H100 printed 51.38 GiB for Llama 3.1 8B, on two 34.49 for Qwen3-32B."""
    for model, gpus, printed in (("llama-3.1-8b", 1, 51.38), ("qwen3-32b", 2, 34.49)):
        found = estimated(
            model, "h100", gpus, engine="vllm", precision="bf16", memory_fraction=0.9
        ).kv_cache
        assert found is not None
        assert found.bytes_per_device == pytest.approx(printed * GIB, rel=0.01)


def test_the_cache_s_tokens_are_its_bytes_over_those_of_a_token() -> None:
    found = estimated("llama-3.1-8b", "h100", engine="vllm", precision="bf16")
    assert found.kv_cache is not None and found.memory is not None
    a_token = 2 * 32 * 8 * 128 * 2
    assert found.kv_cache.tokens.expected == int(found.kv_cache.bytes_per_device / a_token)
    assert found.kv_cache.requests == int(found.kv_cache.bytes_per_device / a_token / 5000)
    assert found.kv_cache.max_context == 131_072
    tokens = found.kv_cache.tokens
    assert 0 < tokens.low < tokens.expected < tokens.high
    parts = found.memory.parts_bytes
    assert sum(parts.values()) == pytest.approx(found.memory.total_bytes)


def test_a_cache_below_zero_is_infeasible() -> None:
    """vLLM loads GPT-OSS 120B in 64.4 to 66.0 GiB and has -2.14 GiB left at 0.9 of an H100."""
    found = estimated("gpt-oss-120b", "h100", engine="vllm", memory_fraction=0.9)
    assert not found.feasible and found.reasons[0].code == "memory"
    assert found.kv_cache is not None and found.kv_cache.tokens.expected == 0
    fewer = estimated(
        "gpt-oss-120b", "h100", engine="vllm", memory_fraction=0.9, layout={"max_num_seqs": 64}
    )
    assert fewer.feasible and fewer.memory is not None
    assert fewer.memory.logits_bytes == 0.0  # the activations of a pass are the higher peak


def test_sglang_takes_activations_from_outside_its_share() -> None:
    found = estimated(
        "qwen3-235b-a22b",
        "h100",
        4,
        engine="sglang",
        precision="fp8",
        kv_cache_precision="bf16",
        memory_fraction=0.93,
    )
    assert found.memory is not None and found.kv_cache is not None
    assert found.memory.capacity_bytes == pytest.approx(0.93 * gpu("h100").memory_bytes)
    assert found.kv_cache.tokens.expected == pytest.approx(367_404, rel=0.02)
    tight = estimated(
        "llama-3.1-8b", "h100", engine="sglang", precision="bf16", memory_fraction=0.999
    )
    assert tight.memory is not None and tight.memory.activations_bytes > 0.0


def test_default_limits_are_those_of_the_device() -> None:
    for model, name, sequences, tokens in (
        ("qwen3-0.6b", "rtx-4090", 256, 2048),
        ("qwen3-0.6b", "a100", 256, 2048),
        ("qwen3-0.6b", "h100", 1024, 8192),
        ("gemma-4-31b", "a100", 256, 2496),  # a video in one pass
        ("gemma-4-31b", "h100", 1024, 8192),
    ):
        found = estimated(model, name, engine="vllm", precision="fp8").parallel
        assert found is not None
        assert (found.max_num_seqs, found.max_num_batched_tokens) == (sequences, tokens)
    capacities = {
        name: estimated("qwen3-0.6b", name, engine="sglang", precision="bf16").memory
        for name in ("h100", "rtx-4090")
    }
    shares = {
        name: memory.capacity_bytes / gpu(name).memory_bytes
        for name, memory in capacities.items()
        if memory is not None
    }
    kept = {"h100": 512 + 1.5 * 8192 + 2 * 256 + 128, "rtx-4090": 512 + 1.5 * 2048 + 2 * 24 + 128}
    for name, mib in kept.items():
        assert shares[name] == pytest.approx(1 - mib * 2**20 / gpu(name).memory_bytes, abs=1e-3)


def test_sglang_runs_48_requests_by_default_when_it_drafts() -> None:
    """Groups of data-parallel attention divide them; a query may set another limit."""
    drafts = {"num_speculative_tokens": 3, "acceptance_rate": 0.7, "draft_cost_fraction": 0.05}
    groups = {"tensor_parallel_size": 1, "attention_data_parallel_size": 8}
    for layout, release, sequences in (
        ({}, "0.5.6", 48),
        (groups, "0.5.6", 6),
        ({"max_num_seqs": 200}, "0.5.6", 200),
        ({}, "0.4.3", 1024),
    ):
        found = estimated(
            "deepseek-v3",
            "h200",
            8,
            engine="sglang",
            engine_version=release,
            layout=layout,
            speculative=drafts,
        ).parallel
        assert found is not None and found.max_num_seqs == sequences


def test_a_checkpoint_with_wide_attention_keeps_it_wide() -> None:
    """vLLM loads 57.75 GiB of Meta's Llama 3.1 405B in fp8 on each of eight devices."""
    found = estimated("llama-3.1-405b", "h100", 8, engine="vllm", precision="fp8").memory
    assert found is not None and found.weights_bytes == pytest.approx(57.75 * GIB, rel=0.03)


def test_a_config_json_tells_that_attention_is_wide() -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    ignored = {**stored, "ignored_layers": [f"model.layers.{i}.self_attn" for i in range(36)]}
    weights = []
    for quantization in (stored, ignored):
        found = estimated(config | {"quantization_config": quantization}, "h100", engine="vllm")
        assert found.memory is not None
        weights.append(found.memory.weights_bytes)
    attention = 36 * 4096 * 128 * (2 * 32 + 2 * 8)
    assert weights[1] - weights[0] == pytest.approx(attention)


def test_layers_that_draft_take_weights_and_cache() -> None:
    plain = estimated("deepseek-v3", "h200", 8, engine="sglang")
    drafting = {"num_speculative_tokens": 1, "acceptance_rate": 0.8, "draft_cost_fraction": 0.05}
    drafted = estimated("deepseek-v3", "h200", 8, engine="sglang", speculative=drafting)
    assert plain.memory is not None and drafted.memory is not None
    assert drafted.memory.weights_bytes > 1.01 * plain.memory.weights_bytes
    assert plain.kv_cache is not None and drafted.kv_cache is not None
    assert drafted.kv_cache.tokens.expected < plain.kv_cache.tokens.expected


def test_an_assistant_takes_weights_and_reads_the_models_cache() -> None:
    drafting = {"num_speculative_tokens": 4, "acceptance_rate": 0.8, "draft_cost_fraction": 0.05}
    plain, drafted = (
        estimated("gemma-4-31b", "h100", 2, engine="vllm", **speculative)
        for speculative in ({}, {"speculative": drafting})
    )
    assert plain.memory is not None and drafted.memory is not None
    assert drafted.memory.weights_bytes - plain.memory.weights_bytes == pytest.approx(0.47e9)


@pytest.mark.parametrize(
    ("release", "reserved"), [("0.8.5", 1.79), ("0.9.1", 1.79), ("0.9.2", 0.13), ("0.21.0", 0.93)]
)
def test_releases_reserve_the_memory_that_they_count(release: str, reserved: float) -> None:
    found = estimated(
        "llama-3.1-8b", "h100", engine="vllm", engine_version=release, precision="bf16"
    ).memory
    assert found is not None
    assert found.overhead_bytes == pytest.approx(reserved * GIB, rel=0.01)


def drafted_by(
    name: str | None, *, model: str = "llama-3.1-8b", num_gpus: int = 1
) -> InferenceEstimate:
    drafts = {"num_speculative_tokens": 3, "acceptance_rate": 0.7, "draft_model": name}
    return estimated(model, "h200", num_gpus, engine="vllm", precision="bf16", speculative=drafts)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 0.85),  # its pytorch_model.bin
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", 0.50),  # its file without the embedding
    ],
)
def test_an_eagle_head_takes_its_weights_and_one_layer_of_cache(
    name: str, gigabytes: float
) -> None:
    plain, drafted = drafted_by(None), drafted_by(name)
    assert plain.memory is not None and drafted.memory is not None
    added = drafted.memory.weights_bytes - plain.memory.weights_bytes
    assert added == pytest.approx(gigabytes * 1e9, rel=0.03)
    assert plain.kv_cache is not None and drafted.kv_cache is not None
    per_token = drafted.kv_cache.bytes_per_device / drafted.kv_cache.tokens.expected
    assert per_token == pytest.approx(2 * 33 * 8 * 128 * 2, rel=1e-3)
    assert "drafter" not in drafted.provenance


def test_a_drafting_model_of_the_catalogue_takes_its_weights_and_cache() -> None:
    """Qwen3-0.6B: 28 layers of 8 KV heads of 128, 1.19 GB with its tied embedding."""
    for ranks in (1, 2):
        plain, drafted = (
            drafted_by(name, model="qwen3-32b", num_gpus=ranks)
            for name in (None, "Qwen/Qwen3-0.6B")
        )
        assert plain.memory is not None and drafted.memory is not None
        added = drafted.memory.weights_bytes - plain.memory.weights_bytes
        assert added == pytest.approx(1.19e9 / ranks, rel=0.02)
        assert drafted.kv_cache is not None
        per_token = drafted.kv_cache.bytes_per_device / drafted.kv_cache.tokens.expected
        assert per_token == pytest.approx(2 * (64 + 28) * 8 * 128 * 2 / ranks, rel=1e-3)


def test_a_drafter_of_unknown_size_is_named() -> None:
    plain, drafted = drafted_by(None), drafted_by("someone/dflash")
    assert drafted.memory == plain.memory
    assert "someone/dflash is not counted" in str(drafted.provenance["drafter"])
    assert f"{drafted.provenance['drafter']}." in assumption_sentences(drafted.provenance)


def test_a_drafter_forms_a_group_of_its_own_beside_windows() -> None:
    """vLLM's pages are shared: layers of a drafter take whole groups."""
    plain, drafted = (
        drafted_by(name, model="gemma-4-31b", num_gpus=2) for name in (None, "Qwen/Qwen3-0.6B")
    )
    assert plain.kv_cache is not None and drafted.kv_cache is not None
    assert drafted.kv_cache.tokens.expected < 0.9 * plain.kv_cache.tokens.expected


def test_a_terminal_says_it_in_words() -> None:
    found = estimated("llama-3.1-8b", "h100", engine="vllm", precision="bf16")
    assert found.kv_cache is not None
    tokens = found.kv_cache.tokens
    sentence = (
        f"KV cache: {tokens.expected:,} tokens per replica ({tokens.low:,}-{tokens.high:,}); "
        "longest request 131,072"
    )
    assert cache_words(found.kv_cache) == sentence


def test_most_caches_that_engines_printed_are_near() -> None:
    alike = kv_cache.by_title(EVIDENCE)["KV cache sizes that engines report"]
    assert len(alike) >= 11
    near = [row for row in alike if abs(row.error) <= 0.1]
    inside = [row for row in alike if row.low <= row.published <= row.high]  # type: ignore[operator]
    assert len(near) >= 0.75 * len(alike) and len(inside) >= 0.85 * len(alike)
