"""What a configuration says and an import once passed over: read, or refused by name, never another
training or server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import hp_tool

LOAD = (
    "--set",
    "inference.input_length=1000",
    "--set",
    "inference.output_length=100",
    "--set",
    "inference.concurrency=8",
)
GPUS = ("--gpu", "h100-sxm-80gb", "--num-gpus", "16")
NANOTRON = """
general: {{project: x, run: y}}
parallelism: {{dp: 16, tp: 1, pp: 1}}
tokens: {{micro_batch_size: 1, sequence_length: 2048, batch_accumulation_per_replica: 4}}
model:
  dtype: bfloat16
  model_config: {{num_hidden_layers: 16, hidden_size: 2048, num_attention_heads: 16, num_key_value_heads: 16,
    intermediate_size: 5632, vocab_size: 32000{more}}}
optimizer: {{zero_stage: 1}}
"""  # noqa: E501
DEEPSPEED = """
cat > ds.json <<X
{config}
X
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-4 \\
  --deepspeed --deepspeed_config ds.json --vocab-size 50257 --data-path x {flags}
"""  # noqa: E501


def read(folder: Path, name: str, text: str, *options: str) -> tuple[int, dict[str, Any], str]:
    (folder / name).write_text(text)
    done = hp_tool("import", str(folder / name), *options, "--json")
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout.splitlines()[0]) if done.stdout.startswith("{") else {}
    return done.returncode, answer.get("query", {}), done.stdout + done.stderr


def test_an_unknown_flag_with_an_unset_variable_is_named(tmp_path: Path) -> None:
    code, _, shown = read(
        tmp_path, "run.sh", "vllm serve meta-llama/Llama-3.1-8B --my-flag $X\n", *GPUS[:2], *LOAD
    )
    assert code == 2 and "--my-flag" in shown and "internal" not in shown


VLLM = "vllm serve meta-llama/Llama-3.1-70B --config serve.yaml --max-num-seqs 64\n"
SERVE = "tensor-parallel-size: 8\nenable_expert_parallel: false\nmax_num_seqs: 32\nport: 8000\n"


@pytest.mark.parametrize("flag", ["--config serve.yaml", "--config=serve.yaml"])
def test_a_servers_file_is_read_where_it_is_beside(tmp_path: Path, flag: str) -> None:
    (tmp_path / "serve.yaml").write_text(SERVE)
    code, query, shown = read(
        tmp_path, "run.sh", VLLM.replace("--config serve.yaml", flag), *GPUS[:2], *LOAD
    )
    assert code in (0, 3), shown
    assert query["parallel"]["tensor_parallel_size"] == 8 and query["cluster"]["num_gpus"] == 8
    assert query["parallel"]["max_num_seqs"] == 64  # the command's own word wins


def test_a_servers_file_that_is_not_at_hand_is_asked_for(tmp_path: Path) -> None:
    code, _, shown = read(tmp_path, "run.sh", VLLM, *GPUS[:2], *LOAD)
    assert code == 2 and "serve.yaml" in shown and "--file" in shown


@pytest.mark.parametrize(
    "more", [", moe: {num_experts: 8, top_k: 2}", ", moe_num_experts: 8", ", num_experts: 8"]
)
def test_nanotrons_experts_are_no_dense_model(tmp_path: Path, more: str) -> None:
    assert read(tmp_path, "dense.yaml", NANOTRON.format(more=""), *GPUS)[0] in (0, 3)
    code, _, shown = read(tmp_path, "experts.yaml", NANOTRON.format(more=more), *GPUS)
    assert code == 2 and "experts are not supported for nanotron" in shown


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("pp: 1", "pp: 2, pp_engine: afab"), "pp_engine afab"),
        (("vocab_size: 32000", "vocab_size: 32000, sliding_window_size: 1024"), "sliding_window"),
    ],
)
def test_nanotrons_schedules_and_windows_are_refused(
    tmp_path: Path, change: tuple[str, str], word: str
) -> None:
    text = NANOTRON.format(more="").replace(*change).replace("dp: 16", "dp: 8")
    code, _, shown = read(tmp_path, "run.yaml", text, *GPUS)
    assert code == 2 and word in shown


@pytest.mark.parametrize(
    ("flags", "kind"),
    [("", "fp16"), ("--fp16", "fp16"), ("", "bf16"), ("--fp16 --zero-stage 1", "fp16")],
)
def test_deepspeeds_file_decides_precision_and_stage(tmp_path: Path, flags: str, kind: str) -> None:
    config = json.dumps(
        {"train_batch_size": 64, "zero_optimization": {"stage": 3}, kind: {"enabled": True}}
    )
    code, query, shown = read(
        tmp_path, "run.sh", DEEPSPEED.format(config=config, flags=flags), *GPUS
    )
    assert code in (0, 3), shown
    assert (query["training"].get("precision", "bf16"), query["parallel"]["zero_stage"]) == (
        kind,
        3,
    )


def test_axolotls_file_is_not_taken_for_deepspeeds(tmp_path: Path) -> None:
    text = (
        "base_model: NousResearch/Llama-3.2-1B\nadapter: lora\nlora_r: 16\nbf16: "
        "true\nsequence_len: 2048\n"
    )
    code, query, shown = read(tmp_path, "config.yaml", text, *GPUS)
    assert code in (0, 3), shown
    assert query["training"]["task"] == "lora" and query["training"]["sequence_length"] == 2048


CHAT = """deepspeed --num_gpus 8 main.py --data_path Dahoas/rm-static Dahoas/full-hh-rlhf \\
  --data_split 2,4,4 --model_name_or_path facebook/opt-1.3b --zero_stage 2 --deepspeed \\
  --num_warmup_steps 0 --output_dir out {}
