"""torchtitan: its own configuration classes read what was exported, and it comes back the same."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.tools import torchtitan
from tests.formats.cases import same_work, setup_of

LOAD = """
import sys, types
package = types.ModuleType("torchtitan")
package.__path__ = [sys.argv[1]]  # its __init__ wants a GPU compiler; the configuration does not
sys.modules["torchtitan"] = package
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims
for path in sys.argv[2:]:
    config = ConfigManager().parse_args([f"--job.config_file={path}"])
    split = config.parallelism
    dims = ParallelDims(
        dp_replicate=split.data_parallel_replicate_degree, dp_shard=split.data_parallel_shard_degree,
        cp=split.context_parallel_degree, tp=split.tensor_parallel_degree, pp=split.pipeline_parallel_degree,
        ep=split.expert_parallel_degree, etp=split.expert_tensor_parallel_degree, world_size=int(path.split(".")[-2]),
    )
    print("read", dims.world_size, dims.tp, config.training.local_batch_size, config.activation_checkpoint.mode)
"""  # noqa: E501
"""Each file as on as many processes as its name says."""


@st.composite
def queries(draw: st.DrawFn) -> dict[str, Any]:
    """Llama 3 8B, 32 layers, under FSDP and what torchtitan puts around it."""
    t, p, c = (
        draw(st.sampled_from((1, 2, 8))),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2))),
    )
    parallel: dict[str, Any] = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_parallel_size": draw(st.sampled_from((1, 2, 4))) if p > 1 else 1,
        "context_parallel_size": c,
        "micro_batch_size": draw(st.sampled_from((1, 2))),
        "sequence_parallel": t > 1,
        "recompute": draw(st.sampled_from(("none", "per_layer"))),
        "zero_stage": draw(st.sampled_from((2, 3))),
    }
    if c > 1:
        parallel["context_parallel_communication"] = draw(st.sampled_from(("p2p", "all_gather")))
    return {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 128},
        "training": {
            "sequence_length": 8192,
            "global_batch_size": 512,
            "framework": "torch-fsdp",
            "precision": draw(st.sampled_from(("bf16", "fp8"))),
        },
        "parallel": parallel,
    }


@given(queries())
def test_what_was_exported_comes_back_the_same(query: dict[str, Any]) -> None:
    setup = setup_of(query)
    again = read_query(
        torchtitan.toml_file(setup), num_gpus=128, overrides={"cluster.gpu": "h100-sxm-80gb"}
    )
    same_work(setup_of(again), setup)


@pytest.mark.components
def test_torchtitan_reads_it(tmp_path: Path) -> None:
    try:
        root = importlib.metadata.distribution("torchtitan").locate_file("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchtitan is not installed")
    query: dict[str, Any] = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {
            "sequence_length": 8192,
            "global_batch_size": 128,
            "framework": "torch-fsdp",
            "precision": "fp8",
        },
        "parallel": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 4,
            "virtual_pipeline_parallel_size": 2,
            "micro_batch_size": 1,
            "recompute": "per_layer",
            "zero_stage": 3,
        },
    }
    expected, paths = [], []
    for world in (8, 64, 1024):
        query["cluster"]["num_gpus"], query["training"]["global_batch_size"] = world, 2 * world
        paths.append(tmp_path / f"train.{world}.toml")
        paths[-1].write_text(torchtitan.toml_file(setup_of(query)), encoding="utf-8")
        expected.append(f"read {world} 2 16 full")
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(root), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line.startswith("read")] == expected


def test_context_parallelism_of_another_kind_is_refused() -> None:
    query: dict[str, Any] = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"sequence_length": 8192, "global_batch_size": 16, "framework": "torch-fsdp"},
        "parallel": {
            "context_parallel_size": 2,
            "context_parallel_communication": "a2a",
            "micro_batch_size": 1,
        },
    }
    with pytest.raises(UnsupportedError, match="a2a"):
        torchtitan.toml_file(setup_of(query))


def test_defaults_of_a_short_file() -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\nlocal_batch_size '
        "= 1\n"
    )
    query = read_query(
        text + '[activation_checkpoint]\nmode = "full"\n',
        num_gpus=8,
        overrides={"cluster.gpu": "h100-sxm-80gb"},
    )
    assert query["model"] == "llama-3-8b"
    assert query["training"]["global_batch_size"] == 8
    assert query["parallel"]["zero_stage"] == 3
    assert query["parallel"]["recompute"] == "per_layer"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[model]\nname = 'llama3'\nflavor = '9B'\n", UnsupportedError),
        ("[parallelism]\ntensor_parallel_degree = 'two'\n", InputError),
        (
            "[parallelism]\npipeline_parallel_schedule = 'Looped'\n[model]\nflavor = '8B'\n",
            UnsupportedError,
        ),
        ("[model\n", InputError),
    ],
)
def test_what_cannot_be_read_is_named(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_query(
            text, format="torchtitan", num_gpus=8, overrides={"cluster.gpu": "h100-sxm-80gb"}
        )
