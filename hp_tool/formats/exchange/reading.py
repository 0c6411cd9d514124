"""Read another tool's configuration as a query, and complete it from the catalogue.

One error lists all unsupported and all missing settings.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_tool import catalog
from hp_tool.catalog.huggingface.refused import refusal_of_checkpoint
from hp_tool.catalog.models import published_precision
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import HpToolError, InputError
from hp_tool.formats import imports, pools
from hp_tool.formats.manifests import PodCommand, pod_command
from hp_tool.formats.reading import (
    MAX_NAMED,
    ImportRefusedError,
    Missing,
    Reading,
    Setting,
    set_option,
)
from hp_tool.formats.source import Source
from hp_tool.questions import schema

_GENERIC_WORDS = re.compile(r"modelprovider|moe|-(?:instruct|chat|it|hf)\b.*|[^a-z0-9]")
"""Matches parts of model names whose spelling varies, such as separators and `instruct`."""


def read_configuration(
    text: str,
    *,
    format: str | None = None,
    num_gpus: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    log: Sequence[str] = (),
) -> Reading:
    """Read another tool's configuration as a query, and report how each setting is used.

    Args:
        overrides: Query values by dotted path, such as the GPU or the model.
        variables: The script's environment; 1, 2, ... are its arguments.
        files: Texts of files that the script sources or names.
        ignore: Flags to ignore.
        log: Log that supplies settings that the script does not set.

    Raises:
        ImportRefusedError: Settings are unsupported or missing; the error names all of them.
        InputError: The text cannot be read.
    """
    changes = dict(overrides or {})
    started = pod_command(text)
    text = started.script if started else text
    cluster = changes.get("cluster")
    cluster_gpus = cluster.get("num_gpus") if isinstance(cluster, Mapping) else None
    devices = num_gpus or changes.get("cluster.num_gpus", cluster_gpus)
    num_gpus = devices if isinstance(devices, int) and devices > 0 else None
    if started is not None and num_gpus is None:
        _check_nodes(started)
    source = Source(
        text=text,
        overrides={**changes, **({"cluster.num_gpus": num_gpus} if num_gpus else {})},
        variables=variables or {},
        files=files or {},
        ignore=ignore,
        log=log,
        num_gpus=num_gpus,
        environment=started.environment if started else {},
        unset=started.unknown if started else (),
        vocabulary=_vocabulary_of_tokenizer,
        layers_of=lambda name: _num_layers(changes.get("model", name)),
        precision_of=published_precision,
        named=_nearest_model,
        num_experts_of=lambda name: _model_spec(changes.get("model", name)).num_experts,
        positions_of=lambda name: _model_spec(changes.get("model", name)).max_position_embeddings,
    )
    if (sides := pools.split_pools(source, started)) is not None:
        reading = pools.read_pools(sides, pools.count_replicas(source, started), format=format)
        reading.num_gpus = num_gpus or reading.num_gpus
    else:
        reading = imports.read_source(source, format=format)
        if started and not started.trains and reading.num_gpus and num_gpus is None:
            reading.num_gpus *= started.replicas
    query = reading.query
    if reading.num_gpus:
        query["cluster"] = {**query.get("cluster", {}), "num_gpus": reading.num_gpus}
    if "model" in changes or "model.vocab_size" in changes:
        query["model"] = query.get("model", {}) if "model" not in changes else {}
    schema.set_paths(query, changes)
    if isinstance(query.get("cluster"), str):
        query["cluster"] = changes["cluster"]
    if "kind" in query or not reading.refused:  # A reader that stops early sets no query.
        _note_missing(reading, source.overrides, text)
    _drop_overlap_across_nodes(query)
    if reading.refused or reading.missing:
        raise _refusal_error(reading)
    return reading


def _check_nodes(started: PodCommand) -> None:
    """Check that the number of pods of a training job is known.

    Raises:
        InputError: Several pods run the command, but the manifest does not give their number.
    """
    if (
        started.trains
        and started.replicas > 1
        and not re.search("nnodes|num_machines", started.script)
    ):
        raise InputError(
            f"{started.replicas} pods run the training, but its command lacks --nnodes; "
            "add --num-gpus",
            field="cluster.num_gpus",
            code="missing_field",
        )


def _model_spec(model: Any) -> ModelSpec:
    return catalog.model_from_mapping(model) if isinstance(model, Mapping) else catalog.model(model)


def _num_layers(model: Any) -> int | None:
    try:
        return _model_spec(model).num_hidden_layers
    except HpToolError:  # An unknown model is reported as missing.
        return None


def read_query(text: str, **options: Any) -> dict[str, Any]:
    """Return the query of another tool's configuration, as `read_configuration` does."""
    return read_configuration(text, **options).query


