"""Commands of vLLM and SGLang as queries: what was exported comes back, and the engines' short
names are understood.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import assess, export, read_configuration, read_query
from hp_tool.questions import schema
from hp_tool.questions.serving.evaluate import estimate

LOAD = {
    "inference.input_length": 1000,
    "inference.output_length": 200,
    "inference.concurrency": 64,
    "cluster.gpu": "h200",
}


def served(engine: str, *, parallel: dict[str, int], **inference: Any) -> dict[str, Any]:
    """A mixture on 16 H200."""
    load = {
        "input_length": 1000,
        "output_length": 200,
        "concurrency": 64,
        "engine": engine,
        "kv_cache_precision": "fp8",
    }
    return {
        "kind": "inference",
        "model": "qwen3-30b-a3b",
        "cluster": {"gpu": "h200", "num_gpus": 16},
        "inference": load | inference,
        "parallel": parallel,
    }


@given(
    engine=st.sampled_from(("vllm", "sglang")),
    t=st.sampled_from((1, 2, 4)),
    d=st.sampled_from((1, 2, 4)),
    divided=st.booleans(),
    rounds=st.integers(0, 2),
    overlap=st.sampled_from((None, True)),
)
def test_an_exported_deployment_comes_back_the_same(
    engine: str, t: int, d: int, divided: bool, rounds: int, overlap: bool | None
) -> None:
    e = t * d if divided else 1
    parallel = {
        "tensor_parallel_size": t,
        "attention_data_parallel_size": d,
        "expert_parallel_size": e,
        "pipeline_parallel_size": 1,
        "redundant_experts": rounds * e if e > 1 else 0,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 4096,
    }
    query = served(
        engine, parallel=parallel, precision="fp8", two_batch_overlap=overlap, max_model_len=4096
    )
    again = schema.parse_query(
        read_query(export(result=query, format=engine), num_gpus=16, overrides=LOAD)
    )
    assert estimate(query=again) == estimate(query=schema.parse_query(query))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("draft", [None, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"])
def test_speculation_comes_back_with_what_the_load_decides(engine: str, draft: str | None) -> None:
    speculative = {"num_speculative_tokens": 3, "acceptance_rate": 0.7, "draft_model": draft}
    if draft is not None:
        speculative["draft_cost_fraction"] = 0.05
    parallel = {"tensor_parallel_size": 2, "max_num_seqs": 128, "max_num_batched_tokens": 4096}
    query = served(engine, parallel=parallel, speculative=speculative)
    text = export(result=query, format=engine)
    decided = {
        f"inference.speculative.{name}": value
        for name, value in speculative.items()
        if name in ("acceptance_rate", "draft_cost_fraction")
    }
    found = read_query(text, num_gpus=16, overrides=LOAD | decided)
    again, before = (estimate(query=schema.parse_query(each)) for each in (found, query))
    assert (again.ttft_s, again.tpot_s, again.memory) == (
        before.ttft_s,
        before.tpot_s,
        before.memory,
    )
    with pytest.raises(InputError, match="acceptance_rate"):
        read_query(text, num_gpus=16, overrides=LOAD)


def test_trees_of_drafts_and_strange_keys_of_speculation_are_refused() -> None:
    base = "python -m sglang.launch_server --model-path qwen3-32b --speculative-algorithm EAGLE"
    with pytest.raises(UnsupportedError, match="trees of drafts"):
        read_query(f"{base} --speculative-num-steps 3 --speculative-eagle-topk 4", overrides=LOAD)
    dotted = "vllm serve qwen3-32b --speculative-config.method mtp --speculative-config.strange 1"
    with pytest.raises(UnsupportedError, match=r"speculative-config\.strange"):
        read_query(dotted, overrides=LOAD)


def test_a_beginning_of_an_option_is_taken_for_it() -> None:
    found = read_query("vllm serve qwen3-32b --tensor-parallel 4", overrides=LOAD)
    assert found["parallel"] == {"tensor_parallel_size": 4}


def test_short_names_and_the_devices_of_one_replica() -> None:
    text = (
        "vllm serve deepseek-ai/DeepSeek-V3 -tp 1 --data_parallel_size=16 "
        "--enable-expert-parallel --port 8000"
    )
    found = read_query(text, overrides=LOAD)
    assert found["model"] == "deepseek-ai/DeepSeek-V3" and found["cluster"]["num_gpus"] == 16
    assert found["parallel"] == {
        "tensor_parallel_size": 1,
        "attention_data_parallel_size": 16,
        "expert_parallel_size": 16,
    }
    text = (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dp 16 "
        "--enable-dp-attention --ep 16 "
        "--enable-eplb --ep-num-redundant-experts 16 --enable-two-batch-overlap "
        "--max-running-requests 2048"
    )
    found = read_query(text, overrides=LOAD)
    assert found["parallel"] == {
        "tensor_parallel_size": 1,
        "attention_data_parallel_size": 16,
        "expert_parallel_size": 16,
        "redundant_experts": 16,
        "max_num_seqs": 128,
    }
    assert found["inference"]["two_batch_overlap"] is True


def test_replicas_of_a_dense_model_are_no_attention_groups() -> None:
    found = read_query("vllm serve meta-llama/Llama-3.1-8B -tp 2 -dp 4", overrides=LOAD)
    assert found["cluster"]["num_gpus"] == 8 and found["parallel"] == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8"),
        ("/m/Qwen3-32B-AWQ/", "int4"),
        ("nvidia/Qwen3-32B-NVFP4", "nvfp4"),
        ("qwen3-32b", None),
    ],
)
def test_a_quantised_checkpoint_is_known_by_its_name(name: str, precision: str | None) -> None:
    found = read_query(f"vllm serve {name} -tp 2", overrides=LOAD | {"model": "qwen3-32b"})
    assert found["inference"].get("precision") == precision


def test_a_model_that_nobody_knows_is_asked_for_with_the_rest() -> None:
    with pytest.raises(InputError, match=r"--gpu .* --model qwen3-32b, or"):
        read_query(
            "vllm serve Qwen/Qwen3-32B-MoE",
            overrides={k: v for k, v in LOAD.items() if k != "cluster.gpu"},
        )


def test_what_is_not_modelled_or_not_said_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as unknown:
        read_query("vllm serve qwen3-32b --enforce-eager", overrides=LOAD)
    assert unknown.value.field == "--enforce-eager"
    with pytest.raises(InputError) as missing:
        read_query("vllm serve qwen3-32b -tp 2", overrides={"cluster.gpu": "h200"})
    assert missing.value.field == "inference.input_length"
    with pytest.raises(InputError) as unreadable:
        read_query("vllm serve qwen3-30b-a3b --eplb-config nothing", overrides=LOAD)
    assert unreadable.value.field == "--eplb-config"


def test_a_deployment_is_assessed_beside_the_best_one() -> None:
    slow = read_query("vllm serve qwen3-30b-a3b -tp 8", overrides=LOAD)
    found = assess(schema.parse_query(slow))
    assert (
        found.estimate.feasible and found.better is not None and (found.gain_fraction or 0.0) > 0.0
    )
    best = slow | {"parallel": schema.to_dict(found.better.parallel)}
    assert assess(schema.parse_query(best)).better is None


@pytest.mark.parametrize(
    ("parallel", "inference"),
    [
        ({"tensor_parallel_size": 4, "expert_parallel_size": 4}, {"kv_cache_precision": "fp8"}),
        (
            {
                "attention_data_parallel_size": 8,
                "expert_parallel_size": 8,
                "redundant_experts": 16,
            },
            {"memory_fraction": 0.8},
        ),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
    ],
)
def test_tensorrt_llms_server_comes_back_with_its_options_file(
    parallel: dict[str, int], inference: dict[str, Any]
) -> None:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    query = served("trtllm", parallel=parallel | limits, precision="fp8")
    del query["inference"]["kv_cache_precision"]
    query["inference"] |= inference
    found = read_query(export(result=query, format="trtllm"), num_gpus=16, overrides=LOAD)
    again, before = (estimate(query=schema.parse_query(each)) for each in (found, query))
    assert (again.ttft_s, again.tpot_s, again.memory) == (
        before.ttft_s,
        before.tpot_s,
        before.memory,
    )


def test_what_tensorrt_llms_options_say_beyond_is_refused_by_name() -> None:
    script = "cat > extra.yml <<'E'\nspeculative_config: {decoding_type: MTP}\nE\n"
    command = "trtllm-serve nvidia/Qwen3-32B-NVFP4 --tp_size 2 --extra_llm_api_options extra.yml"
    with pytest.raises(UnsupportedError, match=r"speculative_config\.decoding_type"):
        read_query(script + command, overrides=LOAD)
    with pytest.raises(
        UnsupportedError, match=r"--extra_llm_api_options extra\.yml: file not found"
    ):
        read_query(command, overrides=LOAD)


@pytest.mark.parametrize(
    "script",
    [
        "export VLLM_PP_LAYER_PARTITION=10,12\nvllm serve qwen3-32b -pp 2",
        "VLLM_PP_LAYER_PARTITION=10,12 vllm serve qwen3-32b -pp 2",
        "env VLLM_PP_LAYER_PARTITION=10,12 vllm serve qwen3-32b -pp 2",
        "docker run -e VLLM_PP_LAYER_PARTITION=10,12 image vllm serve qwen3-32b -pp 2",
    ],
)
def test_variables_of_a_script_are_read(script: str) -> None:
    with pytest.raises(UnsupportedError, match="VLLM_PP_LAYER_PARTITION"):
        read_query(script, num_gpus=2, overrides=LOAD)


def test_variables_that_a_script_does_not_export_are_not_read() -> None:
    assigned = "VLLM_PP_LAYER_PARTITION=10,12\nvllm serve qwen3-32b -pp 2"
    other = "VLLM_PP_LAYER_PARTITION=10,12 ls\nvllm serve qwen3-32b -pp 2"
    for script in (assigned, other):
        found = read_query(script, num_gpus=2, overrides=LOAD)
        assert found["parallel"]["pipeline_parallel_size"] == 2


@pytest.mark.parametrize(
    ("override", "is_read"),
    [
        ('{"num_nextn_predict_layers": 1}', True),
        ('{"text_config": {"rope_parameters": {"factor": 4.0}}}', True),
        ('{"num_hidden_layers": 2}', False),
        ("{}", False),
    ],
)
def test_overrides_of_the_models_file_are_read_if_harmless(override: str, is_read: bool) -> None:
    command = f"vllm serve Qwen/Qwen3-32B --hf-overrides '{override}'"
    given = {
        "cluster.gpu": "h100-sxm-80gb",
        "inference.input_length": 1000,
        "inference.output_length": 100,
    }
    if is_read:
        reading = read_configuration(command, num_gpus=1, overrides=given)
        assert [each.flag for each in reading.ignored] == ["--hf-overrides"]
    else:
        with pytest.raises(UnsupportedError, match="--hf-overrides"):
            read_configuration(command, num_gpus=1, overrides=given)
