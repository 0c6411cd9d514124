"""Bytes that Megatron Core's transformer layers keep for their backward pass: a program, because it
patches torch.

Nothing is computed: under fake tensors and a fake process group one rank of a model of any size
runs its forward pass, and the storages that autograd keeps alive are counted. For each line of
standard input, a case as JSON, it prints a list of one number: bytes a layer, parameters and the
layer's own input left out, its output (the next one's input) counted.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hp_tool.cluster.profiler import cpu_shim

cpu_shim.install()
# A GPU's dropout keeps a mask of one byte an element; the CPU's keeps a scaled one in the tensor's
# own precision.
functional.dropout = lambda x, p=0.5, training=True, inplace=False: (
    torch.native_dropout(x, p, True)[0] if p and training else x
)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer import (  # noqa: E402
    MegatronModule,
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules  # noqa: E402

from tests.cost.megatron_mixers import MambaLayers, delta_mixer  # noqa: E402

LAYERS = 2
# Latent attention asks every layer whether it is Transformer Engine's.
multi_latent_attention.TELinear = type("TELinear", (), {})
# Random states are real tensors, which fake ones cannot be compared with; nothing random is drawn
# here.
random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
random._get_all_rng_states = lambda: ()
# Checkpoints that discard their outputs ask Transformer Engine about fp8, which is off here.
random.FP8GlobalStateManager = SimpleNamespace(
    is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
)
moe_utils.te_general_gemm = None  # where Transformer Engine is missing, so is the name
random.activation_recompute_forward = lambda **_: contextlib.nullcontext()


class FusedAttention(MegatronModule):
    """What a flash-attention kernel keeps: its inputs, its output and the scores' log-sum-exp in
    fp32.

    Values whose strides are not the keys' are copied first (Transformer Engine, get_qkv_layout).
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        return _Flash.apply(
            query, key, value if value.stride() == key.stride() else value.contiguous()
        )


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        sequence, batch, heads, _ = query.shape
        context = query.new_empty(sequence, batch, heads * value.shape[-1])
        ctx.save_for_backward(
            query, key, value, context, query.new_empty(batch, heads, sequence, dtype=torch.float32)
        )
        return context


class FusedNorm(torch.nn.Module):
    """What a fused norm keeps: its input, and the statistics of each token in fp32 (mean too for
    layernorm).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.statistics = 1 if config.normalization == "RMSNorm" else 2
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(x, self.weight, self.statistics)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, statistics: int) -> torch.Tensor:
        each = [x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(statistics)]
        ctx.save_for_backward(x, weight, *each)
        return torch.empty_like(x)


class EvenExperts(SequentialMLP):
    """Experts that all get as many tokens: how many is data, which fake tensors do not have."""

    def forward(self, tokens: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
        even = SimpleNamespace(
            tolist=lambda: [len(tokens) // self.num_local_experts] * self.num_local_experts
        )
        return super().forward(tokens, even, probs)


class Storages(TorchDispatchMode):
    """Weak references to every storage that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage)
        return result

    def alive_bytes(self, *, without: set[int]) -> int:
        """Of all but the given storages; views of the weights are among those seen. A discarded
        output has no bytes left.
        """
        gc.collect()
        alive = (
            torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            for key, ref in self.seen.items()
            if key not in without
        )
        return sum(storage.nbytes() for storage in alive if storage is not None)


def kept_bytes(case: dict[str, Any]) -> float:
    """Bytes a layer of one case."""
    t, sharded, ep = (
        case["tensor_parallel_size"],
        case["sequence_parallel"],
        case.get("expert_parallel_size", 1),
    )
    etp = case.get("expert_tensor_parallel_size", 1)
    distributed.init_process_group("fake", rank=0, world_size=max(t, etp) * ep, store=FakeStore())
    parallel_state.initialize_model_parallel(
        t,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    random.model_parallel_cuda_manual_seed(0)
    latent = case.get("latent", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=LAYERS,
        perform_initialization=False,
        tensor_model_parallel_size=t,
        sequence_parallel=sharded,
        bf16=True,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        params_dtype=torch.bfloat16,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        activation_func=functional.silu
        if case["config"].get("gated_linear_unit")
        else functional.gelu,
        **case["config"],
    )
    encoder_length = case.get("encoder_length")
    if encoder_length:
        layer = decoder_model_with_local_spec()
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            normalization=config.normalization,
            multi_latent_attention=latent,
            qk_layernorm=latent or case.get("query_key_norm", False),
        )
    if config.num_moe_experts:
        layer.submodules.mlp.submodules.experts.module = EvenExperts
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = FusedNorm
    if latent:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.kv_layernorm = FusedNorm
    elif case.get("query_key_norm"):
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = FusedNorm
    if case["attention"] == "flash":
        layer.submodules.self_attention.submodules.core_attention = FusedAttention
    if encoder_length:
        layer.submodules.pre_cross_attn_layernorm = FusedNorm
        if case["attention"] == "flash":
            layer.submodules.cross_attention.submodules.core_attention = FusedAttention
    sequence, batch = case["sequence_length"], case["micro_batch_size"]
    mixer = case.get("mixer")
    if mixer == "gated_delta":
        layer.submodules.self_attention = delta_mixer(FusedNorm)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if mixer == "mamba2":
            block: torch.nn.Module = MambaLayers(config, FusedNorm, LAYERS)
        else:
            block = TransformerBlock(
                config,
                TransformerBlockSubmodules(layer_specs=[layer] * LAYERS),
                post_layer_norm=False,
            )
        rows = sequence // t if sharded else sequence
        hidden = torch.empty(
            rows, batch, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
        )
        mask = torch.empty(1, 1, sequence, sequence, dtype=torch.bool)
        angles = torch.empty(sequence, 1, 1, config.kv_channels) if case["rotary"] else None
        read: dict[str, Any] = {}
        if encoder_length:
            rows = encoder_length // t if sharded else encoder_length
            read["context"] = torch.empty(
                rows, batch, config.hidden_size, dtype=torch.bfloat16, requires_grad=True
            )
            read["context_mask"] = torch.empty(1, 1, sequence, encoder_length, dtype=torch.bool)
        storages = Storages()
        with storages:
            output = block(hidden, mask, rotary_pos_emb=angles, **read)
        parallel_state.get_global_memory_buffer().buffer.clear()
        weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
        given = {tensor.untyped_storage()._cdata for tensor in (hidden, mask, *read.values())}
        kept = storages.alive_bytes(without=weights | given)
        del output
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    return kept / LAYERS


if __name__ == "__main__":
    gc.freeze()  # what was imported stays: looking through it took nine tenths of the time
    for line in sys.stdin:
        print(json.dumps([kept_bytes(json.loads(line))]), flush=True)
