"""LoRA: parameters as published, saved tensors as torch's autograd keeps them, and nothing paid for
frozen weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import model
from hp_tool.cost.block import NO_TIME, Shapes, shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.flops import token_flops
from hp_tool.cost.layer import layer_bytes
from hp_tool.cost.lora import (
    adapter_tensor_seconds,
    layer_adapter_parameters,
    token_adapter_parameters,
    trained_parameters,
    with_adapter_time,
    with_named_targets,
)
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import LoraSpec, TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from tests.cost.cases import NODE, Problem, case_of, columns, problems
from tests.cost.test_primitives import plain_profile
from tests.torch_or_skip import torch_or_skip

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
HUGGING_FACE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = [
    None,
    ALL,
    HUGGING_FACE,
    ("q_proj", "v_proj"),
    ("down_proj",),
    ("linear_proj", "up_proj"),
]


@pytest.mark.parametrize(
    ("name", "rank", "targets", "published"),
    [
        ("gpt3-175b", 1, ("q_proj", "v_proj"), 4.7e6),  # arXiv 2106.09685 table 4
        ("gpt3-175b", 8, ("q_proj", "v_proj"), 37.7e6),
        ("llama-2-7b", 8, ("q_proj", "v_proj"), 4_194_304),  # what PEFT prints
        ("llama-3-8b", 16, HUGGING_FACE, 41_943_040),
        (
            "deepseek-v2-lite",
            16,
            ("q_proj",),
            27 * 16 * (2048 + 16 * 192),
        ),  # latent attention with whole queries
    ],
)
def test_adapters_have_the_published_number_of_parameters(
    name: str, rank: int, targets: tuple[str, ...], published: float
) -> None:
    found = token_adapter_parameters(model(name), LoraSpec(rank=rank, target_modules=targets))
    assert (
        found == published
        if isinstance(published, int)
        else found == pytest.approx(published, rel=0.01)
    )


@pytest.mark.parametrize("targets", [None, ALL])
def test_torch_wraps_the_matrices_that_megatron_core_fuses(targets: tuple[str, ...] | None) -> None:
    """Left open, the adapters are those of PEFT's seven matrices; a query's own names stay."""
    lora = LoraSpec(rank=16, target_modules=targets)
    for framework, open_names in (("torch-fsdp", HUGGING_FACE), ("megatron-core", None)):
        workload = TrainingWorkload(
            sequence_length=4096, global_batch_size=8, framework=framework, task="lora", lora=lora
        )
        named = with_named_targets(workload, model=model("llama-3-8b")).lora
        assert named is not None and set(named.target_modules or ()) == set(
            targets or open_names or ()
        )


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt3-175b"])
def test_tensor_parallel_ranks_share_adapters_evenly(
    name: str, targets: tuple[str, ...] | None
) -> None:
    """Of a fused matrix that is whole there: key and value heads must divide."""
    targets = None if name == "gpt3-175b" and targets and "gate_proj" in targets else targets
    lora = LoraSpec(rank=16, target_modules=targets)
    sizes = [
        t
        * layer_adapter_parameters(
            model(name),
            lora,
            Candidates.alone(ParallelConfig(tensor_parallel_size=t)),
            routed=False,
        )
        for t in (1, 2, 8)
    ]
    assert sizes == pytest.approx([sizes[0]] * 3)


def autograd_saves(shape: ModelSpec, *, tokens: int, trained: bool, lora: LoraSpec | None) -> int:
    """Bytes of the distinct storages that torch's autograd saves of one Llama-like layer,
    parameters left out.
    """
    torch = torch_or_skip()
    bf16, h, d = torch.bfloat16, shape.hidden_size, shape.head_size
    heads, keys, width = shape.num_attention_heads * d, shape.kv_heads * d, shape.ffn_size
    held: dict[int, int] = {}
    keep: list[Any] = []
    weights: set[int] = set()

    class Keeps(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """A fused kernel: keeps the given tensors and answers with a fresh one."""

        @staticmethod
        def forward(ctx: Any, size: int, *inputs: Any) -> Any:
            output = inputs[0].new_empty(len(inputs[0]), size)
            extra = [
                output,
                inputs[0].new_empty(tokens, shape.num_attention_heads, dtype=torch.float32),
            ]
            ctx.save_for_backward(*inputs, *(extra if len(inputs) == 3 else ()))
            return output

    class Permuted(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Copies of tokens in the order of their experts."""

        @staticmethod
        def forward(ctx: Any, x: Any, copies: int) -> Any:
            return x.new_empty(copies * len(x), x.shape[1])

    def parameters(rows: int, columns: int, *, trains: bool) -> Any:
        keep.append(torch.empty(rows, columns, dtype=bf16, requires_grad=trains))
        weights.add(keep[-1].data_ptr())
        return keep[-1]

    def linear(x: Any, parts: dict[str, int], name: str) -> Any:
        y = torch.nn.functional.linear(
            x, parameters(sum(parts.values()), x.shape[1], trains=trained)
        )
        named = (
            {name: sum(parts.values())}
            if lora and (lora.target_modules is None or name in lora.target_modules)
            else {
                part: rows
                for part, rows in parts.items()
                if lora and part in (lora.target_modules or ())
            }
        )
        for rows in named.values():
            inner = torch.nn.functional.linear(x, parameters(lora.rank, x.shape[1], trains=True))  # type: ignore[union-attr]
            outer = (
                torch.nn.functional.linear(inner, parameters(rows, lora.rank, trains=True)) * 2.0
            )  # type: ignore[union-attr]
            y = y + (
                outer
                if rows == y.shape[1]
                else torch.nn.functional.pad(outer, (0, y.shape[1] - rows))
            )
        return y

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        keep.append(storage)
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.empty(tokens, h, dtype=bf16, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        qkv = linear(
            Keeps.apply(h, x), {"q_proj": heads, "k_proj": keys, "v_proj": keys}, "linear_qkv"
        )
        core = Keeps.apply(heads, *qkv.split([heads, keys, keys], dim=1))
        x = x + linear(core, {"o_proj": h}, "linear_proj")
        copies = (
            shape.num_experts_per_tok or 1
        )  # a token's, which its experts' ranks hold one after the other
        entering = Keeps.apply(h, x) if copies == 1 else Permuted.apply(Keeps.apply(h, x), copies)
        gated = linear(entering, {"gate_proj": width, "up_proj": width}, "linear_fc1")
        linear(Keeps.apply(width, gated), {"down_proj": h}, "linear_fc2")
    return sum(held.values())


SHAPE = ModelSpec(
    num_hidden_layers=1,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=128,
    gated_mlp=True,
    normalization="rmsnorm",
    position_embedding="none",
)


@pytest.mark.components
@pytest.mark.parametrize(
    "targets",
    [None, ("linear_qkv",), ("q_proj", "v_proj"), ("down_proj",), ("linear_proj", "up_proj")],
)
@pytest.mark.parametrize("rank", [4, 16])
def test_saved_bytes_are_those_of_autograd(targets: tuple[str, ...] | None, rank: int) -> None:
    lora = LoraSpec(rank=rank, target_modules=targets)
    workload = TrainingWorkload(sequence_length=32, global_batch_size=1, task="lora", lora=lora)
    formula = layer_bytes(
        case=case_of(model=SHAPE, workload=workload), candidates=Candidates.alone(ParallelConfig())
    ).saved
    assert formula == autograd_saves(SHAPE, tokens=32, trained=False, lora=lora)


@pytest.mark.components
@pytest.mark.parametrize(
    "targets", [None, ("linear_fc1",), ("down_proj",), ("up_proj", "linear_fc2"), ("linear_qkv",)]
)
def test_adapters_of_experts_keep_what_autograd_keeps_of_every_copy_of_a_token(
    targets: tuple[str, ...] | None,
) -> None:
    """Beside what routing keeps, which adapters do not change."""
    sparse = replace(
        SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=SHAPE.intermediate_size
    )

    def saved(lora: LoraSpec) -> tuple[float, float]:
        workload = TrainingWorkload(
            sequence_length=32, global_batch_size=1, task="lora", lora=lora, expert_imbalance=1.0
        )
        case = case_of(model=sparse, workload=workload)
        formula = layer_bytes(case=case, candidates=Candidates.alone(ParallelConfig())).saved
        return float(formula), float(autograd_saves(sparse, tokens=32, trained=False, lora=lora))

    alone, found = (
        saved(LoraSpec(rank=4, target_modules=each)) for each in (("linear_proj",), targets)
    )
    assert found[0] - alone[0] == found[1] - alone[1]


@pytest.mark.components
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_routed_experts_of_a_rank_share_an_adapter(ranks: int) -> None:
    """Against modules: a dense MLP, then two layers with a pair for each rank's experts and one for
    the shared experts.
    """
    torch = torch_or_skip()
    shape = replace(
        SHAPE,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        num_shared_experts=2,
        first_k_dense_replace=1,
    )

    def pair(inputs: int, outputs: int) -> list[Any]:
        return [torch.nn.Linear(inputs, 4, bias=False), torch.nn.Linear(4, outputs, bias=False)]

    modules = [*pair(64, 2 * 96), *pair(96, 64)]
    for _ in range(2):
        modules += [*pair(64, 2 * 2 * 48), *pair(2 * 48, 64)]
        modules += [linear for _ in range(ranks) for linear in (*pair(64, 2 * 48), *pair(48, 64))]
    counted = sum(weight.numel() for module in modules for weight in module.parameters())
    config = ParallelConfig(expert_parallel_size=ranks, data_parallel_size=ranks)
    assert (
        trained_parameters(
            shape, LoraSpec(rank=4, target_modules=("linear_fc1", "linear_fc2")), config
        )
        == counted
    )


@pytest.mark.components
def test_saved_bytes_of_full_training_are_those_of_autograd() -> None:
    workload = TrainingWorkload(sequence_length=32, global_batch_size=1)
    formula = layer_bytes(
        case=case_of(model=SHAPE, workload=workload), candidates=Candidates.alone(ParallelConfig())
    ).saved
    assert formula == autograd_saves(SHAPE, tokens=32, trained=True, lora=None)


def adapted(problem: Problem, rank: int = 16, targets: tuple[str, ...] | None = None) -> Problem:
    lora = LoraSpec(rank=rank, target_modules=targets)
    return replace(problem, workload=replace(problem.workload, task="lora", lora=lora))


@given(problems(), st.sampled_from((0, 1, 2, 3)))
def test_adapters_cost_less_than_training_everything(
    case: tuple[Problem, ParallelConfig], zero: int
) -> None:
    problem, config = case
    config = replace(config, zero_stage=zero)
    # Nothing hidden: with less to compute, less would be. And no waits for the slowest GPU, which
    # grow with the adapters' own compute.
    framework = replace(
        problem.profile.framework,
        data_parallel_overlap=0.0,
        all_reduce_overlap=None,
        device_log_sd=0.0,
        micro_batch_log_sd=0.0,
    )
    problem = replace(problem, profile=replace(problem.profile, framework=framework))
    full, lora = (
        problem.costs([config]),
        adapted(problem, rank=1, targets=("linear_proj",)).costs([config]),
    )
    for name in ("gradients", "optimizer"):
        assert lora.memory_parts[name][0] <= full.memory_parts[name][0]
    assert lora.parts["optimizer"][0] < full.parts["optimizer"][0]
    assert lora.parts["data_parallel"][0] <= full.parts["data_parallel"][0] * (1 + 1e-12)


@given(problems(), st.sampled_from((1, 8)), st.sampled_from((16, 64)))
def test_a_larger_rank_never_costs_less(
    case: tuple[Problem, ParallelConfig], low: int, high: int
) -> None:
    problem, config = case
    small, large = (columns(adapted(problem, rank=rank).costs([config])) for rank in (low, high))
    for name in (
        "memory_total_bytes",
        "layer_activations_bytes",
        "memory.optimizer",
        "time.compute",
        "step_s",
    ):
        assert large[name][0] >= small[name][0], name


@given(problems())
def test_parts_sum_and_one_alone_is_a_batch_of_one(case: tuple[Problem, ParallelConfig]) -> None:
    problem, config = case
    costs = adapted(problem).costs([config])
    np.testing.assert_allclose(sum(costs.parts.values()), costs.step_s, rtol=1e-12)
    alone = columns(adapted(problem).costs(Candidates.alone(config)))
    for name, column in columns(costs).items():
        assert alone[name] == column[0], name


QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 32,
        "task": "lora",
        "lora": {"rank": 16},
    },
    "parallel": {"tensor_parallel_size": 8, "recompute": "full"},
}


