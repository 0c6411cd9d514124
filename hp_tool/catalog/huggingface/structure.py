"""Read a config.json with an unknown model_type as a known family, if the parameter counts match.

A matching count does not confirm windows or gates. For this reason, every key in the file must be
one that the family uses, or one that affects neither weights nor compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.catalog.huggingface.family import Config, Family
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import HpToolError, UnsupportedError

HARMLESS = frozenset(
    [
        "_name_or_path",
        "name",
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "id2label",
        "label2id",
        "problem_type",
        "torchscript",
        "is_encoder_decoder",
        "is_decoder",
        "chunk_size_feed_forward",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "unk_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "init_std",
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout",
        "embedding_dropout",
        "residual_dropout",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_interleave",
        "partial_rotary_factor",
        "pretraining_tp",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "router_jitter_noise",
        "norm_topk_prob",
        "routed_scaling_factor",
        "scoring_func",
        "topk_method",
        "router_scaling_factor",
        "qk_head_dim",
        "max_position_embeddings",
        "quantization_config",
        "num_parameters",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "enable_moe_fp32_combine",
    ]
)
"""Keys that affect neither weights nor compute, regardless of their value."""


class RecordingConfig(dict[str, Any]):
    """A config.json that records which of its keys were used."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the key's value and record the key."""
        self.seen.add(key)
        return super().get(key, default)


def read_by_structure(
    config: Config,
    *,
    families: Mapping[str, Family],
    read: Callable[[RecordingConfig, Family], ModelSpec],
) -> ModelSpec | None:
    """Return the model as read by the first family whose parameter count matches. Return None if
    the file has no parameter count or no family matches.

    Raises:
        UnsupportedError: A family matches, but does not use all keys. The error names the unused
            keys.
    """
    stated_count = config.get("num_parameters")
    if not isinstance(stated_count, int | float):
        return None
    unread_keys: set[str] = set()
    for name, family in families.items():
        recorded = RecordingConfig(config)
        try:
            spec = read(recorded, family)
            counted = total_parameters(spec)
        except (HpToolError, KeyError, TypeError, ValueError):
            continue
        if spec.architecture != "decoder" or counted != stated_count:
            continue
        unread = config.keys() - recorded.seen - HARMLESS
        if not unread:
            mark = f"read by structure, as {name}: its parameter count alone was checked"
            return replace(spec, left_out=", ".join(filter(None, (spec.left_out, mark))))
        unread_keys = unread if not unread_keys else min(unread_keys, unread, key=len)
    if not unread_keys:
        return None
    key_list = ", ".join(sorted(unread_keys))
    raise UnsupportedError(
        f"model_type {config.get('model_type')!r} resembles a known family, but "
        f"{key_list} may change its layers; describe the model by its fields",
        field=f"model.{min(unread_keys)}",
    )
