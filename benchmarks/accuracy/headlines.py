"""Compare predictions with headline figures of papers and vendors: `python -m
benchmarks.accuracy.headlines [--json]`.

Reads evidence/headlines.yaml; needs no folder of measured figures.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from benchmarks.accuracy import dynamic_context
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.korthikanti import GPU, a100
from benchmarks.accuracy.korthikanti import workload as workload_2022
from benchmarks.accuracy.published import Query, best_recommendation, estimate_query, with_values
from evidence.table import FOLDER
from hp_tool.catalog import gpu, model
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.layer import layer_bytes, layer_time
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.units import GIB, SECONDS_PER_DAY

Found = tuple[float, Mapping[str, str]]
"""A predicted figure, and the values that notes about it may contain."""
PUBLISHED_2021_FLOPS_PER_SECOND = 140e12
"""FLOP/s of one A100 in arXiv 2104.04473 section 5.1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """A published figure and its prediction."""

    source: str
    date: str
    """Month of the measured software."""
    what: str
    published: str
    predicted: float
    unit: str
    error: float | None = None
    """Return predicted / published - 1 if the published figure is a single number."""
    note: str = ""


def specifications() -> Iterator[dict[str, Any]]:
    """Yield each row of evidence/headlines.yaml with the settings of its source and with its
    query.
    """
    for paper in yaml.safe_load((FOLDER / "headlines.yaml").read_text(encoding="utf-8")):
        for size, name in paper.get("sizes", {"": ""}).items():
            for row in paper["rows"]:
                if isinstance(row, list):
                    values = dict(zip(paper["columns"], row, strict=True))
                    row = {"published": values.pop("published"), "set": values}
                yield {**paper, **row, "size": size, "model": name}


def evaluate(source: str = "") -> list[Headline]:
    """Return the headlines of the sources that contain `source`."""
    return [_headline(each) for each in specifications() if source in each["source"]]


def _headline(of: Mapping[str, Any]) -> Headline:
    base, query = of.get("query", {}), query_of(of)
    value, words = _predict(of, query)
    if "less" in of:
        value -= _predict(of, with_values(base, of["less"]))[0]
    predicted = of.get("times", 1.0) * value
    if "over" in of:
        predicted /= _predict(of, with_values(base, of["over"]))[0]
    named = {**query, **query.get("cluster", {}), **query.get("training", {}), "size": of["size"]}
    stated = {name: of[name].format(**named, **words) for name in ("what", "note") if name in of}
    published, error = of["published"], None
    if isinstance(published, float):
        published, error = f"{published:g}", predicted / published - 1.0
    elif isinstance(published, list):
        low, high = published
        error = (1.0 + predicted) / (1.0 + min(max(predicted, low), high)) - 1.0
        published, predicted = f"{100 * low:.0f}-{100 * high:.0f}", 100.0 * predicted
    return Headline(
        source=of["source"],
        date=of["date"],
        published=published,
        predicted=predicted,
        unit=of["unit"],
        error=error,
        **stated,
    )


def query_of(of: Mapping[str, Any]) -> Query:
    """Return the query of a specification."""
    return with_values(of.get("query", {}), of.get("set", {}))


def _predict(of: Mapping[str, Any], query: Query) -> Found:
    if of["figure"] == "layer":
        return LAYER[of["part"]](of["model"]), {}
    return _evaluate_figure(of["figure"], json.dumps(query))


@functools.cache
def _evaluate_figure(figure: str, query: str) -> Found:
    return FIGURES[figure](json.loads(query))


def _step_s(query: Query) -> Found:
    found = estimate_query(query)
    assert found.time is not None
    return found.time.step_s, {}


def _model_tflops(query: Query) -> Found:
    found = estimate_query(query)
    rate, memory = found.model_tflops_per_gpu, found.memory
    assert rate is not None and memory is not None and found.feasible, found.reasons
    return rate, {"needs": f"{memory.total_bytes / GIB:.1f} GiB"}


def _recomputed_tflops(query: Query) -> Found:
    """Return TFLOP/s per GPU for a step of 96 B s L h^2 (1 + s/6h + V/16Lh) FLOPs: arXiv
    2104.04473, equation 3.
    """
    shape, load = model(query["model"]), query["training"]
    h, layers, sequence = shape.hidden_size, shape.num_hidden_layers, load["sequence_length"]
    tail = 1.0 + sequence / (6.0 * h) + shape.vocab_size / (16.0 * layers * h)
    flops = 96.0 * load["global_batch_size"] * sequence * layers * h**2 * tail
    return flops / _step_s(query)[0] / query["cluster"]["num_gpus"] * 1e-12, {}


