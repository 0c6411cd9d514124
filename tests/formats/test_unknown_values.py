"""A value that a configuration does not tell is refused or asked for by its flag and its variable;
no default replaces it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hp_tool.errors import HpToolError
from tests.formats.test_public_files import FILES, read_as
from tests.formats.test_silent_readings import read

REFERENCES = ("$HP_UNSET", "$(hp_unset)", "${HP_UNSET}")
GPUS = ("--gpu", "h100-sxm-80gb", "--num-gpus", "16")
MODEL = "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --bf16 true"
ACCUMULATED = {
    "trainer": f"torchrun --nproc_per_node 16 train.py {MODEL} --max_seq_length 4096 "
    "--gradient_accumulation_steps $GAS\n",
    "trl": f"accelerate launch --num_processes 16 -m trl.scripts.sft {MODEL} "
    "--gradient_accumulation_steps $GAS\n",
    "deepspeed": f"""cat > ds.json <<X
{{"zero_optimization": {{"stage": 2}}, "bf16": {{"enabled": true}}, "gradient_accumulation_steps": "auto"}}
X
deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed ds.json {MODEL} --max_seq_length 4096 \\
  --gradient_accumulation_steps $GAS
""",  # noqa: E501
    "ms-swift": """NNODES=2 NPROC_PER_NODE=8 swift sft --model meta-llama/Llama-3.1-8B --tuner_type lora \\
  --torch_dtype bfloat16 --per_device_train_batch_size 2 --gradient_accumulation_steps $GAS --max_length 4096
