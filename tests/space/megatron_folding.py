"""Which foldings of expert into attention parallelism Megatron Core accepts: a program, because its
state is global.

Under a fake process group its groups are made and one layer with experts is built, with fake
tensors. Reads a model, the number of ranks and a list of (experts, sizes of tensor, pipeline,
context, expert and expert tensor parallelism); prints the parameters of a rank's routed experts for
each, 0 if it is refused.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_tool.cluster.profiler import cpu_shim

cpu_shim.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402

random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def expert_parameters(
    model: dict[str, Any], experts: int, t: int, p: int, c: int, ep: int, etp: int
) -> int:
    """Parameters of the routed experts of a layer on one rank; 0 if groups of these sizes cannot be
    made, or hold no layer.
    """
    try:
        parallel_state.initialize_model_parallel(
            t,
            p,
            context_parallel_size=c,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            create_gloo_process_groups=False,
        )
        random.model_parallel_cuda_manual_seed(0)
        config = TransformerConfig(
            **model,
            num_moe_experts=experts,
            tensor_model_parallel_size=t,
            pipeline_model_parallel_size=p,
            pipeline_dtype=torch.float32,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            sequence_parallel=t > 1,
            add_bias_linear=False,
            moe_token_dispatcher_type="alltoall",
            perform_initialization=False,
        )
        layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        parts = layer.submodules
        # What needs Transformer Engine says nothing of groups: norms of sharded sequences,
        # attention between context ranks.
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        with FakeTensorMode(allow_non_fake_inputs=True):
            built = build_module(layer, config=config)
        return sum(
            weight.numel() for name, weight in built.named_parameters() if ".local_experts." in name
        )
    except (AssertionError, RuntimeError, ValueError):
        return 0
    finally:
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    model, ranks, cases = json.loads(sys.argv[1])
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    print(json.dumps([expert_parameters(model, *case) for case in cases]))
