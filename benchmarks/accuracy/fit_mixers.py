"""Fit kernels of recurrent mixers and of sparse attention: `python -m benchmarks.accuracy.fit_mixers --data DIR`.

Writes `mixers` into hp_tool/catalog/data/efficiency/silicon/*.yaml from kernels timed alone (ops/gdn.csv, kda.csv, mamba2.csv)
and from whole modules of sparse attention (ops/dsa.csv), and prints how far the constants of another card are off: H100 and
H200 for each other, B200 and B300. That scatter is each kernel's `log_sd`; of a die that nobody timed it is that of the other
generation's constants.

Mamba 2's scan and update were not timed, its convolution alone: they have the gated delta rule's constants, with the scatter of
one delta rule's constants on the other. Modules of sparse attention hold projections, which `matmuls_seconds` gives; what is
left of a decoding token's overhead is not told apart, and the indexer and the attention get half of it each.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.data import Row, change_constants, command_line, read
from benchmarks.accuracy.fit_gpus import PRECISIONS, SILICON, SYSTEMS
from benchmarks.accuracy.fitting import Floats, Values, conformal_sd
from hp_tool.calibration.microbenchmarks import robust_fit, short
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import engine_efficiency, gpu_efficiency
from hp_tool.cost.matrices import attention_matrices, index_width
from hp_tool.cost.matrix import shapes_by_source
from hp_tool.cost.recurrent import convolved_width
from hp_tool.cost.roofline import peak_flops, roofline_seconds
from hp_tool.cost.serving import mixers
from hp_tool.cost.serving.operations import matmuls_seconds
from hp_tool.cost.serving.weights import attention_flops, weight_format
from hp_tool.domain.blocks import Mixer
from hp_tool.domain.efficiency import MixerRoofline
from hp_tool.domain.hardware import ClusterQuery, GpuSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.serving.problem import serving_case

NEIGHBOUR = {"h100_sxm": "h200_sxm", "h200_sxm": "h100_sxm", "b200_sxm": "b300_sxm", "b300_sxm": "b200_sxm"}
"""The nearest card to one that is left out."""
OTHER_GENERATION = {"h100": "b200", "b200": "h100", "b300": "h100"}
BORROWED = {"a100": "h100", "v100": "h100", "generic": "h100", "mi300x": "h100", "mi355x": "b200"}
"""Dies that nobody timed, and the nearest one timed. A CPU has none."""
FILES: dict[str, Mixer] = {"gdn": "gated_delta", "kda": "kimi_delta", "mamba2": "mamba2"}
KERNELS = {
    ("causal_conv1d_fn", "context"): "convolution",
    ("causal_conv1d_fn_qkv3", "context"): "convolution",
    ("causal_conv1d_update", "generation"): "convolution_update",
    ("causal_conv1d_update", "verify"): "convolution_update",
    ("chunk_gated_delta_rule_flashinfer", "context"): "scan",
    ("flashkda_fwd", "context"): "scan",
    ("fused_recurrent_gated_delta_rule_packed_decode", "generation"): "update",
    ("fused_recurrent_kda_packed_decode", "generation"): "update",
    ("fused_kda_decode", "generation"): "update",
    ("fused_recurrent_kda", "verify"): "update",
}
FIRST_CALLS = ("kimi_delta", "convolution")
"""Rows that hold a kernel's first call, 0.4 to 0.8 ms whatever the work: the shortest row of a card is taken off."""
LONG_ENOUGH = 2.0**29
"""Numbers that a convolution reads from which such rows tell something else than their first call."""
STATE_SPACE_LAUNCHES = 5.0
"""Kernels of Mamba 2's scan: steps, scores within chunks, states of chunks, their passing on, outputs."""
PROMPT_TOKENS = 8192
"""Tokens from which a module of sparse attention is not bound by the host, which launches its prompts' kernels one by one."""
Free = dict[str, tuple[float, float, float]]
UPDATE: Free = {"bandwidth_fraction": (0.8, 0.02, 1.5), "overhead_s": (4e-6, 1e-7, 1e-4)}
WINDOW: Free = {"peak_fraction": (4e-3, 1e-4, 0.1), "overhead_s": (3e-6, 1e-7, 1e-4)}
CONVOLUTION: Free = {
    "peak_fraction": (4e-3, 1e-4, 0.1), "overhead_s": (3e-6, 1e-7, 1e-4), "prompt_rows": (100.0, 1.0, 4000.0),
    "sharpness": (3.0, 1.0, 6.0),
}  # fmt: skip
SCAN: Free = {
    "peak_fraction": (0.3, 0.01, 1.2), "overhead_s": (1e-5, 1e-7, 1e-4), "prompt_rows": (100.0, 1.0, 2000.0),
    "sharpness": (2.0, 1.0, 6.0), "step_s": (5e-8, 1e-9, 1e-6),
}  # fmt: skip
TOKEN = (1e-8, 1e-10, 1e-7)
FREE = {"update": UPDATE, "convolution_update": WINDOW, "convolution": CONVOLUTION, "scan": SCAN}
SPARSE: Free = {
    "index_peak": (0.4, 0.02, 1.0), "index_scores": (0.5, 0.02, 1.0), "index_keys": (0.7, 0.05, 1.0),
    "peak": (0.6, 0.05, 1.0), "token_s": (5e-7, 1e-9, 1e-5), "decode_token_s": (1e-6, 1e-9, 1e-5), "overhead_s": (1e-4, 1e-6, 1e-3),
}  # fmt: skip
"""Shares of the arithmetic and of the bandwidth, the indexer's and the attention's, and the overhead of both."""


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
    for name, mixer in FILES.items():
        for row in read(folder / "ops", f"{name}.csv"):
            grouped[mixer, KERNELS[row["kernel_source"], row["phase"]]][row["system"]][recurrent_model(row, mixer)].append(row)
    result: Batches = {}
    for kernel, cards in grouped.items():
        result[kernel] = {
            system: [_batch(SYSTEMS[system], model, rows) for model, rows in models.items()] for system, models in cards.items()
        }
        if kernel == FIRST_CALLS:
            result[kernel] = {system: _without_first_calls(batches) for system, batches in result[kernel].items()}
    return result