def test_a_model_too_large_to_train_whole_is_fine_tuned_on_one_node() -> None:
    """18 bytes a parameter of 70B do not fit 8 x 80 GB; 2 bytes and adapters do. FLOPs: two thirds
    of 6 P, and attention.
    """
    lora, whole = (
        estimate(query=parse_query(QUERY)),
        estimate(
            query=parse_query(
                QUERY | {"training": {"sequence_length": 4096, "global_batch_size": 32}}
            )
        ),
    )
    assert lora.feasible and not whole.feasible
    assert (
        lora.memory is not None and lora.time is not None and lora.model_tflops_per_gpu is not None
    )
    assert lora.tokens_per_second_per_gpu is not None
    shape = model("llama-3-70b")
    r = token_adapter_parameters(shape, LoraSpec(rank=16))
    assert lora.memory.weights_bytes == pytest.approx(
        2 * (total_parameters(shape) + r) / 8, rel=0.001
    )
    assert lora.memory.gradients_bytes == pytest.approx(4 * r / 8, rel=1e-9)
    attention = 3 * 80 * 2 * 4096 * 8192 * 2
    matrices = total_parameters(shape) - 128256 * 8192 - 161 * 8192
    expected = (4 * matrices + 6 * r + attention) * lora.tokens_per_second_per_gpu / 1e12
    assert lora.model_tflops_per_gpu == pytest.approx(expected, rel=1e-9)
    assert whole.time is not None
    assert lora.time.parts_s["compute"] < whole.time.parts_s["compute"]
    assert "no weight gradients" in str(lora.provenance["flops_convention"])


