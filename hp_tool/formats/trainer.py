"""DeepSpeed's JSON file and the arguments of Hugging Face's Trainer beside it, which fill what the file calls "auto";
Accelerate's
file.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hp_tool.errors import InputError
from hp_tool.formats.deepspeed import BESIDE
from hp_tool.formats.launch import SWITCHES
from hp_tool.formats.reading import Read, Reading, Setting, as_settings, fraction, plain, sort, table, whole_number

_BESIDE = f"{plain(BESIDE)}.gradient-checkpointing"
_OFF = ("false", "no", "none", "0", "")
_AUTO = {
    "parallel.micro_batch_size": ("per-device-train-batch-size", "train_micro_batch_size_per_gpu", "4"),
    "training.precision": ("bf16", "bf16.enabled", "bf16"),
    "training.global_batch_size": ("gradient-accumulation-steps", "gradient_accumulation_steps", "256"),
}
"""What "auto" leaves to the trainer: its argument, the file's key, an example."""

_KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM"}
_SECTIONS = {
    "fsdp_": "fsdp_config",
    "parallelism_config_": "parallelism_config",
    **dict.fromkeys(("zero", "offload_", "gradient_accumulation", "deepspeed_"), "deepspeed_config"),
}
"""Options of `accelerate launch`, and where its file has them."""


def read(
    content: Mapping[str, Any] | None,
    *,
    text: str = "",
    words: Iterable[Setting] = (),
    reading: Reading,
    num_gpus: int | None,
    spare: Iterable[str] = (),
) -> None:
    """Fill `reading` with the query of a DeepSpeed file (None: there is none) and its trainer's arguments."""
    spare = tuple(spare)
    arguments = sort(words, table=table("trainer"), reading=reading, spare=spare)
    leaves = as_settings(content or {}, lines=text)
    reading_of_file = Reading(tool=reading.tool)
    keys = sort(leaves, table=table("deepspeed"), reading=reading_of_file, spare=spare)
    reading.read += [each for each in reading_of_file.read if each.value != "auto"]
    reading.ignored += reading_of_file.ignored
    reading.refused += [each for each in reading_of_file.refused if "auto" not in each]

    def key(name: str) -> str | None:
        setting = keys.get(name)
        return None if setting is None or setting.values in ((), ("auto",), ("none",)) else " ".join(setting.values)

    def argument(*names: str) -> str | None:
        setting = next((arguments[name] for name in names if name in arguments), None)
        if setting is None or setting.unknown:
            return None
        return " ".join(setting.values) or "true"

    def count(value: str | None, name: str) -> int | None:
        if value is None:
            return None
        number = whole_number(value, name)
        if number < 1:
            raise InputError(f"{name} must be a whole number, got {value}", field=name)
        return number

    micro = count(
        key("train-micro-batch-size-per-gpu") or argument("per-device-train-batch-size", "micro-batch-size"),
        "train_micro_batch_size_per_gpu",
    )
    steps = count(key("gradient-accumulation-steps") or argument("gradient-accumulation-steps"), "gradient_accumulation_steps")
    batch = count(key("train-batch-size") or argument("train-batch-size"), "train_batch_size")
    replicas = num_gpus or 0
    automatic = any(
        keys[name].values == ("auto",) for name in ("train-micro-batch-size-per-gpu", "train-batch-size") if name in keys
    )
    if micro is None and (automatic or arguments) and not (batch and steps):
        _lack(reading, "parallel.micro_batch_size", auto=automatic)
    if batch is None and steps is None and keys.get("gradient-accumulation-steps") is not None:
        _lack(reading, "training.global_batch_size", auto=True)
    whole = batch or (micro or 1) * (steps or 1) * max(replicas, 1)
    micro = micro or max(whole // max((steps or 1) * replicas, 1), 1)
    if steps is not None and replicas and whole != micro * steps * replicas:
        raise InputError(
            f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            f"{replicas} GPUs; change one of them",
            field="train_batch_size",
        )
    stage = whole_number(key("zero-optimization.stage") or argument("zero-stage") or 0, "zero_optimization.stage")
    if stage not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization.stage must be from 0 to 3, got {stage!r}", field="zero_optimization.stage")
    training: dict[str, Any] = {
        "global_batch_size": whole,
        "precision": _precision(keys, arguments, reading),
        "framework": "deepspeed" if content is not None or stage else "hf-trainer",
    }
    kept = key("data-types.grad-accum-dtype")
    if kept in ("bf16", "fp16"):
        training["gradient_precision"] = kept
    if key("zero-optimization.offload-optimizer.device") or key("zero-optimization.cpu-offload") == "true":
        training["offload"] = "optimizer"
    if (
        length := count(
            argument(
                "max-seq-length",
                "max-length",
                "model-max-length",
                "block-size",
                "cutoff-len",
                "max-seq-len",
                "seq-length",
                "max-len",
            ),
            "max_seq_length",
        )
    ) is not None:
        training["sequence_length"] = length
    _optimizer(training, key("optimizer.type") or argument("optim"), reading)
    _lora(training, arguments, reading)
    if argument("loss-type") == "chunked_nll":
        training["cross_entropy"] = "chunked"
    if argument("attn-implementation", "attn-impl", "flash-attn") in ("eager", "disabled"):
        training["attention"] = "unfused"
    recompute = (argument("gradient-checkpointing") or key(_BESIDE) or "no").lower() not in _OFF
    if "per-device-train-batch-size" not in arguments:  # a Trainer does not call deepspeed.checkpointing, which the block sets
        recompute = recompute or any(name.startswith("activation-checkpointing") for name in keys)
    parallel: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "micro_batch_size": micro,
        "zero_stage": stage,
    }
    parallel["recompute"] = "full" if recompute else "none"
    reading.query = {"kind": "training", "training": training, "parallel": parallel}
    if (model := argument("model-name-or-path", "model-name", "model", "model-id", "pretrain")) is not None:
        reading.query["model"] = model