def recurrent_model(row: Row, mixer: Mixer) -> ModelSpec:
    """A layer that has a row's shape."""
    common = {"num_hidden_layers": 1, "hidden_size": int(row["d_model"]), "num_attention_heads": 1, "vocab_size": 1}
    if mixer == "mamba2":
        names = {"mamba_num_heads": "nheads", "mamba_head_dim": "head_dim", "ssm_state_size": "d_state",
                 "mamba_n_groups": "n_groups", "mamba_conv_kernel": "d_conv"}  # fmt: skip
    else:
        names = {"linear_num_key_heads": "num_k_heads", "linear_num_value_heads": "num_v_heads",
                 "linear_key_head_dim": "head_k_dim", "linear_value_head_dim": "head_v_dim",
                 "linear_conv_kernel_dim": "d_conv"}  # fmt: skip
    return ModelSpec(mixer=mixer, **common, **{field: int(row[column]) for field, column in names.items()})  # type: ignore[arg-type]


def _batch(card: str, model: ModelSpec, rows: Sequence[Row]) -> Batch:
    sequences, lengths, milliseconds = (
        np.array([float(row[key]) for row in rows]) for key in ("batch_size", "seq_len", "latency_ms")
    )
    return Batch(gpu(card), model, sequences, lengths, 1e-3 * milliseconds)


def _without_first_calls(batches: list[Batch]) -> list[Batch]:
    first = min(batch.seconds.min() for batch in batches)
    kept = []
    for batch in batches:
        long = batch.sequences * batch.lengths * convolved_width(batch.model, 1) >= LONG_ENOUGH
        if np.any(long):
            kept.append(Batch(batch.card, batch.model, *(column[long] for column in (batch[2], batch[3], batch[4] - first))))
    return kept


def predicted(kernel: str, roof: MixerRoofline, batch: Batch) -> Floats:
    """Seconds of a recurrent mixer's kernel for each row."""
    card, model, sequences, lengths, _ = batch
    peak = peak_flops(card, precision="bf16")
    if kernel in ("convolution", "scan"):
        work = mixers.convolution_work(model, 1) if kernel == "convolution" else mixers.scan_work(model, 1)
        return np.asarray(
            mixers.chunked_seconds(roof, work, tokens=sequences * lengths, prompts=sequences, gpu=card, peak=peak)
        )
    drafted = lengths.astype(np.int64) - 1
    window = mixers.window_work(model, 1, drafted)
    work = window if kernel == "convolution_update" else mixers.Work(0.0, mixers.state_traffic(model, 1, drafted))
    return np.asarray(roofline_seconds(sequences * work.flops, sequences * work.traffic, roof, gpu=card, peak=peak))