@pytest.mark.parametrize(
    ("name", "tflops", "tokens_per_s"),
    [("llama-2-7b", 663, 24_824), ("llama-2-13b", 757, 14_629), ("llama-2-70b", 722, 2_621)],
)
def test_model_flops_are_counted_as_published(
    name: str, tflops: float, tokens_per_s: float
) -> None:
    """NeMo 24.12's performance summary, LoRA on H100: FLOPs a token follow from its two columns.
    Its packed sequences are short (SQuAD), so that attention counts little; adapters on queries,
    keys and values.
    """
    lora = LoraSpec(rank=32, target_modules=("linear_qkv",))
    flops = token_flops(
        model(name),
        TrainingWorkload(sequence_length=4096, global_batch_size=32, task="lora", lora=lora),
    )
    assert flops.model - 3 * flops.attention == pytest.approx(
        tflops * 1e12 / tokens_per_s, rel=0.02
    )


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-32b"])
def test_experts_and_latent_attention_have_adapters_too(name: str) -> None:
    query = QUERY | {"model": name, "parallel": {"recompute": "full", "zero_stage": 3}}
    found = estimate(query=parse_query(query))
    assert found.memory is not None and found.time is not None
    assert 0 < found.memory.gradients_bytes < 0.05 * found.memory.weights_bytes * 8


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"task": "lora"}, "training.lora"),
        ({"lora": {"rank": 8}}, "training.lora"),
        ({"task": "lora", "lora": {"rank": 0}}, "training.lora.rank"),
        (
            {"task": "lora", "lora": {"rank": 8, "target_modules": ["linear_q_down_proj"]}},
            "training.lora.target_modules",
        ),
        (
            {"task": "lora", "lora": {"rank": 8, "target_modules": []}},
            "training.lora.target_modules",
        ),
    ],
)
def test_adapters_that_do_not_exist_are_refused(training: dict[str, Any], field: str) -> None:
    query = QUERY | {"training": {"sequence_length": 4096, "global_batch_size": 32} | training}
    with pytest.raises(InputError) as caught:
        estimate(query=parse_query(query))
    assert caught.value.field == field


