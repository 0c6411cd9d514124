"""Whose configuration a text is: by the keys of a file, or the words of a script."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_tool import documents
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.names import IMPORTS as READ
from hp_tool.formats.renamed import PRINTED_ARGUMENTS

_TRAINERS = {
    "base_model": "Axolotl", "finetuning_type": "LLaMA-Factory", "cutoff_len": "LLaMA-Factory", "template": "LLaMA-Factory",
}  # fmt: skip
"""Keys of trainers whose files have bf16 and fp16 as DeepSpeed's have."""
NOT_READ = {
    "openrlhf": "OpenRLHF", **_TRAINERS, "apiVersion": "Kubernetes",
    "_component_": "torchtune",
    "max_duration": "LLM Foundry (Composer)", "auto_map": "a model's config.json", "architectures": "a model's config.json",
    "enable_attention_dp": "TensorRT-LLM's options", "nodes_and_edges": "a workflow",
}  # fmt: skip
"""Keys and words that give away a format that is not read."""
_NOT_READ_COMMANDS = {
    r"\bopenrlhf\b": "OpenRLHF", r"trtllm-serve|tensorrt_llm\.commands\.serve": "TensorRT-LLM's server",
    r"(?m)^[^#\n]*(?<![/\w-])axolotl(\.cli|\s+train)": "Axolotl", r"\bllamafactory-cli\b": "LLaMA-Factory",
    r"(?m)^[^#\n]*\b(megatron|swift)\s+(sft|pt|rlhf)\b": "ms-swift", r"\bcolossalai\s+run\b": "ColossalAI",
    r"--rollout-function-path|--actor-num-gpus-per-node": "slime",
    r"verl\.trainer\.(fsdp_)?sft_trainer": "verl's trainer of SFT",
    r"run_recipe\.py|(?<!\S)--recipe[ =]": "a recipe by name (its settings stand in Python; import the YAML file it saves)",
    r"\A(#[^\n]*\n|\s)*(from|import)\s+[\w.]+[ ,\n]": "a program in Python (import its launch script or configuration)",
}  # fmt: skip
"""What a script that is not read says, and whose it is."""
MAX_YAML = 400_000
_KEYS = (".json", ".yaml", ".yml", ".toml")
"""Endings of files of keys, which are no scripts."""


def detect(text: str, *, files: Mapping[str, str] | None = None) -> str:
    """Whose configuration a text is, one of READ. Raises UnsupportedError for a known format that is not read, InputError
    where it
    is none.
    """
    stripped = text.lstrip("\ufeff \t\r\n")
    if re.search(r"(?m)^[ \t]*\[(parallelism|training|model|job|optimizer|activation_checkpoint)\][ \t]*(#.*)?$", text):
        return "torchtitan"
    if PRINTED_ARGUMENTS.search(text):
        return "megatron-lm"
    if stripped.startswith("{") or (found := mapping_of(text)) is not None:
        content = found if not stripped.startswith("{") else parsed(text)
        return _of_mapping(content or {}, text)
    beside = [each for name, each in (files or {}).items() if not name.endswith(_KEYS)]
    if tool := _of_script(text, files=bool(files)) or _of_script("\n".join(beside), files=bool(files)):
        return tool
    if re.search(r"(?<!\S)--[A-Za-z]", text):
        return "megatron-lm"
    if others := re.findall(r"(?m)^[ \t]*(?:source|\.|sbatch|bash|sh)\s+(?:-\S+\s+)*([^\s;&|]+)", text):
        raise InputError(
            f"it only starts or sources other files ({', '.join(dict.fromkeys(others))}); give them with --file",
            field="command",
        )
    raise InputError(
        f"nothing that is read: {', '.join(READ)} are, as launch scripts, configuration files or logs; say which with --format",
        field="format",
    )