""",  # noqa: E501
}
SHAPE = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--micro-batch-size 1 "
    "--global-batch-size 64 --bf16 --vocab-size 32000 --max-position-embeddings 4096"
)


def references(name: str) -> list[tuple[str, str, str]]:
    """The file with the value of one setting that is read replaced, for each of them: its flag, the
    reference, the text.
    """
    expected, text = FILES[name]
    if "error" in expected:
        return []
    try:
        reading, refusal = read_as(expected, text)
    except HpToolError:
        return []
    if refusal is not None:
        return []
    given, made = expected.get("given", {}), []
    for number, each in enumerate(reading.read):
        if (
            not each.value
            or " " in each.value
            or any(each.field.startswith(path) for path in given)
        ):
            continue
        written = rf"(?<![\w.-]){re.escape(each.flag)}(['\"]?\s*[:=]\s*|=|\s+)(['\"]?)({re.escape(each.value)})(?![\w.])"  # noqa: E501
        if (
            found := list(re.finditer(written, text, re.IGNORECASE))
        ) and not text.lstrip().startswith("{"):
            start, end = found[-1].span(3)
            reference = REFERENCES[number % len(REFERENCES)]
            made.append((each.flag, reference, text[:start] + reference + text[end:]))
    return made


@pytest.mark.parametrize("format", sorted({file[0].get("format", "") for file in FILES.values()}))
def test_a_value_that_nothing_sets_is_named(format: str) -> None:
    """Each flag of each format, in the first file that has it."""
    seen = set()
    for name in (name for name, file in FILES.items() if file[0].get("format", "") == format):
        for flag, reference, text in references(name):
            if flag in seen:
                continue
            seen.add(flag)
            try:
                _, refusal = read_as(FILES[name][0], text)
            except HpToolError as error:
                assert "hp_unset" in str(error).lower(), (name, flag, reference)
                continue
            assert refusal is not None, (name, flag, reference)
            assert "hp_unset" in str(refusal).lower(), (name, flag, reference)


@pytest.mark.parametrize("tool", ACCUMULATED)
def test_steps_of_accumulation_that_nothing_sets_are_asked_for(tmp_path: Path, tool: str) -> None:
    options = () if "NPROC" in ACCUMULATED[tool] else GPUS
    code, _, shown = read(tmp_path, "run.sh", ACCUMULATED[tool], *(options or GPUS[:2]))
    assert code == 2 and "--gradient_accumulation_steps is $GAS" in shown and "--var GAS=" in shown
    code, query, shown = read(
        tmp_path, "run.sh", ACCUMULATED[tool], *(options or GPUS[:2]), "--var", "GAS=4"
    )
    assert code in (0, 3), shown
    assert query["training"]["global_batch_size"] == 2 * 4 * 16


def test_a_size_that_is_given_counts_in_what_follows_from_it(tmp_path: Path) -> None:
    text = ACCUMULATED["trainer"].replace("batch_size 2", "batch_size $MICRO").replace("$GAS", "4")
    code, _, shown = read(tmp_path, "run.sh", text, *GPUS)
    assert code == 2 and "--per_device_train_batch_size is $MICRO" in shown
    code, query, shown = read(
        tmp_path, "run.sh", text, *GPUS, "--set", "parallel.micro_batch_size=2"
    )
    assert code in (0, 3), shown
    assert query["training"]["global_batch_size"] == 2 * 4 * 16


def test_a_setting_whose_field_is_given_is_accounted_for(tmp_path: Path) -> None:
    options = ("--set", "training.global_batch_size=64", "--set", "training.sequence_length=4096")
    code, query, shown = read(tmp_path, "run.sh", ACCUMULATED["trainer"], *GPUS, *options)
    assert code in (0, 3) and query["training"]["global_batch_size"] == 64, shown
    assert "its value is unknown, but training.global_batch_size is set" in shown


def test_what_depends_on_a_degree_that_is_given_is_kept(tmp_path: Path) -> None:
    text = (
        f"torchrun --nproc-per-node 8 {SHAPE} --tensor-model-parallel-size $TP "
        "--sequence-parallel\n"
    )
    code, query, shown = read(
        tmp_path, "run.sh", text, *GPUS[:2], "--set", "parallel.tensor_parallel_size=4"
    )
    assert code in (0, 3), shown
    assert (
        query["parallel"]["tensor_parallel_size"] == 4
        and query["parallel"]["sequence_parallel"] is True
    )


@pytest.mark.parametrize(
    ("header", "gpus"),
    [
        ("#SBATCH --ntasks-per-node=8 --nodes=8", 64),
        ("#SBATCH --nodes 8 --ntasks-per-node 8  # everything", 64),
        ("#SBATCH -J run -N 8 --exclusive --gpus-per-node=h100:8 --mem=0", 64),
        ("#SBATCH -N8 -p batch --gres=gpu:8", 64),
        ("#SBATCH --comment='two nodes' --nodes=2\n#SBATCH --time=1:00:00 --gpus-per-node=8", 16),
    ],
)
def test_each_option_of_a_line_of_slurms_header_counts(
    tmp_path: Path, header: str, gpus: int
) -> None:
    code, query, shown = read(
        tmp_path, "run.sh", f"#!/bin/bash\n{header}\nsrun python {SHAPE}\n", *GPUS[:2]
    )
    assert code in (0, 3), shown
    assert query["cluster"]["num_gpus"] == gpus


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("srun -N8 --ntasks-per-node=8 python", 64),
        ("srun -n64 python", 64),
        ("srun -N 8 --ntasks-per-node 8 python", 64),
    ],
)
def test_a_short_option_may_touch_its_number(tmp_path: Path, command: str, gpus: int) -> None:
    code, query, shown = read(tmp_path, "run.sh", f"{command} {SHAPE}\n", *GPUS[:2])
    assert code in (0, 3), shown
    assert query["cluster"]["num_gpus"] == gpus


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        (
            "#SBATCH --nodes=4 --gpus-per-node=8\nsrun torchrun --nnodes $COUNT --nproc-per-node 8",
            "--nnodes is $COUNT",
        ),
        (
            "#SBATCH --nodes=4 --gpus-per-node=8\ntorchrun --nnodes 4 --nproc-per-node "
            "$(nvidia-smi -L | wc -l)",
            "nvidia-smi",
        ),
        (
            "#SBATCH --nodes=4 --ntasks-per-node=$TASKS --gpus-per-node=8\nsrun python",
            "#SBATCH --ntasks-per-node is $TASKS",
        ),
        ("deepspeed --hostfile hosts.txt --num_gpus 8", "hosts.txt"),
        ("trl sft --accelerate_config fsdp2 --num_processes $COUNT", "--num_processes is $COUNT"),
        ("NNODES=$COUNT NPROC_PER_NODE=8 swift sft", "NNODES is $COUNT"),
    ],
)
def test_a_number_of_processes_that_nothing_tells_is_asked_for(
    tmp_path: Path, launch: str, named: str
) -> None:
    program = (
        f"{MODEL.replace('--model_name_or_path', '--model')} --max_length 4096"
        if "sft" in launch
        else SHAPE
    )
    code, _, shown = read(tmp_path, "run.sh", f"#!/bin/bash\n{launch} {program}\n", *GPUS[:2])
    assert code == 2 and "cluster.num_gpus" in shown and named in shown, shown


def test_a_degree_that_an_unknown_condition_decides_is_asked_for(tmp_path: Path) -> None:
    choice = "if [ -f /etc/big ]; then TP=8; else TP=2; fi\n"
    text = f"{choice}torchrun --nproc-per-node 8 {SHAPE} --tensor-model-parallel-size $TP\n"
    code, _, shown = read(tmp_path, "run.sh", text, *GPUS[:2])
    assert (
        code == 2
        and "--tensor-model-parallel-size is $TP (by [ -f /etc/big ]), only known at run time"
        in shown
    )
    code, query, shown = read(
        tmp_path, "run.sh", text, *GPUS[:2], "--set", "parallel.tensor_parallel_size=8"
    )
    assert code in (0, 3) and query["parallel"]["tensor_parallel_size"] == 8, shown


@pytest.mark.parametrize(
    "option", ["--config_file fsdp.yaml", "--config_file=fsdp.yaml", "--config_file $CONFIG"]
)
def test_a_file_of_accelerates_that_is_not_at_hand_is_asked_for(
    tmp_path: Path, option: str
) -> None:
    text = ACCUMULATED["trl"].replace("launch ", f"launch {option} ").replace("$GAS", "4")
    code, _, shown = read(tmp_path, "run.sh", text, *GPUS)
    assert code == 2 and option.split("=")[-1].split()[-1] in shown
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 16\nfsdp_config: {fsdp_version: 2}\n"
    )
    options = ("--var", "CONFIG=fsdp.yaml", "--file", str(tmp_path / "fsdp.yaml"))
    code, query, shown = read(tmp_path, "run.sh", text, *GPUS, *options)
    assert code in (0, 3), shown
    assert query["training"]["framework"] == "hf-trainer" and query["parallel"]["zero_stage"] == 3


FSDP = """distributed_type: FSDP
num_processes: 16
mixed_precision: bf16
fsdp_config: {fsdp_version: 2}
"""
NANOTRON = """parallelism:
  dp: 16
  tp: 1
  pp: 1
  tp_mode: REDUCE_SCATTER