def test_fine_tuning_of_all_weights_costs_what_pretraining_does() -> None:
    plain = {"sequence_length": 4096, "global_batch_size": 32}
    sft, pretrain = (
        estimate(query=parse_query(QUERY | {"training": plain | {"task": task}}))
        for task in ("sft", "pretrain")
    )
    assert sft.time == pretrain.time and sft.memory == pretrain.memory


GATED = ModelSpec(
    num_hidden_layers=1,
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=2048,
    vocab_size=1024,
    gated_mlp=True,
    normalization="rmsnorm",
)
"""Matrices (outputs x inputs) of one of two tensor-parallel ranks: linear_qkv 768 x 1,024,
linear_proj 1,024 x 512, linear_fc1 2,048 x 1,024, linear_fc2 1,024 x 1,024; 4,456,448 entries in
all.
"""


def plain_case(**changes: Any) -> tuple[Problem, Candidates, Shapes]:
    """4,096 tokens on two ranks of H100 with adapters of rank 16 on linear_qkv and linear_fc1 (by
    columns) and on linear_proj (by rows).

    Half of every bandwidth; launches and messages take 1 us.
    """
    plain = plain_profile(NODE)
    gpu = replace(plain.gpu, memory_fraction=0.5, kernel_overhead_s=1e-6)
    lora = LoraSpec(rank=16, target_modules=("linear_qkv", "linear_proj", "linear_fc1"))
    sharded = changes.pop("sequence_parallel", True)
    workload = TrainingWorkload(
        sequence_length=4096, global_batch_size=8, task="lora", lora=lora, **changes
    )
    framework = replace(plain.framework, elementwise_traffic_factor=1.0)
    problem = Problem(
        model=GATED,
        cluster=NODE,
        workload=workload,
        profile=replace(plain, gpu=gpu, framework=framework),
    )
    candidate = Candidates.alone(ParallelConfig(tensor_parallel_size=2, sequence_parallel=sharded))
    return problem, candidate, shapes(case=problem, candidates=candidate)