def log_ratios(kernel: str, roof: MixerRoofline, batches: Sequence[Batch]) -> Floats:
    """Logarithms of predicted over measured seconds."""
    return np.concatenate([np.log(predicted(kernel, roof, batch) / batch.seconds) for batch in batches])


def fit_kernel(kernel: str, batches: Sequence[Batch], **fixed: float) -> MixerRoofline:
    """Constants of one recurrent kernel on one die; `fixed` ones are not fitted.

    Updates are bound by memory; the others nowhere here, so the share of it that elementwise kernels reach is their bound.
    """
    free = {name: bounds for name, bounds in FREE[kernel].items() if name not in fixed}
    if "overhead_s" in fixed:
        free["token_s"] = TOKEN
    start = dataclasses.replace(MixerRoofline(peak_fraction=1.0, bandwidth_fraction=math.inf, overhead_s=0.0), **fixed)
    roof = dataclasses.replace(
        start, **solve(lambda values: log_ratios(kernel, dataclasses.replace(start, **values), batches), free)
    )
    if math.isinf(roof.bandwidth_fraction):
        return dataclasses.replace(roof, bandwidth_fraction=gpu_efficiency(batches[0].card).memory_fraction)
    return roof


def solve(residuals: Callable[[Values], Floats], free: Free) -> Values:
    """Return the free constants, of four digits, that make log ratios least; the search steps in their logarithms."""
    start, low, high = (np.array(column) for column in zip(*free.values(), strict=True))

    def named(x: Floats) -> Values:
        return dict(zip(free, map(float, start * np.exp(x - 1.0)), strict=True))

    ones, bounds = [1.0] * len(free), [list(1.0 + np.log(bound / start)) for bound in (low, high)]
    return {name: short(value) for name, value in named(robust_fit(lambda x: residuals(named(x)), ones, *bounds)).items()}


class Modules(NamedTuple):
    """Whole modules of sparse attention on one card, and the seconds of each one's parts at the datasheet's peaks."""

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
        if row["phase"] == phase and (phase == "generation" or float(row["batch_size"]) * float(row["isl"]) >= PROMPT_TOKENS):
            grouped[row["system"], row["model"], row["gemm_type"], row["num_heads"]].append(row)
    parts: dict[str, list[Modules]] = defaultdict(list)
    for (system, name, kind, heads), rows in grouped.items():
        model = dataclasses.replace(catalogue_model(name), num_attention_heads=int(heads))
        sequences, length, cached, milliseconds = (
            np.array([float(row[key]) for row in rows]) for key in ("batch_size", "isl", "step", "latency_ms")
        )
        parts[system].append(
            sparse_modules(model, SYSTEMS[system], kind, sequences, length, cached, 1e-3 * milliseconds, phase)
        )
    return {system: Modules(*map(np.concatenate, zip(*each, strict=True))) for system, each in parts.items()}


def sparse_modules(
    model: ModelSpec, card: str, kind: str, sequences: Floats, length: Floats, cached: Floats, seconds: Floats, phase: str
) -> Modules:
    """The parts of modules of one shape."""
    name = PRECISIONS.get(kind, "fp8")
    case = serving_case(
        model=catalogue_model("llama-3.1-8b"), cluster=cluster(ClusterQuery(gpu=card, num_gpus=1)),
        workload=InferenceWorkload(input_length=1, output_length=1),
        engine=engine_efficiency(engine="megatron-core", version=None),
    )  # fmt: skip
    stored, precision = weight_format(name, gpu=case.cluster.gpu)
    tokens, topk = sequences * length, float(model.index_topk or 0)
    matrices = shapes_by_source(attention_matrices(model))
    projections = matmuls_seconds(case, tokens, matrices, precision=precision, weight_bytes=stored)
    if phase == "generation":
        seen, chosen = cached + 1.0, np.minimum(cached + 1.0, topk)
        traffic = tokens * seen * mixers.INDEX_BYTES * index_width(model)
    else:
        ends = list(zip(cached + length, cached, strict=True))
        seen = np.array([mixers.visible_keys(end, cached=start) for end, start in ends])
        chosen = np.array([mixers.visible_keys(end, cached=start, most=topk) for end, start in ends])
        traffic = tokens * seen * 2.0 * mixers.SCORE_BYTES
    gpu_, bandwidth = case.cluster.gpu, case.cluster.gpu.memory_bandwidth_bytes_per_second
    return Modules(
        seconds=seconds,
        projections=projections,
        scores=tokens * seen * mixers.index_flops(model) / peak_flops(gpu_, precision="fp8"),
        index=traffic / bandwidth,
        products=tokens * chosen * attention_flops(model, 1, decoding=True) / peak_flops(gpu_, precision="bf16"),
        tokens=tokens,
    )


