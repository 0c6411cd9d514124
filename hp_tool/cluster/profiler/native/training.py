"""Shard a model with plain torch, then run optimizer steps.

The model is split into pipeline stages. Its matrices are split over a tensor-parallel mesh, and its
parameters are sharded by FSDP, with recomputation. Layers are materialized, filled and sharded one
at a time, so no rank ever stores the unsharded model.
"""

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from hp_tool.cluster.profiler import steps
from hp_tool.cluster.profiler.native.model import Decoder
from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.parallel import recompute_name
from hp_tool.domain.pipeline_layout import chunk_layers

_LEARNING_RATE = 1e-4
_STD = 0.02
_aten = torch.ops.aten
_MATMUL = _aten.mm.default
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def train(request: ProfileRequest, *, device: torch.device) -> steps.Steps:
    """Build the model and run the steps. Raise ArithmeticError if a loss is not finite."""
    mesh = make_mesh(request, device=device)
    stages = build_stages(request, mesh, device=device)
    parameters = [parameter for _, stage in stages for parameter in stage.parameters()]
    optimizers = {"adam": lambda: torch.optim.AdamW(parameters, lr=_LEARNING_RATE, foreach=True)}
    optimizers["sgd"] = lambda: torch.optim.SGD(
        parameters, lr=_LEARNING_RATE, momentum=0.9, foreach=True
    )
    optimizer = optimizers[request.training.optimizer]()
    loss_of = (
        _Pipeline(request, mesh, stages, device=device)
        if mesh["pp"].size() > 1
        else _SequentialMicroBatches(request, stages[0][1])
    )
    rows = _rows(request, mesh, device=device)

    def step() -> tuple[torch.Tensor | None, float]:
        optimizer.zero_grad()
        loss = loss_of(rows)
        norm = _clip(parameters, mesh, max_norm=1.0)
        optimizer.step()
        return loss, norm

    return steps.run(request, step, device=device)


class _SequentialMicroBatches:
    """Run micro-batches one by one. Gradients are reduced after each one, so they stay sharded."""

    def __init__(self, request: ProfileRequest, model: Decoder) -> None:
        self.size, self.model = request.parallel.micro_batch_size, model

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        pieces = rows.split(self.size)
        total = torch.zeros((), device=rows.device)
        for piece in pieces:
            loss = _loss(self.model(piece[:, :-1]), piece[:, 1:]) / len(pieces)
            loss.backward()
            total += loss.detach()
        return total


class _Pipeline:
    """Run a torch pipeline schedule over this rank's stages.

    Only ranks of the last stage have the loss.
    """

    def __init__(
        self,
        request: ProfileRequest,
        mesh: DeviceMesh,
        stages: list[tuple[int, Decoder]],
        *,
        device: torch.device,
    ) -> None:
        parallel = request.parallel
        group, p = mesh["pp"].get_group(), parallel.pipeline_parallel_size
        total = p * parallel.virtual_pipeline_parallel_size
        pipeline_stages = [
            PipelineStage(model, number, total, device, group=group) for number, model in stages
        ]
        count = request.training.global_batch_size // (
            parallel.data_parallel_size * parallel.micro_batch_size
        )
        self.schedule: Any
        if len(pipeline_stages) > 1:
            self.schedule = ScheduleInterleaved1F1B(
                pipeline_stages, n_microbatches=count, loss_fn=_loss
            )
        else:
            self.schedule = Schedule1F1B(pipeline_stages[0], n_microbatches=count, loss_fn=_loss)
        self.first, self.last = stages[0][0] == 0, stages[-1][0] == total - 1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        targets = {"target": rows[:, 1:].contiguous(), "losses": losses} if self.last else {}
        self.schedule.step(*([rows[:, :-1].contiguous()] if self.first else []), **targets)
        return torch.stack(losses).mean().detach() if self.last else None


