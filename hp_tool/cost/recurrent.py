"""Matrices, vectors and states of delta-rule and state-space mixers on one rank."""

import functools

from hp_tool.cost.arrays import Floats, Ints, maximum
from hp_tool.cost.matrix import Matrix, column, replicated
from hp_tool.domain.model import ModelSpec


def recurrent_matrices(model: ModelSpec, *, tensor: Ints = 1) -> list[Matrix]:
    """Return the projection matrices of a delta-rule or state-space mixer.

    Sources: arXiv 2412.06464, 2510.26692; arXiv 2312.00752, 2405.21060.
    """
    h, t = float(model.hidden_size), tensor
    inner = recurrent_width(model) / t
    output = Matrix(
        module="out_proj", outputs=(h,), inputs=inner, source="core", division="row", ranks=t
    )
    read = functools.partial(column, inputs=h, source="attention_input", ranks=t)
    if model.mixer == "mamba":
        rank, state = float(model.mamba_dt_rank or 0), float(model.ssm_state_size or 0)
        steps = Matrix(
            module="x_proj",
            outputs=(rank + 2.0 * state,),
            inputs=inner,
            source="conv",
            division="row",
            ranks=t,
        )
        return [
            read("in_proj", (inner, inner)),
            steps,
            column("dt_proj", (inner,), rank, source="dt", ranks=t),
            output,
        ]
    if model.mixer == "mamba2":
        groups, heads = state_groups(model, t), (model.mamba_num_heads or 0) / t
        width = groups * float(model.ssm_state_size or 0)
        return [read("in_proj", (inner, inner, width, width, heads)), output]
    keys, heads = (
        key_heads(model) * float(model.linear_key_head_dim or 0) / t,
        value_heads(model) / t,
    )
    if model.mixer == "gated_delta":
        return [read("in_proj", (keys, keys, inner, inner, heads, heads)), output]
    head = float(model.linear_key_head_dim or 0)  # The width of low-rank gates.
    gates = [
        replicated("f_a_proj", head, h, source="attention_input"),
        column("f_b_proj", (keys,), head, source="f", ranks=t),
    ]
    if model.linear_full_rank_gate:
        gates.append(read("g_proj", (inner,)))
    else:
        gates.append(replicated("g_a_proj", head, h, source="attention_input"))
        gates.append(column("g_b_proj", (inner,), head, source="g", ranks=t))
    return [read("in_proj", (keys, keys, inner, heads)), *gates, output]


def recurrent_width(model: ModelSpec) -> float:
    """Return the number of inner channels of a recurrent mixer. This is the input width of its
    output projection.
    """
    match model.mixer:
        case "mamba":
            return float(model.mamba_inner_size or 0)
        case "mamba2":
            return float((model.mamba_num_heads or 0) * (model.mamba_head_dim or 0))
        case _:
            return float(
                value_heads(model) * (model.linear_value_head_dim or model.linear_key_head_dim or 0)
            )


def key_heads(model: ModelSpec) -> int:
    """Return the number of query and key heads of a delta rule."""
    return model.linear_num_key_heads or 0


def value_heads(model: ModelSpec) -> int:
    """Return the number of value heads of a delta rule."""
    return model.linear_num_value_heads or key_heads(model)


def state_groups(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of Mamba 2 groups (which share B and C) on one rank; at least one."""
    return maximum(model.mamba_n_groups / tensor, 1.0)


def convolved_width(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of channels of a recurrent mixer's short convolution on one rank."""
    inner = recurrent_width(model) / tensor
    match model.mixer:
        case "mamba":
            return inner
        case "mamba2":
            return inner + 2.0 * state_groups(model, tensor) * float(model.ssm_state_size or 0)
        case _:
            return inner + 2.0 * key_heads(model) * float(model.linear_key_head_dim or 0) / tensor


def state_numbers(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of elements in a sequence's recurrent state and convolution window, per
    layer and rank; 0 for attention.
    """
    if not model.is_recurrent:
        return 0.0 * tensor
    space = model.mixer in ("mamba", "mamba2")
    width = float((model.ssm_state_size if space else model.linear_key_head_dim) or 0)
    return width * recurrent_width(model) / tensor + convolution_numbers(model, tensor)


def convolution_numbers(model: ModelSpec, tensor: Ints) -> Floats:
    """Return the number of elements in a sequence's convolution window (the inputs of its last
    tokens), per layer and rank; 0 for attention.
    """
    if not model.is_recurrent:
        return 0.0 * tensor
    space = model.mixer in ("mamba", "mamba2")
    kernel = model.mamba_conv_kernel if space else model.linear_conv_kernel_dim
    return (kernel - 1.0) * convolved_width(model, tensor)


def recurrent_vectors(model: ModelSpec, t: Ints) -> Floats:
    """Return the parameter count of a recurrent mixer's convolutions, decays and norms per rank."""
    inner = recurrent_width(model) / t
    channels = convolved_width(model, t)
    match model.mixer:
        case (
            "mamba"
            # A for each channel and each number of its state; D and the time-step bias for each
            # channel.
        ):
            state = float(model.ssm_state_size or 0)
            kernel, vectors = model.mamba_conv_kernel, inner * (state + 2.0)
            vectors = vectors + (
                float(model.mamba_dt_rank or 0) + 2.0 * state if model.mamba_norms else 0.0
            )
        case "mamba2":  # A, D and the time-step bias for each head; the gated norm.
            kernel, vectors = (
                model.mamba_conv_kernel,
                3.0 * (model.mamba_num_heads or 0) / t + inner,
            )
        case "gated_delta":  # A and the time-step bias for each head; the gated norm of a head.
            kernel, vectors = (
                model.linear_conv_kernel_dim,
                2.0 * value_heads(model) / t + float(_value_head(model)),
            )
        case (
            _
            # A for each head; the time-step bias for each key channel; the gated norm of a head.
        ):
            keys = key_heads(model) * float(model.linear_key_head_dim or 0) / t
            kernel, vectors = (
                model.linear_conv_kernel_dim,
                key_heads(model) / t + keys + float(_value_head(model)),
            )
    biases = channels if model.mixer in ("mamba", "mamba2") and model.mamba_conv_bias else 0.0
    return kernel * channels + biases + vectors


def _value_head(model: ModelSpec) -> int:
    return model.linear_value_head_dim or model.linear_key_head_dim or 0
