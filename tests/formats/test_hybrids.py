"""Models whose layers differ, in Megatron-LM's letters: what is written is read again and takes the
same, and what a release lacks is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.catalog import models
from hp_tool.errors import UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.exchange.export import write_configuration
from hp_tool.formats.reading import ImportRefusedError
from hp_tool.formats.tools import megatron_lm
from hp_tool.formats.tools.megatron_lm.hybrid import pattern_of_fractions
from hp_tool.questions import schema, training
from hp_tool.questions.configuration import Configuration
from tests.formats.cases import setup_of
from tests.formats.test_megatron_arguments import RELEASES, parser

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
ENDS, STAIRS = "E(t*14|)*3t*10L", "Et*14|t*13|t*15|t*10L"

SCATTERED = {
    **schema.to_dict(models.model("qwen3-30b-a3b")),
    "blocks": [{"feed_forward": "dense"}, {}],
}


def query(
    model: Any = "nemotron-3-nano-30b-a3b",
    *,
    version: str | None = None,
    gpus: int = 64,
    **parallel: Any,
) -> dict[str, Any]:
    usual = {
        "tensor_parallel_size": 2,
        "micro_batch_size": 1,
        "sequence_parallel": True,
        "zero_stage": 1,
    }
    work = {
        "sequence_length": 4096,
        "global_batch_size": 128,
        "framework": "megatron-core",
        "precision": "bf16",
    }
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": gpus},
        "training": work | ({"framework_version": version} if version else {}),
        "parallel": usual | parallel,
    }


def figures(mapping: dict[str, Any]) -> tuple[float, float]:
    estimate = training.estimate(query=schema.parse_query(mapping), with_fixes=False)
    assert estimate.memory is not None and estimate.time is not None, estimate.reasons
    return estimate.time.step_s, estimate.memory.total_bytes


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (query(expert_parallel_size=8), f"hybrid-override-pattern {NANO}"),
        (
            query(expert_parallel_size=4, pipeline_parallel_size=4),
            f"hybrid-override-pattern {NANO}",
        ),
        (
            query(pipeline_parallel_size=4, expert_parallel_size=4, pipeline_layout=ENDS),
            "decoder-last-pipeline-num-layers 10",
        ),
        (
            query(
                pipeline_parallel_size=4,
                expert_parallel_size=4,
                pipeline_layout=ENDS,
                version="0.17.1",
            ),
            f"{NANO[28:42]}|{NANO[42:]}",
        ),
        (
            query(expert_parallel_size=4, pipeline_parallel_size=4, version="0.17.1"),
            f"|{NANO[13:26]}|",
        ),
        (
            query(
                "nemotron-3-super-120b-a12b",
                gpus=256,
                tensor_parallel_size=8,
                expert_parallel_size=32,
                version="0.18.2",
            ),
            "/*E",
        ),
        (query("qwen3.6-27b", version="0.17.1"), "linear-attention-freq ([1]*3+[0]*1)*16"),
        (
            query(
                "qwen3.6-35b-a3b",
                version="0.19.2",
                expert_parallel_size=8,
                pipeline_parallel_size=4,
                pipeline_layout="Et*12|t*11|t*10|t*7mL",
            ),
            "attention-output-gate",
        ),
        (
            query(SCATTERED, expert_parallel_size=4, pipeline_parallel_size=2),
            "moe-layer-freq ([0]*1+[1]*1)*24",
        ),
    ],
)
def test_what_was_written_is_read_and_takes_the_same(case: dict[str, Any], said: str) -> None:
    script = megatron_lm.torchrun_script(setup_of(case))
    assert said in script.replace("'", "")
    again = read_query(script, overrides={"cluster.gpu": "h200-sxm-141gb"})
    if version := case["training"].get("framework_version"):
        again["training"]["framework_version"] = version
    assert figures(again) == pytest.approx(figures(case), rel=1e-12)


@pytest.mark.parametrize("model", ["nemotron-3-nano-30b-a3b", "qwen3.6-35b-a3b"])
@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_is_one_of_the_release(release: str, model: str) -> None:
    case = query(model, expert_parallel_size=4, pipeline_parallel_size=4, version=release)
    words = [
        w
        for flag, values in megatron_lm.flags(setup_of(case)).items()
        for w in (f"--{flag}", *values)
    ]
    parser(release).parse_args(words)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (
            query(
                "nemotron-3-super-120b-a12b",
                gpus=256,
                tensor_parallel_size=8,
                expert_parallel_size=32,
            ),
            "framework_version",
        ),
        (
            query(
                expert_parallel_size=4, pipeline_parallel_size=2, virtual_pipeline_parallel_size=2
            ),
            "framework_version",
        ),
        (
            query(pipeline_parallel_size=4, expert_parallel_size=4, pipeline_layout=STAIRS),
            r"Megatron-LM has no flag for stages of \[14, 13, 15, 10\] layers before 0\.17",
        ),
        (query("qwen3.6-27b"), r"Megatron-LM has no flags for gated delta rules before 0\.17"),
        (
            query("llama-4-maverick", expert_parallel_size=32),
            "no flags for a layer of llama-4-maverick",
        ),
    ],
)
def test_what_a_release_lacks_is_refused_by_name(case: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        megatron_lm.flags(setup_of(case))


def test_shares_of_layers_are_those_of_megatron() -> None:
    """Attention evenly between, MLPs among the rest (mamba_hybrid_layer_allocation.py)."""
    assert pattern_of_fractions(10, attention=0.2, mlp=0.0) == "MMM*MM*MMM"
    assert pattern_of_fractions(4, attention=0.0, mlp=0.5) == "M-M-"
    # 3 Mamba layers in 2 sections of 1.5: a half that is left over still takes a Mamba layer.
    assert pattern_of_fractions(4, attention=0.25, mlp=0.0) == "MM*M"


def test_letters_that_are_not_modelled_are_refused() -> None:
    script = megatron_lm.torchrun_script(setup_of(query(version="0.19.2")))
    for wrong in ("G" + NANO[1:], NANO + "/M"):
        with pytest.raises(ImportRefusedError, match="hybrid-layer-pattern"):
            read_query(script.replace(NANO, wrong), overrides={"cluster.gpu": "h200-sxm-141gb"})


def test_an_interleaved_pipeline_of_states_runs_from_the_release_that_says_its_stages() -> None:
    """Four segments on two stages (training/arguments.py of 0.17); Megatron Core 0.16 asserts one
    chunk a rank.
    """
    script = megatron_lm.torchrun_script(
        setup_of(query(pipeline_parallel_size=2, expert_parallel_size=4, version="0.17.1"))
    )
    halves = "|".join((NANO[:26], NANO[26:]))
    quarters = "|".join(NANO[at : at + 13] for at in range(0, 52, 13))
    assert halves in script
    interleaved = read_query(
        script.replace(halves, quarters), overrides={"cluster.gpu": "h200-sxm-141gb"}
    )
    assert interleaved["parallel"]["virtual_pipeline_parallel_size"] == 2
    assert (
        figures(interleaved)[0]
        < figures(read_query(script, overrides={"cluster.gpu": "h200-sxm-141gb"}))[0]
    )
    interleaved["training"]["framework_version"] = "0.16"
    estimate = training.estimate(query=schema.parse_query(interleaved), with_fixes=False)
    assert [reason.code for reason in estimate.reasons] == ["mixer_not_divisible"]
    assert "framework_version" in estimate.reasons[0].message


def test_sparse_attention_of_megatron_is_refused_by_name() -> None:
    script = megatron_lm.torchrun_script(setup_of(query("qwen3.6-27b", version="0.19.2")))
    with pytest.raises(
        ImportRefusedError,
        match="experimental-attention-variant dsa: its kernels store all scores",
    ):
        read_query(
            script.replace("gated_delta_net", "dsa"), overrides={"cluster.gpu": "h200-sxm-141gb"}
        )


@pytest.mark.parametrize("case", [query(version="0.19.2"), query("qwen3.6-27b", version="0.19.2")])
def test_windows_beside_layers_that_differ_are_refused_by_name(case: dict[str, Any]) -> None:
    script = megatron_lm.torchrun_script(setup_of(case)).replace(
        "--bf16", "--bf16 --window-size 127,0"
    )
    with pytest.raises(
        ImportRefusedError,
        match="--window-size 127,0: not supported with layers of different kinds",
    ):
        read_query(script, overrides={"cluster.gpu": "h200-sxm-141gb"})


def test_a_tool_without_layouts_leaves_out_the_one_that_a_ranking_chose() -> None:
    """And says at what price; one that the query itself names is refused."""
    fixed = {
        "micro_batch_size": 1,
        "pipeline_parallel_size": 4,
        "virtual_pipeline_parallel_size": 1,
        "expert_parallel_size": 8,
        "recompute": "none",
        "context_parallel_size": 1,
    }
    asked = schema.parse_query(query("qwen3.6-35b-a3b", version="0.18", **fixed))
    best = training.recommend(query=asked, top=1).recommendations[0]
    chosen = Configuration.from_row(best, query=asked)
    assert best.parallel.pipeline_layout is not None and chosen.adds_layout
    exported = write_configuration(chosen, "nemo")
    assert (
        "pipeline_model_parallel_size=4" in exported.text
        and best.parallel.pipeline_layout not in exported.text
    )
    assert any(
        "the ranking took parallel.pipeline_layout, for which there is no setting here" in note
        for note in exported.notes
    )
    with pytest.raises(UnsupportedError, match=r"parallel\.pipeline_layout"):
        write_configuration(Configuration.from_row(best, query=chosen.query), "nemo")