"""


def test_deepspeed_chat_has_the_defaults_of_its_own_program(tmp_path: Path) -> None:
    code, query, shown = read(tmp_path, "run.sh", CHAT.format(""), *GPUS[:2], "--num-gpus", "8")
    assert code in (0, 3), shown
    assert query["training"]["precision"] == "fp16"
    assert query["training"]["sequence_length"] == 512
    assert query["parallel"]["micro_batch_size"] == 16


@pytest.mark.parametrize("flag", ["--lora_dim 128", "--num_padding_at_beginning 1", "--offload"])
def test_deepspeed_chat_is_refused_beyond_full_fine_tuning(tmp_path: Path, flag: str) -> None:
    code, _, shown = read(tmp_path, "run.sh", CHAT.format(flag), *GPUS)
    assert code == 2 and "DeepSpeed-Chat" in shown


AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {{global_batch_size: 256, local_batch_size: 4}}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config: {{pretrained_model_name_or_path: {model}}}
distributed:
  pp_size: 4
  pipeline: {{pp_schedule: interleaved1f1b{more}}}
loss_fn: {{_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}}
optimizer: {{_target_: torch.optim.Adam}}
dataset: {{seq_len: 4096}}
"""


@pytest.mark.parametrize(
    ("model", "more", "chunks"),
    [
        ("meta-llama/Llama-3.1-8B", "", 2),
        ("meta-llama/Llama-3.1-8B", ", layers_per_stage: 2", 4),
        (
            "deepseek-ai/DeepSeek-V3",
            ", layers_per_stage: 2, round_virtual_stages_to_pp_multiple: down",
            7,
        ),
        (
            "deepseek-ai/DeepSeek-V3",
            ", layers_per_stage: 2, round_virtual_stages_to_pp_multiple: up",
            8,
        ),
    ],
)
def test_automodels_chunks_are_those_of_its_pipeline(
    tmp_path: Path, model: str, more: str, chunks: int
) -> None:
    text = AUTOMODEL.format(model=model, more=more)
    _, query, shown = read(tmp_path, "run.yaml", text, "--gpu", "h100-sxm-80gb", "--num-gpus", "64")
    assert query.get("parallel", {}).get("virtual_pipeline_parallel_size") == chunks, shown


def test_automodels_chunks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    text = AUTOMODEL.format(model="deepseek-ai/DeepSeek-V3", more=", layers_per_stage: 2")
    code, _, shown = read(tmp_path, "run.yaml", text, *GPUS)
    assert code == 2 and "31 chunks of 61 layers" in shown


def test_a_batch_schedule_ends_at_its_last_size(tmp_path: Path) -> None:
    flags = (
        "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --bf16 --vocab-size 32000 "
        '--step-batch-size-schedule "0:16 2.4B:320 12B:1536"'
    )
    code, query, shown = read(tmp_path, "run.sh", f"torchrun pretrain_gpt.py {flags}", *GPUS)
    assert code in (0, 3), shown
    assert query["training"]["global_batch_size"] == 1536
    script = f"torchrun pretrain_gpt.py {flags} --global-batch-size 1536"
    assert read(tmp_path, "run.sh", script, *GPUS)[0] == 2
