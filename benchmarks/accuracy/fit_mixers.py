"""Fit kernels of recurrent mixers and of sparse attention: `python -m evidence.fit --only
mixers`.

Writes `mixers` into hp_tool/catalog/data/efficiency/silicon/*.yaml, fitted to isolated kernels
(ops/gdn.csv, kda.csv, mamba2.csv) and to complete modules of sparse attention (ops/dsa.csv). Prints
the error of each card's constants on another card of its generation: H100 and H200, B200 and B300.
That scatter is the kernel's `log_sd`. For a die that was not timed, `log_sd` is the error of the
other generation's constants.

Mamba 2's scan and update were not timed, only its convolution. They use the constants of the gated
delta rule, with the scatter of one delta rule's constants on the other. Modules of sparse attention
include projections, which `matmuls_seconds` predicts, and were timed outside an engine. Their fixed
time (`module_s`) is fitted but not stored: see sparse_kernels in fits.yaml.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fit_gpus import PRECISIONS, SYSTEMS
from benchmarks.accuracy.fitting import Floats, Values, conformal_sd, fit_settings, rounded
from benchmarks.accuracy.tables import table
from benchmarks.accuracy.timed_kernels import Free, solve
from evidence.fitted_file import FittedFile
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import engine_efficiency, gpu_efficiency
from hp_tool.cost import scans
from hp_tool.cost.matrices import attention_flops, attention_matrices, index_width
from hp_tool.cost.matrix import shapes_by_source
from hp_tool.cost.recurrent import convolved_width
from hp_tool.cost.roofline import peak_flops, roofline_seconds
from hp_tool.cost.serving import mixers
from hp_tool.cost.serving.operations import matmuls_seconds, visible_keys
from hp_tool.cost.serving.weights import weight_format
from hp_tool.cost.sparse_attention import SCORE_BYTES
from hp_tool.domain.blocks import Mixer
from hp_tool.domain.efficiency import MixerRoofline
from hp_tool.domain.hardware import ClusterQuery, GpuSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.loop.calibration.microbenchmarks import round_timing
from hp_tool.questions.serving.problem import serving_case

GIVEN = fit_settings("mixers")
FIRST_CALLS = ("kimi_delta", "convolution")
"""Rows that include the first call of a kernel, which adds 0.4 to 0.8 ms for any size. The shortest
time of each card is subtracted from them.
"""
LONG_ENOUGH = 2.0**29
"""Minimum number of elements of a convolution for such rows to measure more than their first
call.
"""
PROMPT_TOKENS = 8192
"""Minimum number of tokens of a prompt for a module of sparse attention not to be limited by its
host, which launches the kernels of prompts one by one.
"""


class Batch(NamedTuple):
    """Rows of one kernel of one mixer on one GPU."""

    card: GpuSpec
    model: ModelSpec
    sequences: Floats
    lengths: Floats
    seconds: Floats


Batches = dict[tuple[str, str], dict[str, list[Batch]]]
"""Batches by mixer and kernel, and by GPU."""


def recurrent_rows(folder: Path) -> Batches:
    """Return the timed kernels of recurrent mixers."""
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
    """Return a model with one layer of the shape of a row."""
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
    """Complete modules of sparse attention on one GPU, and the seconds of each part of a module at
    the datasheet's peaks.
    """

    seconds: Floats
    projections: Floats
    scores: Floats
    """Seconds of the index scores' arithmetic."""
    index: Floats
    """Seconds of the indexer's memory traffic: cached keys in decoding, scores in prompts."""
    products: Floats
    """Seconds of the attention's arithmetic."""
    tokens: Floats
    """Number of tokens that attend."""


def sparse_rows(folder: Path, phase: str) -> dict[str, Modules]:
    """Return modules of sparse attention by GPU: `context` (prompts of many tokens) or
    `generation`.
    """
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
    """Return the parts of the modules in these rows."""
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


NEIGHBOUR = GIVEN["neighbours"]


def solve_rounded(residuals: Callable[[Values], Floats], free: Free) -> Values:
    """Return the fitted constants, with four digits."""
    return rounded(solve(residuals, free, in_logarithms=True))


