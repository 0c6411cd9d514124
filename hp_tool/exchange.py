"""Results as other tools' configurations; and those as queries, their runs compared with prediction and best alternative."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hp_tool import catalog, serving, training
from hp_tool.domain.parallel import OF_THE_QUERY, ParallelConfig, ParallelQuery
from hp_tool.domain.pipeline_layout import ends_are_shorter, parse_layout
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingRecommendation
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats import accelerate, deepspeed, engines, imports, megatron_bridge, megatron_lm, nanotron, torchtitan, verl
from hp_tool.formats.imports import detect as detect
from hp_tool.formats.logs import LogFacts, read_log
from hp_tool.formats.names import FRAMEWORKS
from hp_tool.formats.reading import Ignored, ImportRefusedError, Missing, Read, Reading, Setting, as_settings
from hp_tool.formats.setup import ServingSetup, TrainingSetup, option_words
from hp_tool.queries import schema
from hp_tool.serving.problem import cache_precision, resolve_serving
from hp_tool.training.problem import TrainingProblem, resolve_training

TRAINING: dict[str, Callable[[TrainingSetup], str]] = {
    "megatron-lm": megatron_lm.command,
    "megatron-lm-yaml": megatron_lm.yaml,
    "nemo": megatron_bridge.text,
    "torchtitan": torchtitan.toml,
    "deepspeed": deepspeed.text,
    "accelerate": accelerate.text,
    "slurm": megatron_lm.slurm,
    "kubernetes": megatron_lm.kubernetes,
    "nanotron": nanotron.text,
    "verl": verl.text,
}
OF_ONE_FRAMEWORK = ("framework_version", "recipe", "overlap")
"""Keys of `training` that mean something under one framework alone."""
OF_MEGATRON = ("cross_entropy", "cuda_graphs", "fp8_recipe", "optimizer_precision", "exp_avg_sq_precision", "master_precision")
"""Those that only Megatron Core has of what is ranked here."""
RUNS: dict[str, dict[str, Any]] = {
    "torchtitan": {"zero_stage": (2, 3)},
    "accelerate": {"zero_stage": (2, 3), "pipeline_parallel_size": 1},
    "deepspeed": dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), 1)
    | {"recompute": ("none", "full")},
    "nanotron": {"zero_stage": (0, 1), "virtual_pipeline_parallel_size": 1},
    "verl": {"recompute": ("none", "selective", "full")},
}
"""Axes of what a tool can be told, where it cannot be told all."""
MAX_TRIED = 200
"""Ranked configurations that are tried in a tool's words."""
LOGS = {"nemo": "megatron-lm", "gpt-neox": "megatron-lm", "accelerate": "deepspeed", "nanotron": "json", "verl": "json"}
"""Whose lines a tool's log has, where not its own."""
MAX_NAMED = 40
"""Refusals, and missing fields, that one error lists."""
WARMUP_LINES = 2
"""Logged steps at a run's start that are left out where more follow: compilation, caches, first communication."""


