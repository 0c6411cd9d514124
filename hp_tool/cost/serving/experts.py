"""Experts in serving: slots per rank, the load of the busiest rank, grouped matmuls, and the
exchange of tokens.

E experts and r redundant experts fill S = E + r slots, S / e on each of e ranks. The popularity of
experts follows a Gamma distribution with mean 1 and variance s. If n tokens use k experts each, a
slot gets at least one token with probability 1 - (1 + s x)^(-1/s), x = n k / S. For s = 0, the
probability is 1 - exp(-x). Routers balance experts over a corpus, not over the current requests, so
s is fitted. The load of ranks has a smaller s, because it averages over many passes. Layers with
fewer than 128 experts have a smaller s, too: s E / 128, as if each expert were the mean of several
smaller ones.
"""

import functools
import heapq
import math
from statistics import NormalDist

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.matrices import (
    expert_matrices,
    latent_matrices,
    router_matrix,
    shared_expert_matrices,
)
from hp_tool.cost.matrix import entries, shapes
from hp_tool.cost.moe import expert_hit_probability
from hp_tool.cost.precision import ELEMENT_BYTES
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.operations import (
    OUTPUT_BYTES,
    exchange_seconds,
    matmuls_seconds,
    thin_roofline,
)
from hp_tool.cost.serving.weights import INT4_BYTES, MXFP4_BYTES
from hp_tool.domain.efficiency import ExpertKernel, GroupedRoofline
from hp_tool.domain.model import ModelSpec

USUAL_LAUNCHES_S = 3e-5
"""Fixed seconds per layer of routed experts on GPU types without timings: the value for the H100 in
16 bits.
"""
FINE = 128
"""Number of experts per layer at which the popularity variance reaches its full value."""
SPARE_SLOTS = 16
"""Number of redundant experts per rank (beyond the minimum for equal slots) after which additional
ones do not improve the balance.
"""


def fewest_redundant(model: ModelSpec, expert_parallel_size: IntArray) -> IntArray:
    """Return the smallest number of redundant experts that gives each rank the same number of
    slots; 0 for a dense model.

    For example, 256 experts on 144 ranks need 32.
    """
    fewest: IntArray = -(model.num_experts or 0) % np.asarray(expert_parallel_size)
    return fewest * (model.num_experts is not None)


def slots_per_rank(case: ServingCase, candidates: ServingCandidates) -> FloatArray:
    """Return (E + r) / e, the number of experts on each rank, including redundant ones."""
    per_rank: FloatArray = (
        (case.model.num_experts or 0) + candidates.redundant_experts
    ) / candidates.expert_parallel_size
    return per_rank


def expert_weights(case: ServingCase, candidates: ServingCandidates) -> Floats:
    """Return the number of routed-expert weights per layer and rank: those of the rank's slots,
    each split across t d / e ranks.
    """
    each = entries(expert_matrices(case.model)) / (case.model.num_experts or 1)
    return slots_per_rank(case, candidates) * each / _ranks_per_expert(candidates)


def _ranks_per_expert(candidates: ServingCandidates) -> FloatArray:
    return _ranks_per_stage(candidates) / candidates.expert_parallel_size


def _ranks_per_stage(candidates: ServingCandidates) -> IntArray:
    ranks: IntArray = candidates.tensor_parallel_size * candidates.attention_data_parallel_size
    return ranks


def imbalance(case: ServingCase, candidates: ServingCandidates, tokens: FloatArray) -> FloatArray:
    """Return the number of token copies on the busiest of the e ranks divided by the mean, if each
    scheduler processes `tokens` tokens.

    This is the popularity of the busiest rank's experts (`busiest_share`), plus sqrt(2 ln e / load)
    for random variation, the expected maximum of e Poisson counts. It is at most e: all tokens are
    then on one rank. If the query sets inference.expert_imbalance, that value is returned.
    """
    e = candidates.expert_parallel_size
    if case.expert_imbalance is not None:
        fixed: FloatArray = np.minimum(case.expert_imbalance, e)
        return fixed
    load = (
        tokens * candidates.attention_data_parallel_size * (case.model.num_experts_per_tok or 1) / e
    )
    chance = np.sqrt(2.0 * np.log(e) / np.maximum(load, 1e-9))
    base = int(e.max(initial=1)) + 1
    different, which = np.unique(candidates.redundant_experts * base + e, return_inverse=True)
    experts = case.model.num_experts or 1
    variance = case.experts.load_variance * min(experts / FINE, 1.0)
    shares = [
        busiest_share(experts, *divmod(layout, base), variance) for layout in different.tolist()
    ]
    factor: FloatArray = np.minimum(np.array(shares)[which] + chance, e)
    return factor


