"""Timed kernels of recurrent mixers, and timed modules of sparse attention, as fit_mixers takes
them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fit_gpus import PRECISIONS, SYSTEMS
from benchmarks.accuracy.fitting import Floats, given
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import engine_efficiency
from hp_tool.cost import scans
from hp_tool.cost.matrices import attention_flops, attention_matrices, index_width
from hp_tool.cost.matrix import shapes_by_source
from hp_tool.cost.recurrent import convolved_width
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.serving import mixers
from hp_tool.cost.serving.operations import matmuls_seconds, visible_keys
from hp_tool.cost.serving.weights import weight_format
from hp_tool.cost.sparse_attention import SCORE_BYTES
from hp_tool.domain.blocks import Mixer
from hp_tool.domain.hardware import ClusterQuery, GpuSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.questions.serving.problem import serving_case

GIVEN = given("mixers")
FIRST_CALLS = ("kimi_delta", "convolution")
"""Rows that hold a kernel's first call, 0.4 to 0.8 ms whatever the work: the shortest row of a card
is taken off.
"""
LONG_ENOUGH = 2.0**29
"""Numbers that a convolution reads from which such rows tell something else than their first
call.
"""
PROMPT_TOKENS = 8192
"""Tokens from which a module of sparse attention is not bound by the host, which launches its
prompts' kernels one by one.
"""


class Batch(NamedTuple):
    """Rows of one kernel of one mixer on one card."""

    card: GpuSpec
    model: ModelSpec
    sequences: Floats
    lengths: Floats
    seconds: Floats


Batches = dict[tuple[str, str], dict[str, list[Batch]]]
"""By mixer and kernel, and by card."""


def recurrent_rows(folder: Path) -> Batches:
    """Kernels of recurrent mixers."""
    grouped: dict[tuple[str, str], dict[str, dict[ModelSpec, list[Row]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for name, mixer in GIVEN["files"].items():
        for row in read(folder / "ops", f"{name}.csv"):
            grouped[mixer, GIVEN["kernels"][f"{row['kernel_source']} {row['phase']}"]][
                row["system"]
            ][recurrent_model(row, mixer)].append(row)
    result: Batches = {}
    for kernel, cards in grouped.items():
        result[kernel] = {
            system: [_batch(SYSTEMS[system], model, rows) for model, rows in models.items()]
            for system, models in cards.items()
        }
        if kernel == FIRST_CALLS:
            result[kernel] = {
                system: _without_first_calls(batches) for system, batches in result[kernel].items()
            }
    return result


def recurrent_model(row: Row, mixer: Mixer) -> ModelSpec:
    """A layer that has a row's shape."""
    shape = {field: int(row[column]) for field, column in GIVEN["shapes"][mixer].items()}
    return ModelSpec(
        mixer=mixer,
        num_hidden_layers=1,
        hidden_size=int(row["d_model"]),
        num_attention_heads=1,
        vocab_size=1,
        **shape,
    )


def _batch(card: str, model: ModelSpec, rows: Sequence[Row]) -> Batch:
    sequences, lengths, milliseconds = (
        np.array([float(row[key]) for row in rows])
        for key in ("batch_size", "seq_len", "latency_ms")
    )
    return Batch(gpu(card), model, sequences, lengths, 1e-3 * milliseconds)


def _without_first_calls(batches: list[Batch]) -> list[Batch]:
    first = min(batch.seconds.min() for batch in batches)
    kept = []
    for batch in batches:
        long = batch.sequences * batch.lengths * convolved_width(batch.model, 1) >= LONG_ENOUGH
        if np.any(long):
            kept.append(
                Batch(
                    batch.card,
                    batch.model,
                    *(column[long] for column in (batch[2], batch[3], batch[4] - first)),
                )
            )
    return kept


class Modules(NamedTuple):
    """Whole modules of sparse attention on one card, and the seconds of each one's parts at the
    datasheet's peaks.
    """

    seconds: Floats
    projections: Floats
    scores: Floats
    """Arithmetic of the index scores."""
    index: Floats
    """Bytes of the indexer: its cached keys while decoding, scores of prompts."""
    products: Floats
    """Arithmetic of the attention."""
    tokens: Floats
    """Tokens that attend; no seconds."""


def sparse_rows(folder: Path, phase: str) -> dict[str, Modules]:
    """Modules of sparse attention by card: `context` (of many tokens) or `generation`."""
    grouped: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in read(folder / "ops", "dsa.csv"):
        if row["phase"] == phase and (
            phase == "generation" or float(row["batch_size"]) * float(row["isl"]) >= PROMPT_TOKENS
        ):
            grouped[row["system"], row["model"], row["gemm_type"], row["num_heads"]].append(row)
    parts: dict[str, list[Modules]] = defaultdict(list)
    for (system, name, kind, heads), rows in grouped.items():
        model = dataclasses.replace(catalogue_model(name), num_attention_heads=int(heads))
        sequences, length, cached, milliseconds = (
            np.array([float(row[key]) for row in rows])
            for key in ("batch_size", "isl", "step", "latency_ms")
        )
        parts[system].append(
            sparse_modules(
                model, SYSTEMS[system], kind, sequences, length, cached, 1e-3 * milliseconds, phase
            )
        )
    return {
        system: Modules(*map(np.concatenate, zip(*each, strict=True)))
        for system, each in parts.items()
    }


def sparse_modules(
    model: ModelSpec,
    card: str,
    kind: str,
    sequences: Floats,
    length: Floats,
    cached: Floats,
    seconds: Floats,
    phase: str,
) -> Modules:
    """The parts of modules of one shape."""
    name = PRECISIONS.get(kind, "fp8")
    case = serving_case(
        model=catalogue_model("llama-3.1-8b"),
        cluster=cluster(ClusterQuery(gpu=card, num_gpus=1)),
        workload=InferenceWorkload(input_length=1, output_length=1),
        engine=engine_efficiency(engine="megatron-core", version=None),
    )
    stored, precision = weight_format(name, gpu=case.cluster.gpu)
    tokens, topk = sequences * length, float(model.index_topk or 0)
    matrices = shapes_by_source(attention_matrices(model))
    projections = matmuls_seconds(case, tokens, matrices, precision=precision, weight_bytes=stored)
    if phase == "generation":
        seen, chosen = cached + 1.0, np.minimum(cached + 1.0, topk)
        traffic = tokens * seen * mixers.INDEX_BYTES * index_width(model)
    else:
        ends = list(zip(cached + length, cached, strict=True))
        seen = np.array([visible_keys(end, cached=start) for end, start in ends])
        chosen = np.array([visible_keys(end, cached=start, most=topk) for end, start in ends])
        traffic = tokens * seen * 2.0 * SCORE_BYTES
    gpu_, bandwidth = case.cluster.gpu, case.cluster.gpu.memory_bandwidth_bytes_per_second
    return Modules(
        seconds=seconds,
        projections=projections,
        scores=tokens * seen * scans.index_flops(model) / peak_flops(gpu_, precision="fp8"),
        index=traffic / bandwidth,
        products=tokens
        * chosen
        * attention_flops(model, 1, decoding=True)
        / peak_flops(gpu_, precision="bf16"),
        tokens=tokens,
    )