def _of_script(text: str, *, files: bool) -> str:
    """The tool whose words a script has; an empty text where it has none. Raises UnsupportedError."""
    for sign, name in _NOT_READ_COMMANDS.items():
        if re.search(sign, text):
            raise _unread(name)
    if re.search(r"(?m)(?<![\w/.-])vllm\s+serve\b|vllm/vllm-openai\b|vllm\.entrypoints\.(openai\.)?api_server", text):
        return "vllm"
    if re.search(r"sglang\.launch_server|(?<![\w/.-])sglang\s+serve\b", text):
        return "sglang"
    if re.search(r"\bverl\.trainer\.|actor_rollout_ref\.", text):
        return "verl"
    if re.search(r"\bdeepy\.py\b", text):
        return "gpt-neox"
    if re.search(
        r"--(num[-_]layers|tensor[-_]model[-_]parallel[-_]size|hidden[-_]size|micro[-_]batch[-_]size|recompute[-_]granularity)\b",
        text,
    ):
        return "megatron-lm"
    if re.search(r"--per[-_]device[-_]train[-_]batch[-_]size|--model[-_]name[-_]or[-_]path|accelerate\s+launch", text):
        return "accelerate" if re.search(r"accelerate\s+launch", text) and "--config_file" in text and files else "deepspeed"
    if re.search(r"--job\.config_file|--model\.flavor", text):
        return "torchtitan"
    return ""


def _unread(name: str) -> UnsupportedError:
    return UnsupportedError(f"this is {name}, which is not read; {', '.join(READ)} are", field="format")


def mapping_of(text: str) -> dict[str, Any] | None:
    """What a YAML text holds; None where it is none, as a shell script."""
    first = next((row for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")), "")
    if len(text) > MAX_YAML or text.startswith("#!") or not re.match(r"(---|[\w\"'.-]+[ \t]*:([ \t]|$))", first):
        return None
    try:
        return documents.parse(text, origin=Path("configuration.yaml"))
    except InputError:
        return None


def parsed(text: str) -> dict[str, Any]:
    """What a file of keys holds, in JSON or YAML. Raises InputError."""
    try:
        return documents.parse(text, origin=Path("deepspeed.json"))
    except InputError:  # GPT-NeoX writes YAML in braces, with comments
        return documents.parse(text, origin=Path("configuration.yaml"))


def _of_mapping(content: Mapping[str, Any], text: str) -> str:
    keys = {str(key).replace("-", "_") for key in content}
    model = content.get("model")
    if keys & {"pipe_parallel_size", "model_parallel_size", "train_iters"} or ("num_layers" in keys and "hidden_size" in keys):
        return "gpt-neox"
    if keys & {"actor_rollout_ref", "critic"}:
        return "verl"
    if keys & {"distributed_type", "compute_environment"}:
        return "accelerate"
    if "parallelism" in keys and "tokens" in keys:
        return "nanotron"
    for sign, name in _TRAINERS.items():
        if sign in keys:
            raise _unread(name)
    if keys & {"train_batch_size", "zero_optimization", "train_micro_batch_size_per_gpu", "bf16", "fp16"}:
        return "deepspeed"
    if keys & {"language_model", "model_parallel"} or (
        isinstance(model, Mapping) and keys & {"train", "trainer", "ddp", "mixed_precision"}
    ):
        return "nemo"
    if isinstance(model, Mapping) and any("tensor_model_parallel_size" in str(key) for key in model):
        return "nemo"
    if "max_duration" in keys and isinstance(model, Mapping) and "name" not in model:
        raise _unread("OLMo")
    for sign, name in NOT_READ.items():
        if sign in keys or f"{sign}:" in text[:20_000]:
            raise _unread(name)
    if "kind" in keys and keys & {"training", "inference"}:
        raise InputError("this is a query already: give it to estimate, recommend or tune", field="format")
    if text.lstrip().startswith("{"):
        return "deepspeed"
    raise InputError(f"a file of keys that none of {', '.join(READ)} has; say which with --format", field="format")
