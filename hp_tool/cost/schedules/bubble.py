"""Costs of a pipeline schedule: the bubble of split backward passes, and micro-batches in flight.

`cost.critical_stage` computes the bubble of plain and interleaved 1F1B. Symbols:
docs/cost-model.md.

The closed forms equal the durations of the schedules that `execution` simulates. A step ends with
its slowest rank, because optimizers wait for the gradient norm of all ranks. The time to fill the
pipeline of a "zero bubble" schedule therefore counts, even if a framework overlaps the optimizer
step with it.
"""

from hp_tool.cost.arrays import Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import DUALPIPE, DUALPIPE_V, GPIPE, ZB_H1, ZBV, Candidates
from hp_tool.cost.network import Axis, Group, dense_group
from hp_tool.domain.hardware import ClusterSpec


def split_bubble_share(
    c: Candidates, *, forward: Floats, total: Floats, weight_gradient: Floats
) -> Floats:
    """Return the bubble with split backward passes, relative to the bubble (p-1) (t_f + t_b + t_w)
    of GPipe and 1F1B.

    `forward` is t_f; `total` is t_f + t_b + t_w. For other schedules the value is undefined.

    - ZB-H1: t_f + t_b - min(t_f, t_b, t_w) for each of p - 1 ranks; with t_w the smallest, as
      usual, this is arXiv 2401.10241 section 2.3.
    - ZB-V: max(t_b, 2(t_b - t_w)) / 2 if t_w <= t_f <= t_b; otherwise an upper bound.
    - DualPipe, with q = p/2 - 1: q max(t_b - t_w, 0) + max(2 q t_f, (q-1) t_f + q t_b) in total. If
      t_f = t_b this is q (F&B + B - 3W) of arXiv 2412.19437 table 2 (whose B is both backward
      passes); otherwise it is at most one t_f less. DualPipeV is the same with 2p stages, each half
      as long.
    """
    p, schedule = c.pipeline_parallel_size, c.pipeline_schedule
    f, w = forward, weight_gradient
    b = total - f - w
    h1 = f + b - minimum(minimum(f, b), w)
    v = 0.5 * maximum(maximum(b, 2.0 * (maximum(f, b) - w)), maximum(2.0 * f - b, w))
    two = 1.0 + (schedule == DUALPIPE_V)
    f, b, w = f / two, b / two, w / two
    q = maximum(0.5 * two * p - 1.0, 0.0)
    dual = (q * maximum(b - w, 0.0) + maximum(2.0 * q * f, (q - 1.0) * f + q * b)) / maximum(
        p - 1, 1
    )
    share: Floats = where(schedule == ZB_H1, h1, where(schedule == ZBV, v, dual)) / total
    return share


def chunks_in_flight(c: Candidates, *, from_end: Ints | Floats, micro_batches: Floats) -> Floats:
    """Return the maximum number of model chunks of L/(pv) layers whose activations rank r stores at
    the same time.

    `from_end` is p - 1 - r. 1F1B and ZB-H1: min(p - r, m). Interleaved: min(2(p-r-1) + (v-1)p + 1,
    m v), Megatron's warm-up count plus the running chunk; on rank 0 with many micro-batches this is
    arXiv 2205.05198's L(1 + (p-1)/(pv)) layers. GPipe: m. ZB-V: 2p on every rank, as many layers as
    on the first rank of 1F1B. DualPipe: p + 1. DualPipeV: 2p + 1.
    """
    p, v, m = c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, micro_batches
    plain = from_end + 1
    interleaved = plain + from_end + (v - 1) * p
    chunks = minimum(where(v > 1, interleaved, plain), m * v)
    schedule = c.pipeline_schedule
    if not c.names_schedules:
        return chunks
    chunks = where(schedule == GPIPE, m, chunks)
    chunks = where(schedule == ZBV, 2 * p, where(schedule == DUALPIPE, p + 1, chunks))
    return where(schedule == DUALPIPE_V, 2 * p + 1, chunks)


def waiting_in_flight(c: Candidates, *, from_end: Ints | Floats) -> Floats:
    """Return the number of micro-batches with delayed weight gradients on rank r when
    `chunks_in_flight` is reached.

    In ZB-H1, there are r; their matmul inputs and output gradients stay allocated (arXiv 2401.10241
    table 1: 32sbh of a layer's 34sbh). In the other schedules, there are none.
    """
    waiting: Floats = (c.pipeline_schedule == ZB_H1) * (c.pipeline_parallel_size - 1 - from_end)
    return waiting


# Folded pipelines: the first rank of a V has the first and the last stage; DualPipe's rank r has
# the stages r and p - 1 - r.


def with_mirrored_stage(c: Candidates, group: Group, *, cluster: ClusterSpec) -> Group:
    """Return `group`, whose ranks have the same parameters, extended by the ranks of DualPipe's
    mirrored stage.

    The mirrored stage has the same parameters (arXiv 2412.19437 table 2): both stages reduce their
    gradients together, and ZeRO shards over both. The distance between the two stages is that of
    the farthest pair.
    """
    if not (c.names_schedules and anywhere(c.pipeline_schedule == DUALPIPE)):
        return group
    (stages,) = dense_group(c, "pp", cluster=cluster).axes
    pair = Axis(
        1 + (c.pipeline_schedule == DUALPIPE),
        stages.stride * maximum(c.pipeline_parallel_size - 1, 1),
    )
    return Group((pair, *group.axes), group.domain)


def share_of_ends(c: Candidates) -> Floats:
    """Return the fraction of micro-batches for which the critical rank runs the embedding and the
    output layer.

    In a V schedule, the first rank runs them for all micro-batches. In DualPipe, the first and the
    last rank each run them for half of the micro-batches.
    """
    return where(c.pipeline_schedule == DUALPIPE, 0.5, 1.0)
