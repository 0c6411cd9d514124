"""Read Hugging Face Trainer arguments and a DeepSpeed JSON config.

The arguments replace the config's "auto" values.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_tool.catalog.library import stored_precision
from hp_tool.errors import InputError
from hp_tool.formats.reading import (
    Ignored,
    Reading,
    Setting,
    as_settings,
    hyphenated,
    parse_fraction,
    parse_whole_number,
    sort_settings,
    table,
)

SCRIPT_SECTION = "for_the_training_script"
"""Key for arguments of the training script. DeepSpeed and the Trainer ignore it."""
_SCRIPT_CHECKPOINTING = f"{hyphenated(SCRIPT_SECTION)}.gradient-checkpointing"
AXES: dict[str, Any] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), 1),
    "recompute": ("none", "full"),
}
"""Values of the `parallel` axes that DeepSpeed with a Trainer supports."""
_EIGHT_BIT_ADAM = re.compile(r"(paged_)?adamw?_(bnb_|torch_)?8bit|adamw_hf_8bit|adamw_8bit")
"""Matches names of Adam with both moments in 8 bits, and one scale per block of 256."""
_OTHER_ADAMS = re.compile(
    r"[48]-?bit|fp8|onebit|zeroone|galore|apollo|loro|ademamix|adam_?mini|anyprecision|grokadam"
)
"""Matches parts of optimizer names whose states are not two fp32 moments per weight."""
_OFF_VALUES = ("false", "no", "none", "0", "")
LENGTH_OPTIONS = (
    "max-seq-length",
    "max-length",
    "model-max-length",
    "block-size",
    "cutoff-len",
    "max-seq-len",
    "seq-length",
    "max-len",
)
"""Names of the sequence length option in various trainers."""
_LENGTH_BOUNDS = ("max-seq-length", "max-length", "cutoff-len")
"""Options that limit the sample length, unless samples are packed."""
_PACKING_OPTIONS = ("packing", "neat-packing", "pad-to-max-length")
_AUTO_OPTIONS = {
    "parallel.micro_batch_size": (
        "per-device-train-batch-size",
        "train_micro_batch_size_per_gpu",
        "4",
    ),
    "training.precision": ("bf16", "bf16.enabled", "bf16"),
    "training.global_batch_size": (
        "gradient-accumulation-steps",
        "gradient_accumulation_steps",
        "256",
    ),
}
"""For each field with an "auto" value: the Trainer's argument, the config's key, and an example."""


_DEFAULT_BATCH = "8"
"""Default of per_device_train_batch_size in TrainingArguments, whose output_dir is required."""


@dataclass(frozen=True, slots=True)
class _TrainerSettings:
    """The keys of a DeepSpeed config and the Trainer's arguments."""

    keys: Mapping[str, Setting]
    arguments: Mapping[str, Setting]
    reading: Reading

    def file_value(self, name: str) -> str | None:
        setting = self.keys.get(name)
        return (
            None
            if setting is None or setting.values in ((), ("auto",), ("none",))
            else setting.text
        )

    def argument(self, *names: str) -> str | None:
        """Return the value of the first argument that is set; `true` for a switch."""
        setting = next((self.arguments[name] for name in names if name in self.arguments), None)
        return None if setting is None else setting.text or "true"

    def is_on(self, name: str) -> bool:
        return (self.argument(name) or "no").lower() not in _OFF_VALUES

    def is_auto(self, *names: str) -> bool:
        return any(self.keys[name].values == ("auto",) for name in names if name in self.keys)

    def batch(self, num_gpus: int) -> tuple[int, int]:
        """Return the micro-batch size and the global batch size.

        Raises:
            InputError: The file is inconsistent.
        """
        file_micro, file_batch = "train-micro-batch-size-per-gpu", "train-batch-size"
        steps_name = "gradient-accumulation-steps"
        micro = _parse_count(
            self.file_value(file_micro)
            or self.argument("per-device-train-batch-size", "micro-batch-size")
            or self.reading.overridden_size("parallel.micro_batch_size")
            or (_DEFAULT_BATCH if "output-dir" in self.arguments else None),
            file_micro,
        )
        steps = _parse_count(self.file_value(steps_name) or self.argument(steps_name), steps_name)
        batch = _parse_count(self.file_value(file_batch) or self.argument(file_batch), file_batch)
        automatic = self.is_auto(file_micro, file_batch)
        if micro is None and (automatic or self.arguments) and not (batch and steps):
            _note_missing(self.reading, "parallel.micro_batch_size", auto=automatic)
        if batch is None and steps is None and steps_name in self.keys:
            _note_missing(self.reading, "training.global_batch_size", auto=True)
        global_batch = batch or (micro or 1) * (steps or 1) * max(num_gpus, 1)
        micro = micro or max(global_batch // max((steps or 1) * num_gpus, 1), 1)
        if steps is not None and num_gpus and global_batch != micro * steps * num_gpus:
            raise InputError(
                f"train_batch_size {global_batch} does not equal train_micro_batch_size_per_gpu "
                f"{micro} x gradient_accumulation_steps {steps} x {num_gpus} GPUs; change one "
                "of them",
                field="train_batch_size",
            )
        return micro, global_batch

    def zero_stage(self) -> int:
        name = "zero_optimization.stage"
        stage = parse_whole_number(
            self.file_value("zero-optimization.stage") or self.argument("zero-stage") or 0, name
        )
        if stage not in (0, 1, 2, 3):
            raise InputError(f"{name} must be from 0 to 3, got {stage!r}", field=name)
        return stage

    def recomputes(self) -> bool:
        checkpointing = self.argument(
            "activation-checkpointing", "gradient-checkpointing"
        )  # The newer name takes precedence.
        if (
            checkpointing or self.file_value(_SCRIPT_CHECKPOINTING) or "no"
        ).lower() not in _OFF_VALUES:
            return True
        trainer = (
            "per-device-train-batch-size" in self.arguments
        )  # The Trainer does not use deepspeed.checkpointing.
        return not trainer and any(
            name.startswith("activation-checkpointing") for name in self.keys
        )


def read_arguments(
    content: Mapping[str, Any] | None,
    *,
    text: str = "",
    words: Iterable[Setting] = (),
    reading: Reading,
    num_gpus: int | None,
    spare: Iterable[str] = (),
) -> None:
    """Fill the reading with the query of a DeepSpeed config and its Trainer arguments."""
    spare, of_file = tuple(spare), Reading(tool=reading.tool)
    arguments = sort_settings(words, table=table("trainer"), reading=reading, spare=spare)
    leaves = as_settings(content or {}, lines=text)
    automatic = [leaf for leaf in leaves if leaf.values == ("auto",)]
    keys = sort_settings(
        (leaf for leaf in leaves if leaf.values != ("auto",)),
        table=table("deepspeed"),
        reading=reading,
        spare=spare,
    )
    keys |= sort_settings(automatic, table=table("deepspeed"), reading=of_file, spare=spare)
    reading.ignored += of_file.ignored
    run = _TrainerSettings(keys, arguments, reading)
    (micro, global_batch), stage = run.batch(num_gpus or 0), run.zero_stage()
    training: dict[str, Any] = {
        "global_batch_size": global_batch,
        "precision": _read_precision(keys, arguments, reading),
        "framework": "deepspeed" if content is not None or stage else "hf-trainer",
    }
    if (dtype_of_gradients := run.file_value("data-types.grad-accum-dtype")) in ("bf16", "fp16"):
        training["gradient_precision"] = dtype_of_gradients
    device = run.file_value("zero-optimization.offload-optimizer.device")
    if device or run.file_value("zero-optimization.cpu-offload") == "true":
        training["offload"] = "optimizer"
    if (
        device
        and (share := run.file_value("zero-optimization.offload-optimizer.ratio")) is not None
    ):
        training["offload_fraction"] = parse_fraction(
            share, "zero_optimization.offload_optimizer.ratio"
        )
    if device not in (None, "cpu"):
        reading.refuse(
            f"zero_optimization.offload_optimizer.device {device} is not supported; supported: cpu"
        )
    if (length := _parse_count(run.argument(*LENGTH_OPTIONS), "max-seq-length")) is not None:
        training["sequence_length"] = length
        packed = any(run.is_on(name) for name in _PACKING_OPTIONS)
        named = next(name for name in LENGTH_OPTIONS if name in arguments)
        if named in _LENGTH_BOUNDS and not packed:
            reading.note_length_bound(arguments[named].written)
    _read_lora(training, arguments, reading)
    dtype = (run.argument("torch-dtype", "dtype") or "").lower()
    narrow = dtype in SIXTEEN_BITS
    if (
        run.argument("use-peft") is not None
        and training.get("task") == "lora"
        and dtype in ("", "float32")
    ):
        training["parameter_precision"] = "fp32"  # TRL's default.
    if content is None and not stage and "task" not in training:
        if narrow:
            dtype_of_gradients = (
                training["precision"] if training["precision"] != "fp32" else SIXTEEN_BITS[dtype]
            )
            training |= {"precision": dtype_of_gradients, **pure_state_fields(SIXTEEN_BITS[dtype])}
        elif dtype == "float32" and training["precision"] != "fp32":
            training["parameter_precision"] = "fp32"
    optimizer = run.file_value("optimizer.type") or run.argument("optim")
    sharded = content is not None or bool(stage)
    _read_optimizer(training, optimizer, reading, sharded=sharded and "task" not in training)
    loss = run.argument("loss-type")
    if loss not in (None, "chunked_nll", "nll", "dft", "cross_entropy", "causal_lm"):
        reading.refuse(
            f"loss_type {loss} is not supported; supported: cross entropy of the next token"
        )
    liger = run.is_on("use-liger-kernel")
    # Both are chunked since TRL 1.16. Liger's loss never materialises all logits.
    in_chunks = loss in ("chunked_nll", "nll")
    if in_chunks or liger:  # Liger's loss never stores all logits.
        training["cross_entropy"] = "chunked"
    if liger or run.is_on("torch-compile"):
        training["kernel_fusion"] = True
    if run.argument("attn-implementation", "attn-impl", "flash-attn") in ("eager", "disabled"):
        training["attention"] = "unfused"
    parallel: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "micro_batch_size": micro,
        "zero_stage": stage,
        "recompute": "full" if run.recomputes() else "none",
    }
    reading.query = {"kind": "training", "training": training, "parallel": parallel}
    if (
        model := run.argument("model-name-or-path", "model-name", "model", "model-id", "pretrain")
    ) is not None:
        reading.query["model"] = model
        add_checkpoint_precision(training, model, reading)


