"""vLLM's server, both ways: options as in vllm/engine/arg_utils.py."""

import json

from hp_tool.errors import UnsupportedError
from hp_tool.formats.engine_commands import reader
from hp_tool.formats.engines import above_one, command, model_word, number_formats, option_values, travels_by_deepep
from hp_tool.formats.registry import Format, register
from hp_tool.formats.setup import ServingSetup, Values
from hp_tool.formats.signs import Sign, words

VERSION = "0.12.0"


def start(setup: ServingSetup) -> tuple[str, Values]:
    """vllm serve, options as in vllm/engine/arg_utils.py."""
    c, w = setup.parallel, setup.workload
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    if c.expert_parallel_size not in (1, ranks):
        raise UnsupportedError(
            f"vllm divides experts over all {ranks} ranks of a stage or over none; "
            f"set expert_parallel_size to {ranks} or 1, or choose sglang",
            field="parallel.expert_parallel_size",
        )
    return f"vllm serve {model_word(setup)}", {
        "--tensor-parallel-size": c.tensor_parallel_size,
        "--pipeline-parallel-size": c.pipeline_parallel_size,
        "--max-num-seqs": c.max_num_seqs,
        "--max-num-batched-tokens": c.max_num_batched_tokens,
        "--max-model-len": setup.longest,
        "--gpu-memory-utilization": setup.memory_fraction,
        "--data-parallel-size": above_one(c.attention_data_parallel_size),
        "--enable-expert-parallel": c.expert_parallel_size > 1,
        "--enable-eplb": c.redundant_experts > 0,
        "--eplb-config": json.dumps({"num_redundant_experts": c.redundant_experts}) if c.redundant_experts else None,
        "--all2all-backend": "deepep_low_latency" if travels_by_deepep(setup) else None,
        "--enable-dbo": w.two_batch_overlap is True,
        **number_formats(setup, engine="vllm", version=VERSION, cache={"fp8": "fp8"}),
    }


register(
    Format(
        name="vllm",
        kind="inference",
        place=0,
        signs=(
            Sign(
                of="script",
                rank=20,
                holds=words(r"(?m)(?<![\w/.-])vllm\s+serve\b|vllm/vllm-openai\b|vllm\.entrypoints\.(openai\.)?api_server"),
            ),
        ),
        read=reader("vllm"),
        write=lambda setup: command(setup, tool=f"vllm {VERSION}", start=start),
        options=lambda setup: option_values(start(setup)[1]),
        usual_of="vllm",
        reads="`vllm serve`: a query of kind inference",
        writes="the command of one replica",
        checked="options and values recorded from the engine's own parser; read back by `import`",
    )
)