def _lack(reading: Reading, path: str, *, auto: bool) -> None:
    argument, key, example = _AUTO[path]
    why = f'{key} is "auto", which the trainer fills from --{argument.replace("-", "_")}' if auto else f"nothing says {key}"
    reading.lack(path, f"{why}; add --set {path}={example}")


def _precision(keys: Mapping[str, Setting], arguments: Mapping[str, Setting], reading: Reading) -> str:
    words = {name: " ".join(each.values).lower() or "true" for name, each in arguments.items()}
    for name, key in (("bf16", "bf16.enabled"), ("bf16", "bfloat16.enabled"), ("fp16", "fp16.enabled")):
        if key in keys and keys[key].values == ("true",):
            return name
    told = next((name for name in ("bf16", "fp16") if words.get(name, "no") not in _OFF), words.get("mixed-precision"))
    if told in ("bf16", "fp16"):
        return told
    auto = [key for key in ("bf16.enabled", "fp16.enabled") if key in keys and keys[key].values == ("auto",)]
    if auto and not arguments:
        _lack(reading, "training.precision", auto=True)
    return "fp32"


def _optimizer(training: dict[str, Any], name: str | None, reading: Reading) -> None:
    if name is None:
        return
    word = name.lower()
    kind = next((kind for kind in ("adam", "sgd", "muon") if kind in word), None)
    if kind is None or "8bit" in word or "onebit" in word:
        reading.refused.append(f"optimizer {name}: is not modelled; adam, sgd and muon are")
    elif kind != "adam":
        training["optimizer"] = kind


