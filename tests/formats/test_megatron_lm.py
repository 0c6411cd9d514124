"""Megatron-LM: every flag is one that the installed Megatron Core knows, and what was exported
comes back the same.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from hypothesis import given

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import detect_format, read_query
from hp_tool.formats.tools import megatron_lm
from tests.conftest import skip_or_fail
from tests.formats.cases import llama, queries, same_work, setup_of

RENAMED = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "swiglu": "gated_linear_unit",
    "num-layers-per-virtual-pipeline-stage": "virtual_pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "untie-embeddings-and-output-weights": "share_embeddings_and_output_weights",
    "disable-bias-linear": "add_bias_linear",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    "num-experts": "num_moe_experts",
    "group-query-attention": "num_query_groups",
    "make-vocab-size-divisible-by": "vocab_size",
    "seq-length": "max_sequence_length",
    "max-position-embeddings": "max_sequence_length",
    "position-embedding-type": "position_embedding_type",
    "no-rope-fusion": "apply_rope_fusion",
    "accumulate-allreduce-grads-in-fp32": "grad_reduce_in_fp32",
    "grad-reduce-in-bf16": "grad_reduce_in_fp32",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "multi-latent-attention": "multi_latent_attention",
    "micro-batch-size": "micro_batch_size",
    "global-batch-size": "global_batch_size",
    "ckpt-format": "ckpt_format",
    "moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "exp-avg-dtype": "exp_avg_dtype",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
"""Flags that arguments.py spells differently from the field they set."""
OF_THE_LOOP = {"micro_batch_size", "global_batch_size", "ckpt_format"}
"""Arguments of the training loop, which megatron-core leaves to its caller."""


def known_fields() -> set[str]:
    """Fields of Megatron Core's configuration classes and of GPTModel's constructor."""
    try:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import MLATransformerConfig
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="megatron-core is not installed")
    import inspect

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    names = {field.name for kind in classes for field in dataclasses.fields(kind)}
    return names | set(inspect.signature(GPTModel.__init__).parameters) | OF_THE_LOOP


def test_a_pipeline_laid_out_by_hand_comes_back_the_same() -> None:
    layout = "Et*9|(t*10|)*6,t*11L"
    setup = setup_of(llama(pipeline_layout=layout))
    assert setup.parallel.virtual_pipeline_parallel_size == 2
    assert {
        "num-virtual-stages-per-pipeline-rank",
        "account-for-loss-in-pipeline-split",
    }.isdisjoint(megatron_lm.flags(setup))
    again = read_query(
        megatron_lm.torchrun_script(setup), overrides={"cluster.gpu": "h100-sxm-80gb"}
    )
    assert again["parallel"]["pipeline_layout"] == layout
    same_work(setup_of(again), setup)


@given(queries())
def test_what_was_exported_comes_back_the_same(query: dict) -> None:
    setup = setup_of(query)
    again = read_query(
        megatron_lm.torchrun_script(setup), overrides={"cluster.gpu": "h100-sxm-80gb"}
    )
    assert again["cluster"]["num_gpus"] == setup.cluster.num_gpus
    same_work(setup_of(again), setup)


@pytest.mark.components
@given(queries())
def test_every_flag_sets_a_field_that_megatron_core_has(query: dict) -> None:
    known = known_fields()
    for flag in megatron_lm.flags(setup_of(query)):
        assert RENAMED.get(flag, flag.replace("-", "_")) in known, flag


@pytest.mark.components
@given(queries())
def test_the_yaml_puts_every_key_in_the_section_of_its_class(query: dict) -> None:
    known_fields()
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    content = megatron_lm.yaml_content(setup_of(query))
    parallel = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    transformer = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(content["language_model"]) <= transformer - parallel
    assert set(content["model_parallel"]) <= parallel
    beside = set(content) - {"language_model", "model_parallel"}
    assert not beside & (parallel | transformer) - {"group_query_attention"}


def test_a_llama_as_its_flags() -> None:
    script = megatron_lm.torchrun_script(
        setup_of(llama(virtual_pipeline_parallel_size=5, recompute="selective"))
    )
    assert "torchrun --nnodes 8 --nproc-per-node 8" in script
    for line in (
        "--num-layers 80",
        "--num-query-groups 8",
        "--swiglu",
        "--tensor-model-parallel-size 4",
        "--sequence-parallel",
        "--num-virtual-stages-per-pipeline-rank 5",
        "--recompute-modules core_attn",
        "--use-distributed-optimizer",
        "--bf16",
    ):
        assert f"\n    {line} \\\n" in script


def test_the_scripts_are_shell(tmp_path: Path) -> None:
    for text in (
        megatron_lm.torchrun_script(setup_of(llama())),
        megatron_lm.slurm_script(setup_of(llama())),
    ):
        path = tmp_path / "run.sh"
        path.write_text(text)
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_slurm_asks_for_the_segments_of_racks() -> None:
    query = llama(tensor_parallel_size=8)
    assert "--segment" not in megatron_lm.slurm_script(setup_of(query))
    for num_gpus, nodes in ((1024, 16), (1152, 18), (1120, 14)):  # Slurm wants equal segments
        query["cluster"] = {"gpu": "gb200-nvl72", "num_gpus": num_gpus}
        query["training"]["global_batch_size"] = num_gpus
        assert f"\n#SBATCH --segment={nodes}\n" in megatron_lm.slurm_script(setup_of(query))


def test_uneven_pipelines_count_embedding_and_loss_as_layers() -> None:
    query = llama(tensor_parallel_size=8, pipeline_parallel_size=8) | {"model": "llama-3.1-405b"}
    query["cluster"]["num_gpus"] = 512
    flags = megatron_lm.flags(setup_of(query))
    assert {"account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"} <= set(
        flags
    )


def deepseek(**parallel: object) -> dict:
    query = llama(**parallel) | {"model": "deepseek-v3"}
    query["cluster"]["num_gpus"] = 512
    return query


def test_shorter_ends_are_said_in_layers_and_read_back() -> None:
    setup = setup_of(
        deepseek(tensor_parallel_size=1, pipeline_parallel_size=16, expert_parallel_size=32)
    )
    said = megatron_lm.flags(setup)
    assert (
        said["decoder-first-pipeline-num-layers"],
        said["decoder-last-pipeline-num-layers"],
    ) == (["4"], ["1"])
    again = read_query(
        megatron_lm.torchrun_script(setup), overrides={"cluster.gpu": "h100-sxm-80gb"}
    )
    assert "pipeline_layout" not in again["parallel"]
    same_work(setup_of(again), setup)


@pytest.mark.parametrize(
    ("ends", "layout"),
    [
        (
            "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6",
            "Et*7|t*8|t*8|t*8|t*8|t*8|t*8|t*6mL",
        ),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 6",
            "Et*1|t*9|t*9|t*9|t*9|t*9|t*9|t*6mL",
        ),
    ],
)
def test_other_ends_are_a_layout(ends: str, layout: str) -> None:
    text = megatron_lm.torchrun_script(
        setup_of(
            deepseek(tensor_parallel_size=1, pipeline_parallel_size=8, expert_parallel_size=64)
        )
    )
    ours = "--decoder-first-pipeline-num-layers 8 \\\n    --decoder-last-pipeline-num-layers 5"
    assert ours in text
    read = read_query(text.replace(ours, ends), overrides={"cluster.gpu": "h100-sxm-80gb"})
    assert read["parallel"]["pipeline_layout"] == layout
    with pytest.raises(
        InputError,
        match="--num-layers 61 does not fit 8 stages of 1 chunks with these first and last stages:",
    ):
        read_query(
            text.replace(ours, "--account-for-loss-in-pipeline-split"),
            overrides={"cluster.gpu": "h100-sxm-80gb"},
        )


def test_what_megatron_cannot_say_is_refused_by_name() -> None:
    query = llama()
    query["training"]["framework"] = "torch-fsdp"
    query["parallel"] |= {"pipeline_parallel_size": 1, "zero_stage": 3}
    with pytest.raises(
        UnsupportedError, match=r"chosen for torch-fsdp.*training.framework: megatron-core"
    ):
        megatron_lm.flags(setup_of(query))


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (
            "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 "
            "--seq-length 512",
            "model.vocab_size",
        ),
        (
            "--num-layers many --hidden-size 512 --num-attention-heads 8 --vocab-size 512",
            "--num-layers",
        ),
        ("--hidden-size 512 --num-attention-heads 8 --vocab-size 512", "model.num_hidden_layers"),
    ],
)
def test_what_is_missing_or_malformed_is_named(flags: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        read_query(
            f"torchrun --nproc-per-node 8 pretrain_gpt.py {flags}",
            overrides={"cluster.gpu": "h100-sxm-80gb"},
        )
    assert caught.value.field == field


def test_formats_are_told_apart() -> None:
    assert detect_format("torchrun pretrain_gpt.py --num-layers 8") == "megatron-lm"
    assert detect_format('{"train_batch_size": 8}') == "deepspeed"
    for kind in ("training", "inference"):
        for text in (f"kind: {kind}\n{kind}: {{}}", f'{{"kind": "{kind}", "{kind}": {{}}}}'):
            with pytest.raises(InputError, match="this is already a query"):
                detect_format(text)
    assert detect_format('[model]\nname = "llama3"') == "torchtitan"
    with pytest.raises(InputError):
        detect_format("hello")