_UNSUPPORTED_WEIGHTS = re.compile(r"aqlm|hqq|eetq|[23]bit")
"""Matches parts of checkpoint names whose weight formats are not supported."""


def add_checkpoint_precision(training: dict[str, Any], model: str, reading: Reading) -> None:
    """Add the precision of frozen weights that a quantised checkpoint's name implies.

    4-bit checkpoints of bitsandbytes are nf4, those of AWQ and GPTQ int4. Quantised weights must be
    frozen.
    """
    stored, name = stored_precision(model), model.rpartition("/")[2].lower()
    if strange := _UNSUPPORTED_WEIGHTS.search(name):
        stored = strange[0]
    is_set = "frozen_precision" in training or "training.frozen_precision" in reading.overrides
    if stored in (None, "bf16") or is_set:
        return
    if training.get("task") != "lora":
        reading.refuse(f"{model}: its {stored} weights cannot be trained; use a 16-bit checkpoint")
    elif stored == "int4":
        training["frozen_precision"] = "nf4" if re.search("bnb|-4bit", name) else "int4"
    else:
        reading.refuse(
            f"{model}: frozen weights in {stored} are not supported; set training.frozen_precision"
        )


SIXTEEN_BITS = {"bfloat16": "bf16", "float16": "fp16"}
"""Query precisions by PyTorch's names of 16-bit dtypes."""


