"""Laws that predictions must satisfy for the whole catalogue. Each law is derived by hand and
checked against its bound.

A law needs no measurement, so it also covers models and GPUs that were never measured. `check()`
returns the comparisons of each law.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product
from typing import Any

from hp_tool import catalog
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.catalog.models import model as catalogue_model
from hp_tool.domain.blocks import Block
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import HpToolError
from hp_tool.questions.serving.evaluate import estimate as serving_estimate
from hp_tool.questions.training import estimate as training_estimate

GENERATIONS = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "b300-sxm-288gb")
"""GPU generations in order. Each is at least as fast as the previous one in every datasheet figure
that affects a training step in 16 or 8 bits.
"""
ENGINES = ("vllm", "sglang", "trtllm")
CONCURRENCY = (1, 64)
SIZES = (1, 8, 16, 32)
"""Numbers of devices tried for serving; the smallest number that the model fits on is used."""
EQUAL_LAYERS_BOUND = 1.005
"""Bound for equal models. A model given as blocks is summed layer by layer, a model with equal
layers is multiplied; embedding and output layer are the same. Rounding alone is far smaller, but
the mean layer of a model with dense first layers is an approximation.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two predictions, of which one may not exceed the other by more than a factor."""

    what: str
    ratio: float
    """The value that must not be larger, divided by the other value."""
    bound: float

    @property
    def is_broken(self) -> bool:
        return self.ratio > self.bound * (1.0 + 1e-9)


@cache
def models() -> tuple[str, ...]:
    """Return the names of the catalogue's decoder models."""
    return tuple(
        name for name in catalog.names("models") if catalogue_model(name).architecture == "decoder"
    )


def newer_gpu_trains_no_slower() -> Iterator[Comparison]:
    """Check that a training step on the next generation takes no longer with equal layout and
    precision, within the interval of one prediction.
    """
    for name, precision in product(models(), ("bf16", "fp8")):
        steps = [(gpu, _step(name, gpu, precision)) for gpu in GENERATIONS]
        yield from _generations(
            f"{name} {precision}", [(gpu, *_of_step(found)) for gpu, found in steps if found]
        )


def newer_gpu_serves_no_slower() -> Iterator[Comparison]:
    """Check that a token takes no longer on the next generation with equal engine, precision and
    load, within the interval of one prediction.
    """
    precisions = ("bf16", "fp8", "mxfp4", "nvfp4")
    for case in product(models(), ENGINES, precisions, CONCURRENCY):
        yield from _serving_generations(*case)


def _serving_generations(
    name: str, engine: str, precision: str, concurrency: int
) -> Iterator[Comparison]:
    for devices in SIZES:
        found = [
            (gpu, _token(name, gpu, engine, precision, concurrency, devices)) for gpu in GENERATIONS
        ]
        fitting = [(gpu, *token) for gpu, token in found if token is not None]
        if len(fitting) == len(GENERATIONS) or devices == SIZES[-1]:
            yield from _generations(f"{name} {precision} {engine}, {concurrency} at once", fitting)
            return


def _generations(what: str, found: list[tuple[str, float, float]]) -> Iterator[Comparison]:
    """Compare each GPU with the previous one. `found` has (name, seconds, ln(upper interval bound /
    seconds)) of each GPU.

    The bound is the wider of the two intervals, not their sum, because most of the uncertainty
    concerns the engine or framework, which both share.
    """
    for (older, before, doubt), (newer, after, more) in pairwise(found):
        bound = math.exp(max(doubt, more))
        yield Comparison(what=f"{what}: {newer} against {older}", ratio=after / before, bound=bound)


def _of_step(found: Estimate) -> tuple[float, float]:
    assert found.time is not None and found.intervals is not None
    return found.time.step_s, math.log(found.intervals.step_s[1] / found.time.step_s)