def _days(query: Query) -> Found:
    days = best_recommendation(query).estimate.days
    assert days is not None
    return days, {}


def _mfu(query: Query) -> Found:
    best = best_recommendation(query)
    config, mfu = best.parallel, best.estimate.mfu
    assert mfu is not None
    layout = (
        f"TP {config.tensor_parallel_size}, PP {config.pipeline_parallel_size}, CP "
        f"{config.context_parallel_size}"
    )
    return mfu, {"layout": layout}


def _dynamic_context(_: Query) -> Found:
    """Return the gain of dynamic over static context parallelism, relative to packing, for the
    lengths most similar to the published ones.
    """
    rows = dynamic_context.evaluate(["synthetic-code"])["scenarios"][0]["rows"]
    return rows[0]["gain_over_packing"], {}


FIGURES: Mapping[str, Callable[[Query], Found]] = {
    "step_s": _step_s,
    "model_tflops": _model_tflops,
    "recomputed_tflops": _recomputed_tflops,
    "days": _days,
    "mfu": _mfu,
    "dynamic_context": _dynamic_context,
}


def layer_overhead(name: str, *, recompute: str) -> float:
    """Return the seconds that recomputation adds to the forward and backward pass of one layer,
    minus what sequence parallelism saves if it is enabled together with recomputation: TP 8,
    micro-batch 1 (22B: 4), as in figure 8 of the paper.
    """

    def seconds(*, sharded: bool) -> Any:
        case, candidates = _layer(name, sharded=sharded, micro_batch=4 if name == "gpt-22b" else 1)
        return layer_time(case=case, candidates=candidates)

    base = seconds(sharded=False)
    plain = base.forward + base.backward + base.tensor + base.tensor_backward
    if recompute == "full":
        return float((base.forward + base.tensor) / plain)
    other = seconds(sharded=True)
    both = other.forward + other.backward + other.tensor + other.tensor_backward + other.repeated
    return float(both / plain - 1.0)


def layer_memory_factor(name: str) -> float:
    """Return the bytes that a layer saves with tensor parallelism alone, relative to those with SP
    and selective recomputation.
    """
    alone, sharded = (
        layer_bytes(case=case, candidates=candidates)
        for case, candidates in (_layer(name, sharded=each) for each in (False, True))
    )
    return float(alone.saved / sharded.saved_selective)


def _layer(name: str, *, sharded: bool, micro_batch: int = 1) -> tuple[TrainingCase, Candidates]:
    config = ParallelConfig(
        tensor_parallel_size=8, micro_batch_size=micro_batch, sequence_parallel=sharded
    )
    case = TrainingCase(
        model=model(name),
        cluster=a100(8),
        workload=workload_2022(micro_batch),
        profile=efficiency_profile(gpu=gpu(GPU), framework="megatron-core"),
    )
    return case, Candidates.alone(config)


LAYER: Mapping[str, Callable[[str], float]] = {
    "full": functools.partial(layer_overhead, recompute="full"),
    "selective": functools.partial(layer_overhead, recompute="selective"),
    "memory": layer_memory_factor,
}


def training_days() -> dict[str, Any]:
    """Return the days to train GPT-3 175B on 300B tokens with 1,024 A100 with and without the
    techniques of arXiv 2205.05198, their ratio and layouts, and the days of the 2021 paper with its
    software.
    """
    queries = [query_of(each) for each in specifications() if each["figure"] == "days"]
    selective, full = (best_recommendation(query) for query in queries[:2])
    days, full_days = selective.estimate.days, full.estimate.days
    assert days is not None and full_days is not None
    return {
        "selective_sequence_parallel_days": days,
        "full_recompute_days": full_days,
        "ratio": full_days / days,
        "configurations": [dataclasses.asdict(one.parallel) for one in (selective, full)],
        "published_2021_days": published_2021_days(),
    }


def published_2021_days() -> float:
    """Return 8 T P / (n X), the estimate of arXiv 2104.04473 for the software of 2021."""
    tokens, parameters, gpus = 300e9, 175e9, 1024
    rate = gpus * PUBLISHED_2021_FLOPS_PER_SECOND
    return 8.0 * tokens * parameters / rate / SECONDS_PER_DAY


if __name__ == "__main__":
    print_report(
        description=__doc__,
        evaluate=evaluate,
        as_dict=lambda found: [dataclasses.asdict(one) for one in found],
        needs_data=False,
    )