def pure_state_fields(precision: str) -> dict[str, str]:
    """Return the precision fields of a training without an fp32 master copy.

    Gradients and optimizer states have the precision of the weights.
    """
    precisions = dict.fromkeys(
        ("parameter_precision", "gradient_precision", "optimizer_precision"), precision
    )
    return {**precisions, "master_precision": "none"}


def add_fsdp_precision(training: dict[str, Any], words: Iterable[Setting]) -> None:
    """Add the precision in which FSDP stores trained weights.

    In mixed precision, Accelerate upcasts weights to fp32 (accelerate/accelerator.py,
    utils/fsdp_utils.py). Otherwise the weights keep the dtype in which they were loaded.
    """
    if "task" in training:  # Frozen weights keep the dtype in which they were loaded.
        return
    dtype = next((word.text.lower() for word in words if word.name in ("torch-dtype", "dtype")), "")
    if training["precision"] != "fp32":
        training["parameter_precision"] = "fp32"
    elif dtype in SIXTEEN_BITS:
        training["precision"] = SIXTEEN_BITS[dtype]
        training |= pure_state_fields(training["precision"])


def _parse_count(value: str | None, name: str) -> int | None:
    if value is None:
        return None
    field = name.replace("-", "_")
    number = parse_whole_number(value, field)
    if number < 1:
        raise InputError(f"{field} must be a whole number, got {value}", field=field)
    return number


def _note_missing(reading: Reading, path: str, *, auto: bool) -> None:
    argument, key, example = _AUTO_OPTIONS[path]
    argument = argument.replace("-", "_")
    named = f"{argument} (of the script)" if reading.tool == "accelerate" else key
    why = (
        f'{key} is "auto", which the trainer fills from --{argument}'
        if auto
        else (f"{named} is not set")
    )
    reading.add_missing(path, f"{why}; add", example=example)


