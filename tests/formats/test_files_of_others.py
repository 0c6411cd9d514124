"""DeepSpeed, Accelerate and Megatron Bridge: their own readers take what was exported; serving
engines' commands.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import export, read_query
from hp_tool.formats.tools import accelerate, deepspeed
from hp_tool.formats.tools.nemo import write as megatron_bridge
from hp_tool.questions import schema
from tests.formats.cases import llama, same_work, setup_of

DEEPSPEED = """
import json, sys
from deepspeed.runtime import config
config.dist.get_rank = lambda: 0
for path in sys.argv[1:]:
    config.dist.get_world_size = lambda: int(path.split(".")[-2])
    read = config.DeepSpeedConfig(json.load(open(path)))
    print("read", read.zero_optimization_stage, read.world_size, read.train_batch_size, read.bfloat16_config.enabled)
"""  # noqa: E501
"""Each file as on as many processes as its name says: batch, micro-batches and accumulation have to
agree.
"""
WORLDS = (8, 64, 1024)


def fsdp(**parallel: Any) -> dict[str, Any]:
    """Llama 3 8B fully sharded over 16 H100."""
    return {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"sequence_length": 4096, "global_batch_size": 64, "framework": "torch-fsdp"},
        "parallel": {"micro_batch_size": 1, "zero_stage": 3, "recompute": "per_layer"} | parallel,
    }


@given(
    zero=st.sampled_from((0, 1, 2, 3)),
    micro=st.sampled_from((1, 2, 4)),
    precision=st.sampled_from(("bf16", "fp16")),
    recompute=st.sampled_from(("none", "full")),
)
def test_deepspeed_comes_back_the_same(
    zero: int, micro: int, precision: str, recompute: str
) -> None:
    query = llama(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        micro_batch_size=micro,
        zero_stage=zero,
        recompute=recompute,
    )
    query["training"] |= {"framework": "deepspeed", "precision": precision}
    query["training"]["global_batch_size"] = 256
    setup = setup_of(query)
    said = {
        "cluster.gpu": "h100-sxm-80gb",
        "model": "llama-3-70b",
        "training.sequence_length": 8192,
    }
    same_work(setup_of(read_query(deepspeed.text(setup), num_gpus=64, overrides=said)), setup)


@pytest.mark.long
def test_deepspeed_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    expected, paths = [], []
    for zero, (world, micro) in itertools.product(
        (0, 1, 2, 3), zip(WORLDS, (1, 4, 2), strict=True)
    ):
        query = llama(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            zero_stage=zero,
            micro_batch_size=micro,
        )
        query["cluster"]["num_gpus"], query["training"]["global_batch_size"] = world, 4096
        paths.append(tmp_path / f"ds{zero}.{world}.json")
        paths[-1].write_text(deepspeed.text(setup_of(query)), encoding="utf-8")
        expected.append(f"read {zero} {world} 4096 True")
    ran = subprocess.run(
        [sys.executable, "-c", DEEPSPEED, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.startswith("read")] == expected


@pytest.mark.components
def test_accelerate_reads_it(tmp_path: Path) -> None:
    config_args = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    path = tmp_path / "fsdp.yaml"
    layouts = (
        {},
        {"data_parallel_shard_size": 8},
        {"tensor_parallel_size": 2, "sequence_parallel": False},
        {"context_parallel_size": 2},
    )
    for world, layout in itertools.product((16, 64, 1024), layouts):
        query = fsdp(**layout)
        query["cluster"]["num_gpus"], query["training"]["global_batch_size"] = world, 1024
        path.write_text(accelerate.text(setup_of(query)), encoding="utf-8")
        config = config_args.ClusterConfig.from_yaml_file(str(path))
        assert (
            config.num_processes == world
            and config.fsdp_config["fsdp_reshard_after_forward"] is True
        )
        sizes = {
            name.removeprefix("parallelism_config_"): size
            for name, size in config.parallelism_config.items()
        }
        assert ("cp_comm_strategy" in sizes) == (sizes["cp_size"] > 1)
        TorchContextParallelConfig(cp_comm_strategy=sizes.pop("cp_comm_strategy", None))
        assert ParallelismConfig(**sizes).total_size == world


def test_bridge_overrides() -> None:
    text = megatron_bridge.text(setup_of(llama(recompute="full", virtual_pipeline_parallel_size=5)))
    for line in (
        "model.virtual_pipeline_model_parallel_size=5",
        "model.recompute_method=uniform",
        "train.micro_batch_size=1",
    ):
        assert f"\n{line}\n" in text


@pytest.mark.parametrize("format", ["deepspeed", "accelerate", "torchtitan"])
def test_what_a_tool_cannot_say_is_refused(format: str) -> None:
    with pytest.raises(UnsupportedError):
        export(result=llama(), format=format)


SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "precision": "fp8",
        "engine": "vllm",
    },
    "parallel": {"tensor_parallel_size": 4},
}


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (
            "vllm",
            (
                "vllm serve Qwen/Qwen3-32B-FP8",
                "--tensor-parallel-size 4",
                "--gpu-memory-utilization 0.9",
            ),
        ),
        (
            "sglang",
            (
                "--model-path Qwen/Qwen3-32B-FP8",
                "--tp-size 4",
                "--context-length 6144",
                "--mem-fraction-static",
            ),
        ),
        ("trtllm", ("trtllm-serve Qwen/Qwen3-32B-FP8", "--tp_size 4", "--max_seq_len 6144")),
    ],
)
def test_serving_commands(engine: str, options: tuple[str, ...]) -> None:
    text = export(result=SERVING, format=engine)
    for option in options:
        assert option in text
    assert "kv-cache" not in text


def test_tensorrt_llm_reads_from_a_file_what_its_command_has_no_option_for(tmp_path: Path) -> None:
    """The script is run with a command of that name in its path: it finds a file that says what the
    estimate assumed.
    """
    experts = SERVING | {
        "model": "qwen3-30b-a3b",
        "parallel": {"attention_data_parallel_size": 8, "expert_parallel_size": 8},
    }
    experts["inference"] = {**SERVING["inference"], "engine": "trtllm", "kv_cache_precision": "fp8"}
    (tmp_path / "trtllm-serve").write_text(
        '#!/bin/sh\nwhile [ "$1" != --extra_llm_api_options ]; do shift; done\ncat "$2"\n'
    )
    (tmp_path / "trtllm-serve").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", export(result=experts, format="trtllm")],
        env=path,
        capture_output=True,
        check=True,
    )
    assert yaml.safe_load(done.stdout) == {
        "enable_attention_dp": True,
        "kv_cache_config": {"dtype": "fp8"},
    }
    both = experts | {"parallel": {"tensor_parallel_size": 2, "attention_data_parallel_size": 4}}
    with pytest.raises(UnsupportedError, match="all ranks or on none") as refused:
        export(result=both, format="trtllm")
    assert refused.value.field == "parallel.attention_data_parallel_size"


def test_a_draft_model_is_not_dropped_silently() -> None:
    spec = {"num_speculative_tokens": 2, "acceptance_rate": 0.5}
    speculating = SERVING | {"inference": SERVING["inference"] | {"speculative": spec}}
    with pytest.raises(UnsupportedError, match="speculative"):
        read_query(
            export(result=speculating, format="vllm"), overrides={"cluster.gpu": "h200-sxm-141gb"}
        )


def test_formats_answer_the_right_kind() -> None:
    with pytest.raises(InputError, match="trains"):
        export(result=SERVING, format="slurm")
    with pytest.raises(InputError, match="serves"):
        export(result=llama(), format="vllm")
    with pytest.raises(InputError, match="no format is named word"):
        export(result=llama(), format="word")


def test_a_result_without_its_query_says_so() -> None:
    with pytest.raises(InputError, match="does not contain its query"):
        export(result={"recommendations": []}, format="slurm")


def test_a_model_that_nobody_published_is_asked_for_and_its_name_starts_nothing(
    tmp_path: Path,
) -> None:
    query = json.loads(json.dumps(SERVING))
    query["model"] = schema.to_dict(setup_of(llama()).model) | {"name": "x;\ntouch /tmp/never #"}
    script = export(result=query, format="vllm")
    assert not any(line.startswith("touch") for line in script.splitlines())
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "$2"\n')
    (tmp_path / "vllm").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    refused = subprocess.run(
        ["bash", "-c", script], env=path, capture_output=True, check=False, text=True
    )
    assert refused.returncode != 0 and "set MODEL" in refused.stderr
    done = subprocess.run(
        ["bash", "-c", script],
        env=path | {"MODEL": "my model"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == "my model\n"


def test_a_hostile_model_name_stays_in_its_comment() -> None:
    query = llama()
    query["model"] = schema.to_dict(setup_of(llama()).model) | {"name": "x\n$(touch /tmp/never)"}
    for format in ("megatron-lm", "slurm", "nemo"):
        lines = export(result=query, format=format).splitlines()
        assert all(line.startswith("#") for line in lines if "never" in line)


@pytest.mark.parametrize("framework", ["deepspeed", "llama-factory", "openrlhf"])
def test_deepspeeds_file_is_written_for_what_runs_deepspeed(framework: str) -> None:
    query = llama(tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=3)
    with pytest.raises(UnsupportedError, match=r"training\.framework: deepspeed"):
        deepspeed.text(setup_of(query))
    query["training"]["framework"] = framework
    assert deepspeed.text(setup_of(query))
