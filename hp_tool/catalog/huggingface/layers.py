"""What a config.json says layer by layer, as blocks."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from hp_tool.catalog.huggingface.family import Config
from hp_tool.domain.blocks import Block
from hp_tool.errors import InputError, UnsupportedError

T = TypeVar("T")
MOST_LAYERS = 10_000


def as_fields(layers: Sequence[Block]) -> dict[str, Any]:
    """ModelSpec's fields of these layers, in order: `first_k_dense_replace` where dense layers
    precede layers that are the model's own, else the shortest pattern of blocks.
    """
    dense = len(
        list(itertools.takewhile(lambda layer: layer == Block(feed_forward="dense"), layers))
    )
    if all(layer == Block() for layer in layers[dense:]):
        return {"first_k_dense_replace": dense}
    lengths = (length for length in range(1, len(layers) + 1) if len(layers) % length == 0)
    length = next(length for length in lengths if layers[length:] == layers[:-length])
    runs = ((layer, len(list(alike))) for layer, alike in itertools.groupby(layers[:length]))
    return {
        "first_k_dense_replace": 0,
        "blocks": tuple(_written(replace(layer, count=count)) for layer, count in runs),
    }


def _written(block: Block) -> dict[str, Any]:
    """The block's values that are not the usual ones."""
    return {
        each.name: value
        for each in fields(block)
        if (value := getattr(block, each.name)) != each.default
    }


def layer_count(config: Config) -> int:
    """`num_hidden_layers`. Raises InputError."""
    return whole(config, "num_hidden_layers", most=MOST_LAYERS)


def whole(config: Config, key: str, default: int | None = None, *, most: int = 1 << 26) -> int:
    """The whole number of a key. Raises InputError where it is none or the file lacks it and there
    is no default.
    """
    if (value := config.get(key, default)) is None:
        raise InputError(f"{key} must be given", field=f"model.{key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InputError(
            f"{key} must be a whole number up to {most:,}, got {str(value)[:80]}",
            field=f"model.{key}",
        )
    return value


def each_layer(
    config: Config, key: str, meanings: Mapping[Any, T], *, layers: int
) -> list[T] | None:
    """The meaning of each layer's entry of a list; None where the file has no such list.

    Entries behind those of the layers describe multi-token prediction. Raises InputError for too
    short a list, UnsupportedError for an entry without a meaning.
    """
    entries = config.get(key)
    if entries is None:
        return None
    if not isinstance(entries, list | tuple | str) or len(entries) < layers:
        raise InputError(
            f"{key} must say for each of {layers} layers what it is", field=f"model.{key}"
        )
    foreign = [
        entry
        for entry in entries[:layers]
        if not isinstance(entry, str | int) or entry not in meanings
    ]
    if foreign:
        raise UnsupportedError(
            f"{key} {str(foreign[0])[:80]!r}: such layers are not modelled", field=f"model.{key}"
        )
    return [meanings[entry] for entry in entries[:layers]]


def numbered(config: Config, key: str) -> set[int]:
    """The layers whose numbers a list, or a text with commas, gives. Raises InputError."""
    entries = config.get(key, ())
    entries = entries.split(",") if isinstance(entries, str) else entries
    try:
        return {int(entry) for entry in entries if str(entry).strip()}
    except (OverflowError, TypeError, ValueError):
        raise InputError(f"{key} must be a list of layers' numbers", field=f"model.{key}") from None


def feeding(blocks: list[Block], dense: list[bool]) -> list[Block]:
    """The blocks with a dense MLP where one stands in a model with experts."""
    return [
        replace(block, feed_forward="dense") if plain else block
        for block, plain in zip(blocks, dense, strict=True)
    ]


def sparse_steps(config: Config, *, layers: int) -> list[bool]:
    """Whether each layer is dense: those that `mlp_only_layers` names, and all but every
    `decoder_sparse_step`-th.
    """
    step, dense = (
        max(whole(config, "decoder_sparse_step", 1), 1),
        numbered(config, "mlp_only_layers"),
    )
    return [layer in dense or (layer + 1) % step != 0 for layer in range(layers)]


def dense_layers(config: Config, *, layers: int) -> list[bool]:
    """Whether each layer of a model with experts has a dense MLP: by a list of its own, or the
    first ones are dense.
    """
    lists = (
        ("mlp_layer_types", {"dense": True, "sparse": False}),
        ("moe_layer_freq", {0: True, 1: False}),
    )
    for key, meanings in lists:
        if key in config and not isinstance(config[key], int):
            return each_layer(config, key, meanings, layers=layers) or []
    if "moe_layers_enum" in config:
        sparse = numbered(config, "moe_layers_enum")
        return [layer not in sparse for layer in range(layers)]
    first = whole(config, "first_k_dense_replace", 0)
    return [layer < first for layer in range(layers)]
