"""Leading dense layers of a mixture of experts on the stages of a pipeline."""

from dataclasses import dataclass

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import DUALPIPE, Candidates
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import ends_are_shorter, layers_before, missing_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayers:
    """Dense layers of the stages among which the slowest is, and of all stages together; shape (n,) or the same for all.

    A stage's seconds are linear in its dense layers, so of equally full stages one with the most or the fewest is slowest.
    """

    first: Floats
    last: Floats
    most: Floats
    """On the full stage between the ends that holds most of them."""
    fewest: Floats
    between: Bools
    """Whether there is a full stage between the ends."""
    total: Floats


def has_both_kinds(model: ModelSpec) -> bool:
    """Whether a model has layers with experts, and dense ones before them."""
    return bool(model.num_experts) and model.moe_layers < model.num_hidden_layers


def dense_layers(model: ModelSpec, c: Candidates, *, late: bool) -> DenseLayers:
    """The dense layers of a whole pipeline, whose layers lie as `domain.pipeline_layout` has them; `late`: as there.

    Between the ends of DualPipe the mean of a stage and its mirrored one count: a rank runs each for half of the micro-batches.
    """
    p, (lowest, highest) = c.pipeline_parallel_size, full_ranks(model, c, late=late)

    def on_rank(rank: Ints | Floats) -> Floats:
        own = dense_on_stage(rank, model, c, late=late)
        if not (c.names_schedules and anywhere(c.pipeline_schedule == DUALPIPE)):
            return own
        mirrored = dense_on_stage(p - 1 - rank, model, c, late=late)
        return where(c.pipeline_schedule == DUALPIPE, 0.5 * (own + mirrored), own)

    one, other = on_rank(minimum(lowest, highest)), on_rank(highest)
    return DenseLayers(
        first=dense_on_stage(0 * p, model, c, late=late),
        last=dense_on_stage(p - 1, model, c, late=late),
        most=maximum(one, other),
        fewest=minimum(one, other),
        between=(p > 2) & (lowest <= highest),
        total=model.num_hidden_layers - model.moe_layers,
    )


def dense_on_stage(stage: Ints | Floats, model: ModelSpec, c: Candidates, *, late: bool) -> Floats:
    """Dense layers of the model chunks of one stage: chunk i is on stage i mod p, in a V chunk 2p - 1 - r on stage r."""
    dense, p, v = model.num_hidden_layers - model.moe_layers, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size

    def before(place: Ints | Floats) -> Floats:
        count: Floats = layers_before(place, num_layers=model.num_hidden_layers, stages=p, chunks=v, late=late)
        return count

    count: Floats = 0.0
    row = 0
    while anywhere((row < v) & (before(row * p) < dense)):
        place: Ints | Floats = row * p + stage
        if row and c.names_schedules:
            place = where(c.is_v, 2 * p - 1 - stage, place)
        ahead = before(place)
        count = count + (row < v) * minimum(maximum(dense - ahead, 0), before(place + 1) - ahead)
        row += 1
    return count


def full_ranks(model: ModelSpec, c: Candidates, *, late: bool) -> tuple[Ints, Ints]:
    """(first, last) rank between the ends that is as full as any; the first is beyond the last if none is.

    Of DualPipe's ranks, which hold two stages, the first half.
    """
    p, v, layers = c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, model.num_hidden_layers
    first, last = missing_layers(num_layers=layers, stages=p, chunks=v)
    if late:
        first, last = first + last, 0 * last
        at_ends = False & (p > 0)
    else:
        at_ends = ends_are_shorter(num_layers=layers, stages=p, chunks=v)
    # Chunk i is on rank i mod p: the first and the last few ranks have a shorter chunk, or a few in the middle have two.
    begun, ended = where(at_ends, 0, first % p), where(at_ends, 0, last % p)
    overlap = begun + ended >= p
    lowest = where(overlap, where(p - ended > 1, 1, begun), maximum(begun, 1))
    highest = where(overlap, where(begun <= p - 2, p - 2, p - ended - 1), p - 1 - maximum(ended, 1))
    if c.names_schedules:
        inside = maximum(maximum(where(first < p, first, 0), where(last < p, last, 0)), 1)
        lowest, highest = where(c.is_v, inside, lowest), where(c.is_v, p - 1, highest)
        dual, middle = c.pipeline_schedule == DUALPIPE, maximum(p // 2 - 1, 1)
        paired = minimum(maximum(maximum(begun, ended), 1), middle)
        lowest, highest = where(dual, paired, lowest), where(dual, middle, highest)
    return lowest, highest


def fullest_ranks(model: ModelSpec, c: Candidates, *, late: bool) -> list[Ints]:
    """Ranks between the ends among which the fullest is: the first full one, one with layers of both kinds if there is one, the
    first full one with experts in all layers, and the last full one.

    Each but the last keeps as many micro-batches as any with its contents; ZB-H1's later ranks wait with more weight gradients.
    Ranks of candidates without a stage between the ends are meaningless.
    """
    p, v, layers = c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, model.num_hidden_layers
    inner = maximum(p - 2, 1)
    lowest, highest = (minimum(rank, inner) for rank in full_ranks(model, c, late=late))
    first, last = missing_layers(num_layers=layers, stages=p, chunks=v)
    size = (layers + first + last) // (p * v)
    filled = layers - model.moe_layers + (first + last if late else first)
    behind = minimum(maximum(-(-filled // size) % p, lowest), inner)
    mixed = (filled % size > 0) & (behind > lowest + 1)
    ranks = [lowest, *([where(mixed, behind - 1, behind)] if anywhere(mixed) else []), behind]
    return [*ranks, highest] if c.names_schedules else ranks