def _read_precision(
    keys: Mapping[str, Setting], arguments: Mapping[str, Setting], reading: Reading
) -> str:
    words = {name: each.text.lower() or "true" for name, each in arguments.items()}
    if words.get("fp8", "no") not in _OFF_VALUES:
        return "fp8"
    for name, key in (
        ("bf16", "bf16.enabled"),
        ("bf16", "bfloat16.enabled"),
        ("fp16", "fp16.enabled"),
    ):
        if key in keys and keys[key].values == ("true",):
            return name
    kind = next(
        (name for name in ("bf16", "fp16") if words.get(name, "no") not in _OFF_VALUES),
        words.get("mixed-precision"),
    )
    if kind in ("bf16", "fp16"):
        return kind
    auto = [
        key
        for key in ("bf16.enabled", "fp16.enabled")
        if key in keys and keys[key].values == ("auto",)
    ]
    if auto and not arguments:
        _note_missing(reading, "training.precision", auto=True)
    return "fp32"


def _read_optimizer(
    training: dict[str, Any], name: str | None, reading: Reading, *, sharded: bool
) -> None:
    """Read the optimizer and the precision of its states.

    8-bit Adam is rejected if `sharded`, because DeepSpeed then stores the optimizer states. For
    LoRA, the states of the adapters are so small that 8-bit Adam is read as plain Adam.
    """
    if name is None:
        return
    word = name.lower()
    if _EIGHT_BIT_ADAM.fullmatch(word) and not sharded:
        if "task" not in training:
            training["optimizer_precision"] = "fp8"
        return
    kind = next((kind for kind in ("adam", "sgd", "muon") if kind in word), None)
    if kind is None or _OTHER_ADAMS.search(word):
        reading.refused.append(f"optimizer {name} is not modelled; supported: adam, sgd, muon")
    elif kind != "adam":
        training["optimizer"] = kind


def _read_lora(
    training: dict[str, Any], arguments: Mapping[str, Setting], reading: Reading
) -> None:
    """Read LoRA settings, with the defaults of TRL (use_peft) or LLaMA-Factory."""
    words = {name: each.text.lower() or "true" for name, each in arguments.items()}
    trl = words.get("use-peft", "no") not in _OFF_VALUES
    used = trl or any(words.get(name, "no") not in _OFF_VALUES for name in ("use-lora", "lora"))
    if not used and words.get("finetuning-type") != "lora":
        return
    training["task"] = "lora"
    default_rank = next(
        (
            words[name]
            for name in ("use-lora", "lora")
            if words.get(name, "").isdecimal() and words[name] != "1"
        ),
        "16",
    )
    default_rank = "8" if words.get("finetuning-type") == "lora" else default_rank
    training["lora"] = {
        "rank": parse_whole_number(
            words.get("lora-r", words.get("lora-rank", default_rank)), "lora_r"
        )
    }
    targets = arguments.get("lora-target-modules", arguments.get("lora-target"))
    if targets is not None and targets.values and targets.values[0] not in ("all", "all-linear"):
        training["lora"]["target_modules"] = [
            part for value in targets.values for part in value.split(",") if part
        ]
    elif targets is None and trl:  # PEFT's default for Llama, Mistral, Qwen and similar models.
        training["lora"]["target_modules"] = ["q_proj", "v_proj"]
    if "lora-dropout" in words or trl:
        training["lora"]["dropout"] = parse_fraction(
            words.get("lora-dropout", "0.05"), "lora_dropout"
        )
    if words.get("load-in-4bit", "no") not in _OFF_VALUES or words.get("quantization-bit") == "4":
        _read_four_bit_weights(training, words, reading)
    elif words.get("quantization-bit", "4") != "4":
        reading.refuse(
            f"quantization_bit {words['quantization-bit']} is not supported; use 4, or "
            "set training.frozen_precision"
        )


def _read_four_bit_weights(
    training: dict[str, Any], words: Mapping[str, str], reading: Reading
) -> None:
    """Read the precision of 4-bit frozen weights, which must be nf4."""
    kind = words.get("bnb-4bit-quant-type", words.get("quantization-type", "nf4"))
    factory = words.get("quantization-bit") == "4"
    nested = (
        words.get(
            "double-quantization" if factory else "use-bnb-nested-quant",
            "true" if factory else "no",
        )
        not in _OFF_VALUES
    )
    if kind != "nf4":
        reading.refuse(
            f"4-bit weights as {kind} are not supported; to read them as nf4, pass "
            "--ignore load_in_4bit and --set training.frozen_precision=nf4"
        )
        return
    if not nested:
        reading.ignored.append(
            Ignored(
                flag="load_in_4bit",
                reason="scales are not quantised, which takes 0.37 bits per frozen weight more "
                "than estimated",
            )
        )
    training["frozen_precision"] = "nf4"