def _lora(training: dict[str, Any], arguments: Mapping[str, Setting], reading: Reading) -> None:
    """Adapters and frozen weights; what TRL (use_peft) and LLaMA-Factory leave out takes their defaults."""
    words = {name: " ".join(each.values).lower() or "true" for name, each in arguments.items()}
    trl = words.get("use-peft", "no") not in _OFF
    used = trl or any(words.get(name, "no") not in _OFF for name in ("use-lora", "lora"))
    if not used and words.get("finetuning-type") != "lora":
        return
    training["task"] = "lora"
    usual = next((words[name] for name in ("use-lora", "lora") if words.get(name, "").isdecimal() and words[name] != "1"), "16")
    usual = "8" if words.get("finetuning-type") == "lora" else usual
    training["lora"] = {"rank": whole_number(words.get("lora-r", words.get("lora-rank", usual)), "lora_r")}
    targets = arguments.get("lora-target-modules", arguments.get("lora-target"))
    if targets is not None and targets.values and targets.values[0] not in ("all", "all-linear"):
        training["lora"]["target_modules"] = [part for value in targets.values for part in value.split(",") if part]
    elif targets is None and trl:  # PEFT's own choice for Llama, Mistral, Qwen and their kin
        training["lora"]["target_modules"] = ["q_proj", "v_proj"]
    if "lora-dropout" in words or trl:
        training["lora"]["dropout"] = fraction(words.get("lora-dropout", "0.05"), "lora_dropout")
    if words.get("load-in-4bit", "no") not in _OFF or words.get("quantization-bit") == "4":
        _four_bits(training, words, reading)
    elif words.get("quantization-bit", "4") != "4":
        reading.refuse(f"quantization_bit {words['quantization-bit']}: only 4 is read; write training.frozen_precision")


def _four_bits(training: dict[str, Any], words: Mapping[str, str], reading: Reading) -> None:
    """Frozen weights of 4 bits: nf4 whose scales are quantised too; LLaMA-Factory's double_quantization is on by itself."""
    kind = words.get("bnb-4bit-quant-type", words.get("quantization-type", "nf4"))
    factory = words.get("quantization-bit") == "4"
    nested = words.get("double-quantization" if factory else "use-bnb-nested-quant", "true" if factory else "no") not in _OFF
    if kind != "nf4" or not nested:
        reading.refuse(
            f"4 bits as {kind}{'' if nested else ' with scales of 32 bits (no use_bnb_nested_quant)'}: nf4 with quantised "
            "scales is modelled; --ignore load_in_4bit, and add --set training.frozen_precision=nf4 to take it as that"
        )
        return
    training["frozen_precision"] = "nf4"


