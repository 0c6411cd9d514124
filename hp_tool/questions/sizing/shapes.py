"""Choose the shape of a model of a given size: depth, width, heads, MLP and vocabulary that can be
split evenly over devices.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from hp_tool.cost.parameters import active_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.sizing import Choice, SizingQuery
from hp_tool.errors import InputError

TENSOR_PARALLEL = 8
"""Tensor-parallel size for which shapes must be divisible: the number of devices in a typical
node.
"""
TILE = 128
"""Matrix dimensions per rank are multiples of this number, so that they fill tensor-core tiles."""
TOLERANCE = 0.03
"""Accepted relative deviation from the target number of parameters, in exchange for a depth that
more pipeline sizes divide.
"""
ASPECT_TOLERANCE = 1.4
"""Factor by which h/L may deviate from `aspect_ratio`. Published models of one size differ by
more.
"""
MIN_PARAMETERS_FOR_NODE = 10e9
"""Minimum number of parameters for which the number of heads must be divisible by 8. Below, it must
be divisible by 4.
"""
DEFAULT_VOCABULARY = {"llama": 128_256, "gpt": 50_257}
MAX_LAYERS = 256
MAX_HEADS = 512
_SMALL, _LARGE = (0.76e9, 64.0), (6.7e9, 128.0)
"""(parameters, h/L) of two GPT-3 models, between which h/L doubles."""


def aspect_ratio(*, parameters: float) -> float:
    """Return h / L as in GPT-3's models (arXiv 2005.14165, table 2.1).

    The ratio is 64 up to 0.76B parameters and 128 from 6.7B on, with geometric interpolation in
    between. It has little effect on the loss: 3% over a factor of 40 (arXiv 2001.08361, section
    3.1). Llama models have 102 to 130.
    """
    share = math.log(parameters / _SMALL[0]) / math.log(_LARGE[0] / _SMALL[0])
    return float(_SMALL[1] * (_LARGE[1] / _SMALL[1]) ** min(max(share, 0.0), 1.0))


def choose_shape(query: SizingQuery, *, parameters: float) -> ModelSpec:
    """Return a model with about this number of active parameters and the query's style, vocabulary,
    heads and experts.

    Depths divisible by 8 are preferred, then by 4, 2 and 1, because the number of pipeline stages
    must divide the depth. A shape qualifies if its size is within 3% of the target and h/L within a
    factor of 1.4 of `aspect_ratio`. The qualifying shape nearest to that ratio is returned. If no
    shape qualifies, a deviation in size counts ten times as much as a deviation of the ratio.
    """
    target_ratio = query.aspect_ratio or aspect_ratio(parameters=parameters)
    multiple = TILE * TENSOR_PARALLEL
    vocabulary = -(-(query.vocab_size or DEFAULT_VOCABULARY[query.style]) // multiple) * multiple
    options = list(_shape_options(query, parameters, vocabulary))
    for divisor in (8, 4, 2, 1):
        good = [
            option
            for option in options
            if option.num_hidden_layers % divisor == 0
            and abs(active_parameters(option) / parameters - 1.0) <= TOLERANCE
            and _log_aspect_error(option, target_ratio) <= math.log(ASPECT_TOLERANCE)
        ]
        if good:
            return min(good, key=lambda one: _log_aspect_error(one, target_ratio))
    if not options:
        heads = query.num_key_value_heads
        grouped = "" if heads is None else f" and {heads} key/value heads"
        raise InputError(
            f"No model shape with {parameters:,.0f} parameters allows a vocabulary of "
            f"{vocabulary:,}{grouped}. Use more parameters (or days), or a smaller vocab_size.",
            field="parameters",
        )
    return min(
        options,
        key=lambda one: (
            10.0 * abs(math.log(active_parameters(one) / parameters))
            + _log_aspect_error(one, target_ratio)
        ),
    )


def shape_choices(model: ModelSpec, query: SizingQuery, *, parameters: float) -> tuple[Choice, ...]:
    """Return the reasons for each choice in a model from `choose_shape`."""
    degree = _tensor_degree(model.num_attention_heads)
    wide = model.hidden_size / model.num_hidden_layers
    ratio = query.aspect_ratio
    rule = (
        f"{ratio:g}, as set in the query"
        if ratio is not None
        else f"{aspect_ratio(parameters=parameters):.0f} at this size"
    )
    table = (
        "arXiv 2005.14165, table 2.1; the loss changes little around it: arXiv 2001.08361, "
        "section 3.1"
    )
    tiles = (
        "matmul tiles of 128 on each tensor-parallel rank (NVIDIA, Matrix Multiplication "
        "Background User's Guide)"
    )
    mlp = (
        (
            "8/3 hidden_size, so that three matrices have the weights of two with 4 hidden_size",
            "arXiv 2002.05202",
        )
        if model.gated_mlp
        else ("4 hidden_size", table)
    )
    width = model.intermediate_size or 4 * model.hidden_size
    choices = [
        Choice(
            name="hidden_size / num_hidden_layers",
            value=round(wide, 1),
            rule=f"near {rule}",
            source=table,
        ),
        Choice(
            name="num_hidden_layers",
            value=model.num_hidden_layers,
            rule="pipeline stages and model chunks divide it",
            source="arXiv 2104.04473, section 2.2",
        ),
        Choice(
            name="num_attention_heads",
            value=model.num_attention_heads,
            rule=f"head_dim {model.head_size}; tensor parallelism up to {degree} divides the heads",
            source="arXiv 1909.08053, section 3; " + tiles,
        ),
        Choice(
            name="intermediate_size",
            value=width,
            rule=f"{mlp[0]}; a multiple of {TILE} x {degree}",
            source=mlp[1],
        ),
        Choice(
            name="vocab_size",
            value=model.vocab_size,
            rule=f"a multiple of {TILE} x {TENSOR_PARALLEL}",
            source="Megatron-LM, --make-vocab-size-divisible-by",
        ),
    ]
    if query.style == "llama":
        choices.append(
            Choice(
                name="num_key_value_heads",
                value=model.kv_heads,
                rule="8, one for each tensor-parallel rank of a node; fewer if 8 does not divide "
                "the heads; or the query's number",
                source="grouped queries: arXiv 2305.13245; 8: arXiv 2307.09288 and 2407.21783",
            )
        )
    if model.num_experts:
        choices.append(
            Choice(
                name="moe_intermediate_size",
                value=model.moe_intermediate_size or width,
                rule="the experts of one token are together as wide as the dense MLP",
                source="fine-grained experts: arXiv 2401.06066, section 3.1",
            )
        )
    return tuple(choices)


def _shape_options(query: SizingQuery, parameters: float, vocabulary: int) -> Iterator[ModelSpec]:
    """Yield shapes for each width, with the depths that come nearest to the target size."""

    def model(heads: int, layers: int) -> ModelSpec:
        return _model(query, parameters, heads=heads, layers=layers, vocabulary=vocabulary)

    step = math.lcm(
        8 if parameters >= MIN_PARAMETERS_FOR_NODE else 4, query.num_key_value_heads or 1
    )
    for heads in range(step, MAX_HEADS + 1, step):
        one, two = active_parameters(model(heads, 1)), active_parameters(model(heads, 2))
        depth = 1.0 + (parameters - one) / (two - one)
        if depth < 1.0:
            return
        rounded = {
            d * k for d in (8, 4, 2, 1) for k in (math.floor(depth / d), math.ceil(depth / d))
        }
        yield from (model(heads, layers) for layers in sorted(rounded) if 1 <= layers <= MAX_LAYERS)


def _model(
    query: SizingQuery, parameters: float, *, heads: int, layers: int, vocabulary: int
) -> ModelSpec:
    """Return the model with these numbers of heads and layers.

    The head dimension is 128 from a billion parameters on and 64 below, as in GPT-3 and Llama.
    """
    h, degree = heads * (128 if parameters >= 1e9 else 64), _tensor_degree(heads)
    gated = query.style == "llama"
    model = ModelSpec(
        name=f"{query.style}-{parameters / 1e9:.3g}b",
        num_hidden_layers=layers,
        hidden_size=h,
        num_attention_heads=heads,
        num_key_value_heads=query.num_key_value_heads or (degree if gated else None),
        intermediate_size=_round_to_multiple(8 * h / 3, TILE * degree) if gated else 4 * h,
        vocab_size=vocabulary,
        tie_word_embeddings=not gated,
        gated_mlp=gated,
        normalization="rmsnorm" if gated else "layernorm",
        max_position_embeddings=query.sequence_length,
    )
    if (experts := query.experts) is None:
        return model
    width = model.ffn_size / (experts.num_experts_per_tok + experts.num_shared_experts)
    return replace(
        model,
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        num_shared_experts=experts.num_shared_experts,
        moe_intermediate_size=_round_to_multiple(width, TILE),
    )


def _tensor_degree(heads: int) -> int:
    """Return the largest power of two up to TENSOR_PARALLEL that divides the number of heads."""
    return math.gcd(heads, TENSOR_PARALLEL)


def _log_aspect_error(model: ModelSpec, ratio: float) -> float:
    return abs(math.log(model.hidden_size / model.num_hidden_layers / ratio))


def _round_to_multiple(value: float, multiple: int) -> int:
    return max(round(value / multiple), 1) * multiple
