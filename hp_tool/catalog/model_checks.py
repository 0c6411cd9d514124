"""Check that a model's fields describe a possible transformer."""

from collections.abc import Iterator
from dataclasses import replace

from hp_tool.domain.blocks import Mixer
from hp_tool.domain.fields import check_spec
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import InputError

_NEEDED: dict[Mixer, tuple[str, ...]] = {
    "gated_delta": ("linear_num_key_heads", "linear_key_head_dim"),
    "kimi_delta": ("linear_num_key_heads", "linear_key_head_dim"),
    "mamba": ("mamba_inner_size", "mamba_dt_rank", "ssm_state_size"),
    "mamba2": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
}
MAX_KINDS = 128
"""Maximum number of layer kinds in one model. The cost of each kind is computed, and no known model
has this many.
"""
_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


def check_model(spec: ModelSpec) -> ModelSpec:
    """Return the spec after checking that it describes a possible transformer.

    Raises:
        InputError: A field is impossible; the error names the field, its value and the fix.
    """
    check_spec(spec, field="model")
    if spec.blocks is not None:
        _check_pattern(spec)
    for _, kind in spec.kinds:
        _check_kind(kind)
    _check_experts(spec)
    window_layers = spec.sliding_window_layers
    if window_layers is not None and (
        spec.sliding_window is None or window_layers > spec.num_hidden_layers
    ):
        needed = f"sliding_window, and must not exceed num_hidden_layers {spec.num_hidden_layers}"
        raise _model_error(
            "sliding_window_layers", f"sliding_window_layers {window_layers} requires {needed}"
        )
    return spec


def _check_pattern(spec: ModelSpec) -> None:
    blocks, layers = spec.blocks or (), spec.num_hidden_layers
    length = sum(
        check_spec(block, field=f"model.blocks.{index}").count for index, block in enumerate(blocks)
    )
    if not length or layers % length:
        raise _model_error(
            "blocks",
            f"blocks contain {length} layers in total, which does not divide num_hidden_layers "
            f"{layers}",
        )
    if (kinds := len({replace(block, count=1) for block in blocks})) > MAX_KINDS:
        raise _model_error(
            "blocks",
            f"blocks contain {kinds} kinds of layers; the maximum is {MAX_KINDS}. Give "
            "identical layers identical fields",
        )
    if spec.architecture != "decoder":
        raise _model_error(
            "blocks",
            f"blocks describe decoder layers, which architecture {spec.architecture} does not "
            "support; remove blocks",
        )
    for name in ("first_k_dense_replace", "sliding_window_layers"):
        if getattr(spec, name):
            raise _model_error(
                name,
                f"{name} {getattr(spec, name)} and blocks both describe the layers; remove {name}",
            )
    for wants, name in (("windowed", "sliding_window"), ("shares_index", "index_topk")):
        if any(getattr(block, wants) for block in blocks) and getattr(spec, name) is None:
            raise _model_error(name, f"blocks with {wants}: true require {name}; set it")


def _check_kind(kind: ModelSpec) -> None:
    if kind.feed_forward == "experts" and kind.num_experts is None:
        raise _model_error("num_experts", "layers with experts require num_experts; set it")
    if kind.feed_forward not in (None, "experts") and kind.num_experts is not None:
        raise _model_error(
            "feed_forward",
            f"feed_forward {kind.feed_forward} contradicts num_experts; remove one of them",
        )
    if missing := [name for name in _NEEDED.get(kind.mixer, ()) if getattr(kind, name) is None]:
        raise _model_error(
            missing[0], f"layers of {kind.mixer} require {', '.join(missing)}; set all of them"
        )
    for message, field in _uneven_message(kind):
        raise _model_error(field, message)
    sizes = [name for name in _INDEXER if getattr(kind, name) is not None]
    if kind.mixer == "attention" and sizes and len(sizes) < len(_INDEXER):
        missing = [name for name in _INDEXER if name not in sizes]
        raise _model_error(
            missing[0], f"{', '.join(_INDEXER)} must be set together; also set {', '.join(missing)}"
        )


def _uneven_message(kind: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield pairs of (error message, field) for sizes that do not divide each other."""
    heads = kind.num_attention_heads
    if kind.mixer == "attention":
        if kind.head_dim is None and kind.kv_lora_rank is None and kind.hidden_size % heads:
            width = (
                f"hidden_size {kind.hidden_size} is not a multiple of num_attention_heads {heads}"
            )
            yield f"{width}; change one, or set head_dim", "num_attention_heads"
        if heads % kind.kv_heads:
            yield (
                f"num_key_value_heads {kind.kv_heads} does not divide num_attention_heads {heads}",
                "num_key_value_heads",
            )
    keys, values = kind.linear_num_key_heads or 1, kind.linear_num_value_heads
    if values is not None and values % keys:
        yield (
            f"linear_num_key_heads {keys} does not divide linear_num_value_heads {values}",
            "linear_num_key_heads",
        )
    if kind.mamba_num_heads is not None and kind.mamba_num_heads % kind.mamba_n_groups:
        yield (
            f"mamba_n_groups {kind.mamba_n_groups} does not divide mamba_num_heads "
            f"{kind.mamba_num_heads}",
            "mamba_n_groups",
        )


def _check_experts(spec: ModelSpec) -> None:
    experts, per_token = spec.num_experts, spec.num_experts_per_tok or 1
    if (experts is None) != (spec.num_experts_per_tok is None):
        raise _model_error(
            "num_experts_per_tok",
            "num_experts and num_experts_per_tok must be set together",
        )
    if experts is not None and per_token > experts:
        raise _model_error(
            "num_experts_per_tok",
            f"num_experts_per_tok {per_token} is more than num_experts {experts}",
        )
    if spec.n_group is None and spec.topk_group is None:
        return
    groups = spec.n_group or 1
    if not experts or experts % groups:
        raise _model_error(
            "n_group", f"n_group {groups} does not divide num_experts {experts or 0}"
        )
    chosen_groups, each = spec.topk_group or groups, experts // groups
    if chosen_groups > groups or chosen_groups * each < per_token:
        raise _model_error(
            "topk_group",
            f"topk_group {chosen_groups} selects {chosen_groups * each} of {groups * each} "
            f"experts, fewer than num_experts_per_tok {per_token}; raise topk_group",
        )


def _model_error(field: str, message: str) -> InputError:
    return InputError(message, field=f"model.{field}")