@pytest.mark.parametrize(
    ("stored", "widened_bytes", "kernels"),
    [(None, 0.0, 0), ("nf4", 4_456_448 * (0.515869140625 + 2), 4)],
)
def test_adapters_add_both_paths_and_widen_frozen_matrices_in_both_passes(
    stored: Any, widened_bytes: float, kernels: int
) -> None:
    """The sum of both paths moves three tensors of 2 bytes per number: outputs forward (768 + 1,024
    + 2,048), inputs backward (1,024 + 512 + 1,024), with two kernels for each adapter.

    nf4 takes 1/2 byte, a byte per 64 and 4 bytes per 64 x 256: 0.515869140625. One kernel reads
    each frozen matrix in nf4 and writes it in 2 bytes, forward and again backward.
    """
    case, candidate, s = plain_case(frozen_precision=stored)
    found = with_adapter_time(NO_TIME, case=case, candidates=candidate, s=s)
    for seconds, width in (
        (found.elementwise, 768 + 1024 + 2048),
        (found.elementwise_backward, 1024 + 512 + 1024),
    ):
        moved = 3 * 2 * 4096 * width + widened_bytes
        assert seconds == pytest.approx(moved / (0.5 * 3.35e12) + (6 + kernels) * 1e-6)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_collectives_of_adapters(sequence_parallel: bool) -> None:
    """Half of 4,096 tokens x 2 bytes leave a rank for each number of a token: 4,096 bytes.

    A's 16 outputs are gathered by columns (16 x 4,096 bytes, two adapters) and all-reduced, twice
    that, by rows (one adapter). B's 1,024 outputs of linear_proj are gathered, and with sequence
    parallelism so is their gradient.
    """
    case, candidate, s = plain_case(sequence_parallel=sequence_parallel)
    forward, backward = adapter_tensor_seconds(case=case, candidates=candidate, s=s)
    inner, outer = (
        3 * 1e-6 + 4096 * (16 + 16 + 2 * 16) / (0.5 * 450e9),
        1e-6 + 4096 * 1024 / (0.5 * 450e9),
    )
    assert forward == pytest.approx(inner + outer)
    assert backward == pytest.approx(inner + (outer if sequence_parallel else 0.0))
