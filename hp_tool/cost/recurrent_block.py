"""The block of a recurrent mixer in training: a delta rule or state space with its projections and
norm.

Heads are split across tensor-parallel ranks. With context parallelism, each rank runs 1/c of these
heads over the complete sequence: all-to-alls before and after the scan convert sequence sharding to
head sharding and back (Megatron Core, ssm/mamba_context_parallel.py).
"""

from hp_tool.cost.arrays import Floats, Ints, anywhere
from hp_tool.cost.block import BlockBytes, BlockTime, Kernels, Shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrix import shapes
from hp_tool.cost.network import all_to_all_seconds, dense_group
from hp_tool.cost.precision import cast_traffic
from hp_tool.cost.recurrent import (
    key_heads,
    recurrent_matrices,
    recurrent_width,
    state_groups,
    value_heads,
)
from hp_tool.cost.roofline import elementwise_seconds, peak_flops, weight_matmuls
from hp_tool.cost.scans import (
    DELTA_CHUNK,
    STATE_BYTES,
    Work,
    chunked_seconds,
    convolution_work,
    mixer_kernel,
    scan_work,
    wide_precision,
)
from hp_tool.domain.model import ModelSpec

KERNELS = Kernels(forward=14.0, backward=24.0)
"""Number of elementwise kernels, copies and scan kernels. A scan has kernels for the chunks' sums,
states and outputs, and for passing states between chunks.
"""
BACKWARD_FACTOR = 3.0
"""Time of the scan's backward pass relative to its forward pass. Not measured.

Gradients take twice the time of the forward pass, and both implementations first recompute the
chunk states (mamba_ssm 2.3, ssd_combined.py; fla 0.6, gated_delta_rule/chunk.py).
"""