@functools.lru_cache(maxsize=4096)
def busiest_share(experts: int, redundant: int, ranks: int, variance: float) -> float:
    """Return the total popularity of the busiest rank's experts, divided by the mean over ranks.

    Without redundant experts, experts are assigned to ranks in order: 1 + sqrt(2 ln e s e / E).
    Otherwise, as in DeepSeek's EPLB, each redundant copy goes to the expert with the most tokens
    per slot, and slots are assigned to ranks by load. An engine may leave copies unused, so
    additional copies never increase the result.
    """
    if ranks == 1 or variance == 0.0:
        return 1.0
    fewest = -experts % ranks
    spare = min((redundant - fewest) // ranks, SPARE_SLOTS)
    plans = [
        _balanced_share(experts, fewest + k * ranks, ranks, variance)
        for k in range(spare + 1)
        if fewest + k * ranks
    ]
    if not fewest:
        plans.append(1.0 + math.sqrt(2.0 * math.log(ranks) * variance * ranks / experts))
    return min(*plans, float(ranks))


def _balanced_share(experts: int, redundant: int, ranks: int, variance: float) -> float:
    """Return the load of the busiest rank divided by the mean, under EPLB.

    Redundant copies go to the most loaded experts. Slots are then assigned to ranks, largest first.
    """
    heap = [(-load, 1) for load in _popularity_quantiles(experts, variance)]
    heapq.heapify(heap)
    for _ in range(redundant):
        load, copies = heap[0]
        heapq.heapreplace(heap, (load * copies / (copies + 1), copies + 1))
    loads = sorted((-load for load, copies in heap for _ in range(copies)), reverse=True)
    room = len(loads) // ranks
    open_ranks = [(0.0, 0, rank) for rank in range(ranks)]
    fullest = 0.0
    for load in loads:
        total, copies_on_rank, rank = heapq.heappop(open_ranks)
        fullest = max(fullest, total + load)
        if copies_on_rank + 1 < room:
            heapq.heappush(open_ranks, (total + load, copies_on_rank + 1, rank))
    return fullest * ranks / experts


def _popularity_quantiles(experts: int, variance: float) -> list[float]:
    """Return quantiles of the Gamma distribution by the Wilson-Hilferty approximation, scaled to a
    mean of 1.
    """
    shape = 1.0 / variance
    normal = NormalDist()
    places = (normal.inv_cdf((i + 0.5) / experts) for i in range(experts))
    quantiles = [
        max(1.0 - 1.0 / (9.0 * shape) + z / (3.0 * math.sqrt(shape)), 0.0) ** 3 for z in places
    ]
    mean = sum(quantiles) / experts
    return [value / mean for value in quantiles]


def hit_slots(
    case: ServingCase, candidates: ServingCandidates, tokens: FloatArray, factor: FloatArray
) -> FloatArray:
    """Return the number of slots on the busiest rank that get at least one token. The result is at
    least 1 and at least k / e.
    """
    experts, top_k = case.model.num_experts or 1, case.model.num_experts_per_tok or 1
    available = slots_per_rank(case, candidates)
    mean = (
        -tokens
        * candidates.attention_data_parallel_size
        * math.log1p(-min(top_k / experts, 1.0 - 1e-12))
    )
    x = mean * factor * experts / (experts + candidates.redundant_experts)
    s = (
        0.0
        if case.expert_imbalance is not None
        else case.experts.popularity_variance * min(experts / FINE, 1.0)
    )
    missed = np.exp(-x) if s == 0.0 else (1.0 + s * x) ** (-1.0 / s)
    least = np.maximum(top_k / candidates.expert_parallel_size, 1.0)
    return np.minimum(np.maximum(available * (1.0 - missed), least), available)


def experts_seconds(
    case: ServingCase, candidates: ServingCandidates, tokens: FloatArray
) -> FloatArray:
    """Return the time in seconds of one layer's router, shared experts and routed experts on the
    busiest rank.

    `tokens` is the number of tokens of one scheduler; the experts of a stage process the tokens of
    all d schedulers. The seconds of routed experts are those of timed kernels (`GroupedRoofline`),
    which include launches, permutation and quantisation of the inputs. Gathering, the activation
    and the sum over token copies are added.
    """
    model, gpu, precision = case.model, case.cluster.gpu, case.expert_precision
    factor = imbalance(case, candidates, tokens)
    top_k, split = model.num_experts_per_tok or 1, _ranks_per_expert(candidates)
    busiest = (
        tokens
        * candidates.attention_data_parallel_size
        * top_k
        / candidates.expert_parallel_size
        * factor
    )
    local = hit_slots(case, candidates, tokens, factor)
    expert = entries(expert_matrices(model)) / (model.num_experts or 1) / split
    width = model.expert_size / split
    moved = (
        busiest
        * OUTPUT_BYTES
        * (3.0 * (model.moe_latent_size or model.hidden_size) + 2.0 * model.mlp_inputs * width)
    )
    moved = moved / (case.profile.gpu.memory_fraction * gpu.memory_bandwidth_bytes_per_second)
    kernel = expert_kernel(case)
    routed = _grouped_seconds(case, kernel, copies=busiest, hit=local, weights=expert) + moved
    if kernel.few is not None:
        few = _grouped_seconds(case, kernel.few, copies=busiest, hit=local, weights=expert) + moved
        routed = np.where(
            tokens * candidates.attention_data_parallel_size <= kernel.few_tokens, few, routed
        )
    always: Floats = 0.0
    if model.num_shared_experts:
        shared = shapes(shared_expert_matrices(model, tensor=candidates.tensor_parallel_size))
        always = matmuls_seconds(
            case, tokens, shared, precision=precision, weight_bytes=case.expert_bytes
        )
    around = shapes([router_matrix(model), *latent_matrices(model)])
    router = matmuls_seconds(case, tokens, around)
    seconds: FloatArray = (
        case.experts.grouped_slowdown * routed + case.experts.layer_overhead_s + always + router
    )
    return seconds


def _grouped_seconds(
    case: ServingCase,
    roof: GroupedRoofline,
    *,
    copies: FloatArray,
    hit: FloatArray,
    weights: Floats,
) -> FloatArray:
    """Return the time of the grouped matmuls, in seconds.

    `copies` is the number of token copies, `hit` the number of experts that they use, and `weights`
    the number of weights of each expert.
    """
    gpu, p = case.cluster.gpu, roof.sharpness
    peak = peak_flops(gpu, precision=roof.arithmetic or case.expert_precision)
    arithmetic = 2.0 * (copies + roof.tile_rows * hit) * weights / (roof.peak_fraction * peak)
    read = (
        case.expert_bytes
        * weights
        * hit
        / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second)
    )
    seconds: FloatArray = roof.overhead_s + (arithmetic**p + read**p) ** (1.0 / p)
    return seconds