tokens: {micro_batch_size: 1, sequence_length: 2048, batch_accumulation_per_replica: 4}
model: {dtype: bfloat16, model_config: {num_hidden_layers: 16, hidden_size: 2048, num_attention_heads: 16, vocab_size: 32000}}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
"""  # noqa: E501
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 8192
dtype = "float32"
mixed_precision_param = "bfloat16"
[parallelism]
context_parallel_degree = 2
context_parallel_rotate_method = "allgather"
fsdp_reshard_after_forward = "always"
[activation_checkpoint]
mode = "full"
"""
FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
disable_gradient_checkpointing: true
bf16: true
fsdp: full_shard
"""
SWIFT = ACCUMULATED["ms-swift"].replace("$GAS", "4")
VLLM = "vllm serve llama-3-8b --dtype bfloat16 --tensor-parallel-size 2\n"
SGLANG = "sglang serve --model-path llama-3-8b --tp 2 --kv-cache-dtype bf16\n"
BRIDGE = """mixed_precision:
  bf16: true
model:
  _target_: megatron.bridge.models.GPTModelProvider
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  seq_length: 4096
  vocab_size: 32000
  position_embedding_type: rope
  activation: swiglu
train: {global_batch_size: 64, micro_batch_size: 1}
"""


LOAD = ("--set", "inference.input_length=100", "--set", "inference.output_length=100")
BATCH = ("--set", "parallel.micro_batch_size=1", "--set", "training.global_batch_size=64")
LENGTH = ("--set", "training.sequence_length=2048")
OPTIONS: dict[str, tuple[str, ...]] = {
    FSDP: (*GPUS[:2], "--model", "llama-3-8b", *BATCH, *LENGTH),
    SWIFT: GPUS[:2],
    **dict.fromkeys((NANOTRON, TITAN, FACTORY, BRIDGE), GPUS),
    **dict.fromkeys((VLLM, SGLANG), (*GPUS[:2], *LOAD)),
}
"""What is given beside each file."""


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (FSDP, "mixed_precision: bf16", "mixed_precision: fp4"),
        (NANOTRON, "REDUCE_SCATTER", "SCATTER"),
        (NANOTRON, "dtype: bfloat16", "dtype: float8_e4m3"),
        (NANOTRON, "fp32: true", "fp32: maybe"),
        (NANOTRON, "tp: 1", "tp: ${replicas}"),
        (TITAN, '"bfloat16"', '"float16"'),
        (TITAN, '"allgather"', '"ring"'),
        (TITAN, '"always"', '"sometimes"'),
        (FACTORY, "fsdp: full_shard", "fsdp: ${FSDP}"),
        (FACTORY, "fsdp: full_shard", "fsdp: shard"),
        (FACTORY, "checkpointing: true", "checkpointing: ${CHECKPOINTING}"),
        (SWIFT, "bfloat16", "float8"),
        (SWIFT, "--torch_dtype bfloat16", "--torch_dtype"),
        (BRIDGE, "bf16: true", "bf16: ${PRECISION}"),
        (BRIDGE, "activation: swiglu", "activation: ${ACTIVATION}"),
        (VLLM, "llama-3-8b", "$CHECKPOINT"),
        (VLLM, "--dtype bfloat16", "--dtype"),
        (VLLM, "-size 2", "-size $TP"),
        (SGLANG, "--kv-cache-dtype bf16", "--kv-cache-dtype"),
    ],
)
def test_a_word_that_means_nothing_here_is_no_default(
    tmp_path: Path, text: str, right: str, wrong: str
) -> None:
    assert right in text
    code, _, shown = read(tmp_path, "right", text, *OPTIONS[text])
    assert code in (0, 3), shown
    code, _, shown = read(tmp_path, "wrong", text.replace(right, wrong), *OPTIONS[text])
    assert code == 2 and wrong.split()[-1].strip('"') in shown, shown


def test_devices_are_not_counted_from_a_degree_that_nothing_tells(tmp_path: Path) -> None:
    text = VLLM.replace("-size 2", "-size $TP")
    _, _, shown = read(tmp_path, "run.sh", text, *OPTIONS[VLLM])
    assert "cluster.num_gpus" in shown
    code, query, shown = read(
        tmp_path, "run.sh", text, *OPTIONS[VLLM], "--set", "parallel.tensor_parallel_size=2"
    )
    assert code in (0, 3), shown
    assert query["cluster"]["num_gpus"] == 2
