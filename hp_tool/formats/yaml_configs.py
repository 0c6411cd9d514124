"""Megatron's arguments in the YAML files of other trainers: GPT-NeoX, Megatron Bridge, NeMo."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.formats.megatron_lm.read import read as read_arguments
from hp_tool.formats.reading import Read, Reading, Setting, fraction, sort, table, whole_number
from hp_tool.formats.renamed import file_settings, renamed

_MIXED = {
    "bf16": (), "fp16": (), "fp8_delayed": ("fp8-format=hybrid",), "fp8_current": ("fp8-format=hybrid",
    "fp8-recipe=tensorwise"),
    "fp8_subchannel": ("fp8-format=hybrid", "fp8-recipe=blockwise"), "mxfp8": ("fp8-format=e4m3", "fp8-recipe=mxfp8"),
    "nvfp4": ("fp4-format=e2m1",),
}  # fmt: skip


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "uint8": "fp8"}
"""torch's names of number formats, and those of Megatron's arguments; its optimizer keeps fp8 in bytes."""
_OWN = ("mlp-type", "attention-config", "use-bias-in-attn-linear")
"""Keys of GPT-NeoX that no flag of Megatron stands for."""
_BY_PROVIDER = ("normalization", "position_embedding_type", "gated_linear_unit", "add_bias_linear")
"""What a class of model providers decides where a file leaves it out."""
_PLAIN = ("GPTModelProvider", "GPTConfig")
"""Classes whose defaults are Megatron Core's own."""
_DISTRIBUTED = ("mcore_distributed_optim", "distributed_fused_adam")
"""NeMo's optimizers that shard their states over data parallelism."""


