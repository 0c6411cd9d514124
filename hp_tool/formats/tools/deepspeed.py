"""Read and write DeepSpeed 0.18's JSON configuration (deepspeed.ai/docs/config-json)."""

import json
from collections.abc import Mapping
from typing import Any

from hp_tool.domain.declared import BATCH_FIELDS, parse_names
from hp_tool.domain.frameworks import STAND_INS
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Reading, key_values
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Evidence, Sign, matches_pattern
from hp_tool.formats.source import Source
from hp_tool.formats.trainer import arguments, scripts
from hp_tool.formats.trainer.arguments import SCRIPT_SECTION
from hp_tool.formats.writing import SHAPE_FIELDS, reject_inexpressible

TOOL = "DeepSpeed 0.18"
EXPRESSED_FIELDS = BATCH_FIELDS | parse_names(
    "gradient_precision attention dropout optimizer offload"
)
RECOMPUTATION_NOTE = (
    "this file does not make a Trainer recompute activations, and DeepSpeed's "
    "activation_checkpointing block would not either: "
    "pass --gradient_checkpointing true to the Trainer, or call deepspeed.checkpointing in your "
    "own model"
)
_GRADIENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of the JSON file.

    Raises:
        UnsupportedError: DeepSpeed cannot express the setup.
    """
    w, c = setup.workload, setup.parallel
    reject_inexpressible(
        setup,
        tool=TOOL,
        expressed=EXPRESSED_FIELDS | SHAPE_FIELDS,
        runs=_trainer_framework(w.framework),
    )
    if w.precision not in ("bf16", "fp16", "fp32"):
        raise UnsupportedError(
            f"{TOOL} does not support training.precision {w.precision}", field="training.precision"
        )
    zero: dict[str, Any] = {"stage": c.zero_stage}
    if c.zero_stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if w.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif w.offload not in (None, "none"):
        raise UnsupportedError(
            f"{TOOL} does not support training.offload {w.offload}", field="training.offload"
        )
    content: dict[str, Any] = {
        "train_batch_size": w.global_batch_size,
        "train_micro_batch_size_per_gpu": c.micro_batch_size,
        "gradient_accumulation_steps": setup.accumulation_steps,
        "zero_optimization": zero,
        "optimizer": {
            "type": {"adam": "AdamW", "sgd": "SGD", "muon": "Muon"}[w.optimizer],
            "params": {},
        },
    }
    if w.precision != "fp32":
        content[w.precision] = {"enabled": True}
        content["data_types"] = {"grad_accum_dtype": _GRADIENTS[w.gradient_precision or "fp32"]}
    if setup.recomputes_by_layer:
        content[SCRIPT_SECTION] = {"gradient_checkpointing": True, "note": RECOMPUTATION_NOTE}
    elif setup.recomputes_by_layer is None:
        raise UnsupportedError(
            f"{TOOL} recomputes whole layers or nothing; set parallel.recompute to none or full",
            field="parallel.recompute",
        )
    return content


def _trainer_framework(framework: str) -> str:
    """Return the setup's framework if it is a trainer that uses DeepSpeed, else deepspeed."""
    around = framework in STAND_INS and STAND_INS[framework].constants == "deepspeed"
    return framework if around else "deepspeed"


def text(setup: TrainingSetup) -> str:
    """Return the JSON file for --deepspeed_config."""
    return json.dumps(config(setup), indent=2) + "\n"


def script_notes(text: str) -> tuple[str, ...]:
    """Return notes on the arguments that the training script needs with a written file."""
    note = json.loads(text).get(SCRIPT_SECTION, {}).get("note")
    return () if note is None else (note,)


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a DeepSpeed file, or of a script that starts a Trainer."""
    content = source.mapping
    if content is None:
        scripts.read_script(source, reading)
        return
    arguments.read_arguments(
        content, text=source.text, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore
    )


_FILE_KEYS = ("train_batch_size", "zero_optimization", "train_micro_batch_size_per_gpu")


def _is_its_file(evidence: Evidence) -> bool:
    """Return True if the keys are DeepSpeed's, or if they set the precision in DeepSpeed's way."""
    precisions = (evidence.content.get(name) for name in ("bf16", "bfloat16", "fp16"))
    return not evidence.keys.isdisjoint(_FILE_KEYS) or any(
        isinstance(precision, Mapping) and "enabled" in precision for precision in precisions
    )


_TRAINER_OPTIONS = matches_pattern(
    r"--per[-_]device[-_]train[-_]batch[-_]size|--model[-_]name[-_]or[-_]path|accelerate\s+launch|(?m:^[^#\n]*\btrl\s+sft\b)"
)
register(
    Format(
        name="deepspeed",
        title="DeepSpeed",
        signs=(
            Sign(place="keys", rank=60, matches=_is_its_file),
            Sign(place="script", rank=61, matches=_TRAINER_OPTIONS),
        ),
        read=read,
        write=text,
        options=lambda setup: key_values(config(setup)),
        notes=script_notes,
        usual_of="deepspeed",
        framework="deepspeed",
        axes=arguments.AXES,
        logs=("deepspeed", "trainer"),
        file="deepspeed.json",
        reads="DeepSpeed's JSON file, or a launch script of Hugging Face's Trainer or TRL with "
        "`--file ds.json`",
        writes="DeepSpeed's JSON file: batch, ZeRO, precision, offload. Recomputation is an "
        "option of the Trainer (`--gradient_checkpointing`), listed in "
        "`for_the_training_script` and on standard error",
        checked="DeepSpeed 0.18.3's DeepSpeedConfig on 8 to 1,024 processes; read back by `import`",
    )
)