def _step(
    model: str | ModelSpec, gpu: str, precision: str, *, tensor: tuple[int, ...] = (8, 4, 2, 1)
) -> Estimate | None:
    """Return the estimate on eight devices with four sequences per micro-batch; None if no layout
    or precision is supported.

    Experts are spread over the devices. Dense models use the first of the `tensor` degrees that
    divides the model. Memory is not checked.
    """
    spec = catalogue_model(model) if isinstance(model, str) else model
    spread = math.gcd(spec.num_experts or 1, 8)
    for degree in tensor if spread == 1 else (1,):
        parallel = ParallelQuery(
            tensor_parallel_size=degree, micro_batch_size=4, expert_parallel_size=spread
        )
        cluster = ClusterQuery(gpu=gpu, num_gpus=8)
        settings = {"precision": precision, "framework_version": "26.06"}
        found = _training(model, cluster, parallel, **settings)
        if found is None or found.time is not None:
            return found
    return None


def _training(
    model: str | ModelSpec, cluster: ClusterQuery, parallel: ParallelQuery, **settings: Any
) -> Estimate | None:
    """Return the estimate for a batch of 64 sequences of 4,096 tokens; None if it is not
    supported.
    """
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=64, **settings)
    query = Query(
        kind="training", model=model, cluster=cluster, training=workload, parallel=parallel
    )
    try:
        return training_estimate(query=query, with_fixes=False)
    except HpToolError:
        return None


@cache
def _token(
    name: str, gpu: str, engine: str, precision: str, concurrency: int, devices: int
) -> tuple[float, float] | None:
    """Return GPU-seconds per output token and the log of their interval bound; None if the model
    does not fit or is not supported.

    TPOT is unsuitable here, because a larger cache admits more concurrent requests, which slows
    each of them.
    """
    query = Query(
        kind="inference",
        model=name,
        cluster=ClusterQuery(gpu=gpu, num_gpus=devices, gpus_per_node=8),
        inference=InferenceWorkload(
            input_length=1024,
            output_length=256,
            concurrency=concurrency,
            engine=engine,
            precision=precision,  # type: ignore[arg-type]
        ),
        parallel=ParallelQuery(tensor_parallel_size=devices),
    )
    try:
        found = serving_estimate(query=query, with_fixes=False)
    except HpToolError:
        return None
    rate, intervals = found.output_tokens_per_second_per_gpu, found.intervals
    if rate is None or intervals is None:
        return None
    return 1.0 / rate, math.log(rate / intervals.output_tokens_per_second_per_gpu[0])


def one_expert_is_a_dense_model() -> Iterator[Comparison]:
    """Check that an MoE model with one expert of the dense width trains no faster than the dense
    model.

    It has the dense model's matrices and L h more router weights, and each layer adds a router and
    a dispatch, so its step is at least as long. Its step is at most the dense step times the
    interval factor of MoE predictions, plus the fitted time that an MoE layer adds to each
    micro-batch.
    """
    constants = efficiency_profile(
        gpu=catalog.gpu(GENERATIONS[0]), framework="megatron-core"
    ).framework
    micro_batches = 2
    for name in models():
        dense = catalogue_model(name)
        if dense.num_experts or not dense.is_uniform:
            continue
        mixture = dataclasses.replace(
            dense,
            name=f"{name}-one-expert",
            num_experts=1,
            num_experts_per_tok=1,
            moe_intermediate_size=dense.ffn_size,
        )
        pair = [_step(spec, GENERATIONS[0], "bf16", tensor=(1,)) for spec in (dense, mixture)]
        if pair[0] is None or pair[1] is None:
            continue
        (plain, _), (routed, doubt) = (_of_step(found) for found in pair if found)
        added = micro_batches * dense.num_hidden_layers * constants.expert_overhead_s
        yield Comparison(what=f"{name}: dense over one expert", ratio=plain / routed, bound=1.0)
        yield Comparison(
            what=f"{name}: one expert over dense",
            ratio=routed / plain,
            bound=math.exp(doubt) + added / plain,
        )


