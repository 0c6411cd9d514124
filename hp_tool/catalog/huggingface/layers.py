"""Convert the layers that a config.json lists to blocks of a ModelSpec."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from hp_tool.catalog.huggingface.family import Config
from hp_tool.domain.blocks import Block
from hp_tool.errors import InputError, UnsupportedError

T = TypeVar("T")
MAX_LAYERS = 10_000


def layer_fields(layers: Sequence[Block]) -> dict[str, Any]:
    """Return the ModelSpec fields that describe the given layers, in order.

    The result is `first_k_dense_replace` if dense layers are followed by identical default layers,
    else the shortest repeating pattern of blocks.
    """
    dense = len(
        list(itertools.takewhile(lambda layer: layer == Block(feed_forward="dense"), layers))
    )
    if all(layer == Block() for layer in layers[dense:]):
        return {"first_k_dense_replace": dense}
    lengths = (length for length in range(1, len(layers) + 1) if len(layers) % length == 0)
    length = next(length for length in lengths if layers[length:] == layers[:-length])
    runs = (
        (layer, len(list(equal_layers)))
        for layer, equal_layers in itertools.groupby(layers[:length])
    )
    return {
        "first_k_dense_replace": 0,
        "blocks": tuple(_non_default_fields(replace(layer, count=count)) for layer, count in runs),
    }


def _non_default_fields(block: Block) -> dict[str, Any]:
    return {
        field.name: value
        for field in fields(block)
        if (value := getattr(block, field.name)) != field.default
    }


def layer_count(config: Config) -> int:
    """Return `num_hidden_layers`.

    Raises:
        InputError: It is missing or malformed.
    """
    return parse_integer(config, "num_hidden_layers", most=MAX_LAYERS)


def parse_integer(
    config: Config, key: str, default: int | None = None, *, most: int = 1 << 26
) -> int:
    """Return the integer of a key.

    Raises:
        InputError: The value is not an integer, or it is missing and there is no default.
    """
    if (value := config.get(key, default)) is None:
        raise InputError(f"{key} is missing", field=f"model.{key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InputError(
            f"{key} must be a whole number up to {most:,}, got {str(value)[:80]}",
            field=f"model.{key}",
        )
    return value


def layer_list(
    config: Config, key: str, meanings: Mapping[Any, T], *, layers: int
) -> list[T] | None:
    """Return the kind of each layer, from a list of names; None if the list is missing.

    Entries beyond the last layer describe multi-token prediction and are ignored.

    Raises:
        InputError: The list is too short.
        UnsupportedError: An entry is unknown.
    """
    entries = config.get(key)
    if entries is None:
        return None
    if not isinstance(entries, list | tuple | str) or len(entries) < layers:
        raise InputError(
            f"{key} must list the type of each of {layers} layers", field=f"model.{key}"
        )
    foreign = [
        entry
        for entry in entries[:layers]
        if not isinstance(entry, str | int) or entry not in meanings
    ]
    if foreign:
        raise UnsupportedError(
            f"{key} {str(foreign[0])[:80]!r}: such layers are not supported", field=f"model.{key}"
        )
    return [meanings[entry] for entry in entries[:layers]]


def parse_layer_numbers(config: Config, key: str) -> set[int]:
    """Return the layer numbers in a list or a comma-separated string.

    Raises:
        InputError: The value is malformed.
    """
    entries = config.get(key, ())
    entries = entries.split(",") if isinstance(entries, str) else entries
    try:
        return {int(entry) for entry in entries if str(entry).strip()}
    except (OverflowError, TypeError, ValueError):
        raise InputError(f"{key} must be a list of layer numbers", field=f"model.{key}") from None


def with_dense_mlps(blocks: list[Block], dense: list[bool]) -> list[Block]:
    """Return the blocks, with dense MLPs in the layers for which `dense` is True."""
    return [
        replace(block, feed_forward="dense") if plain else block
        for block, plain in zip(blocks, dense, strict=True)
    ]


def dense_layers_by_step(config: Config, *, layers: int) -> list[bool]:
    """Return, for each layer, whether its MLP is dense.

    Layers are dense if they are listed in `mlp_only_layers`, or if their number is not a multiple
    of `decoder_sparse_step`.
    """
    step, dense = (
        max(parse_integer(config, "decoder_sparse_step", 1), 1),
        parse_layer_numbers(config, "mlp_only_layers"),
    )
    return [layer in dense or (layer + 1) % step != 0 for layer in range(layers)]


def dense_layers(config: Config, *, layers: int) -> list[bool]:
    """Return, for each layer of an MoE model, whether its MLP is dense. The file lists the dense
    layers or sets the number of leading dense layers.
    """
    lists = (
        ("mlp_layer_types", {"dense": True, "sparse": False}),
        ("moe_layer_freq", {0: True, 1: False}),
    )
    for key, meanings in lists:
        if key in config and not isinstance(config[key], int):
            return layer_list(config, key, meanings, layers=layers) or []
    if "moe_layers_enum" in config:
        sparse = parse_layer_numbers(config, "moe_layers_enum")
        return [layer not in sparse for layer in range(layers)]
    first = parse_integer(config, "first_k_dense_replace", 0)
    return [layer < first for layer in range(layers)]