Kernels = dict[str, MixerRoofline]
Sparse = dict[str, Modules]
"""By phase."""


def sparse_kernels(values: Values) -> Kernels:
    """The fitted constants as kernels'."""
    half = 0.5 * values["overhead_s"]

    def roof(peak: str, bandwidth: float = 1.0, token_s: float = 0.0) -> MixerRoofline:
        return MixerRoofline(peak_fraction=values[peak], bandwidth_fraction=bandwidth, overhead_s=half, token_s=token_s)

    return {
        "index": roof("index_peak", values["index_scores"]),
        "index_decode": roof("index_peak", values["index_keys"]),
        "attention": roof("peak", token_s=values["token_s"]),
        "attention_decode": roof("peak", token_s=values["decode_token_s"]),
    }


def sparse_log_ratios(kernels: Kernels, phase: str, rows: Modules) -> Floats:
    """Logarithms of predicted over measured seconds of whole modules, projections included."""
    decoding = phase == "generation"
    index, attention = (kernels[f"{name}_decode" if decoding else name] for name in ("index", "attention"))
    arithmetic, moved = rows.scores / index.peak_fraction, rows.index / index.bandwidth_fraction
    seconds = rows.projections + index.overhead_s + (np.maximum(arithmetic, moved) if decoding else arithmetic + moved)
    seconds = seconds + attention.overhead_s + rows.products / attention.peak_fraction + rows.tokens * attention.token_s
    return np.asarray(np.log(seconds / rows.seconds))


def fit_sparse(cards: Sequence[Sparse]) -> Kernels:
    """Constants of sparse attention on one die, from both phases together."""

    def residuals(values: Values) -> Floats:
        kernels = sparse_kernels(values)
        return np.concatenate([sparse_log_ratios(kernels, phase, rows) for card in cards for phase, rows in card.items()])

    return sparse_kernels(solve(residuals, SPARSE))


def report(mixer: str, kernel: str, what: str, own: Floats, left_out: Floats) -> None:
    """Print errors of the constants' own rows, and of those of the card that was left out."""
    off, unseen = np.abs(np.expm1(own)), np.abs(np.expm1(left_out))
    print(
        f"{mixer:12} {kernel:19} {what:5} {len(off):4} rows: median error {np.median(off):6.1%}; "
        f"left out {np.median(unseen):6.1%}, nine tenths within {np.quantile(unseen, 0.9):6.1%}"
    )


def dies() -> dict[str, list[str]]:
    """Cards that were timed, by die."""
    cards: dict[str, list[str]] = defaultdict(list)
    for system in NEIGHBOUR:
        cards[str(gpu(SYSTEMS[system]).silicon)].append(system)
    return dict(cards)


Logs = Callable[[Kernels, str], Floats]
"""Log ratios of a card's rows by constants: of one kernel, or of modules of sparse attention in a phase."""


def fitted_kernels(folder: Path) -> tuple[dict[str, dict[str, Kernels]], dict[str, Floats]]:
    """(constants by die, mixer and kernel, each with its left-out scatter; scatter of the other generation's by "mixer kernel")."""
    result: dict[str, dict[str, Kernels]] = {die: defaultdict(dict) for die in dies()}
    other: dict[str, Floats] = {}
    for (mixer, kernel), cards in recurrent_rows(folder).items():
        fits = {die: fit_kernel(kernel, [b for s in systems for b in cards[s]], **_fixed(result[die], mixer, kernel))
                for die, systems in dies().items()}  # fmt: skip
        alone = {
            s: fit_kernel(kernel, cards[s], **_fixed(result[die], mixer, kernel)) for die, ss in dies().items() for s in ss
        }
        for die, systems in dies().items():
            unseen = [log_ratios(kernel, alone[NEIGHBOUR[s]], cards[s]) for s in systems]
            for system, logs in zip(systems, unseen, strict=True):
                report(mixer, kernel, system[:4], log_ratios(kernel, fits[die], cards[system]), logs)
            result[die][mixer][kernel] = dataclasses.replace(fits[die], log_sd=short(conformal_sd(np.concatenate(unseen))))
        other[f"{mixer} {kernel}"] = np.concatenate(
            [log_ratios(kernel, fits[OTHER_GENERATION[die]], cards[s]) for die, systems in dies().items() for s in systems]
        )
    _borrow_scan(folder, result, other)
    _add_sparse(folder, result, other)
    return result, other