def _note_missing(reading: Reading, supplied: Mapping[str, Any], text: str) -> None:
    """Record the fields that the query requires and that the configuration does not set."""
    query, cluster = reading.query, reading.query.get("cluster")
    gpu = _mentioned_gpu(text)
    kind = "training" if query.get("kind") == "training" else "inference"
    if not isinstance(cluster, str):
        named = cluster if isinstance(cluster, Mapping) else {}
        if "gpu" not in named and "stages" not in named:
            why = f"the file mentions {gpu.split('-')[0]}" if gpu else "`hp-tool gpus` lists them"
            reading.add_missing(
                "cluster.gpu", "add", example=gpu or "h100-sxm-80gb", after=f" ({why})"
            )
        if "num_gpus" not in named and "stages" not in named:
            why = reading.hints.get("cluster.num_gpus", "the number of processes is not set")
            reading.add_missing("cluster.num_gpus", f"{why}; add", example="")
    model = query.get("model")
    is_known = not isinstance(model, str) or not model or catalog.has_entry("models", model)
    if not is_known and (reason := refusal_of_checkpoint(str(model))):
        reading.refuse(f"model {model}: {reason}")
    elif isinstance(model, str) and not is_known:
        near = _nearest_model(model)
        reading.add_missing(
            "model",
            f"unknown model {model[:200]!r}; add",
            example=near or "NAME",
            after=", or its config.json",
        )
    if not model:
        why = "the configuration does not name the model"
        reading.add_missing(
            "model", f"{why}; add", example="llama-3-8b", after=", or a config.json"
        )
    if kind == "training" and "sequence_length" not in query.get("training", {}):
        reading.add_missing(
            "training.sequence_length", "the sequence length is not set; add", example=4096
        )
    covered = {
        *supplied,
        *(
            missing_field.field
            for missing_field in reading.missing
            if missing_field.field == "model"
        ),
    }  # A model's name determines its shape.
    reading.missing = [
        _add_suggestion(missing_field, model, text)
        for missing_field in reading.missing
        if missing_field.field not in supplied
        and not any(missing_field.field.startswith(f"{path}.") for path in covered)
    ]


def _drop_overlap_across_nodes(query: dict[str, Any]) -> None:
    """Drop `overlap.tensor_parallel: false` if tensor parallelism exceeds an NVLink domain.

    Userbuffers, which implement that overlap, do not work across domains, so the flag has no
    effect.
    """
    overlap, cluster = query.get("training", {}).get("overlap") or {}, query.get("cluster")
    if overlap.get("tensor_parallel") is not False:
        return
    try:
        domain = catalog.cluster(
            schema.parse(ClusterQuery, cluster) if isinstance(cluster, Mapping) else str(cluster)
        )
    except HpToolError:  # Missing or wrong values are reported with all others.
        return
    if query.get("parallel", {}).get("tensor_parallel_size", 1) > domain.nvlink_domain_size:
        del overlap["tensor_parallel"]
        if not overlap:
            del query["training"]["overlap"]


