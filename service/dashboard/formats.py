"""Format numbers, names and configurations for pages. The pages' JSON contains plain numbers."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from markupsafe import Markup

from hp_tool.domain.knobs import FREE_PATHS
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.parts import PARTS
from hp_tool.domain.records import JsonObject
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.states import State
from hp_tool.domain.units import JOULES_PER_MWH, capitalize_first, format_duration
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.form_fields import form_fields
from hp_tool.wording import fit
from hp_tool.wording.words import MEANINGS, parallel_sizes
from hp_tool.wording.words import unmeasured_words as words_of_unmeasured

ABSENT = "–"
WORDS = {
    "vocab_size": "vocabulary",
    "version": "hp_tool version",
    "price_per_gpu_hour": "$ per GPU-hour",
    "price_per_hour": "$ per hour",
}
"""Labels that `words` cannot derive from the field name."""
CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - set(map(ord, "\t\n\r"))
DIRECTIONS = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
"""Characters that change the direction of text (Unicode Annex 9)."""
UNSEEN = {code: f"\\u{code:04x}" for code in CONTROLS | DIRECTIONS}
SPELLINGS = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "kv": "KV",
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "flops": "FLOPs",
    "mlp": "MLP",
}


def seconds(value: float | None) -> str:
    """Format a duration as `12.34 s` or `12.3 ms`, as the command line does."""
    if not value:
        return ABSENT if value is None else "0 s"
    return f"{'-' if value < 0 else ''}{format_duration(abs(value))}".replace(" us", " µs")


def count(value: float | None) -> str:
    """Format a number as `12,345`, or as `1.23` below 100."""
    return ABSENT if value is None else _significant(value)


def gib(value: float | None) -> str:
    """Format bytes as GiB (2**30), or as MiB below 0.1 GiB."""
    if not value:
        return ABSENT if value is None else "0 GiB"
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.1f} MiB"


def billions(value: float | None) -> str:
    """Format a number of parameters as `1.01 T`, `70.6 B` or `125 M`."""
    if value is None:
        return ABSENT
    if value >= 0.9995e12:
        return f"{value / 1e12:.3g} T"
    return f"{value / 1e9:.3g} B" if value >= 0.9995e9 else f"{value / 1e6:.3g} M"


def per_second(value: float | None) -> str:
    """Format bytes per second as GB/s (10**9)."""
    return ABSENT if value is None else f"{value / 1e9:,.4g} GB/s"


def tflops(value: float | None) -> str:
    """Format FLOPs per second as TFLOP/s (10**12)."""
    return ABSENT if value is None else f"{value / 1e12:,.4g} TFLOP/s"


def duration(value: float | None) -> str:
    """Format a duration as `40 s`, `12 min` or `3.5 h`."""
    if value is None:
        return ABSENT
    if value < 90:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 90 * 60 else f"{_significant(value / 3600)} h"


def gpu_time(value: float | None, device: str = "GPU") -> str:
    """Format GPU-seconds as GPU-hours, or as GPU-seconds below 0.1 GPU-hours.

    `device` is the name for one GPU.
    """
    if value is None:
        return ABSENT
    return (
        f"{_significant(value / 3600)} {device}-hours"
        if value >= 360
        else f"{_significant(value)} {device}-seconds"
    )


def tick(value: float, unit: str) -> str:
    """Format a tick label without trailing zeros; bytes as GiB, without the unit."""
    if unit == "bytes":
        return f"{value / 2**30:,g}"
    return (
        f"{value:,g} s"
        if value >= 1
        else f"{value * 1e3:g} ms"
        if value >= 1e-3
        else seconds(value)
        if value
        else "0"
    )


def percent(value: float | None) -> str:
    """Format a fraction as a signed percentage: +3.1%."""
    return ABSENT if value is None else f"{value * 100:+.1f}%".replace("-", "−")


def risk(value: float) -> str:
    """Format a probability of running out of memory, as the command line does."""
    return fit.risk_words(value)


def share(value: float | None) -> str:
    """Format a fraction as a percentage: 41.3%, 0.15%."""
    if not value:
        return ABSENT if value is None else "0%"
    percents = 100 * value
    return (
        f"{percents:.1f}%"
        if abs(percents) >= 0.995
        else f"{percents:.2g}%"
        if abs(percents) >= 0.01
        else "below 0.01%"
    )


def arrows(text: str) -> str:
    """Replace `->` in `TP 1 -> 8` by a typographic arrow."""
    return text.replace(" -> ", " → ")


def visible(value: object) -> object:
    """Escape characters that would hide or reorder text on a page."""
    return (
        value.translate(UNSEEN) if isinstance(value, str) and not value.isprintable() else value
    )  # Most texts need no copy.


def words(name: str) -> str:
    """Return the label of a part or field: `GPUs per node` for `gpus_per_node`."""
    if name in PARTS:
        return PARTS[name].label
    return WORDS.get(name) or " ".join(
        SPELLINGS.get(word, word) for word in name.removeprefix("num_").split("_")
    )


def colour(name: str) -> str:
    """Return the CSS class of a bar's part: a palette colour if known, else the name itself."""
    if name not in PARTS:
        return name
    return "idle" if PARTS[name].colour is None else f"series-{PARTS[name].colour}"