def accelerate(
    content: Mapping[str, Any],
    *,
    text: str,
    reading: Reading,
    num_gpus: int | None,
    words: Iterable[Setting] = (),
    spare: Iterable[str] = (),
) -> None:
    """Accelerate's file: FSDP 1 or 2, DeepSpeed, or plain data parallelism; the script's arguments say the batch."""
    kind = str(content.get("distributed_type", "MULTI_GPU"))
    leaves = {each.name: each for each in as_settings(content, lines=text)}
    settings = list(words)
    stage = "0"
    if kind == "DEEPSPEED":
        stage = _value(leaves, "deepspeed-config.zero-stage", "2")
    elif kind == "FSDP":
        version = _value(leaves, "fsdp-config.fsdp-version", "1")
        strategy = _value(leaves, "fsdp-config.fsdp-sharding-strategy", "FULL_SHARD").upper()
        reshard = _value(leaves, "fsdp-config.fsdp-reshard-after-forward", "true").upper()
        shared = {"FULL_SHARD": "3", "1": "3", "SHARD_GRAD_OP": "2", "2": "2", "NO_SHARD": "0", "3": "0", "HYBRID_SHARD": "3"}
        stage = ("3" if reshard in ("TRUE", "FULL_SHARD") else "2") if version == "2" else shared.get(strategy, "3")
    elif kind not in ("MULTI_GPU", "NO"):
        reading.refused.append(f"distributed_type {kind}: only FSDP, DEEPSPEED and MULTI_GPU are read")
    settings.append(Setting(name="zero-stage", written="distributed_type", values=(stage,)))
    precision = _value(leaves, "mixed-precision", "no")
    if precision in ("bf16", "fp16", "fp8"):
        settings.append(Setting(name="fp16" if precision == "fp16" else "bf16", written="mixed_precision", values=()))
    checkpointed = _value(leaves, "fsdp-config.fsdp-activation-checkpointing", "false") == "true"
    if (steps := leaves.get("deepspeed-config.gradient-accumulation-steps")) is not None and steps.values != ("auto",):
        settings.append(
            Setting(name="gradient-accumulation-steps", written=steps.written, values=steps.values, line=steps.line)
        )
    own = Reading(tool=reading.tool)
    sort(
        [each for name, each in leaves.items() if each.name != "deepspeed-config.gradient-accumulation-steps"],
        table=table("accelerate"),
        reading=own,
        spare=spare,
    )
    reading.read += own.read
    reading.ignored += own.ignored
    reading.refused += own.refused
    read(None, words=settings, reading=reading, num_gpus=num_gpus, spare=spare)
    training, parallel = reading.query["training"], reading.query["parallel"]
    if precision == "fp8":
        training["precision"] = "fp8"
    if kind == "FSDP":
        training["framework"] = "torch-fsdp"
        parallel["recompute"] = "per_layer" if checkpointed or parallel["recompute"] == "full" else "none"
        degrees = {"tensor_parallel_size": "tp-size", "context_parallel_size": "cp-size"}
        for field, key in degrees.items():
            parallel[field] = whole_number(_value(leaves, f"parallelism-config.parallelism-config-{key}", "1"), key)
        if parallel["tensor_parallel_size"] > 1:  # the model's own plan shards matrices alone
            parallel["sequence_parallel"] = False
        shard = whole_number(_value(leaves, "parallelism-config.parallelism-config-dp-shard-size", "0"), "dp_shard_size")
        if (
            whole_number(_value(leaves, "parallelism-config.parallelism-config-dp-replicate-size", "1"), "dp_replicate_size")
            > 1
        ):
            parallel["data_parallel_shard_size"] = shard
    if _value(leaves, "deepspeed-config.offload-optimizer-device", "none") == "cpu":
        training["offload"] = "optimizer"
    for name, field in (
        ("per-device-train-batch-size", "parallel.micro_batch_size"),
        ("gradient-accumulation-steps", "training.global_batch_size"),
    ):
        if all(each.name not in (name, "train-batch-size") for each in settings):
            reading.lack(field, f"the script's --{name.replace('-', '_')} says it, not this file; add --set {field}=...")
    if all(isinstance(each, Read) and each.field != "cluster.num_gpus" for each in reading.read):
        reading.read.append(
            Read(flag="num_processes", value=_value(leaves, "num-processes", ""), line=None, field="cluster.num_gpus")
        )


def own_fsdp(words: str, reading: Reading) -> dict[str, Any]:
    """The Trainer's --fsdp, such as "full_shard auto_wrap", as Accelerate's file would say it."""
    parts = words.lower().split()
    if "offload" in parts:
        reading.refuse(f"--fsdp {words}: offload of weights is not modelled")
    if "hybrid_shard_zero2" in parts:
        reading.refuse(f"--fsdp {words}: ZeRO 2 within groups of replicas is not read")
    strategies = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
    return {"fsdp_sharding_strategy": next((part.upper() for part in parts if part in strategies), "FULL_SHARD")}


def launch_options(words: Sequence[str]) -> dict[str, Any]:
    """What the options of `accelerate launch` say, as its file would; empty where they only start processes."""
    content: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            break
        name, separator, value = word.lstrip("-").replace("-", "_").partition("=")
        value = word.partition("=")[2] if separator else "true" if name.replace("_", "-") in SWITCHES else next(rest, "")
        section = next((each for start, each in _SECTIONS.items() if name.startswith(start)), None)
        if name in _KINDS:
            content["distributed_type"] = _KINDS[name]
        elif section is not None:
            content.setdefault(section, {})[name] = value.lower() if value.lower() in ("true", "false") else value
        elif name in ("mixed_precision", "num_processes", "num_machines"):
            content[name] = value
    return content if content.keys() - {"num_processes", "num_machines"} else {}


def _value(leaves: Mapping[str, Setting], name: str, default: str) -> str:
    setting = leaves.get(name)
    return " ".join(setting.values) if setting is not None and setting.values else default