def predict_seconds(kernel: str, roof: MixerRoofline, batch: Batch) -> Floats:
    """Return the seconds of a recurrent mixer's kernel for each row."""
    card, model, sequences, lengths, _ = batch
    peak = peak_flops(card, precision="bf16")
    if kernel in ("convolution", "scan"):
        work = (
            scans.convolution_work(model, 1)
            if kernel == "convolution"
            else scans.scan_work(model, 1)
        )
        return np.asarray(
            scans.chunked_seconds(
                roof, work, tokens=sequences * lengths, prompts=sequences, gpu=card, peak=peak
            )
        )
    drafted = lengths.astype(np.int64) - 1
    window = mixers.window_work(model, 1, drafted)
    work = (
        window
        if kernel == "convolution_update"
        else scans.Work(0.0, mixers.state_traffic(model, 1, drafted))
    )
    return np.asarray(
        roofline_seconds(
            sequences * work.flops, sequences * work.traffic, roof, gpu=card, peak=peak
        )
    )


def log_ratios(kernel: str, roof: MixerRoofline, batches: Sequence[Batch]) -> Floats:
    """Return log(predicted / measured) seconds."""
    return np.concatenate(
        [np.log(predict_seconds(kernel, roof, batch) / batch.seconds) for batch in batches]
    )


def fit_kernel(kernel: str, batches: Sequence[Batch], **fixed: float) -> MixerRoofline:
    """Return the constants of one recurrent kernel on one die; `fixed` constants are not
    fitted.

    Memory bandwidth limits the updates. It limits no row of the other kernels, so they get the
    fraction of bandwidth that elementwise kernels reach.
    """
    free = {name: bounds for name, bounds in GIVEN["free"][kernel].items() if name not in fixed}
    if "overhead_s" in fixed:
        free["token_s"] = GIVEN["token_s"]
    start = dataclasses.replace(
        MixerRoofline(peak_fraction=1.0, bandwidth_fraction=math.inf, overhead_s=0.0), **fixed
    )
    roof = dataclasses.replace(
        start,
        **solve_rounded(
            lambda values: log_ratios(kernel, dataclasses.replace(start, **values), batches), free
        ),
    )
    if math.isinf(roof.bandwidth_fraction):
        return dataclasses.replace(
            roof, bandwidth_fraction=gpu_efficiency(batches[0].card).memory_fraction
        )
    return roof


Kernels = dict[str, MixerRoofline]
Sparse = dict[str, Modules]
"""Constants of sparse attention by phase."""


def sparse_kernels(values: Values) -> Kernels:
    """Return the fitted constants by kernel. The indexer and the attention each get half of a
    module's fixed time.
    """
    half = 0.5 * values["module_s"]

    def roof(peak: str, bandwidth: float = 1.0, token_s: float = 0.0) -> MixerRoofline:
        return MixerRoofline(
            peak_fraction=values[peak],
            bandwidth_fraction=bandwidth,
            overhead_s=half,
            token_s=token_s,
        )

    return {
        "index": roof("index_peak", values["index_scores"]),
        "index_decode": roof("index_peak", values["index_keys"]),
        "attention": roof("peak", token_s=values["token_s"]),
        "attention_decode": roof("peak", token_s=values["decode_token_s"]),
    }


def sparse_log_ratios(kernels: Kernels, phase: str, rows: Modules) -> Floats:
    """Return log(predicted / measured) seconds of complete modules, including projections."""
    decoding = phase == "generation"
    index, attention = (
        kernels[f"{name}_decode" if decoding else name] for name in ("index", "attention")
    )
    arithmetic, moved = rows.scores / index.peak_fraction, rows.index / index.bandwidth_fraction
    seconds = (
        rows.projections
        + index.overhead_s
        + (np.maximum(arithmetic, moved) if decoding else arithmetic + moved)
    )
    seconds = (
        seconds
        + attention.overhead_s
        + rows.products / attention.peak_fraction
        + rows.tokens * attention.token_s
    )
    return np.asarray(np.log(seconds / rows.seconds))


def fit_sparse(cards: Sequence[Sparse]) -> Kernels:
    """Fit the constants of sparse attention on one die to the rows of both phases."""

    def residuals(values: Values) -> Floats:
        kernels = sparse_kernels(values)
        return np.concatenate(
            [
                sparse_log_ratios(kernels, phase, rows)
                for card in cards
                for phase, rows in card.items()
            ]
        )

    return sparse_kernels(solve_rounded(residuals, GIVEN["sparse"]))


