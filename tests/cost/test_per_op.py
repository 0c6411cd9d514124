"""torchtitan's recomputation per operation, against torch's own selective checkpointing on a Llama
block.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates, recompute_codes, recompute_from_codes
from hp_tool.cost.layer import layer_bytes
from hp_tool.cost.mlp import mlp_bytes
from hp_tool.cost.recomputation import per_op_matrices
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.questions.training import config_query, estimate
from tests.cost.cases import case_of
from tests.torch_or_skip import torch_or_skip

SHAPES = [
    ModelSpec(
        num_hidden_layers=1,
        hidden_size=128,
        num_attention_heads=8,
        num_key_value_heads=kv,
        intermediate_size=320,
        vocab_size=256,
        gated_mlp=True,
        normalization="rmsnorm",
    )
    for kv in (8, 2)
]
TOKENS, BATCH = 64, 2


def block(torch: Any, model: ModelSpec) -> tuple[Any, Any]:
    """(forward function of torchtitan's Llama block, its input), rotation of heads by a product of
    the same shape.
    """
    nn, functional, d = torch.nn, torch.nn.functional, model.head_size
    h, f, q, kv = model.hidden_size, model.ffn_size, model.num_attention_heads, model.kv_heads
    wq, wk, wv, wo, w1, w2, w3 = (
        nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16)
        for n_in, n_out in (
            (h, q * d),
            (h, kv * d),
            (h, kv * d),
            (q * d, h),
            (h, f),
            (f, h),
            (h, f),
        )
    )
    norms = [nn.RMSNorm(h, dtype=torch.bfloat16) for _ in range(2)]
    angles = torch.randn(TOKENS, 1, d, dtype=torch.bfloat16)

    def forward(x: Any) -> Any:
        normed = norms[0](x)
        queries, keys, values = (w(normed).view(BATCH, TOKENS, -1, d) for w in (wq, wk, wv))
        queries, keys = queries * angles, keys * angles
        keys, values = (each.repeat_interleave(q // kv, dim=2) for each in (keys, values))
        heads = (each.transpose(1, 2) for each in (queries, keys, values))
        out = (
            functional.scaled_dot_product_attention(*heads, is_causal=True)
            .transpose(1, 2)
            .reshape(BATCH, TOKENS, -1)
        )
        x = x + wo(out)
        normed = norms[1](x)
        return x + w2(functional.silu(w1(normed)) * w3(normed))

    return forward, torch.randn(BATCH, TOKENS, h, dtype=torch.bfloat16, requires_grad=True)


def kept_bytes(model: ModelSpec) -> tuple[int, int]:
    """(bytes torch keeps of one block, matrix entries it multiplies again) under torchtitan's
    policy.
    """
    torch = torch_or_skip()
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    aten = torch.ops.aten
    saved = {aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
    again: list[int] = []
    count = 0

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += func == aten.mm.default
        if func in saved and not (func == aten.mm.default and count % 2 == 0):
            return CheckpointPolicy.MUST_SAVE
        if func == aten.mm.default and not ctx.is_recompute:
            again.append(args[1].numel())
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: list[Any] = []

    def context_fn() -> Any:
        contexts.extend(create_selective_checkpoint_contexts(policy))
        return tuple(contexts)

    forward, x = block(torch, model)
    checkpoint(forward, x, use_reentrant=False, context_fn=context_fn)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}

    def add(value: Any) -> None:
        if (
            isinstance(value, torch.Tensor) and value.numel() > 1
        ):  # not the state of the random numbers
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    torch.utils._pytree.tree_map(
        lambda held: add(getattr(held, "val", held)), list(contexts[0].storage.values())
    )
    return sum(storages.values()), sum(again)


@pytest.mark.components
@pytest.mark.parametrize("model", SHAPES, ids=("mha", "gqa"))
def test_bytes_and_matmuls_are_those_of_torch(model: ModelSpec) -> None:
    config = ParallelConfig(micro_batch_size=BATCH, recompute="per_op", zero_stage=3)
    workload = TrainingWorkload(
        sequence_length=TOKENS, global_batch_size=BATCH, framework="torch-fsdp"
    )
    found = layer_bytes(
        case=case_of(model=model, workload=workload), candidates=Candidates.alone(config)
    )
    assert (float(found.saved_selective), per_op_matrices(model)) == kept_bytes(model)


def asked(
    recompute: str, *, framework: str = "torch-fsdp", model: str = "llama-3-8b", **parallel: Any
) -> Estimate:
    query = Query(
        kind="training",
        model=model,
        cluster=ClusterQuery(gpu="a100-sxm-80gb", num_gpus=64),
        training=TrainingWorkload(sequence_length=8192, global_batch_size=64, framework=framework),
        parallel=ParallelQuery(recompute=recompute, micro_batch_size=1, **parallel),  # type: ignore[arg-type]
    )
    return estimate(query=query, with_fixes=False)


@pytest.mark.parametrize("t", [1, 4])
def test_it_lies_between_nothing_and_whole_layers(t: int) -> None:
    none, per_op, full = (
        asked(name, tensor_parallel_size=t) for name in ("none", "per_op", "per_layer")
    )
    for estimates in zip((none, per_op, full), (per_op, full, None), strict=True):
        more, less = estimates
        if less is None:
            continue
        assert (
            more.memory is not None
            and less.memory is not None
            and more.time is not None
            and less.time is not None
        )
        assert more.memory.layer_activations_bytes > less.memory.layer_activations_bytes
        assert more.time.parts_s["recompute"] < less.time.parts_s["recompute"]
        assert more.hfu is not None and less.hfu is not None


def test_it_is_a_name_again_in_the_answer() -> None:
    assert recompute_from_codes(*recompute_codes("per_op")) == "per_op"
    found = asked("per_op").parallel
    assert (
        found is not None
        and found.recompute == "per_op"
        and config_query(found).recompute == "per_op"
    )


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"framework": "megatron-core", "zero_stage": 1}, "megatron-core"),
        ({"model": "mixtral-8x7b"}, "MoE models"),
    ],
)
def test_where_it_is_not_known_it_is_refused(said: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        asked("per_op", **said)
    assert caught.value.field == "parallel.recompute" and word in str(caught.value)


@pytest.mark.components
def test_eager_mlps_keep_the_activated_gate() -> None:
    """Gate, up, the activated gate and their product, as torch saves them of silu(w1 x) * w3 x
    before w2.
    """
    torch = torch_or_skip()
    model = SHAPES[0]
    h, f = model.hidden_size, model.ffn_size
    w1, w3, w2 = (
        torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16)
        for sizes in ((h, f), (h, f), (f, h))
    )
    normed = torch.randn(BATCH * TOKENS, h, dtype=torch.bfloat16, requires_grad=True)
    known = {
        each.untyped_storage().data_ptr() for each in (normed, w1.weight, w2.weight, w3.weight)
    }
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = w2(torch.nn.functional.silu(w1(normed)) * w3(normed))
    workload = TrainingWorkload(
        sequence_length=TOKENS, global_batch_size=BATCH, framework="torch-fsdp"
    )
    case = case_of(model=model, workload=workload)
    alone = Candidates.alone(ParallelConfig(micro_batch_size=BATCH))
    assert output.requires_grad
    assert sum(kept.values()) == mlp_bytes(model=model, s=shapes(case=case, candidates=alone)).mlp