def expert_kernel(case: ServingCase) -> ExpertKernel:
    """Return the timed kernel for routed experts in the case's weight format.

    For a GPU type without timed experts, return the roofline of other matmuls with typical launch
    times.
    """
    timed, precision = case.expert_kernels, case.expert_precision
    if case.expert_bytes < ELEMENT_BYTES[precision]:
        own = _formats_to_try(case)
    else:
        own = (
            "fp8_tensor"
            if precision == "fp8" and case.engine.fp8_scales == "tensor"
            else precision,
        )
    for name in (*own, "fp8" if ELEMENT_BYTES[precision] < OUTPUT_BYTES else "bf16"):
        if name in timed:
            return timed[name]
    roof = thin_roofline(case, precision)
    return ExpertKernel(
        peak_fraction=roof.peak_fraction,
        bandwidth_fraction=roof.bandwidth_fraction,
        overhead_s=USUAL_LAUNCHES_S,
    )


def _formats_to_try(case: ServingCase) -> tuple[str, ...]:
    """Return the formats whose kernels can run the case's weights, starting with the case's own
    format.

    Without timings for a format, weights are dequantised and multiplied in 16 bits.
    """
    mxfp4 = case.expert_kernels.get("mxfp4")
    narrow = mxfp4 is not None and mxfp4.arithmetic is not None and case.expert_bytes != MXFP4_BYTES
    return ("int4", "mxfp4") if narrow or case.expert_bytes == INT4_BYTES else ("mxfp4", "int4")