class Error(NamedTuple):
    """Errors on the rows of one GPU: the median error of the die's constants, and the median error
    of constants fitted to the nearest other GPU.
    """

    mixer: str
    kernel: str
    system: str
    rows: int
    own: float
    left_out: float
    nine_tenths: float
    """Error that 90% of the rows do not exceed with constants fitted to the nearest other GPU."""


@dataclasses.dataclass
class Fitted:
    """Constants of all dies, and their errors."""

    kernels: dict[str, dict[str, Kernels]]
    """By die and mixer."""
    elsewhere: dict[tuple[str, str], Floats]
    """Log ratios of rows predicted by the constants of the other generation, by mixer and
    kernel.
    """
    errors: list[Error]

    def judge(
        self,
        mixer: str,
        title: str,
        names: Sequence[str],
        fits: Mapping[str, Kernels],
        alone: Mapping[str, Kernels],
        logs: Callable[[Kernels, str], Floats],
    ) -> None:
        """Store the kernels `names` of the dies' `fits`, with their scatter on cards that they were
        not fitted to.

        alone: constants fitted to each card separately; logs: function that returns the log ratios
        of a card's rows for given constants.
        """
        elsewhere = []
        for die, systems in timed_dies().items():
            unseen = {system: logs(alone[NEIGHBOUR[system]], system) for system in systems}
            for system, ratios in unseen.items():
                own, off = (np.abs(np.expm1(each)) for each in (logs(fits[die], system), ratios))
                middle = float(np.median(own)), float(np.median(off))
                self.errors.append(
                    Error(mixer, title, system, len(off), *middle, float(np.quantile(off, 0.9)))
                )
                other = GIVEN["other_generation"][die]
                borrowed = {
                    name: scale_constants(roof, timed_dies()[other][0], SYSTEMS[system])
                    for name, roof in fits[other].items()
                }
                elsewhere.append(logs(borrowed, system))
            log_sd = round_timing(conformal_sd(np.concatenate(list(unseen.values()))))
            self.kernels[die][mixer] |= {
                name: dataclasses.replace(fits[die][name], log_sd=log_sd) for name in names
            }
        self.elsewhere |= {(mixer, name): np.concatenate(elsewhere) for name in names}


def scale_constants(roof: MixerRoofline, system: str, card: str) -> MixerRoofline:
    """Return the constants of one card for another. Constants that are not fractions of a datasheet
    value scale with the ratio of the cards' arithmetic peaks.
    """
    theirs, own = (
        peak_flops(each, precision=scans.wide_precision(each))
        for each in (gpu(SYSTEMS[system]), gpu(card))
    )
    return dataclasses.replace(roof, token_s=round_timing(roof.token_s * theirs / own))


def timed_dies() -> dict[str, list[str]]:
    """Return the timed cards by die."""
    cards: dict[str, list[str]] = defaultdict(list)
    for system in NEIGHBOUR:
        cards[str(gpu(SYSTEMS[system]).silicon)].append(system)
    return dict(cards)


def fit_all(folder: Path) -> Fitted:
    """Return the constants of every kernel on every timed die."""
    fitted = Fitted({die: defaultdict(dict) for die in timed_dies()}, {}, [])
    rows = recurrent_rows(folder)
    for (mixer, kernel), cards in rows.items():
        fits, alone = {}, {}
        for die, systems in timed_dies().items():
            fixed = _fixed(fitted.kernels[die], mixer, kernel)
            fits[die] = {
                kernel: fit_kernel(
                    kernel, [batch for system in systems for batch in cards[system]], **fixed
                )
            }
            alone |= {
                system: {kernel: fit_kernel(kernel, cards[system], **fixed)} for system in systems
            }
        ratios = functools.partial(_kernel_logs, kernel, cards)
        fitted.judge(mixer, kernel, (kernel,), fits, alone, ratios)
    _borrow_for_mamba(rows, fitted)
    _fit_sparse(folder, fitted)
    return fitted


def _kernel_logs(
    kernel: str, cards: Mapping[str, Sequence[Batch]], kernels: Kernels, system: str
) -> Floats:
    return log_ratios(kernel, kernels[kernel], cards[system])


def _fixed(known: dict[str, Kernels], mixer: str, kernel: str) -> Values:
    """Return the fixed constants of a kernel. A delta rule has three convolutions, so its launch
    time is three times that of the convolution that was timed without first calls.
    """
    return (
        {"overhead_s": round_timing(3.0 * known["gated_delta"]["convolution"].overhead_s)}
        if (mixer, kernel) == FIRST_CALLS
        else {}
    )