def export(
    *, result: Mapping[str, Any], format: str, rank: int = 1, read: Callable[[Mapping[str, Any]], Query] = schema.parse_query
) -> str:
    """The text of one configuration in another tool's words.

    `result` is what estimate, recommend or tune answered with --json (its `query` says the model and the workload), or a
    query, which is answered first. `rank` picks a recommendation, `read` parses the query. Raises InputError, UnsupportedError.
    """
    if format not in (formats := (*TRAINING, *engines.ENGINES)):
        raise InputError(f"no format {format}; choose one of {', '.join(formats)}", field="format")
    if "kind" in result:
        query = read(result)
        ranking = (serving.recommend if query.kind == "inference" else training.recommend)(query=query, top=rank)
        if (count := len(ranking.recommendations)) < rank:
            raise InputError(f"the query has {count} acceptable configurations; rank {rank} is not among them", field="rank")
        return _write(query, ranking.recommendations[rank - 1].parallel, format)
    if not isinstance(result.get("query"), dict):
        raise InputError(
            "the result does not hold its query; export what estimate, recommend or tune print with --json",
            field="query",
            code="missing_field",
        )
    query = read(result["query"])
    return _write(query, _chosen(result, rank, kind=ServingConfig if query.kind == "inference" else ParallelConfig), format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranked:
    """The best configuration that a tool can run, and what choosing it costs."""

    format: str
    text: str
    """The configuration in the tool's words."""
    framework: str
    """What the tool runs, and the step time is predicted for."""
    parallel: dict[str, Any]
    step_s: float
    best_step_s: float | None
    """Of the query's own best configuration; None where it has none."""
    cost_fraction: float | None
    """0.1: steps take 10 % longer than those of the query's own best."""
    left_out: tuple[str, ...]
    """Keys of the query that the tool has no setting for and that were left out."""


def export_for(
    *, result: Mapping[str, Any], format: str, read: Callable[[Mapping[str, Any]], Query] = schema.parse_query
) -> Reranked:
    """Rank again among what the tool of this format runs, and write the best. Raises InputError, UnsupportedError."""
    if format not in TRAINING:
        raise InputError(f"no format {format} to rank for; choose one of {', '.join(TRAINING)}", field="for")
    query = read(result if "kind" in result else result.get("query") or {})
    if query.training is None:
        raise InputError(f"{format} trains; a serving configuration becomes {', '.join(engines.ENGINES)}", field="for")
    own = next(iter(training.recommend(query=query, top=1).recommendations), None)
    framework = FRAMEWORKS.get(format, query.training.framework)
    workload = replace(query.training, framework=framework)
    left_out: list[str] = []
    if framework != query.training.framework:
        for name in (*OF_ONE_FRAMEWORK, *(() if framework == "megatron-core" else OF_MEGATRON)):
            default = next(f.default for f in fields(workload) if f.name == name)
            if getattr(workload, name) != default:
                workload = replace(workload, **{name: default})
                left_out.append(f"training.{name}")
    axes = {
        name: value
        for name, value in RUNS.get(format, {}).items()
        if name != "recompute" or framework == query.training.framework
    }
    free = replace(query.parallel, **dict.fromkeys(OF_THE_QUERY)) if framework != query.training.framework else query.parallel
    asked = replace(query, training=workload, parallel=replace(free, **axes), objective=None)
    ranking = training.recommend(query=asked, top=MAX_TRIED).recommendations
    refusal: UnsupportedError | None = None
    for row in ranking:
        try:
            text = _write(asked, row.parallel, format)
        except UnsupportedError as error:
            refusal = refusal or error
            continue
        assert row.estimate.time is not None  # recommendations have it
        best = own.estimate.time.step_s if own is not None and own.estimate.time is not None else None
        step_s = row.estimate.time.step_s
        return Reranked(
            format=format,
            text=text,
            framework=framework,
            parallel=schema.to_dict(row.parallel),
            step_s=step_s,
            best_step_s=best,
            cost_fraction=None if best is None else step_s / best - 1.0,
            left_out=tuple(left_out),
        )
    raise refusal or InputError(f"nothing that {format} runs fits this query", field="for", code="infeasible")


def _chosen(result: Mapping[str, Any], rank: int, *, kind: type[Any]) -> Any:
    """The configuration of this rank in a result's recommendations, or the one it estimates."""
    rows = result.get("recommendations")
    if rows is None and isinstance(result.get("estimate"), dict):
        rows = [result["estimate"]]
    if not isinstance(rows, list) or not 1 <= rank <= len(rows) or not isinstance(rows[rank - 1], dict):
        count = len(rows) if isinstance(rows, list) else 0
        raise InputError(f"the result has {count} configurations; rank {rank} is not among them", field="rank")
    return schema.parse(kind, rows[rank - 1].get("parallel") or {})


def _write(query: Query, config: ParallelConfig | ServingConfig, format: str) -> str:
    if isinstance(config, ServingConfig):
        if format not in engines.ENGINES:
            raise InputError(f"{format} trains; a serving configuration becomes {', '.join(engines.ENGINES)}", field="format")
        return engines.command(serving_setup(query, config), engine=format)
    if format not in TRAINING:
        raise InputError(f"{format} serves; a training configuration becomes {', '.join(TRAINING)}", field="format")
    return TRAINING[format](training_setup(resolve_training(query), config))


def serving_setup(query: Query, config: ServingConfig) -> ServingSetup:
    """The case of one serving configuration."""
    problem, workload = resolve_serving(query), query.inference
    assert workload is not None  # checked with the query
    return ServingSetup(
        model=problem.model,
        model_path=query.model if isinstance(query.model, str) else problem.model.name,
        cluster=problem.cluster,
        workload=replace(workload, kv_cache_precision=cache_precision(workload, engine=problem.engine)),
        parallel=config,
        memory_fraction=min(problem.engine.memory_fraction, 1.0 - query.constraints.memory_headroom_fraction),
    )


def training_setup(problem: TrainingProblem, config: ParallelConfig) -> TrainingSetup:
    """The case of one configuration; objective min_gpus may have chosen fewer devices than the query has."""
    model_parallel = config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    used = model_parallel * config.data_parallel_size
    at = problem if used == problem.cluster.num_gpus else problem.with_num_gpus(used)
    strategy, layout = at.strategy, at.named(config).pipeline_layout
    sizes = {"stages": config.pipeline_parallel_size, "chunks": config.virtual_pipeline_parallel_size}
    if layout is not None and not ends_are_shorter(num_layers=at.model.num_hidden_layers, **sizes):
        strategy = replace(strategy, pipeline_layout=parse_layout(layout))
    return TrainingSetup(model=at.model, cluster=at.cluster, workload=at.workload, parallel=config, strategy=strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The figures of a run's log."""

    step_s: float | None
    """Median of the logged optimizer steps after the first ones."""
    steps: int
    """Logged figures it is the median of."""
    tokens_per_second_per_gpu: float | None
    allocated_bytes: float | None
    reserved_bytes: float | None
    out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A run as it is, as it is predicted, and the best configuration for the same work on the same devices."""

    format: str
    """Whose configuration it is."""
    query: dict[str, Any]
    """The configuration as a query; valid input everywhere else."""
    estimate: Estimate | InferenceEstimate
    logged: LoggedRun | None
    step_gap_fraction: float | None
    """Logged step time over the predicted one, less 1."""
    better: Recommendation | ServingRecommendation | None
    """None where nothing acceptable is predicted to be faster than what runs."""
    gain_fraction: float | None
    """0.2: the better configuration is predicted to train, or to serve, 20 % more tokens in the same time."""
    switched_on: tuple[str, ...]
    """Overlaps (of training.overlap) that the better configuration counts on and the command leaves off."""
    parts_gained_s: dict[str, float]
    """Where the gain comes from: seconds a step of what runs less those of the better one, by part."""
    read: tuple[Read, ...] = ()
    """What was read where, and the query's field that it decides."""
    ignored: tuple[Ignored, ...] = ()
    """What was passed over, and why."""
    missing: tuple[Missing, ...] = ()
    """What the configuration did not say; an import that lacks something is an error that lists it."""
    changes: tuple[dict[str, str | None], ...] = ()
    """{flag, from, to}: what to write otherwise for the better configuration; null: not there, an empty text: a switch."""


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
    """A foreign configuration as a query, with what became of each of its words.

    `overrides` (dotted paths) say what it cannot: the GPU, a model. `variables` are a script's environment and, as 1, 2, ..., its
    arguments; `files` the texts of what it sources or names; `ignore` the flags to pass over; `log` completes what it leaves open.
    Raises ImportRefusedError, which names all that is refused and all that is missing, or InputError where it cannot be read at all.
    """
    changes = dict(overrides or {})
    told = num_gpus or changes.get("cluster.num_gpus")
    source = imports.Source(
        text=text,
        variables=variables or {},
        files=files or {},
        ignore=ignore,
        log=log,
        num_gpus=told if isinstance(told, int) and told > 0 else None,
        vocabulary=_vocabulary,
        layers_of=lambda name: catalog.model(name).num_hidden_layers,
    )
    reading = imports.read(source, format=format)
    query = reading.query
    if reading.num_gpus:
        query["cluster"] = {"num_gpus": reading.num_gpus}
    if "model" in changes or "model.vocab_size" in changes:
        query["model"] = query.get("model", {}) if "model" not in changes else {}
    schema.lay(query, changes)
    if isinstance(query.get("cluster"), str):
        query["cluster"] = changes["cluster"]
    _complete(reading, changes, text)
    if reading.refused or reading.missing:
        raise _refusal(reading)
    return reading


def read_query(text: str, **options: Any) -> dict[str, Any]:
    """The query of a foreign configuration; as `read_configuration`."""
    return read_configuration(text, **options).query


def _complete(reading: Reading, given: Mapping[str, Any], text: str) -> None:
    """Note what the query still needs, less what was given."""
    query, cluster = reading.query, reading.query.get("cluster")
    gpu = _mentioned_gpu(text)
    kind = "training" if query.get("kind") == "training" else "inference"
    if not isinstance(cluster, str):
        named = cluster if isinstance(cluster, Mapping) else {}
        if "gpu" not in named and "stages" not in named:
            why = f"the file speaks of {gpu.split('-')[0]}" if gpu else "`hp-tool gpus` lists them"
            reading.lack("cluster.gpu", f"add --gpu {gpu or 'h100-sxm-80gb'} ({why})")
        if "num_gpus" not in named and "stages" not in named:
            why = reading.hints.get("cluster.num_gpus", "nothing says how many processes it starts")
            reading.lack("cluster.num_gpus", f"{why}; add --num-gpus")
    if not query.get("model"):
        reading.lack(
            "model", f"a {reading.tool} configuration does not name the model; add --model llama-3-8b, or a config.json"
        )
    if kind == "training" and "sequence_length" not in query.get("training", {}):
        reading.lack(
            "training.sequence_length", "nothing says the length of a sequence; add --set training.sequence_length=4096"
        )
    shape = query.get("model")
    reading.missing = [
        _suggested(each, shape)
        for each in reading.missing
        if not any(each.field == path or each.field.startswith(f"{path}.") for path in given)
    ]


def _suggested(missing: Missing, shape: Any) -> Missing:
    """A vocabulary's hint names the catalogue's model of this shape."""
    if missing.field != "model.vocab_size" or not isinstance(shape, Mapping):
        return missing
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    for name in catalog.names("models"):
        spec = catalog.model(name)
        same = all(getattr(spec, each) == shape.get(each) for each in names) and spec.num_experts == shape.get("num_experts")
        if same and spec.ffn_size == shape.get("intermediate_size") and "vocab_size=..." in missing.hint:
            hint = missing.hint.replace("vocab_size=...", f"vocab_size={spec.vocab_size}")
            return Missing(field=missing.field, hint=f"{hint} (the shape is that of {name})")
    return missing


def _vocabulary(found: Mapping[str, Setting]) -> str:
    """What a tokenizer's name tells of its vocabulary: that of the catalogue's model of this name, or GPT-2's."""
    kind = found.get("tokenizer-type")
    if kind is not None and kind.values == ("GPT2BPETokenizer",):
        return "50257"
    for key in ("tokenizer-model", "tokenizer-name-or-path", "load-tokenizer-from", "tokenizer-path"):
        if key in found and found[key].values and not found[key].unknown:
            tail = found[key].values[0].rstrip("/").split("/")[-1].lower()
            whole = found[key].values[0].lower()
            plain = re.sub(r"^meta-|-(hf|instruct|chat|base|it)(?=-|$)", "", tail)
            for name in (whole, tail, plain):
                if catalog.knows("models", name):
                    return str(catalog.model(name).vocab_size)
    return ""


def _mentioned_gpu(text: str) -> str:
    """The catalogue's GPU that a text speaks of, for a hint."""
    words = set(re.findall(r"[a-z]+\d+[a-z]*", text[:100_000].lower()))
    known = sorted(catalog.names("gpus"), key=lambda name: (name.split("-")[0] not in ("h100", "a100", "h200", "b200"), name))
    return next((name for name in known if name.split("-")[0] in words and re.search(r"\d", name.split("-")[0])), "")


def _refusal(reading: Reading) -> ImportRefusedError:
    """One error for all that is refused and all that is missing."""
    parts = []
    if reading.refused:
        listed = "; ".join(reading.refused[:MAX_NAMED])
        more = f"; and {len(reading.refused) - MAX_NAMED} more" if len(reading.refused) > MAX_NAMED else ""
        parts.append(f"not read: {listed}{more} (--ignore NAME passes over what costs neither time nor memory)")
    if reading.missing:
        parts.append("missing: " + "; ".join(f"{each.field}: {each.hint}" for each in reading.missing[:MAX_NAMED]))
    first = reading.missing[0].field if reading.missing else reading.refused[0].split(" ")[0].rstrip(":")
    code = "unsupported" if reading.refused else "missing_field"
    field = reading.refused[0].split(" ")[0].rstrip(":") if reading.refused else first
    return ImportRefusedError("; ".join(parts), reading=reading, field=field, code=code)


def assess(query: Query, *, reading: Reading | None = None, log: Iterable[str] | None = None) -> Assessment:
    """Compare a run with its prediction and with the best configuration for the same model, batch and devices.

    `reading` says what the query was read from; its tool wrote the log. Raises InputError, UnsupportedError.
    """
    if query.kind == "inference":
        return _assess_serving(query, reading)
    workload, num_gpus = query.training, resolve_training(query).cluster.num_gpus
    assert workload is not None  # resolved above
    estimate = training.estimate(query=query)
    tool = reading.tool if reading is not None else "megatron-lm"
    logged = None if log is None else _logged(read_log(log, reader=LOGS.get(tool, tool)), workload, num_gpus=num_gpus)
    hidden = workload.overlap or OverlapSpec()
    off = tuple(f.name for f in fields(hidden) if getattr(hidden, f.name) is False)
    free = replace(query, training=replace(workload, overlap=None), parallel=ParallelQuery(), objective=None)
    best = next(iter(training.recommend(query=free, top=1).recommendations), None)
    gap = gain = None
    gained: dict[str, float] = {}
    if estimate.time is not None:
        if logged is not None and logged.step_s is not None:
            gap = logged.step_s / estimate.time.step_s - 1.0
        if best is not None and best.estimate.time is not None:
            theirs, ours = estimate.time, best.estimate.time
            gain = theirs.step_s / ours.step_s - 1.0
            gained = {name: seconds - ours.parts_s.get(name, 0.0) for name, seconds in theirs.parts_s.items()}
            if estimate.feasible and gain <= 0.0:
                best, gain, gained = None, None, {}
    return Assessment(
        format=tool,
        query=schema.query_mapping(query),
        estimate=estimate,
        logged=logged,
        step_gap_fraction=gap,
        better=best,
        gain_fraction=gain,
        switched_on=off if best is not None else (),
        parts_gained_s=gained,
        changes=()
        if best is None or estimate.parallel is None
        else _changes(query, free, (estimate.parallel, best.parallel), tool),
        **_accounts(reading),
    )


def _assess_serving(query: Query, reading: Reading | None) -> Assessment:
    tool = reading.tool if reading is not None else "vllm"
    estimate = serving.estimate(query=query)
    free = replace(query, parallel=ParallelQuery(), objective=None)
    best = next(iter(serving.recommend(query=free, top=1).recommendations), None)
    gain = None
    ours, theirs = (
        None if each is None else each.output_tokens_per_second_per_gpu for each in (best and best.estimate, estimate)
    )
    if ours and theirs:
        gain = ours / theirs - 1.0
        best, gain = (best, gain) if gain > 0.0 or not estimate.feasible else (None, None)
    return Assessment(
        format=tool,
        query=schema.query_mapping(query),
        estimate=estimate,
        logged=None,
        step_gap_fraction=None,
        better=best,
        gain_fraction=gain,
        switched_on=(),
        parts_gained_s={},
        changes=()
        if best is None or estimate.parallel is None
        else _changes(query, free, (estimate.parallel, best.parallel), tool),
        **_accounts(reading),
    )


def _accounts(reading: Reading | None) -> dict[str, Any]:
    if reading is None:
        return {}
    return {"read": tuple(reading.read), "ignored": tuple(reading.ignored), "missing": tuple(reading.missing)}


def _changes(query: Query, free: Query, configs: tuple[Any, Any], tool: str) -> tuple[dict[str, str | None], ...]:
    """What the second of two configurations writes otherwise, in the tool's own words; in the query's where it has none."""
    try:
        words = [options(each, config, tool) for each, config in zip((query, free), configs, strict=True)]
    except UnsupportedError:
        words = [
            {f"parallel.{name}": str(value) for name, value in schema.to_dict(config).items() if value is not None}
            for config in configs
        ]
    before, after = words
    return tuple(
        {"flag": name, "from": before.get(name), "to": after.get(name)}
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    )


def options(query: Query, config: Any, tool: str) -> dict[str, str]:
    """A configuration as the tool's flags or keys, each with its value. Raises UnsupportedError."""
    if isinstance(config, ServingConfig):
        _, values = engines.ENGINES[tool](serving_setup(query, config))
        return {name: " ".join(words) for name, words in option_words(values).items()}
    setup = training_setup(resolve_training(query), config)
    if tool in ("megatron-lm", "gpt-neox"):
        return {f"--{name}": " ".join(words) for name, words in megatron_lm.flags(setup).items()}
    if tool == "nemo":
        return megatron_bridge.overrides(setup)
    if tool == "verl":
        return verl.overrides(setup)
    content = {"torchtitan": torchtitan, "deepspeed": deepspeed, "accelerate": accelerate, "nanotron": nanotron}[tool].config(
        setup
    )
    return {each.written: " ".join(each.values) for each in as_settings(content)}


def _logged(facts: LogFacts, workload: TrainingWorkload, *, num_gpus: int) -> LoggedRun:
    """Medians of what a log printed, as seconds a step whatever unit the trainer prefers."""
    tokens = workload.global_batch_size * workload.sequence_length / num_gpus
    seconds, _ = facts.step_times_s(workload, num_gpus=num_gpus)
    settled = seconds[WARMUP_LINES:] or seconds
    step_s = statistics.median(settled) if settled else None
    return LoggedRun(
        step_s=step_s,
        steps=len(settled),
        tokens_per_second_per_gpu=None if step_s is None else tokens / step_s,
        allocated_bytes=facts.allocated_bytes,
        reserved_bytes=facts.reserved_bytes,
        out_of_memory=facts.out_of_memory,
    )