# Dispatch of tokens to experts and combine of the results, as in DeepEP's kernels
# (github.com/deepseek-ai/DeepEP): inputs in 8 bits if the experts multiply in 8 or 4 bits, results
# in 16 bits.
#
# Low-latency kernels (decode-only passes, complete experts on each rank) send one copy of a token
# to each of its k experts. If the experts span NVLink domains, all copies use the network. Normal
# kernels (passes with prompts) send one copy through the network to each other domain with any of
# the experts, and from there over NVLink to each rank with any of them. Results are summed on the
# way back. A pass that also decodes takes at least the time of its low-latency exchange.

SCALE_BYTES = 4.0 / 128.0
"""Bytes of scales per element of a dispatched token: one fp32 scale per 128 elements."""
SENDING_SHARE = 20.0 / 132.0
"""Fraction of SMs that exchange prompt tokens during compute: 20 of the 132 of an H800 (arXiv
2412.19437, 3.2.2).
"""


Copies = tuple[FloatArray, FloatArray]
"""Mean number of copies of a token that leave a rank: (inside its NVLink domain, over the
network).
"""


def travelling_copies(case: ServingCase, candidates: ServingCandidates) -> tuple[Copies, Copies]:
    """Return the number of token copies in a decode-only pass, and in a pass with prompts."""
    n = _ranks_per_stage(candidates)
    domains = -(-n // case.cluster.nvlink_domain_size)
    near: FloatArray = (n - domains) * _hit_probability(case, candidates.expert_parallel_size)
    far: FloatArray = (domains - 1.0) * _hit_probability(
        case, np.minimum(domains, candidates.expert_parallel_size)
    )
    whole, crosses = candidates.expert_parallel_size == n, domains > 1
    each = float(case.model.num_experts_per_tok or 1) * (1.0 - 1.0 / n)
    low = (
        np.where(whole, np.where(crosses, 0.0, each), near),
        np.where(whole, np.where(crosses, each, 0.0), far),
    )
    return low, (near, far)


def exchange(
    case: ServingCase, candidates: ServingCandidates, batch: Pass
) -> tuple[FloatArray, FloatArray]:
    """Return the (dispatch, combine) seconds of one layer; zero with a single attention group."""
    n = _ranks_per_stage(candidates)
    decoding = batch.decoding * (1 + batch.drafted)
    prompts = batch.prefill_requests > 0.0
    low, normal = travelling_copies(case, candidates)

    def seconds(width: float) -> FloatArray:
        row = (
            width
            * (case.model.moe_latent_size or case.model.hidden_size)
            / candidates.tensor_parallel_size
        )
        exchange = exchange_seconds(
            case, row * decoding * low[0], row * decoding * low[1], group_size=n
        )
        if np.any(prompts):
            both = exchange_seconds(
                case, row * batch.tokens * normal[0], row * batch.tokens * normal[1], group_size=n
            )
            exchange = np.where(prompts, np.maximum(both, exchange), exchange)
        return np.where(candidates.attention_data_parallel_size > 1, exchange, 0.0)

    narrow = ELEMENT_BYTES[expert_kernel(case).arithmetic or case.expert_precision] < OUTPUT_BYTES
    return seconds(1.0 + SCALE_BYTES if narrow else OUTPUT_BYTES), seconds(OUTPUT_BYTES)


def _hit_probability(case: ServingCase, parts: IntArray) -> FloatArray:
    """Return the probability that a token uses at least one expert of a given part, if the experts
    are divided into `parts` equal parts.
    """
    model = case.model
    experts, groups = model.num_experts or 1, model.n_group or 1
    kept = min(model.topk_group or groups, groups)

    def hit_probability(count: int) -> float:
        chosen = model.num_experts_per_tok or 1
        if experts % count:  # redundant experts fill the remainder
            return 1.0 - (1.0 - 1.0 / count) ** chosen
        return expert_hit_probability(
            count, experts=experts, chosen=chosen, groups=groups, kept=kept
        )

    different, which = np.unique(parts, return_inverse=True)
    return np.array([hit_probability(int(count)) for count in different])[which]