@torch.no_grad()
def _clip(parameters: list[torch.nn.Parameter], mesh: DeviceMesh, *, max_norm: float) -> float:
    """Clip the gradients to a norm of at most `max_norm`. Return the norm before clipping.

    Meshes are handled separately, because an operation cannot combine tensors of different meshes.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh].append(parameter.grad)
    squares = [
        torch.nn.utils.get_total_norm(gradients).full_tensor() ** 2
        for gradients in by_mesh.values()
    ]
    square = torch.stack(squares).sum()
    if mesh["pp"].size() > 1:
        distributed.all_reduce(square, group=mesh["pp"].get_group())
    norm = square.sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in by_mesh.values():
        torch._foreach_mul_(gradients, factor)
    return float(norm)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _rows(request: ProfileRequest, mesh: DeviceMesh, *, device: torch.device) -> torch.Tensor:
    d = request.parallel.data_parallel_size
    rank = (
        mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    )
    mine = range(rank, request.training.global_batch_size, d)
    return torch.stack([steps.sample(request, number) for number in mine]).to(device)


def make_mesh(request: ProfileRequest, *, device: torch.device) -> DeviceMesh:
    """Create the device mesh.

    Dimensions from outermost to innermost: pipeline, replicas, shards, TP.
    """
    parallel = request.parallel
    shards = parallel.data_parallel_shard_size or parallel.data_parallel_size
    replicas = parallel.data_parallel_size // shards
    sizes = (parallel.pipeline_parallel_size, replicas, shards, parallel.tensor_parallel_size)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))


def build_stages(
    request: ProfileRequest, mesh: DeviceMesh, *, device: torch.device
) -> list[tuple[int, Decoder]]:
    """Build this rank's stages as (stage number, model) pairs.

    Of the p v stages (p pipeline ranks with v stages each), a rank has every p-th.
    """
    parallel, model = request.parallel, request.model
    p = parallel.pipeline_parallel_size
    counts = chunk_layers(
        num_layers=model.num_hidden_layers, stages=p, chunks=parallel.virtual_pipeline_parallel_size
    )
    stages = []
    for number in range(mesh["pp"].get_local_rank(), len(counts), p):
        first_layer = sum(counts[:number])
        layers = range(first_layer, first_layer + counts[number])
        with torch.device("meta"):
            decoder = Decoder(
                model, layers=layers, sequence_length=request.training.sequence_length
            )
        _distribute(decoder, request, mesh, device=device)
        stages.append((number, decoder))
    return stages


def _distribute(
    decoder: Decoder, request: ProfileRequest, mesh: DeviceMesh, *, device: torch.device
) -> None:
    sequence_parallel = request.parallel.sequence_parallel
    if mesh["tp"].size() > 1:
        parallelize_module(
            decoder, mesh["tp"], _embedding_and_output_plan(decoder, sequence_parallel)
        )
        for layer in decoder.layers.values():
            parallelize_module(layer, mesh["tp"], _layer_plan(layer, sequence_parallel))
    options = _fsdp_options(request, mesh)
    for number, layer in decoder.layers.items():
        _materialise(layer, f"layers.{number}", request, device=device)
        _recompute(layer, request)
        fully_shard(layer, **options)
    _materialise(decoder, "", request, device=device, only=_embedding_and_output(decoder))
    fully_shard(decoder, **options)


def _recompute(layer: nn.Module, request: ProfileRequest) -> None:
    """Recompute a layer in the backward pass.

    `per_layer` stores only the layer's input. `per_op`, as in torchtitan, stores the outputs of
    attention, reduce-scatters and every second matmul.
    """
    name = recompute_name(request.parallel.recompute)
    if name == "none":
        return
    context = _per_op_contexts if name == "per_op" else noop_context_fn
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=context)


def _per_op_contexts() -> Any:
    """Return checkpoint contexts that count forward and recomputed matmuls separately."""
    counters = {False: itertools.count(), True: itertools.count()}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        second = operation == _MATMUL and next(counters[context.is_recompute]) % 2 == 1
        keep = operation in _KEPT or (operation == _MATMUL and not second)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _embedding_and_output(decoder: Decoder) -> list[nn.Module]:
    return [
        each
        for each in (decoder.embedding, decoder.positions, decoder.norm, decoder.output)
        if each is not None
    ]


def _embedding_and_output_plan(
    decoder: Decoder, sequence_parallel: bool
) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan of the embedding and output layer.

    The embedding is vocabulary-parallel, and the output layer gathers its logits.
    """
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if decoder.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)
    if decoder.positions is not None and sequence_parallel:
        plan["positions"] = PrepareModuleOutput(
            output_layouts=(Replicate(),), desired_output_layouts=(Shard(0),)
        )
    if decoder.output is not None:
        plan["output"] = ColwiseParallel(input_layouts=hidden, output_layouts=Replicate())
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
    return plan


def _layer_plan(layer: nn.Module, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan of a layer.

    Matrices are column- or row-parallel, and norms may be sequence-parallel.
    """
    out = RowwiseParallel(output_layouts=Shard(1) if sequence_parallel else Replicate())
    plan: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out": out, "mlp.up": ColwiseParallel(), "mlp.down": out}
    if layer.mlp.gate is not None:
        plan["mlp.gate"] = ColwiseParallel()
    if not isinstance(layer.attention.q_norm, nn.Identity):
        # [b, heads, s, d]: each rank has its own heads, so the norms' gradients must be summed over
        # ranks.
        plan |= {
            f"attention.{name}_norm": SequenceParallel(sequence_dim=1, use_local_output=True)
            for name in "qk"
        }
    if sequence_parallel:
        gathered = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": gathered,
            "mlp": gathered,
        }
    return plan


def _fsdp_options(request: ProfileRequest, mesh: DeviceMesh) -> dict[str, object]:
    half = request.training.precision == "bf16"
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy()
    )
    hybrid = mesh["replicate"].size() > 1
    return {
        "mesh": mesh["replicate", "shard"] if hybrid else mesh["shard"],
        "reshard_after_forward": request.parallel.zero_stage == 3,
        "mp_policy": policy,
    }


@torch.no_grad()
def _materialise(
    module: nn.Module,
    prefix: str,
    request: ProfileRequest,
    *,
    device: torch.device,
    only: Iterable[nn.Module] | None = None,
) -> None:
    """Allocate a module's parameters and fill them with values that depend only on their names."""
    for each in [module] if only is None else only:
        each.to_empty(device=device)
    if isinstance(module, Decoder):
        module.tie()  # Not earlier, because memory is allocated for each parameter of a module.
    for name, parameter in module.named_parameters(prefix=prefix):
        if parameter.device.type == "meta" or (only is not None and ".layers." in f".{name}"):
            continue
        full = _values(name, torch.Size(parameter.shape), request)
        if isinstance(parameter, DTensor):
            local = distribute_tensor(
                full.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(local.to_local())
        else:
            parameter.copy_(full)


def _values(name: str, shape: torch.Size, request: ProfileRequest) -> torch.Tensor:
    """Return initial values of a parameter.

    These are normal for matrices (scaled by depth for residual ones), 1 for norms and 0 for biases.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    residual = "attention.out" in name or "mlp.down" in name
    std = _STD / math.sqrt(2 * request.model.num_hidden_layers) if residual else _STD
    generator = torch.Generator().manual_seed(zlib.crc32(f"{request.seed}/{name}".encode()))
    return torch.randn(shape, generator=generator) * std