def token(label: str) -> str:
    """Return the CSS custom property for the colour of a part's label.

    Other labels have the colour of measured values.
    """
    key = next((part.key for part in PARTS.values() if part.label == label), None)
    return "--ink-soft" if key is None else f"--{colour(key)}"


def coloured(parts: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """Return (label, seconds, colour) for each part of a bar in plot.js."""
    names = {"ideal compute": "compute", "below peak": "pipeline bubble"}
    return [(name, value, token(names.get(name, name))) for name, value in parts.items()]


def plain_number(value: float) -> str:
    """Format an integer in full, and other numbers with four significant digits."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def field_label(path: str) -> str:
    """Return a query field's label for running text; without a form label, its name in words."""
    known = next(
        (each for each in (form_fields("training"), form_fields("inference")) if path in each), None
    )
    if known is None:
        section, _, name = path.partition(".")
        return words(
            (name if section in ("training", "parallel", "inference") else path).replace(".", "_")
        )
    label = known[path].label
    return label if label[:2].isupper() else label[:1].lower() + label[1:]


def unmeasured_words(names: Iterable[str]) -> str:
    """Explain the star on an interval, with the fields' labels."""
    labelled = (
        f"{field_label(path)}{colon}{value}"
        for path, colon, value in (name.partition(": ") for name in names)
    )
    return words_of_unmeasured(labelled)


def sentence(text: str) -> str:
    """Return the text with a capital first letter and a full stop."""
    return f"{capitalize_first(text).rstrip('.')}." if text else ""


def in_words(value: Any, *, number: Callable[[float], str] = plain_number) -> str:
    """Format a field's value on one line: yes or no, a text, a list, or a mapping.

    `number` formats the numbers in it.
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return number(value)
        case list() | tuple():
            return ", ".join(in_words(item, number=number) for item in value)
        case dict():
            return ", ".join(
                f"{words(name)} {in_words(item, number=number)}"
                for name, item in value.items()
                if item is not None
            )
        case _:
            return str(value)


def dotted(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to values by dotted path. `schema.lay` is the inverse."""
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        nested = isinstance(value, dict) and all(
            isinstance(key, str) and "." not in key and "=" not in key for key in value
        )
        values |= dotted(value, f"{prefix}{name}.") if nested and value else {prefix + name: value}
    return values


def dollars(value: float) -> str:
    """Format US dollars as `$1,234`, `$12.34` or `$0.0123`."""
    return f"${value:,.0f}" if value >= 100 else f"${value:.2f}" if value >= 1 else f"${value:.3g}"


def number(value: float) -> str:
    """Format a number with three significant digits: `14.1`, `1,234`."""
    return _significant(value)


def days(value: float) -> str:
    """Format a number of days as `14.1 days`."""
    return UNITS["days"](value)


def measured(value: float | str | None, unit: str) -> str:
    """Format a figure in its unit; return texts unchanged."""
    if isinstance(value, str):
        return value or ABSENT
    return ABSENT if value is None else UNITS.get(unit, _significant)(value)


def bare(value: float, unit: str) -> str:
    """Format an interval bound in its unit, without the word `days`, which follows the value."""
    return number(value) if unit == "days" else measured(value, unit)


def moment(value: datetime | None) -> str:
    """Format a timestamp as a UTC date and time, to the minute."""
    return ABSENT if value is None else f"{value:%Y-%m-%d %H:%M} UTC"


def when(value: datetime) -> Markup:
    """Return a UTC date and time that times.js rewrites in the reader's time zone."""
    return Markup('<time datetime="{}">{}</time>').format(value.isoformat(), moment(value))


def subject(query: JsonObject) -> str:
    """Return a query's model and cluster: `llama-3-70b on 64 x h100-sxm-80gb`."""
    model, cluster = query.get("model"), query.get("cluster")
    name = model.get("name") or "own model" if isinstance(model, dict) else str(model)
    if not isinstance(cluster, dict):
        return f"{name} on {cluster}"
    gpu = cluster.get("gpu") or cluster.get("node_type") or "GPU"
    gpu_name = gpu.get("name", "own GPU") if isinstance(gpu, dict) else str(gpu)
    number = cluster.get("num_gpus")
    return f"{name} on {number} x {gpu_name}" if number else f"{name} on {gpu_name}"


def workload(query: JsonObject) -> str:
    """Describe the workload of one step or request.

    For example `8,192 tokens per sequence, batch 512, 1,000 billion tokens in total` or `weights in
    fp8, 4,000 tokens in, 1,000 out, 64 in flight`. Length distributions, traces and defaults are
    omitted.
    """
    training, served = query.get("training") or {}, query.get("inference") or {}
    total = training.get("total_tokens")
    parts = (
        (training.get("precision"), "{}"),
        (served.get("precision"), "weights in {}"),
        (training.get("sequence_length"), "{:,} tokens per sequence"),
        (training.get("global_batch_size"), "batch {:,}"),
        (total and total / 1e9, "{:,.4g} billion tokens in total"),
        (served.get("input_length"), "{:,} tokens in"),
        (served.get("output_length"), "{:,} out"),
        (served.get("concurrency"), "{:,} in flight"),
        (served.get("request_rate_per_second"), "{:,} requests/s"),
    )
    return ", ".join(
        text.format(value)
        for value, text in parts
        if isinstance(value, int | float | str) and value
    )


def query_text(query: JsonObject) -> str:
    """Return a stored query as text for a URL."""
    return json.dumps(query, ensure_ascii=False, separators=(",", ":"))


def device_of(query: JsonObject) -> str:
    """Return the name for one device of a query's cluster. A CPU process is not called a GPU."""
    cluster = query.get("cluster")
    return "device" if isinstance(cluster, dict) and cluster.get("gpu") == "cpu" else "GPU"


def arithmetic(parallel: ParallelConfig, device: str = "GPU") -> str:
    """Return `TP 2 x PP 1 x DP 1 = 2 GPUs`, with CP only if it is used."""
    sizes, number = parallel_sizes(parallel)
    return f"{sizes} = {number} {device}{'s' if number > 1 else ''}"


def details(parallel: ParallelConfig) -> str:
    """Describe the rest of a configuration: micro-batch, recomputation, ZeRO stage and so on."""
    recompute = recompute_name(parallel.recompute)
    parts = [f"micro-batch {parallel.micro_batch_size}"]
    if parallel.virtual_pipeline_parallel_size > 1:
        parts.append(f"{parallel.virtual_pipeline_parallel_size} chunks per pipeline rank")
    if parallel.expert_parallel_size > 1:
        parts.append(f"EP {parallel.expert_parallel_size}")
    if parallel.expert_tensor_parallel_size > 1:
        parts.append(f"expert TP {parallel.expert_tensor_parallel_size}")
    if parallel.moe_token_dispatcher_type is not None:
        parts.append(f"expert dispatcher: {parallel.moe_token_dispatcher_type}")
    if parallel.sequence_parallel:
        parts.append("sequence parallel")
    parts.append("no recomputation" if recompute == "none" else f"{recompute} recomputation")
    if parallel.zero_stage != 1:
        parts.append(f"ZeRO {parallel.zero_stage}")
    if parallel.data_parallel_shard_size:
        parts.append(f"shard groups of {parallel.data_parallel_shard_size}")
    if parallel.context_parallel_size > 1 and parallel.context_parallel_communication is not None:
        levels = " x ".join(map(str, parallel.hierarchical_context_parallel_sizes or ()))
        parts.append(
            "CP exchange: "
            f"{parallel.context_parallel_communication}{f' ({levels})' if levels else ''}"
        )
    return ", ".join(parts)


def serving_details(config: ServingConfig) -> str:
    """Describe the limits of a server."""
    return (
        f"engine limit {config.max_num_seqs:,} (max_num_seqs), "
        f"{config.max_num_batched_tokens:,} tokens per pass"
    )


def code(text: str) -> Markup:
    """Escape the text, and mark text in backticks as code."""
    return Markup().join(
        _CODE.format(part) if n % 2 else part for n, part in enumerate(text.rstrip(".").split("`"))
    )


def letters(text: str) -> Markup:
    """Escape the text, and explain abbreviations such as TP and PP."""
    parts = _LETTERS.split(text)
    return Markup().join(
        _ABBREVIATED.format(MEANINGS[part], part) if n % 2 else part for n, part in enumerate(parts)
    )


_CODE = Markup('<code class="mono">{}</code>')
_ABBREVIATED = Markup('<abbr title="{}">{}</abbr>')
_LETTERS = re.compile(
    rf"\b({'|'.join(letters for letters in MEANINGS if letters[:2].isupper() and ' ' not in letters)})\b"  # noqa: E501
)


def configuration_details(configuration: Configuration) -> str:
    """Describe the rest of a configuration, including settings that a ranking chose."""
    config, training = configuration.parallel, configuration.query.training
    if isinstance(config, ServingConfig):
        return serving_details(config)
    knobs = () if training is None else tuple(_knobs(training))
    listed = sorted(
        path
        for path in configuration.set
        if path.startswith("training.") and path not in DESCRIBED_KNOBS
    )
    chosen = (
        f"{path.removeprefix('training.').replace('_', ' ')} {configuration.set[path]}"
        for path in listed
    )
    return ", ".join((details(config), *chosen, *knobs))


DESCRIBED_KNOBS = ("training.offload", *FREE_PATHS)
"""Keys that a ranking chooses and that `_knobs` describes."""


def _knobs(training: TrainingWorkload) -> Iterator[str]:
    """Yield descriptions of training settings that differ from the defaults."""
    if training.offload not in (None, "none"):
        yield f"offload {training.offload}"
    if training.cuda_graphs:
        yield "CUDA graphs"
    if training.cross_entropy not in (None, "unfused"):
        yield f"cross entropy {training.cross_entropy}"
    if training.merges_passes:
        yield "expert exchange overlapped"


def slashed(text: str) -> Markup:
    """Escape the text, and allow line breaks after slashes but not within words."""
    return Markup("/<wbr>").join(str(visible(text)).split("/"))


def _significant(value: float) -> str:
    if value == int(value) or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:#.3g}"


UNITS: dict[str, Callable[[float], str]] = {
    "seconds": seconds,
    "bytes": gib,
    "share": share,
    "change": percent,
    "tflops": lambda value: f"{_significant(value)} TFLOP/s",
    "days": lambda value: f"{_significant(value)} days",
    "hours": lambda value: f"{value:,.0f} h",
    "dollars": dollars,
    "joules": lambda value: f"{_significant(value / JOULES_PER_MWH)} MWh",
    "kilograms": lambda value: f"{_significant(value / 1e3)} t",
    "risk": risk,
}
"""Formatting functions, by unit."""


def state_looks(states: Mapping[str, State]) -> dict[str, dict[str, object]]:
    """Return each state's label and tone, and whether the search ended without a result."""
    return {
        key: {"label": state.label, "tone": state.tone, "failed": state.failed}
        for key, state in states.items()
    }
