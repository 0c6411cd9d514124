"""Megatron-LM's arguments in the releases that bring its parser: each is read, and it takes those
that are written.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.reading import table
from hp_tool.formats.registry import get_format
from hp_tool.formats.tools.megatron_lm import torchrun_script
from tests.formats.cases import setup_of
from tests.formats.test_megatron_validation import parsed, queries

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("megatron_arguments.json").read_text()
)
RELEASES = [each.rpartition(" ")[2] for each in RECORDED["source"]]
TYPES = {"int": int, "float": float}
CASES = (
    ("llama-3-70b", "h100-sxm-80gb"),
    ("gpt3-13b", "a100-sxm-80gb"),
    ("qwen3-30b-a3b", "b200-sxm-180gb"),
    ("deepseek-v3", "h100-sxm-80gb"),
    ("mixtral-8x7b", "h100-sxm-80gb"),
    ("llama-3-8b", "b200-sxm-180gb"),
)
RARE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"optimizer": "muon", "framework_version": "0.19.2"}, {}),
    ({"optimizer": "muon", "overlap": {"data_parallel": False}}, {"zero_stage": 0}),
    ({"optimizer": "sgd"}, {}),
    ({"precision": "nvfp4"}, {}),
    ({"precision": "mxfp8"}, {}),
    ({"precision": "fp8", "fp8_recipe": "blockwise"}, {}),
    ({"cuda_graphs": True}, {}),
    ({"cuda_graphs": True, "cuda_graph_modules": ["attn"]}, {}),
    (
        {"optimizer_precision": "bf16", "exp_avg_sq_precision": "fp8", "master_precision": "fp16"},
        {},
    ),
    ({"offload": "optimizer", "offload_fraction": 0.5}, {}),
    (
        {"offload": "activations", "offload_fraction": 0.5},
        {"recompute": "none", "pipeline_parallel_size": 1},
    ),
    ({"cross_entropy": "fused"}, {}),
    ({"overlap": {"data_parallel": False, "tensor_parallel": False}}, {}),
    ({}, {"zero_stage": 3}),
    ({}, {"recompute": {"granularity": "selective", "modules": ["layernorm", "mlp"]}}),
    ({}, {"recompute": {"granularity": "full", "method": "block", "num_layers": 3}}),
    ({}, {"pipeline_parallel_size": 2, "pipeline_layout": "Et*15|t*17L"}),
)


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


@cache
def parser(release: str) -> Strict:
    made = Strict(add_help=False, allow_abbrev=False)
    for name, forms in RECORDED["arguments"].items():
        form = next((each["form"] for each in forms if release in each["releases"]), None)
        if form is None:
            continue
        if form["words"] == 0:
            made.add_argument(f"--{name}", action="store_true")
        else:
            kind = TYPES.get(form["type"], str)
            words = {} if form["words"] == 1 else {"nargs": form["words"]}
            made.add_argument(
                f"--{name}",
                type=kind,
                choices=[kind(each) for each in form["choices"]] or None,
                **words,
            )
    return made


def commands() -> list[str]:
    made = []
    rare = [
        {
            "kind": "training",
            "model": "llama-3-8b",
            "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 32},
            "training": {"sequence_length": 8192, "global_batch_size": 128, **training},
            "parallel": {"micro_batch_size": 1, **parallel},
        }
        for training, parallel in RARE
    ]
    for query in [*(each for case in CASES for each in queries(*case)[::5]), *rare]:
        try:
            made.append(torchrun_script(setup_of(query)))
        except InputError:  # what is illegal, or has no flag, is refused by name
            continue
    return made


@pytest.mark.parametrize("release", RELEASES)
def test_the_loops_own_parser_takes_what_is_written(release: str) -> None:
    written = commands()
    assert len(written) > 40
    for script in written:
        words, _ = parsed(script)
        parser(release).parse_args(
            [word for name, values in words.items() for word in (f"--{name}", *values)]
        )


def test_the_parser_refuses_what_the_release_does() -> None:
    with pytest.raises(AssertionError, match="unrecognized"):
        parser("0.19.2").parse_args(["--num-key-value-heads", "8"])
    with pytest.raises(AssertionError, match="invalid choice"):
        parser("0.17.1").parse_args(["--cuda-graph-impl", "full_iteration"])


def test_every_argument_has_its_line() -> None:
    arguments = table("megatron")
    assert [name for name in RECORDED["arguments"] if name.replace("_", "-") not in arguments] == []


GRAPHS = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --swiglu"
    " --ffn-hidden-size 11008 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size "
    "1 --global-batch-size 8"
    " --bf16 --vocab-size 32000 --tokenizer-type NullTokenizer"
)


@pytest.mark.parametrize(
    ("older", "newer", "modules"),
    [
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration",
            "--cuda-graph-impl full_iteration",
            None,
        ),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn",
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn",
            ["attn"],
        ),
    ],
)
def test_graphs_are_read_in_the_words_of_0_18(
    older: str, newer: str, modules: list[str] | None
) -> None:
    for options in (older, newer):
        training = read_query(f"{GRAPHS} {options}", overrides={"cluster.gpu": "h100-sxm-80gb"})[
            "training"
        ]
        assert (training["cuda_graphs"], training.get("cuda_graph_modules")) == (True, modules)


@pytest.mark.parametrize("format", ["megatron-lm", "nemo"])
def test_an_offload_that_megatron_core_would_refuse_is_not_written(format: str) -> None:
    def written(fraction: float | None, **parallel: Any) -> str:
        training = {
            "sequence_length": 4096,
            "global_batch_size": 8,
            "offload": "activations",
            "offload_fraction": fraction,
        }
        split = {"micro_batch_size": 1, "recompute": "none", **parallel}
        query = {
            "kind": "training",
            "model": "llama-3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
            "training": training,
            "parallel": split,
        }
        text = get_format(format).write
        assert text is not None
        return text(setup_of(query))

    assert "31" in next(
        line
        for line in written(31 / 32).splitlines()
        if "num-layers 31" in line or "num_layers=31" in line
    )
    for fraction, parallel in (
        (None, {}),
        (0.5, {"pipeline_parallel_size": 2}),
        (0.5, {"recompute": "selective"}),
    ):
        with pytest.raises(UnsupportedError, match=r"Megatron Core (cannot|does not) offload"):
            written(fraction, **parallel)
