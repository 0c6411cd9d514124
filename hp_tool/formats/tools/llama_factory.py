"""LLaMA-Factory 0.9.5: a script that fine-tunes over FSDP 2, started by Accelerate."""

from typing import Any

from hp_tool.formats import fine_tuning
from hp_tool.formats.fine_tuning import targets, trainer_arguments
from hp_tool.formats.registry import Format, register
from hp_tool.formats.setup import TrainingSetup
from hp_tool.formats.signs import Sign, any_key, key_within, words

TOOL = "LLaMA-Factory 0.9.5"
ARGUMENTS = "sft.yaml"
"""LLaMA-Factory's file, which the script writes."""


def text(setup: TrainingSetup) -> str:
    """Return a script that writes Accelerate's and LLaMA-Factory's file, and starts `src/train.py` of a checkout."""
    fine_tuning.check(setup, tool=TOOL, loss="unfused")
    files = {ARGUMENTS: config(setup)}
    return fine_tuning.script(setup, tool=TOOL, program=f"src/train.py {ARGUMENTS}", files=files)


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of LLaMA-Factory's file; data and template are the user's."""
    w = setup.workload
    content: dict[str, Any] = {
        **trainer_arguments(setup),
        "stage": "pt" if w.task == "pretrain" else "sft",
        "do_train": True,
        "cutoff_len": w.sequence_length,
        "disable_gradient_checkpointing": True,  # FSDP's own, of Accelerate's file
        "flash_attn": "auto" if w.attention == "flash" else "disabled",
        "finetuning_type": "full" if w.lora is None else "lora",
        "dataset": "alpaca_en_demo",
        "template": "default",
    }
    if w.lora is not None:
        content |= {"lora_rank": w.lora.rank, "lora_dropout": w.lora.dropout}
        content["lora_target"] = ",".join(targets(setup, tool=TOOL))
        if w.frozen_precision == "nf4":
            content |= {"quantization_bit": 4, "quantization_method": "bnb", "quantization_type": "nf4"}
            content["double_quantization"] = True
    return content


_KEYS = ("finetuning_type", "cutoff_len", "template")
register(
    Format(
        name="llama-factory",
        signs=(
            Sign(of="keys", rank=51, holds=any_key(*_KEYS), refused="LLaMA-Factory"),
            Sign(of="keys", rank=92, holds=key_within(*_KEYS), refused="LLaMA-Factory"),
            Sign(of="script", rank=13, holds=words(r"\bllamafactory-cli\b"), refused="LLaMA-Factory"),
        ),
        write=text,
        framework="torch-fsdp",
        fsdp_axes=fine_tuning.AXES,
        writes="a script that writes Accelerate's and LLaMA-Factory's file and starts `src/train.py`, in full or with LoRA and "
        "QLoRA",
        checked="the fields of LLaMA-Factory 0.9.5's and transformers' classes",
    )
)
