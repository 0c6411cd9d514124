"""Checks that the figures of a row are consistent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]
SLACK = 0.015
"""Relative difference allowed in addition to the rounding of printed figures; for example, a run of
99 steps may be timed as 100.
"""
PHASE_SLACK = 1.02
"""Factor by which the sum of the phases may exceed the step, because phases are timed
separately.
"""
TOKENS_IN_FLIGHT_SLACK = 1.25
"""Factor by which a published median latency may exceed the mean latency derived from the
throughput.
"""


def find_contradictions(row: Row, kind: str) -> list[str]:
    """Return the reasons why the figures of a row contradict each other."""
    return [reason for check in CHECKS.get(kind, ()) for reason in check(row)]


def _layout(row: Row) -> Iterator[str]:
    gpus, dp = row["num_gpus"], row.get("data_parallel_size")
    sizes = [row.get(f"{name}_parallel_size") or 1 for name in ("tensor", "pipeline", "context")]
    ranks = math.prod(sizes)
    if gpus is None:
        return
    if dp is not None and ranks * dp != gpus:
        yield f"TP x PP x CP x DP is {ranks * dp}, not num_gpus {gpus}"
    elif gpus % ranks:
        yield f"TP x PP x CP is {ranks}, which does not divide num_gpus {gpus}"
    else:
        yield from _batch(row, gpus // ranks)


def _batch(row: Row, replicas: int) -> Iterator[str]:
    batch, micro, count = (
        row.get(name) for name in ("global_batch_size", "micro_batch_size", "num_microbatches")
    )
    if batch is None or micro is None:
        return
    if count is not None and micro * count * replicas != batch:
        yield (
            f"micro_batch_size x num_microbatches x DP is {micro * count * replicas}, not "
            f"global_batch_size {batch}"
        )
    elif batch % (micro * replicas):
        product = f"micro_batch_size x DP {micro * replicas}"
        yield f"global_batch_size {batch} is no multiple of {product}"


def _chunks(row: Row) -> Iterator[str]:
    chunks, stages = row["virtual_pipeline_parallel_size"], row["pipeline_parallel_size"]
    if (chunks or 1) > 1 and stages == 1:
        yield f"{chunks} model chunks per rank without pipeline stages"


def _nodes(row: Row) -> Iterator[str]:
    gpus, per_node = row["num_gpus"], row["gpus_per_node"]
    if gpus and per_node and gpus > per_node and gpus % per_node:
        yield f"num_gpus {gpus} is no multiple of gpus_per_node {per_node}"


def _speed(row: Row) -> Iterator[str]:
    """Check that speeds, step time and tokens per step agree within rounding."""
    gpus, step = row["num_gpus"], row["step_s"]
    total, per_gpu = row["tokens_per_second"], row["tokens_per_second_per_gpu"]
    if total and per_gpu and gpus and not _agree(total, per_gpu * gpus, total, per_gpu):
        yield f"tokens_per_second {total:g} is not {gpus} x {per_gpu:g}"
    batch, length = row["global_batch_size"], row["sequence_length"]
    if not (step and batch and length):
        return
    for rate in (total, per_gpu * gpus if per_gpu and gpus else None):
        if rate and not _agree(rate * step, batch * length, step, rate):
            yield (
                f"{rate:g} tokens/s x {step:g} s is {rate * step:.6g} tokens, not "
                f"{batch} x {length}"
            )


def _utilization(row: Row) -> Iterator[str]:
    for name in ("mfu", "hfu"):
        if row[name] is not None and row[name] > 1.0:
            yield f"{name} {row[name]:g} is above 1"
    if row["mfu"] and row["hfu"] and row["mfu"] > row["hfu"] * (1.0 + SLACK):
        yield f"mfu {row['mfu']:g} is above hfu {row['hfu']:g}"


def _ordered(*names: str) -> Callable[[Row], Iterator[str]]:
    """Return a function that checks that the values of these columns do not decrease from left to
    right.
    """

    def check(row: Row) -> Iterator[str]:
        given = [(name, row[name]) for name in names if row[name] is not None]
        for (low, least), (high, most) in pairwise(given):
            if least > most * (1.0 + 1e-9):
                yield f"{low} {least:g} is above {high} {most:g}"

    return check


def _serving_rates(row: Row) -> Iterator[str]:
    gpus = row["num_gpus"]
    total, per_gpu = row["output_tokens_per_second"], row["output_tokens_per_second_per_gpu"]
    if total and per_gpu and gpus and not _agree(total, per_gpu * gpus, total, per_gpu):
        yield f"output_tokens_per_second {total:g} is not {gpus} x {per_gpu:g}"
    in_flight, tpot = row["concurrency"], row["tpot_s"]
    if total and in_flight and tpot and total > TOKENS_IN_FLIGHT_SLACK * in_flight / tpot:
        yield f"{total:g} tokens/s is more than {in_flight} requests give at {tpot:g} s a token"


def _fits_on_gpus(row: Row) -> Iterator[str]:
    ranks = (row["tensor_parallel_size"] or 1) * (row.get("pipeline_parallel_size") or 1)
    if row["num_gpus"] and row["num_gpus"] % ranks:
        yield f"TP x PP is {ranks}, which does not divide num_gpus {row['num_gpus']}"


def _share(row: Row) -> Iterator[str]:
    if row["memory_fraction"] and row["memory_fraction"] > 1.0:
        yield f"memory_fraction {row['memory_fraction']:g} is above 1"


def _cache(row: Row) -> Iterator[str]:
    blocks, size, tokens = (
        row[name] for name in ("kv_cache_blocks", "block_size", "kv_cache_tokens")
    )
    if blocks and size and tokens and blocks * size != tokens:
        yield f"{blocks} blocks of {size} tokens are {blocks * size}, not kv_cache_tokens {tokens}"
    device, weights = row["device_memory_bytes"], row["weights_bytes"]
    if device and weights and weights > device:
        yield f"weights_bytes {weights:g} exceeds device_memory_bytes {device:g}"


def _rl(row: Row) -> Iterator[str]:
    prompts, answers, rollouts = (
        row[name] for name in ("prompts_per_step", "generations_per_prompt", "rollouts_per_step")
    )
    if prompts and answers and rollouts and prompts * answers != rollouts:
        yield f"{prompts} prompts x {answers} answers are not rollouts_per_step {rollouts}"
    train, generate, gpus = (row[name] for name in ("training_gpus", "generation_gpus", "num_gpus"))
    if row["colocated"] is False and train and generate and gpus and train + generate != gpus:
        yield f"training_gpus {train} + generation_gpus {generate} are not num_gpus {gpus}"
    phases = [row[name] or 0.0 for name in ("generation_s", "logprob_s", "update_s")]
    if row["mode"] == "sync" and row["step_s"] and sum(phases) > PHASE_SLACK * row["step_s"]:
        yield f"phases take {sum(phases):g} s, the step {row['step_s']:g} s"


def _shape(row: Row) -> Iterator[str]:
    heads, groups = row["num_attention_heads"], row["num_key_value_heads"]
    if heads and groups and heads % groups:
        yield f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
    if row["hidden_size"] and heads and not row["head_dim"] and row["hidden_size"] % heads:
        yield f"hidden_size {row['hidden_size']} is no multiple of num_attention_heads {heads}"
    chosen, experts = row["num_experts_per_tok"], row["num_experts"]
    if chosen and experts and chosen > experts:
        yield f"num_experts_per_tok {chosen} exceeds num_experts {experts}"


CHECKS: Mapping[str, tuple[Callable[[Row], Iterator[str]], ...]] = {
    "training": (
        _layout,
        _chunks,
        _nodes,
        _speed,
        _utilization,
        _ordered("step_s_fastest_run", "step_s_slowest_run"),
        _ordered("step_s_p10", "step_s_p90"),
        _ordered("allocated_bytes", "reserved_bytes"),
    ),
    "serving": (
        _serving_rates,
        _fits_on_gpus,
        _nodes,
        _share,
        _ordered("ttft_s", "request_latency_s"),
    ),
    "cache": (_cache, _fits_on_gpus, _share),
    "rl": (_rl, _share, _nodes),
    "recipes": (_layout, _chunks),
    "models": (_shape,),
}


def _agree(left: float, right: float, *printed: float) -> bool:
    """Return whether two figures are equal within SLACK and the rounding of the values that they
    were computed from.
    """
    return abs(left / right - 1.0) <= SLACK + sum(map(_rounding, printed))


def _rounding(value: float) -> float:
    """Return half a unit of the last printed digit, as a fraction of the value."""
    digits = f"{value:.12g}".partition(".")[2]
    return 0.5 * 10.0 ** -len(digits) / value if "e" not in digits else 0.0