def _fixed(known: dict[str, Kernels], mixer: str, kernel: str) -> Values:
    """A delta rule's three convolutions launch as three of the one that was timed without first calls."""
    return {"overhead_s": short(3.0 * known["gated_delta"]["convolution"].overhead_s)} if (mixer, kernel) == FIRST_CALLS else {}


def _borrow_scan(folder: Path, result: dict[str, dict[str, Kernels]], other: dict[str, Floats]) -> None:
    """Give Mamba 2 the gated delta rule's update, and its scan in parallel over chunks, with one delta rule's scatter by the
    other's constants.
    """
    rows, rules = recurrent_rows(folder), ("gated_delta", "kimi_delta")
    for kernel in ("update", "scan"):
        logs = np.concatenate([
            log_ratios(kernel, result[die][theirs][kernel], rows[mine, kernel][s])
            for die, systems in dies().items() for s in systems for mine, theirs in (rules, rules[::-1])
        ])  # fmt: skip
        print(f"{'mamba2':12} {kernel:19} not timed: one delta rule's constants are {np.median(np.abs(np.expm1(logs))):.1%} off "
              "the other's (median)")  # fmt: skip
        other[f"mamba2 {kernel}"] = logs
        for die in result:
            known = result[die]["gated_delta"][kernel]
            if kernel == "scan":
                launches = short(STATE_SPACE_LAUNCHES * gpu_efficiency(gpu(SYSTEMS[dies()[die][0]])).kernel_overhead_s)
                known = dataclasses.replace(known, step_s=0.0, overhead_s=launches)
            result[die]["mamba2"][kernel] = dataclasses.replace(known, log_sd=short(conformal_sd(logs)))


def _add_sparse(folder: Path, result: dict[str, dict[str, Kernels]], other: dict[str, Floats]) -> None:
    phases = {"context": "", "generation": "_decode"}
    rows = {phase: sparse_rows(folder, phase) for phase in phases}
    cards: dict[str, Sparse] = {system: {phase: rows[phase][system] for phase in phases} for system in NEIGHBOUR}
    fits = {die: fit_sparse([cards[s] for s in systems]) for die, systems in dies().items()}
    alone = {system: fit_sparse([card]) for system, card in cards.items()}
    for phase, suffix in phases.items():
        for die, systems in dies().items():
            unseen = [sparse_log_ratios(alone[NEIGHBOUR[s]], phase, cards[s][phase]) for s in systems]
            for system, logs in zip(systems, unseen, strict=True):
                report(
                    "sparse", f"module, {phase}", system[:4], sparse_log_ratios(fits[die], phase, cards[system][phase]), logs
                )
            log_sd = short(conformal_sd(np.concatenate(unseen)))
            for name in (f"index{suffix}", f"attention{suffix}"):
                result[die]["sparse"][name] = dataclasses.replace(fits[die][name], log_sd=log_sd)
        logs = np.concatenate([sparse_log_ratios(fits[OTHER_GENERATION[die]], phase, cards[s][phase])
                               for die, systems in dies().items() for s in systems])  # fmt: skip
        other |= {f"sparse index{suffix}": logs, f"sparse attention{suffix}": logs}


def main(folder: Path) -> None:
    fits, other = fitted_kernels(folder)
    for name, die in {**dict.fromkeys(fits), **BORROWED}.items():
        kernels = {
            mixer: {key: dataclasses.asdict(roof) for key, roof in each.items()} for mixer, each in fits[die or name].items()
        }
        if die is not None:
            for mixer, each in kernels.items():
                for key, roof in each.items():
                    roof["log_sd"] = short(conformal_sd(other[f"{mixer} {key}"]))
        change_constants(SILICON / f"{name}.yaml", {"mixers": kernels})
    for name, logs in other.items():
        print(f"{name}: the other generation's constants are {np.median(np.abs(np.expm1(logs))):.1%} off (median)")


if __name__ == "__main__":
    command_line(__doc__, main)
