"""Determine the precision of a checkpoint's weights from its quantization_config."""

from collections.abc import Mapping
from typing import Any

from hp_tool.errors import UnsupportedError

_BY_METHOD = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4"}
_BY_MODELOPT = {"FP8": "fp8", "NVFP4": "nvfp4"}
_BY_BITS: dict[tuple[str, Any], str] = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
_BY_FORMAT = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
"""Precision of each 4-bit format in compressed-tensors (compressed_tensors/config/base.py)."""


def weight_precision(config: Mapping[str, Any]) -> str:
    """Return the precision of a checkpoint's weights; bf16 without a quantization_config.

    Raises:
        UnsupportedError: The quantization is unknown.
    """
    stored = _stored_format(config)
    if stored is None:
        return "bf16"
    precision = _precision(stored) if isinstance(stored, Mapping) else None
    if precision is None:
        method = str(stored.get("quant_method") if isinstance(stored, Mapping) else stored)[:80]
        raise UnsupportedError(
            f"quantization_config (quant_method {method}) does not determine the "
            "precision of the weights; set inference.precision",
            field="inference.precision",
        )
    return precision


def attention_is_wide(config: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's quantization leaves the attention projections in 16 bits.

    Its quantization_config then lists them among the unconverted modules.
    """
    stored = _stored_format(config)
    if not isinstance(stored, Mapping):
        return False
    unconverted = (
        name for key in LEFT_WIDE for name in (stored.get(key) or ()) if isinstance(name, str)
    )
    return any(
        "self_attn" in name and "vis" not in name and not name.endswith(SMALL_MODULES)
        for name in unconverted
    )


LEFT_WIDE = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
"""Keys of quantization_config that list modules left in 16 bits."""
SMALL_MODULES = ("norm", "indexer.weights_proj", "sinks")
"""Suffixes of attention modules that are ignored because they have few parameters."""


def _stored_format(config: Mapping[str, Any]) -> object:
    """Return the quantization_config of a config.json, or that of the language model inside it."""
    wrapped = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    parts = (config, *(part for part in wrapped if isinstance(part, Mapping)))
    return next(
        (part["quantization_config"] for part in parts if part.get("quantization_config")), None
    )


def _precision(stored: Mapping[str, Any]) -> str | None:
    method = stored.get("quant_method")
    if method == "gptq":
        return _BY_BITS.get(("int", stored.get("bits", 4)))
    if method == "modelopt":
        return _BY_MODELOPT.get(str(stored.get("quant_algo")))
    if method != "compressed-tensors":
        return _BY_METHOD.get(str(method))
    groups = stored.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    group = group if isinstance(group, Mapping) else {}
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    packed = _BY_FORMAT.get(str(group.get("format") or stored.get("format")))
    return packed or _BY_BITS.get((str(weights.get("type", "int")), weights.get("num_bits")))
