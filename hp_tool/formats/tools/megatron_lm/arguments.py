"""Read Megatron-LM's arguments that describe the model."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from hp_tool.errors import InputError
from hp_tool.formats.reading import Reading, Setting, parse_whole_number, table
from hp_tool.formats.tools.megatron_lm import hybrid, patterns, words

TABLE = "megatron"
MAX_LAYERS = 10_000
SMALL_COUNTS = (
    "num-layers",
    "pipeline-model-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "mtp-num-layers",
)
"""Arguments that determine list lengths. Their values are limited to MAX_LAYERS."""
MAX_NUMBER = 1 << 40


class Arguments:
    """Megatron-LM's arguments with typed access, and the model that they describe."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        reading: Reading,
        num_gpus: int | None,
        *,
        older: bool,
    ) -> None:
        self.settings = settings
        self.reading = reading
        self.num_gpus = num_gpus or 0
        self.older = older

    def is_given(self, *names: str) -> bool:
        return any(name in self.settings for name in names)

    def refuse(self, name: str, why: str) -> None:
        setting = self.settings.get(name)
        self.reading.refuse(f"--{name} {setting.text if setting else ''}".strip() + f": {why}")

    def add_missing(self, name: str, why: str) -> None:
        field = table(TABLE)[name].why
        self.reading.add_missing(field, f"{why}; add", example="...")

    def get_text(self, name: str, default: str) -> str:
        setting = self.settings.get(name)
        if setting is None:
            return default
        if len(setting.values) != 1:
            raise InputError(
                f"--{name} requires one value, got {setting.text or 'none'}", field=f"--{name}"
            )
        return setting.values[0]

    def number(self, name: str, default: int | None = None) -> int:
        if name not in self.settings and default is None:
            self.add_missing(name, f"--{name} is missing")
        text = self.get_text(name, str(1 if default is None else default))
        try:
            number = int(text[:20])
        except ValueError:
            raise InputError(
                f"--{name} must be a whole number, got {text}", field=f"--{name}"
            ) from None
        if abs(number) > MAX_NUMBER or (name in SMALL_COUNTS and number > MAX_LAYERS):
            raise InputError(f"--{name} {text} is too large", field=f"--{name}")
        return number

    def optional_number(self, name: str) -> int | None:
        """Return an argument as an integer; None if it is absent."""
        return self.number(name) if self.is_given(name) else None

    def decimal(self, name: str, default: float) -> float:
        text = self.get_text(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise InputError(f"--{name} must be a number, got {text}", field=f"--{name}") from None

    def query_value(self, name: str, tool_values: Mapping[str, str], default: str) -> str:
        """Return the query's value for an argument.

        `tool_values` contains the tool's value for each query value.
        """
        text = self.get_text(name, default)
        for query_value, tool_value in tool_values.items():
            if tool_value.lower() == text.lower():
                return query_value
        self.refuse(name, "not supported")
        return next(iter(tool_values))

    def model_fields(self) -> dict[str, Any]:
        hidden, heads = self.number("hidden-size"), self.number("num-attention-heads")
        swiglu = self.is_given("swiglu") or self.get_text("glu-activation", "") == "swiglu"
        # validate_args: 4h; with --swiglu two thirds of 4h, rounded down to a multiple of 64.
        default_width = int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden
        layers, bias, latent = (
            self.number("num-layers"),
            not self.is_given("disable-bias-linear"),
            self.is_given("multi-latent-attention"),
        )
        positions = self.position_embedding()
        grouped = self.is_given("group-query-attention", "num-key-value-heads") or (
            latent and self.is_given("num-query-groups")
        )
        groups = self.number("num-key-value-heads", self.number("num-query-groups", 1))
        model: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups if grouped else heads,
            "head_dim": self.number("kv-channels", max(hidden // max(heads, 1), 1)),
            "intermediate_size": self.number("ffn-hidden-size", default_width),
            "vocab_size": self.padded_vocabulary(),
            "tie_word_embeddings": not self.is_given("untie-embeddings-and-output-weights"),
            "gated_mlp": swiglu or self.is_given("quick-geglu", "glu-activation"),
            "normalization": self.query_value("normalization", words.NORMS, "LayerNorm"),
            "embedding_norm": True if self.is_given("embed-layernorm") else None,
            "position_embedding": positions,
            "attention_bias": bias or self.is_given("add-qkv-bias"),
            "attention_output_bias": False if self.is_given("add-qkv-bias") and not bias else None,
            "mlp_bias": bias,
            "max_position_embeddings": self.number("max-position-embeddings")
            if positions == "learned"
            else None,
            # With MLA, the flag refers to norms of the latents, which the model always has.
            "query_key_norm": "head" if self.is_given("qk-layernorm") and not latent else None,
            "attention_sinks": True
            if self.get_text("softmax-type", "vanilla") == "learnable"
            else None,
            "num_nextn_predict_layers": self.optional_number("mtp-num-layers"),
            **self.window_fields(layers),
        }
        if self.num_experts():
            width = self.number("moe-ffn-hidden-size", model["intermediate_size"])
            shared = self.number("moe-shared-expert-intermediate-size", 0)
            limited = self.optional_number("moe-router-num-groups")
            model |= {
                "num_experts": self.num_experts(),
                "num_experts_per_tok": self.number("moe-router-topk", 1 if self.older else 2),
                "moe_intermediate_size": width,
                "num_shared_experts": 1 if shared % width else shared // width,
                "first_k_dense_replace": self.leading_dense_layers(layers),
                "n_group": limited,
                "topk_group": None
                if limited is None
                else self.number("moe-router-group-topk", limited),
                "shared_expert_intermediate_size": shared if shared % width else None,
                "shared_expert_gate": True if self.is_given("moe-shared-expert-gate") else None,
            }
        if latent:
            model |= {
                "kv_lora_rank": self.number("kv-lora-rank", 32),
                "qk_nope_head_dim": self.number("qk-head-dim", 128),
                "qk_rope_head_dim": self.number("qk-pos-emb-head-dim", 64),
                "v_head_dim": self.number("v-head-dim", 128),
                "q_lora_rank": self.optional_number("q-lora-rank"),
            }
        unlike = self.listed_layer_fields(layers) | self.hybrid_layer_fields(
            layers, hidden, experts=bool(self.num_experts())
        )
        if "blocks" in unlike and "sliding_window" in model:
            self.refuse("window-size", "not supported with layers of different kinds")
        return model | unlike

    def listed_layer_fields(self, layers: int) -> dict[str, Any]:
        """Return the model fields that are given as lists with one number per layer."""
        model: dict[str, Any] = (
            {"attention_output_gate": "channel"} if self.is_given("attention-output-gate") else {}
        )
        variant, delta = self.get_text("experimental-attention-variant", patterns.DELTA_RULE), None
        if variant != patterns.DELTA_RULE:
            self.refuse(
                "experimental-attention-variant",
                "its kernels store all scores, which is not modelled",
            )
        elif self.is_given("experimental-attention-variant"):
            delta = self.numbers_per_layer(
                "linear-attention-freq",
                layers,
                every=lambda n: [int((i + 1) % n != 0) for i in range(layers)],
            )
            model |= {
                field: self.number(name, default)
                for field, (name, default) in patterns.SIZES.items()
            }
            if delta is None:
                self.add_missing(
                    "linear-attention-freq",
                    "--linear-attention-freq is missing, which selects the layers with delta rules",
                )
        experts = self.expert_layer_mask(layers) if self.num_experts() else None
        blocks = patterns.blocks_of_lists(delta=delta, experts=experts)
        return model if blocks is None else model | {"blocks": blocks, "first_k_dense_replace": 0}

    def stage_patterns(self) -> list[str]:
        """Return the layer pattern of each pipeline stage of a hybrid model."""
        name = next((flag for flag in hybrid.PATTERN_FLAGS if self.is_given(flag)), None)
        return (
            []
            if name is None
            else self.get_text(name, "").split(hybrid.PREDICTION)[0].split(hybrid.STAGE)
        )

    def hybrid_layer_fields(self, layers: int, hidden: int, *, experts: bool) -> dict[str, Any]:
        """Return the model fields of a hybrid model, whose mixers and MLPs are separate layers."""
        name = next(
            (flag for flag in hybrid.PATTERN_FLAGS if self.is_given(flag)),
            "hybrid-attention-ratio",
        )
        attention, mlp = (
            self.decimal("hybrid-attention-ratio", 0.0),
            self.decimal("hybrid-mlp-ratio", 0.0),
        )
        if not (self.is_given("is-hybrid-model", *hybrid.PATTERN_FLAGS) or attention or mlp):
            return {}
        if not (0.0 <= attention <= 1.0 and 0.0 <= mlp <= 1.0 - attention):
            raise InputError(
                "the fractions of attention and MLP layers must be from 0 to 1 and sum to at "
                "most 1",
                field="--hybrid-attention-ratio",
            )
        letters = "".join(self.stage_patterns()) or hybrid.pattern_of_fractions(
            layers, attention=attention, mlp=mlp
        )
        blocks = hybrid.blocks_of_pattern(letters)
        if blocks is None or len(letters) != layers or ("E" in letters and not experts):
            self.refuse(
                name,
                f"use one of {', '.join(hybrid.LETTERS.values())} for each of {layers} "
                "layers (E: experts)",
            )
            return {}
        predicted = set(self.get_text(hybrid.PATTERN_FLAGS[0], "").split(hybrid.PREDICTION)[1:])
        predicted |= (
            {self.get_text("mtp-hybrid-override-pattern", "")}
            if self.is_given("mtp-hybrid-override-pattern")
            else set()
        )
        if any(
            sorted(symbol) != sorted(hybrid.default_prediction_letters(letters))
            for symbol in predicted
        ):
            self.refuse(
                name,
                "multi-token prediction is supported with "
                f"{hybrid.default_prediction_letters(letters)} only",
            )
        head = self.number("mamba-head-dim", 64)
        fields: dict[str, Any] = {"blocks": blocks, "first_k_dense_replace": 0}
        if "M" in letters:
            fields |= {
                "ssm_state_size": self.number("mamba-state-dim", 128),
                "mamba_head_dim": head,
                "mamba_n_groups": self.number("mamba-num-groups", 8),
                "mamba_num_heads": self.number("mamba-num-heads", 2 * hidden // max(head, 1)),
            }
        if "E" in letters:
            return fields | {"moe_latent_size": self.optional_number("moe-latent-size")}
        return fields | dict.fromkeys(
            ("num_experts", "num_experts_per_tok", "n_group", "topk_group")
        )

    def position_embedding(self) -> str:
        if self.is_given("use-rotary-position-embeddings"):
            return "rotary"
        kind = self.get_text("position-embedding-type", "learned_absolute").lower()
        kinds = {
            "learned_absolute": "learned",
            "absolute": "learned",
            "rope": "rotary",
            "mrope": "rotary",
            "rotary": "rotary",
            "none": "none",
            "alibi": "none",
        }
        if kind not in kinds:
            self.refuse("position-embedding-type", "not supported for decoders")
        return kinds.get(kind, "rotary")

    def window_fields(self, layers: int) -> dict[str, int | None]:
        """Return the sliding window, and the number of layers that use it.

        --window-size LEFT,RIGHT does not count the token itself, so the window is LEFT + 1.
        """
        if not self.is_given("window-size"):
            return {}
        left = self.get_text("window-size", "0,0").strip("()").split(",")[0].strip()
        if not re.fullmatch(r"-?\d{1,18}", left):
            raise InputError(
                f"--window-size requires two numbers, got {self.get_text('window-size', '')}",
                field="--window-size",
            )
        if int(left) < 0:
            return {}
        pattern = self.numbers_per_layer(
            "window-attn-skip-freq",
            layers,
            every=lambda n: [int((i + 1) % n != 0) for i in range(layers)],
        )
        count = layers if pattern is None else sum(pattern)
        return {
            "sliding_window": int(left) + 1,
            "sliding_window_layers": None if count == layers else count,
        }

    def num_experts(self) -> int:
        """Return the number of experts; 0 for a dense model."""
        setting = self.settings.get("num-experts")
        if setting is None:
            return 0
        values = set(setting.values)
        if len(values) != 1:
            self.refuse("num-experts", "layers with different numbers of experts are not supported")
        if not (text := setting.values[0] if setting.values else "").isdecimal():
            self.add_missing("num-experts", f"--num-experts is {setting.text}")
            return 0
        count = parse_whole_number(text, "--num-experts")
        return count if count > 1 or not self.older else 0

    def numbers_per_layer(self, name: str, layers: int, *, every: Any) -> list[int] | None:
        """Return one number per layer for N or a list such as ([0]*3+[1]*58); None if absent."""
        if not self.is_given(name):
            return None
        text = self.get_text(name, "1").replace(" ", "")
        if re.fullmatch(r"0*[1-9]\d{,17}", text):
            return list(every(int(text)))
        try:
            pattern = evaluate_list(ast.parse(text[:1_000], mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pattern = []
        if len(pattern) != layers or not set(pattern) <= {0, 1}:
            self.refuse(
                name, f"use a number, or 0 or 1 for each of {layers} layers, such as ([0]*k+[1]*n)"
            )
            return None
        return pattern

    def padded_vocabulary(self) -> int:
        """Return the vocabulary size after padding for tensor parallelism."""
        if self.is_given("padded-vocab-size"):
            return self.number("padded-vocab-size")
        size = self.number("vocab-size") if self.is_given("vocab-size") else 0
        if not size:
            names = ("tokenizer-model", "tokenizer-name-or-path", "tokenizer-type")
            named = next((self.settings[name] for name in names if name in self.settings), None)
            suggestion = self.reading.hints.get("model.vocab_size", "")
            if not suggestion.isdecimal():
                suggestion = suggestion or (
                    "32000" if self.get_text("tokenizer-type", "") == "Llama2Tokenizer" else ""
                )
                tokenizer = (
                    "the tokenizer" if named is None else f"{named.written} {named.text}".strip()
                )
                self.reading.add_missing(
                    "model.vocab_size",
                    f"the vocabulary depends on {tokenizer}; add",
                    example=suggestion or "...",
                )
                return 1
            size = int(suggestion)
        size += self.number("vocab-extra-ids", 0)
        multiple = self.number("make-vocab-size-divisible-by", 128) * self.number(
            "tensor-model-parallel-size", 1
        )
        return -(-size // max(multiple, 1)) * multiple

    def expert_layer_mask(self, layers: int) -> list[int]:
        """Return 1 for each MoE layer and 0 for the others (--moe-layer-freq)."""
        return (
            self.numbers_per_layer(
                "moe-layer-freq", layers, every=lambda n: [int(i % n == 0) for i in range(layers)]
            )
            or [1] * layers
        )

    def leading_dense_layers(self, layers: int) -> int:
        """Return the number of dense layers before the first MoE layer."""
        pattern = self.expert_layer_mask(layers)
        return pattern.index(1) if 1 in pattern else layers


def evaluate_list(node: ast.expr) -> list[int]:
    """Evaluate a list of integers that is written with sums and multiples of lists.

    Raises:
        ValueError: The expression has another form.
    """
    if isinstance(node, ast.List) and all(
        isinstance(elt, ast.Constant) and isinstance(elt.value, int) for elt in node.elts
    ):
        return [int(elt.value) for elt in node.elts]  # type: ignore[attr-defined]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (evaluate_list(node.left) + evaluate_list(node.right))[:20_000]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = (
            (node.right, node.left)
            if isinstance(node.left, ast.Constant)
            else (node.left, node.right)
        )
        if (
            isinstance(right, ast.Constant)
            and isinstance(right.value, int)
            and 0 <= right.value <= 10_000
        ):
            return (evaluate_list(left) * right.value)[:20_000]
    raise ValueError
