"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen weights: parameters, saved bytes and
time.

y = W x + B A x with A of shape (rank, inputs) and B of shape (outputs, rank); W has no gradient.
The layout is that of Megatron Bridge's ParallelLinearAdapter. For a column-parallel W, A is split
along the rank and B along the outputs. For a row-parallel W, A is split along the inputs and B
along the outputs, and B's outputs are gathered. Adapters run in 16 bits. The local experts of a
rank share one adapter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hp_tool.cost.arrays import Floats, anywhere, maximum, where
from hp_tool.cost.block import BlockBytes, BlockTime, Shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.matrices import rank_matrices
from hp_tool.cost.matrix import Matrix
from hp_tool.cost.moe import routed_tokens
from hp_tool.cost.precision import ELEMENT_BYTES, FROZEN_BYTES, wide_precision
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import LoraSpec, TrainingWorkload

ALIASES = {
    "o_proj": "linear_proj",
    "down_proj": "linear_fc2",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
"""Map from Hugging Face's names of complete matrices to Megatron Core's."""
PARTS = {
    "linear_qkv": (("q_proj", "linear_q"), ("k_proj", "linear_k"), ("v_proj", "linear_v")),
    "linear_q_proj": (("q_proj",),),
    "linear_fc1": (("gate_proj", "linear_fc1_gate"), ("up_proj", "linear_fc1_up")),
}
"""Names of the parts of fused matrices, in Hugging Face and in Megatron Bridge's canonical LoRA."""
DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ADAPTER_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
UNFUSED_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""LoRA targets for frameworks that do not fuse these matrices, with the names of Hugging Face's
models.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The matrices A and B of one adapter on one rank."""

    matrix: Matrix
    rows: Floats
    """Outputs of W on this rank; if the adapter applies only to a part of W, those of that part."""
    rank: float

    @property
    def matrices(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Return (rows, columns) of A and of B on this rank."""
        split = self.matrix.ranks
        if self.matrix.division == "row":
            return (self.rank, self.matrix.inputs), (self.rows / split, self.rank)
        return (self.rank / split, self.matrix.inputs), (self.rows, self.rank)

    @property
    def parameters(self) -> Floats:
        """Return the number of parameters on one rank: r (k + n) / t for rank r and a matrix with k
        inputs and n outputs, split across t tensor-parallel ranks.
        """
        return sum(rows * columns for rows, columns in self.matrices)


def adapters(matrix: Matrix, lora: LoraSpec) -> Iterator[Adapter]:
    """Yield the adapters of a matrix: one for the complete matrix, or one for each target that is a
    part of it.
    """
    targets = {ALIASES.get(name, name) for name in lora.target_modules or DEFAULT_TARGETS}
    rank = float(lora.rank)
    if matrix.module in targets:
        yield Adapter(matrix=matrix, rows=matrix.rows, rank=rank)
        return
    names = PARTS.get(matrix.module, ())
    for aliases, rows in zip(names[-len(matrix.outputs) :], matrix.outputs, strict=False):
        if targets.intersection(aliases):
            yield Adapter(matrix=matrix, rows=rows, rank=rank)


def target_names(model: ModelSpec, candidates: Candidates) -> set[str]:
    """Return all names that a query may use for the matrices of this model."""
    modules = {
        matrix.module: matrix
        for matrix in rank_matrices(model, candidates)
        if matrix.module != "router"
    }
    aliases = {alias for alias, module in ALIASES.items() if module in modules}
    parts = (
        PARTS[name][-len(matrix.outputs) :] for name, matrix in modules.items() if name in PARTS
    )
    return (
        set(modules) | aliases | {name for several in parts for names in several for name in names}
    )


def with_named_targets(workload: TrainingWorkload, *, model: ModelSpec) -> TrainingWorkload:
    """Return the workload with explicit adapter targets if the framework does not fuse the matrices
    that Megatron Core fuses.
    """
    lora = workload.lora
    if (
        lora is None
        or lora.target_modules is not None
        or framework_facts(training_engine(workload.framework)).fuses_queries_keys_values
        or model.kv_lora_rank is not None
    ):
        return workload
    target_set = target_names(model, Candidates.alone(ParallelConfig()))
    names = tuple(name for name in UNFUSED_TARGETS if name in target_set)
    return replace(workload, lora=replace(lora, target_modules=names))


def layer_adapter_parameters(
    model: ModelSpec, lora: LoraSpec, candidates: Candidates, *, routed: bool
) -> Floats:
    """Return the adapter parameter count of one layer on one rank: that of the routed experts if
    `routed`, else that of all other matrices.
    """
    matrices = (matrix for matrix in rank_matrices(model, candidates) if matrix.routed == routed)
    return sum(
        (adapter.parameters for matrix in matrices for adapter in adapters(matrix, lora)), 0.0
    )


def token_adapter_parameters(model: ModelSpec, lora: LoraSpec) -> float:
    """Return the number of adapter parameters of the complete model that process one token.

    The adapters of every expert to which a token is routed are counted.
    """
    return _model_adapter_parameters(model, lora, of_experts=model.num_experts_per_tok or 1)


def trained_parameters(model: ModelSpec, lora: LoraSpec, config: ParallelConfig) -> float:
    """Return the number of adapter parameters of the complete model.

    All routed experts of an expert-parallel rank share one adapter.
    """
    return _model_adapter_parameters(model, lora, of_experts=config.expert_parallel_size)


def _model_adapter_parameters(model: ModelSpec, lora: LoraSpec, *, of_experts: int) -> float:
    """Return the adapter parameter count of all layers, counting the routed experts' adapters
    `of_experts` times.
    """
    alone = Candidates.alone(ParallelConfig())

    def layer(kind: ModelSpec, *, routed: bool) -> float:
        return float(layer_adapter_parameters(kind, lora, alone, routed=routed))

    return sum(
        count * (layer(kind, routed=False) + of_experts * layer(kind, routed=True))
        for count, kind in model.kinds
    )


def added_launches(model: ModelSpec, lora: LoraSpec, candidates: Candidates) -> tuple[float, float]:
    """Return the (forward, backward) kernels that adapters add to a dense layer.

    Each adapter adds two matmuls, a scaling and an addition in the forward pass, and four matmuls
    in the backward pass. The weight-gradient kernels of the frozen matrices are subtracted.
    """
    matrices = rank_matrices(model.without_experts, candidates)
    pairs = num_adapters(model, lora, candidates)
    return 4.0 * pairs, 6.0 * pairs - len(matrices)


def num_adapters(model: ModelSpec, lora: LoraSpec, candidates: Candidates) -> int:
    """Return the number of adapters (pairs of A and B) in a dense layer."""
    matrices = rank_matrices(model.without_experts, candidates)
    return sum(1 for matrix in matrices for _ in adapters(matrix, lora))


def with_adapter_bytes(
    block: BlockBytes, *, case: TrainingCase, candidates: Candidates, s: Shapes
) -> BlockBytes:
    """Return the layer's saved bytes if only adapters are trained.

    A frozen matrix saves no input, because torch and Transformer Engine save it only for the weight
    gradient. A matrix with an adapter saves its input in 16 bits for A, and A's output for B. If
    sequence parallelism gathers the input first, the gathered input is saved. With dropout, each
    adapter also saves the input after dropout and the mask. Inputs that attention or the activation
    function saves anyway are counted there. A matrix that is stored in fewer bits than its matmul
    needs is dequantised just before the matmul, so the largest such matrix adds to the working set.
    """
    workload = case.workload
    assert workload.lora is not None
    routed = routed_tokens(case, candidates, s) if case.model.num_experts else 0.0
    saved = block.saved
    wide: Floats = 0.0
    sources: dict[str, bool] = {}
    for matrix in rank_matrices(case.model, candidates):
        tokens = routed if matrix.routed else s.tokens
        attached = list(adapters(matrix, workload.lora))
        if matrix.source not in sources:
            saved = saved - _saved_input_bytes(
                matrix, tokens, s, experts=bool(case.model.num_experts)
            )
        if workload.lora.dropout > 0.0:
            saved = saved + len(attached) * tokens * matrix.inputs * (s.e + 1.0)
        elif attached and not sources.get(matrix.source) and matrix.source != "core":
            saved = saved + tokens * matrix.inputs * s.e
        sources[matrix.source] = sources.get(matrix.source, False) or bool(attached)
        saved = saved + len(attached) * tokens * workload.lora.rank * s.e
        wide = maximum(wide, matrix.rows * matrix.inputs * s.e)
    return replace(
        block,
        saved=saved,
        working=block.working + wide if widens_frozen(workload) else block.working,
    )


def widens_frozen(workload: TrainingWorkload) -> bool:
    """Return whether frozen matrices are stored in fewer bits than their matmuls need, so that they
    are dequantised before each matmul.
    """
    stored = workload.frozen_precision
    return stored is not None and FROZEN_BYTES[stored] < ELEMENT_BYTES[workload.precision]


def _saved_input_bytes(matrix: Matrix, tokens: Floats, s: Shapes, *, experts: bool) -> Floats:
    """Return the bytes of a matrix's input that are saved if all weights are trained.

    `attention_bytes`, `mlp_bytes` and `expert_bytes` already include them.
    """
    elements = tokens * matrix.inputs
    if matrix.source == "activation" and not experts:
        return elements * s.product
    if matrix.source in ("activation", "routed_input", "routed_activation"):
        return elements * s.saved_input
    if matrix.source == "core":
        return elements * s.saved_input * (s.saved_input < s.e)
    return (
        elements * (s.e if experts and matrix.source == "mlp_input" else s.saved_input) / s.shards
    )


def with_adapter_time(
    block: BlockTime, *, case: TrainingCase, candidates: Candidates, s: Shapes
) -> BlockTime:
    """Return the layer's seconds if only adapters are trained.

    Frozen matrices have no weight gradients. If they are stored in fewer bits than their matmuls
    need, dequantising them adds memory traffic. The adapters add their matmuls and the sum of both
    paths: the forward pass reads two tensors of the output's size and writes one; the backward pass
    does the same for the input gradient.
    """
    workload = case.workload
    assert workload.lora is not None
    routed = routed_tokens(case, candidates, s) if case.model.num_experts else 0.0
    gradient: Floats = 0.0
    matmul, forward, backward = block.matmul, block.elementwise, block.elementwise_backward
    for matrix in rank_matrices(case.model, candidates):
        tokens = routed if matrix.routed else s.tokens
        if workload.frozen_precision is not None and widens_frozen(workload):
            moved = matrix.entries * (FROZEN_BYTES[workload.frozen_precision] + s.e)
            widened = elementwise_seconds(moved, machine=case, kernels=1.0)
            forward, backward = forward + widened, backward + widened
        for adapter in adapters(matrix, workload.lora):
            both, both_gradient = weight_matmuls(
                tokens, adapter.matrices, case=case, precision=wide_precision(workload)
            )
            matmul, gradient = matmul + both, gradient + both_gradient
            forward = forward + elementwise_seconds(
                3.0 * s.e * tokens * adapter.rows, machine=case, kernels=2.0
            )
            backward = backward + elementwise_seconds(
                3.0 * s.e * tokens * matrix.inputs, machine=case, kernels=2.0
            )
            if s.facts.eager_kernels:
                added, added_backward = _eager_traffic(matrix, adapter, workload=workload, s=s)
                forward = forward + elementwise_seconds(tokens * added, machine=case, kernels=0.0)
                backward = backward + elementwise_seconds(
                    tokens * added_backward, machine=case, kernels=0.0
                )
    wider = residual_bytes(case, candidates, s) - s.e
    if anywhere(wider > 0.0):
        # A layer has two norms and two residual additions, which read and write both streams.
        hidden = s.tokens * s.h / s.shards * wider
        forward = forward + elementwise_seconds(8.0 * hidden, machine=case, kernels=0.0)
        backward = backward + elementwise_seconds(10.0 * hidden, machine=case, kernels=0.0)
    return replace(
        block,
        matmul=matmul,
        weight_gradient=gradient,
        elementwise=forward,
        elementwise_backward=backward,
    )


def _eager_traffic(
    matrix: Matrix, adapter: Adapter, *, workload: TrainingWorkload, s: Shapes
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) bytes per token that an adapter moves in PyTorch's eager mode.

    Excludes its matmuls and the final sum. The input is cast to the adapter's precision, dropout is
    applied to it, and the output is scaled. The backward pass does the same for their gradients
    (huggingface/peft, src/peft/tuners/lora/layer.py, Linear.forward).
    """
    assert workload.lora is not None
    width = ADAPTER_BYTES[s.facts.adapter_precision]
    cast = s.e + width if width > s.e else 0.0
    dropped = 2.0 * width + 1.0 if workload.lora.dropout > 0.0 else 0.0
    scaled = 2.0 * width * adapter.rows
    forward = (cast + dropped) * matrix.inputs + scaled
    return forward, forward + cast * adapter.rows


def residual_bytes(case: TrainingCase, c: Candidates, s: Shapes) -> Floats:
    """Return the bytes per element of the residual stream, which activation checkpoints save."""
    if case.workload.lora is None or not s.facts.wide_residual_with_adapters:
        return s.e
    return where((c.zero_stage >= 3) & (c.data_parallel_size > 1), 4.0, s.e)


def wide_gathers(case: TrainingCase, candidates: Candidates) -> int:
    """Return the number of all-gathered inputs per layer that stay in 16 bits because an adapter
    needs them.

    Megatron Bridge's adapters request return_layernorm_output_gathered. Transformer Engine then
    gathers the input before quantising it.
    """
    assert case.workload.lora is not None
    columns = (
        matrix for matrix in rank_matrices(case.model, candidates) if matrix.division == "column"
    )
    gathered = (
        matrix
        for matrix in columns
        if not matrix.routed and matrix.inputs == case.model.hidden_size
    )
    return sum(any(adapters(matrix, case.workload.lora)) for matrix in gathered)


def adapter_tensor_seconds(
    *, case: TrainingCase, candidates: Candidates, s: Shapes
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds of the adapters' tensor-parallel collectives, which do
    not overlap with compute.

    Excludes routed experts. A's output and its gradient are gathered (column-parallel) or
    all-reduced (row-parallel). For a row-parallel matrix, B's output is gathered too, and with
    sequence parallelism also the gradient of that output. The adapters reuse the base layer's
    gathered inputs.
    """
    workload = case.workload
    assert workload.lora is not None
    sent_bytes = s.tokens * s.e * (s.t - 1.0) / s.t
    forward: Floats = 0.0
    backward: Floats = 0.0
    for matrix in rank_matrices(case.model, candidates):
        for one in adapters(matrix, workload.lora) if not matrix.routed else ():
            inner = s.tensor.seconds(
                sent_bytes * one.rank * (2.0 if matrix.division == "row" else 1.0)
            )
            outer = s.tensor.seconds(sent_bytes * one.rows) if matrix.division == "row" else 0.0
            forward, backward = forward + inner + outer, backward + inner + outer * s.sharded
    return forward, backward