def equal_layers_are_equal_blocks() -> Iterator[Comparison]:
    """Check that a model of identical layers and the same model listed block by block have the same
    step time and memory.
    """
    for name in models():
        spec = catalogue_model(name)
        if (
            not spec.is_uniform
            or spec.first_k_dense_replace
            or spec.sliding_window_layers is not None
        ):
            continue
        windowed = spec.sliding_window is not None
        listed = dataclasses.replace(
            spec, blocks=(Block(count=spec.num_hidden_layers, windowed=windowed),)
        )
        pair = [_step(one, GENERATIONS[0], "bf16") for one in (spec, listed)]
        if pair[0] is None or pair[1] is None or pair[0].memory is None or pair[1].memory is None:
            continue
        for figure, values in (
            ("step", [_of_step(found)[0] for found in pair if found]),
            ("memory", [found.memory.total_bytes for found in pair if found and found.memory]),
        ):
            ratio = max(values) / min(values)
            yield Comparison(what=f"{name}: {figure}", ratio=ratio, bound=EQUAL_LAYERS_BOUND)


def dropped_collective_never_adds_time() -> Iterator[Comparison]:
    """Check that a network twice as fast makes no step longer, and that no part of a step is
    negative.

    The exposed seconds of a collective are the time saved if it is removed; a negative value would
    add time.
    """
    for name in models():
        usual = _networked(name, 1.0)
        faster = _networked(name, 2.0)
        if usual is None or faster is None or usual.time is None or faster.time is None:
            continue
        yield Comparison(
            what=f"{name}: network x2", ratio=faster.time.step_s / usual.time.step_s, bound=1.0
        )
        least = min(usual.time.parts_s.values())
        yield Comparison(what=f"{name}: least part of a step", ratio=1.0 - least, bound=1.0)


def _networked(name: str, factor: float) -> Estimate | None:
    spec = catalogue_model(name)
    cluster = ClusterQuery(
        gpu=GENERATIONS[0], num_gpus=64, inter_node_bandwidth_bytes_per_second=5e10 * factor
    )
    parallel = ParallelQuery(
        tensor_parallel_size=4 if spec.num_attention_heads % 4 == 0 else 1,
        pipeline_parallel_size=2 if spec.num_hidden_layers % 2 == 0 else 1,
        micro_batch_size=1,
        expert_parallel_size=None if not spec.num_experts else min(8, spec.num_experts),
    )
    return _training(name, cluster, parallel)


def narrower_precision_is_no_slower() -> Iterator[Comparison]:
    """Check that fp8 matmuls are slower than bf16 matmuls by at most the time of their casts.

    A cast reads 2 bytes and writes 1 for every element of a matmul's two inputs, forward and
    backward (three matmuls, two inputs each): 6 x 3 bytes per input element. A layer has at most 18
    h input elements per token (queries, keys, values, output: 4 h; MLP of 4 h: 5 h and 4 h; their
    weights once per micro-batch). The bound assumes the full memory bandwidth.
    """
    for name in models():
        spec = catalogue_model(name)
        for gpu in GENERATIONS:
            wide, narrow = (_step(name, gpu, precision) for precision in ("bf16", "fp8"))
            if wide is None or narrow is None:
                continue
            before, after = _of_step(wide)[0], _of_step(narrow)[0]
            tokens = 4096.0 * 64 / 8 * max(spec.num_experts_per_tok or 1, 1)
            device = catalog.gpu(gpu)
            casts = (
                18.0
                * 18.0
                * spec.hidden_size
                * spec.num_hidden_layers
                * tokens
                / device.memory_bandwidth_bytes_per_second
            )
            yield Comparison(
                what=f"{name} on {gpu}: fp8 against bf16",
                ratio=after / before,
                bound=1.0 + casts / before,
            )


LAWS: dict[str, Callable[[], Iterator[Comparison]]] = {
    "a newer GPU trains no slower": newer_gpu_trains_no_slower,
    "a newer GPU serves no slower": newer_gpu_serves_no_slower,
    "one expert is a dense model": one_expert_is_a_dense_model,
    "blocks of identical layers change no answer": equal_layers_are_equal_blocks,
    "a dropped collective never adds time": dropped_collective_never_adds_time,
    "a lower precision is no slower": narrower_precision_is_no_slower,
}


def check() -> dict[str, list[Comparison]]:
    """Return the comparisons of each law by name."""
    return {name: list(law()) for name, law in LAWS.items()}