def _nearest_model(text: str) -> str:
    """Return the catalogue model whose name appears in the text in another spelling, or "" if there
    is none.

    For example, Llama3ModelProvider70B and Qwen2.5-7B-Instruct are recognized.
    """
    bare = {_GENERIC_WORDS.sub("", name): name for name in catalog.names("models")}
    for word in re.findall(r"(?<![\w.-])[a-z_.-]*\d[\w.-]*", text[:100_000].lower()):
        for part in (word, word.rpartition(".")[2]):
            if near := bare.get(_GENERIC_WORDS.sub("", part)):
                return near
    return ""


def _add_suggestion(missing: Missing, shape: Any, text: str) -> Missing:
    """Return the missing field with a suggested value: a catalogue model or a vocabulary size."""
    if missing.field == "model":
        nameless = missing.hint.endswith(set_option("model", "NAME"))
        return missing.with_example(_nearest_model(text) or "NAME") if nameless else missing
    if missing.field != "model.vocab_size" or not isinstance(shape, Mapping):
        return missing
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    alike = [
        spec
        for spec in map(catalog.model, catalog.names("models"))
        if all(getattr(spec, each) == shape.get(each) for each in names)
        and spec.num_experts == shape.get("num_experts")
        and spec.ffn_size == shape.get("intermediate_size")
    ]
    if not alike or missing.example != "...":
        return missing
    most_common, _ = Counter(spec.vocab_size for spec in alike).most_common(1)[0]
    name = next(spec.name for spec in alike if spec.vocab_size == most_common)
    suggested = missing.with_example(str(most_common))
    return replace(suggested, hint=f"{suggested.hint} (the shape is that of {name})")


def _vocabulary_of_tokenizer(settings: Mapping[str, Setting]) -> str:
    """Return the vocabulary size of the tokenizer in the settings, as digits; empty if unknown."""
    kind = settings.get("tokenizer-type")
    if kind is not None and kind.values == ("GPT2BPETokenizer",):
        return "50257"
    for key in (
        "tokenizer-model",
        "tokenizer-name-or-path",
        "load-tokenizer-from",
        "tokenizer-path",
    ):
        if key in settings and settings[key].values and not settings[key].unknown:
            tokenizer = settings[key].values[0].rstrip("/").lower()
            tail = tokenizer.rpartition("/")[2]
            for name in (tokenizer, tail, tail.removeprefix("meta-")):
                if catalog.has_entry("models", name):
                    return str(catalog.model(name).vocab_size)
    return ""


def _mentioned_gpu(text: str) -> str:
    """Return the catalogue GPU that a text mentions; empty if none."""
    words = set(re.findall(r"(?<![a-z])[a-z]+\d+[a-z]*", text[:100_000].lower()))
    names = sorted(
        catalog.names("gpus"),
        key=lambda name: (name.split("-")[0] not in ("h100", "a100", "h200", "b200"), name),
    )
    return next(
        (
            name
            for name in names
            if name.split("-")[0] in words and re.search(r"\d", name.split("-")[0])
        ),
        "",
    )


def _refusal_error(reading: Reading) -> ImportRefusedError:
    """Return an error that lists all unsupported and all missing settings."""
    parts = [f"{line}: file not found; pass it with --file" for line in reading.absent[:MAX_NAMED]]
    refused = list(dict.fromkeys(reading.refused))
    if refused:
        listed = "; ".join(refused[:MAX_NAMED])
        more = f"; and {len(refused) - MAX_NAMED} more" if len(refused) > MAX_NAMED else ""
        parts.append(
            f"not read: {listed}{more} (--ignore NAME skips a setting that affects neither "
            "time nor memory)"
        )
    if reading.missing:
        parts.append(
            "missing: "
            + ". ".join(
                f"{missing_field.field}; {missing_field.hint}"
                for missing_field in reading.missing[:MAX_NAMED]
            )
        )
    code = "unsupported" if refused else "missing_field"
    field = refused[0].split(" ")[0].rstrip(":") if refused else reading.missing[0].field
    return ImportRefusedError("; ".join(parts), reading=reading, field=field, code=code)