def neox(content: Mapping[str, Any], *, text: str, reading: Reading, num_gpus: int | None, spare: Iterable[str]) -> None:
    """A GPT-NeoX file; several are given as one, the later ones laid over the earlier."""
    own = [each for each in file_settings(content, text=text) if each.name not in _OWN]
    settings = renamed(own, tool="gpt-neox", reading=reading, spare=spare)
    keys = {str(key).replace("-", "_"): value for key, value in content.items()}
    found = {each.name: each for each in settings}
    if "position-embedding-type" in found and found["position-embedding-type"].values == ("rotary",):
        settings.append(Setting(name="use-rotary-position-embeddings", written="pos_emb", values=()))
        settings.remove(found["position-embedding-type"])
    if found.get("glu-activation") and found["glu-activation"].values[0] not in ("swiglu", "geglu", "reglu"):
        settings.remove(found.pop("glu-activation"))
    if content.get("precision") in ("bfloat16", "fp16"):
        name = "bf16" if content["precision"] == "bfloat16" else "fp16"
        settings.append(Setting(name=name, written="precision", values=()))
    kinds = set(re.findall(r"[a-z]\w*", str(keys.get("attention_config") or ""))) - {"all"}
    if kinds & {"flash"}:
        settings.append(Setting(name="use-flash-attn", written="attention_config", values=()))
    if not kinds <= {"flash", "global"} or kinds >= {"flash", "global"}:
        reading.refuse(f"attention_config {', '.join(sorted(kinds))}: attention of that kind, or of several kinds, is not read")
    settings += _gated(keys, found)
    steps = content.get("gradient_accumulation_steps", content.get("gradient-accumulation-steps"))
    sizes = ("tensor-model-parallel-size", "pipeline-model-parallel-size")
    parallel = [whole_number(found[name].values[0], name) for name in sizes if name in found]
    if "global-batch-size" not in found and "micro-batch-size" in found and steps and num_gpus:
        replicas = max(num_gpus // max(parallel[0] if parallel else 1, 1) // max(parallel[1] if len(parallel) > 1 else 1, 1), 1)
        micro = whole_number(found["micro-batch-size"].values[0], "train_micro_batch_size_per_gpu")
        whole = micro * whole_number(steps, "gradient_accumulation_steps") * replicas
        settings.append(Setting(name="global-batch-size", written="gradient_accumulation_steps", values=(str(whole),)))
    settings.append(Setting(name="deepspeed", written="GPT-NeoX", values=()))
    for name in ("hidden-dropout", "attention-dropout"):
        if name not in found:  # NeoX's default; Megatron's is 0.1
            settings.append(Setting(name=name, written=name.replace("-", "_"), values=("0",)))
    stage = found.get("zero-stage")
    if stage is None:
        settings.append(Setting(name="zero-stage", written="zero_optimization", values=("0",)))
    elif whole_number(stage.values[0], "zero_optimization.stage") == 0:
        pass
    read_arguments([_positive(each) for each in settings], reading=reading, num_gpus=num_gpus, spare=spare)
    reading.query["training"]["framework"] = "gpt-neox"
    if "use_bias_in_attn_linear" in keys and isinstance(reading.query.get("model"), dict):
        biased = keys["use_bias_in_attn_linear"] is not False
        reading.query["model"]["attention_bias"] = biased
        reading.read.append(
            Read(flag="use_bias_in_attn_linear", value=str(biased).lower(), line=None, field="model.attention_bias")
        )


def _gated(keys: Mapping[str, Any], found: Mapping[str, Setting]) -> list[Setting]:
    """A gated MLP as Megatron's flags: GPT-NeoX rounds two thirds of 4h up to multiples of mlp_multiple_of, and its older
    mlp_type llama to multiples of 256, without bias.
    """
    older = keys.get("mlp_type") == "llama"
    if not older and "glu-activation" not in found:
        return []
    settings = [Setting(name=name, written="mlp_type", values=()) for name in ("swiglu", "disable-bias-linear") if older]
    if "ffn-hidden-size" not in found and "hidden-size" in found:
        hidden = whole_number(found["hidden-size"].values[0], "hidden_size")
        multiple = 256 if older else max(whole_number(keys.get("mlp_multiple_of", 1), "mlp_multiple_of"), 1)
        width = -(-int(4 * hidden * 2 / 3) // multiple) * multiple
        settings.append(Setting(name="ffn-hidden-size", written="hidden_size", values=(str(width),)))
    return settings


def _positive(setting: Setting) -> Setting:
    """NeoX writes 0 for no model or pipeline parallelism."""
    if setting.name.endswith("model-parallel-size") and setting.values == ("0",):
        return Setting(name=setting.name, written=setting.written, values=("1",), line=setting.line)
    return setting


def nemo(content: Mapping[str, Any], *, text: str, reading: Reading, num_gpus: int | None, spare: Iterable[str]) -> None:
    """A file of Megatron Bridge's ConfigContainer, or of NeMo."""
    leaves = file_settings(content, text=text)
    trainer = content.get("trainer") if isinstance(content.get("trainer"), Mapping) else {}
    if num_gpus is None and isinstance(trainer, Mapping) and "devices" in trainer:
        num_gpus = whole_number(trainer["devices"], "trainer.devices") * whole_number(
            trainer.get("num_nodes", 1), "trainer.num_nodes"
        )
    reading.num_gpus = reading.num_gpus or num_gpus
    model = content.get("model")
    provider = str(model.get("_target_", "")).rpartition(".")[2] if isinstance(model, Mapping) else ""
    unsaid = [name for name in _BY_PROVIDER if name not in (model or {})]
    if provider and provider not in _PLAIN and unsaid:
        reading.lack("model", f"{provider} decides {', '.join(unsaid)}, which the file does not say; add --model NAME")
    adapters = content.get("peft") if isinstance(content.get("peft"), Mapping) else {}
    low_rank = str((adapters or {}).get("_target_", "")).endswith(".LoRA")
    elsewhere = ("mixed-precision", "peft") if low_rank else ("mixed-precision",)
    own = [each for each in leaves if plain_of(each) not in elsewhere]
    settings = [_dtype(each) for each in renamed(own, tool="nemo", reading=reading, spare=spare)]
    found = {each.name for each in settings}
    settings += [
        Setting(name=name, written=written, values=tuple(value), line=None) for name, written, value in _precision(content)
    ]
    if "num-query-groups" in found:
        settings.append(Setting(name="group-query-attention", written="model.num_query_groups", values=()))
    activation = str((content.get("model") or {}).get("activation", ""))
    if activation in ("fast-swiglu", "swiglu"):
        settings.append(Setting(name="glu-activation", written="model.activation", values=("swiglu",)))
    optimizer = next((each for each in leaves if each.name in ("model.optim.name", "optim.name")), None)
    if optimizer and optimizer.values[0] in _DISTRIBUTED:
        settings.append(Setting(name="use-distributed-optimizer", written=optimizer.written, values=(), line=optimizer.line))
    read_arguments(settings, reading=reading, num_gpus=num_gpus, spare=spare)
    if low_rank:
        _adapters([each for each in leaves if plain_of(each) == "peft"], reading=reading)
    if provider and provider not in _PLAIN:  # where the file is silent the class decides, not Megatron's default
        said = {each.field for each in reading.read}
        for name in ("dropout", "cross_entropy"):
            if f"training.{name}" not in said:
                reading.query["training"].pop(name, None)


def _adapters(leaves: Iterable[Setting], *, reading: Reading) -> None:
    """Bridge's LoRA (megatron/bridge/peft/lora.py) as training.lora; what it leaves out takes that class's defaults."""
    found = sort(leaves, table=table("bridge-lora"), reading=reading)

    def words(name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        return found[f"peft.{name}"].values if f"peft.{name}" in found else default

    targets = words("target-modules", ())
    if any("*" in name for name in targets):
        reading.refuse(f"peft.target_modules {', '.join(targets)}: adapters on some of the layers are not modelled")
    lora: dict[str, Any] = {"rank": whole_number(words("dim", ("32",))[0], "peft.dim")}
    lora |= {"target_modules": list(targets)} if targets else {}
    if (dropout := fraction(words("dropout", ("0",))[0], "peft.dropout")) > 0.0:
        lora["dropout"] = dropout
    reading.query["training"] |= {"task": "lora", "lora": lora}


def _dtype(setting: Setting) -> Setting:
    """Return the setting with torch's name of a number format as Megatron's arguments write it."""
    if not setting.name.endswith("-dtype") or len(setting.values) != 1:
        return setting
    name = setting.values[0].removeprefix("torch.")
    return replace(setting, values=(_DTYPES.get(name, name),))


def plain_of(setting: Setting) -> str:
    return setting.name.partition(".")[0]


def _precision(content: Mapping[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What mixed_precision (a recipe's name, or its fields) and trainer.precision say."""
    given = content.get("mixed_precision")
    name = str(given) if isinstance(given, str) else ""
    if isinstance(given, Mapping):
        fields = [
            (key, given.get(key)) for key in ("bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "fp8_param", "fp4")
        ]
        flags = {"fp8": "fp8-format", "fp8_param": "fp8-param-gather", "fp4": "fp4-format"}
        reduced = [("grad-reduce-in-bf16", "mixed_precision.grad_reduce_in_fp32", ())]
        return (reduced if given.get("bf16") and given.get("grad_reduce_in_fp32") is False else []) + [
            (flags.get(key, key.replace("_", "-")), f"mixed_precision.{key}", () if value is True else (str(value),))
            for key, value in fields
            if value not in (None, False)
        ]
    trainer = content.get("trainer")
    name = name or str(trainer.get("precision", "") if isinstance(trainer, Mapping) else "")
    found: list[tuple[str, str, tuple[str, ...]]] = []
    if name and "32" not in name:
        found.append(("fp16" if name.startswith(("fp16", "16")) and "bf16" not in name else "bf16", "precision", ()))
    for kind, texts in _MIXED.items():
        if kind in name:
            found += [(flag.partition("=")[0], "mixed_precision", (flag.partition("=")[2],)) for flag in texts]
    if "fp8" in name and "subchannel" not in name:
        found.append(("fp8-param-gather", "mixed_precision", ()))
    return found