def _borrow_for_mamba(rows: Batches, fitted: Fitted) -> None:
    """Give Mamba 2 the gated delta rule's update and its scan with all chunks at once, with the
    scatter of one delta rule's constants on the other.
    """
    rules = ("gated_delta", "kimi_delta")
    for kernel in ("update", "scan"):
        logs = np.concatenate(
            [
                log_ratios(kernel, fitted.kernels[die][theirs][kernel], rows[mine, kernel][system])
                for die, systems in timed_dies().items()
                for system in systems
                for mine, theirs in (rules, rules[::-1])
            ]
        )
        fitted.elsewhere["mamba2", kernel] = logs
        for die, systems in timed_dies().items():
            known = fitted.kernels[die]["gated_delta"][kernel]
            if kernel == "scan":
                launches = round_timing(
                    GIVEN["state_space_launches"]
                    * gpu_efficiency(gpu(SYSTEMS[systems[0]])).kernel_overhead_s
                )
                known = dataclasses.replace(known, step_s=0.0, overhead_s=launches)
            fitted.kernels[die]["mamba2"][kernel] = dataclasses.replace(
                known, log_sd=round_timing(conformal_sd(logs))
            )


def _fit_sparse(folder: Path, fitted: Fitted) -> None:
    rows = {phase: sparse_rows(folder, phase) for phase in ("context", "generation")}
    cards: dict[str, Sparse] = {
        system: {phase: each[system] for phase, each in rows.items()} for system in NEIGHBOUR
    }
    fits = {
        die: fit_sparse([cards[system] for system in systems])
        for die, systems in timed_dies().items()
    }
    alone = {system: fit_sparse([card]) for system, card in cards.items()}
    for phase, names in (
        ("context", ("index", "attention")),
        ("generation", ("index_decode", "attention_decode")),
    ):

        def ratios(kernels: Kernels, system: str, phase: str = phase) -> Floats:
            return sparse_log_ratios(kernels, phase, cards[system][phase])

        fitted.judge("sparse", f"module, {phase}", names, fits, alone, ratios)
    for die, systems in timed_dies().items():
        fitted.kernels[die]["sparse"] = {
            name: dataclasses.replace(roof, overhead_s=sparse_overhead(name, SYSTEMS[systems[0]]))
            for name, roof in fitted.kernels[die]["sparse"].items()
        }


def sparse_overhead(name: str, card: str) -> float:
    """Return the fixed seconds of the indexer's or the attention's kernels if an engine replays
    them on a card from a CUDA graph.
    """
    return round_timing(
        GIVEN["sparse_kernels"][name.removesuffix("_decode")]
        * gpu_efficiency(gpu(card)).kernel_overhead_s
    )


def borrow_constants(fitted: Fitted, die: str, card: str | None) -> dict[str, Kernels]:
    """Return the constants of another die for a card whose die was not timed; None for the
    constants of a typical die.
    """
    system = timed_dies()[die][0]
    return {
        mixer: {
            name: dataclasses.replace(
                roof if card is None else scale_constants(roof, system, card),
                log_sd=round_timing(conformal_sd(fitted.elsewhere[mixer, name])),
            )
            for name, roof in kernels.items()
        }
        for mixer, kernels in fitted.kernels[die].items()
    }


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield the constants of recurrent mixers and sparse attention by die, and print their
    errors.
    """
    found = fit_all(folder)
    elsewhere = [
        {"mixer": mixer, "kernel": kernel, "elsewhere": float(np.median(np.abs(np.expm1(logs))))}
        for (mixer, kernel), logs in found.elsewhere.items()
    ]
    errors = [error._asdict() for error in found.errors]
    print("Median errors by a card's own constants, and by others'", *table(errors), sep="\n")
    print("Median errors by constants of another die", *table(elsewhere), sep="\n")
    others = {
        name: borrow_constants(found, die, card) for name, (die, card) in GIVEN["borrowed"].items()
    }
    for name, kernels in (found.kernels | others).items():
        fields = {
            mixer: {key: dataclasses.asdict(roof) for key, roof in each.items()}
            for mixer, each in kernels.items()
        }
        yield FittedFile(file=f"silicon/{name}.yaml", fields={"mixers": fields}, keeps=None)