def recurrent_bytes(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockBytes:
    """Return the activation bytes of the recurrent block.

    Includes the norm input and matmul input (sharded by sequence parallelism, else replicated), the
    tensors that the convolution, the scan and the gated norm save (`saved_numbers`,
    `saved_wide_numbers`), and the output projection's input, split by heads. Recomputing the
    attention core frees nothing here.
    """
    model = case.model
    inner = recurrent_width(model) / s.t
    replicated = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards
    saved = s.e * saved_numbers(
        model, s.t, candidates.context_parallel_size
    ) + STATE_BYTES * saved_wide_numbers(model, s.t)
    projected = recurrent_matrices(model, tensor=s.t)[0].rows
    return BlockBytes(
        saved=replicated + s.tokens * (saved + s.saved_input * inner),
        norm_output=s.tokens * s.h * s.saved_input / s.shards,
        working=s.tokens * s.e * (s.h * (1.0 + s.sharded) + projected + inner),
    )


def saved_numbers(model: ModelSpec, t: Ints, c: Ints = 1) -> Floats:
    """Return the number of 16-bit elements saved per token between the block's projections, on one
    of t ranks.

    Mamba 2: the input projection's output, and the scan's output before and after its gate
    (MambaSplitConv1dScanCombinedFn). If there are fewer groups than ranks, groups are replicated.
    Mamba: the outputs of the projections and of the scan (MambaInnerFn). Delta rules: the
    convolution's input; queries and keys after their norms, repeated for each value head if several
    share them; values; gate; the scan's output; and a row of each chunk's inverse
    (ChunkGatedDeltaRuleFunction, ChunkKDAFunction). Kimi's rule also saves its decays and a row of
    the chunk's scores.
    """
    inner = recurrent_width(model) / t
    if model.mixer == "mamba":
        return 3.0 * inner + (model.mamba_dt_rank or 0) + 2.0 * (model.ssm_state_size or 0)
    if model.mixer == "mamba2":
        states = 2.0 * state_groups(model, t * c) * c * (model.ssm_state_size or 0)
        return 4.0 * inner + states + (model.mamba_num_heads or 0) / t
    heads, width = value_heads(model) / t, float(model.linear_key_head_dim or 0)
    keys = key_heads(model) * width / t
    copied = 2.0 * heads * width if value_heads(model) > key_heads(model) else 0.0
    own = 4.0 * keys + 4.0 * inner + copied + heads * (1.0 + DELTA_CHUNK)
    return own + keys + heads * DELTA_CHUNK if model.mixer == "kimi_delta" else own


def saved_wide_numbers(model: ModelSpec, t: Ints) -> Floats:
    """Return the number of 32-bit elements saved per token: a delta rule's summed decays, one per
    head (Kimi: per channel).
    """
    if model.mixer in ("mamba", "mamba2"):
        return 0.0
    return (
        key_heads(model) * (model.linear_key_head_dim or 0) / t
        if model.mixer == "kimi_delta"
        else value_heads(model) / t
    )


def recurrent_time(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> BlockTime:
    """Return the time of the recurrent block, in seconds.

    In the forward pass, convolution and scan take the time measured for the kernels that inference
    engines run on prompts. The backward pass takes BACKWARD_FACTOR times as long. Norms and
    residual are as in attention. Tensors saved between the projections are written and read once.
    """
    model, workload = case.model, case.workload
    matrices = shapes(recurrent_matrices(model, tensor=s.t))
    matmul, weight_gradient = weight_matmuls(
        s.tokens, matrices, case=case, precision=workload.precision
    )
    kernels = mixer_kernels(case=case, candidates=candidates, s=s)
    cast, cast_backward = cast_traffic(workload, matrices)
    passed = 2.0 * s.e * saved_numbers(model, s.t)
    forward = s.tokens * (s.h * (5.0 * s.e + s.mask) / s.shards + passed + cast)
    backward = s.tokens * (s.h * (8.0 * s.e + s.mask) / s.shards + 1.5 * passed + cast_backward)
    exchange = _exchange_seconds(case=case, candidates=candidates, s=s)
    return BlockTime(
        matmul=matmul,
        weight_gradient=weight_gradient,
        elementwise=kernels + elementwise_seconds(forward, machine=case, kernels=KERNELS.forward),
        elementwise_backward=BACKWARD_FACTOR * kernels
        + elementwise_seconds(backward, machine=case, kernels=KERNELS.backward),
        context=exchange,
        context_backward=exchange,
    )


def mixer_kernels(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> Floats:
    """Return the forward seconds of the short convolution and the scan for the rows of a
    micro-batch.

    Uses the kernel timings for the die; for state spaces, the rate fitted to the framework's runs.
    """
    model, gpu = case.model, case.cluster.gpu
    peak, c = peak_flops(gpu, precision=wide_precision(gpu)), candidates.context_parallel_size
    tokens, rate = s.tokens * c, case.profile.framework.state_scan_flops_per_second

    def seconds(name: str, work: Work) -> Floats:
        roof, prompts = mixer_kernel(case, model, name), 1.0 * candidates.micro_batch_size
        return chunked_seconds(roof, work, tokens=tokens, prompts=prompts, gpu=gpu, peak=peak)

    scanned = scan_work(model, s.t * c)
    of_states = rate is not None and model.mixer in ("mamba", "mamba2")
    scan = tokens * scanned.flops / rate if of_states and rate else seconds("scan", scanned)
    return seconds("convolution", convolution_work(model, s.t * c)) + scan


def _exchange_seconds(*, case: TrainingCase, candidates: Candidates, s: Shapes) -> Floats:
    """Return the time in seconds of the all-to-alls in one pass, which exchange the input
    projection's output and the scan's output.
    """
    c = candidates.context_parallel_size
    if not anywhere(c > 1):
        return 0.0
    ranks = dense_group(candidates, "cp", cluster=case.cluster)
    widths = recurrent_matrices(case.model, tensor=s.t)[0].rows, recurrent_width(case.model) / s.t
    seconds: Floats = sum(
        all_to_all_seconds(s.tokens * s.e * width * (c - 1.0) / c, machine=case, group=ranks)
        for width in widths
    )
    return seconds
