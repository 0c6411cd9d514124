"""GPT-NeoX's YAML files, in Megatron's arguments."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.formats.reading import Read, Reading, Setting, Settings, whole_number
from hp_tool.formats.registry import Format, register
from hp_tool.formats.renamed import file_settings, renamed
from hp_tool.formats.signs import Evidence, Sign, words
from hp_tool.formats.source import Source
from hp_tool.formats.tools.megatron_lm.formats import options
from hp_tool.formats.tools.megatron_lm.read import read as read_arguments

_OWN = ("mlp-type", "attention-config", "use-bias-in-attn-linear")
"""Keys of GPT-NeoX that no flag of Megatron stands for."""
_READ_HERE = {
    "mlp-type": "model.gated_mlp",
    "mlp-multiple-of": "model.intermediate_size",
    "precision": "training.precision",
    "attention-config": "training.attention",
    "use-bias-in-attn-linear": "model.attention_bias",
    "gradient-accumulation-steps": "training.global_batch_size",
}
"""Fields that the file's own keys decide, where Megatron's table does not say it."""


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a GPT-NeoX file; several are given as one, the later ones
    laid over the earlier.
    """
    content, num_gpus, spare = source.keys(reading), reading.num_gpus, source.ignore
    leaves = file_settings(content, text=source.text)
    reading.lack_unknown(leaves, _READ_HERE)
    own = [each for each in leaves if each.name not in _OWN]
    settings = renamed(own, tool="gpt-neox", reading=reading, spare=spare)
    keys = {str(key).replace("-", "_"): value for key, value in content.items()}
    by_name = {each.name: each for each in settings}
    if "position-embedding-type" in by_name and by_name["position-embedding-type"].values == (
        "rotary",
    ):
        settings.append(Setting(name="use-rotary-position-embeddings", written="pos_emb"))
        settings.remove(by_name["position-embedding-type"])
    if by_name.get("glu-activation") and by_name["glu-activation"].values[0] not in (
        "swiglu",
        "geglu",
        "reglu",
    ):
        settings.remove(by_name.pop("glu-activation"))
    texts = {each.name: each.text for each in leaves if not each.unknown}
    precision = texts.get("precision", "fp32")
    if precision not in ("bfloat16", "fp16", "fp32"):
        reading.refuse(f"precision {precision}: bfloat16, fp16 and fp32 are read")
    elif precision != "fp32":
        settings.append(
            Setting(name="bf16" if precision == "bfloat16" else "fp16", written="precision")
        )
    kinds = set(re.findall(r"[a-z]\w*", str(keys.get("attention_config") or ""))) - {"all"}
    if kinds & {"flash"}:
        settings.append(Setting(name="use-flash-attn", written="attention_config"))
    if not kinds <= {"flash", "global"} or kinds >= {"flash", "global"}:
        reading.refuse(
            f"attention_config {', '.join(sorted(kinds))}: attention of that kind, or of several "
            "kinds, is not read"
        )
    settings += _gated(keys, by_name)
    steps = texts.get("gradient-accumulation-steps")
    sizes = [
        Settings(by_name).size(f"{kind}-model-parallel-size") for kind in ("tensor", "pipeline")
    ]
    if "global-batch-size" not in by_name and "micro-batch-size" in by_name and steps and num_gpus:
        replicas = max(num_gpus // max(sizes[0], 1) // max(sizes[1], 1), 1)
        micro = whole_number(
            by_name["micro-batch-size"].values[0], "train_micro_batch_size_per_gpu"
        )
        whole = micro * whole_number(steps, "gradient_accumulation_steps") * replicas
        settings.append(
            Setting(
                name="global-batch-size",
                written="gradient_accumulation_steps",
                values=(str(whole),),
            )
        )
    settings.append(Setting(name="deepspeed", written="GPT-NeoX"))
    for name in ("hidden-dropout", "attention-dropout"):
        if name not in by_name:  # NeoX's default; Megatron's is 0.1
            settings.append(Setting(name=name, written=name.replace("-", "_"), values=("0",)))
    if "zero-stage" not in by_name:
        settings.append(Setting(name="zero-stage", written="zero_optimization", values=("0",)))
    read_arguments(
        [_positive(each) for each in settings], reading=reading, num_gpus=num_gpus, spare=spare
    )
    reading.query["training"]["framework"] = "gpt-neox"
    if "use_bias_in_attn_linear" in keys and isinstance(reading.query.get("model"), dict):
        biased = keys["use_bias_in_attn_linear"] is not False
        reading.query["model"]["attention_bias"] = biased
        reading.read.append(
            Read(
                flag="use_bias_in_attn_linear",
                value=str(biased).lower(),
                line=None,
                field="model.attention_bias",
            )
        )


def _gated(keys: Mapping[str, Any], by_name: Mapping[str, Setting]) -> list[Setting]:
    """A gated MLP as Megatron's flags: GPT-NeoX rounds two thirds of 4h up to multiples of
    mlp_multiple_of, and its older mlp_type llama to multiples of 256, without bias.
    """
    older = keys.get("mlp_type") == "llama"
    if not older and "glu-activation" not in by_name:
        return []
    settings = [
        Setting(name=name, written="mlp_type")
        for name in ("swiglu", "disable-bias-linear")
        if older
    ]
    if "ffn-hidden-size" not in by_name and "hidden-size" in by_name:
        hidden = whole_number(by_name["hidden-size"].values[0], "hidden_size")
        multiple = (
            256
            if older
            else max(whole_number(keys.get("mlp_multiple_of", 1), "mlp_multiple_of"), 1)
        )
        width = -(-int(4 * hidden * 2 / 3) // multiple) * multiple
        settings.append(
            Setting(name="ffn-hidden-size", written="hidden_size", values=(str(width),))
        )
    return settings


def _positive(setting: Setting) -> Setting:
    """NeoX writes 0 for no model or pipeline parallelism."""
    if setting.name.endswith("model-parallel-size") and setting.values == ("0",):
        return replace(setting, values=("1",))
    return setting


def _is_its_file(evidence: Evidence) -> bool:
    keys = evidence.keys
    return (
        bool(keys & {"pipe_parallel_size", "model_parallel_size", "train_iters"})
        or {"num_layers", "hidden_size"} <= keys
    )


register(
    Format(
        name="gpt-neox",
        signs=(
            Sign(of="keys", rank=10, holds=_is_its_file),
            Sign(of="script", rank=40, holds=words(r"\bdeepy\.py\b")),
        ),
        read=read,
        options=options,
        log="megatron-lm",
        reads="its YAML files, alone or as `deepy.py` is given them",
    )
)
