"""A query and a run as arguments of tools: common keys with their meaning, and any other section as
it stands.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hp_tool.api import as_mapping
from service.api.estimates import ImportRequest

Section = dict[str, Any]


class QueryArgument(BaseModel):
    """What to train or serve, on what. A `query` of an earlier answer may be given back as it
    stands. Key names of each section are listed by the tool query_keys; a wrong one is refused with
    the nearest that exists. Example: {"model": "llama-3-70b", "gpu": "h100-sxm-80gb", "num_gpus":
    64, "sequence_length": 8192, "global_batch_size": 128, "parallel": {"tensor_parallel_size": 4,
    "pipeline_parallel_size": 4, "micro_batch_size": 1}}
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    model: str | Section | None = None
    """Catalogue name (tool catalogue), or a Hugging Face config.json's fields, or fields such as
    num_hidden_layers.
    """
    gpu: str | None = None
    """Catalogue name of the device, such as h100-sxm-80gb; or give `cluster`."""
    num_gpus: int | None = None
    """Devices in all."""
    sequence_length: int | None = None
    """Training: tokens per sequence."""
    global_batch_size: int | None = None
    """Training: sequences per optimizer step."""
    precision: str | None = None
    """Training: bf16 (default), fp16, fp8, mxfp8, nvfp4."""
    total_tokens: float | None = None
    """Training: adds days, GPU-hours and cost."""
    kind: Literal["training", "inference"] | None = None
    """Left out, inference where that section is given."""
    cluster: str | Section | list[str | Section] | None = None
    """A registered cluster's name, or {gpu, num_gpus, gpus_per_node, price_per_gpu_hour, ...}.
    recommend alone compares machines, by money and days: a list of these, or of the price list
    {node_type: priced, gpu: [...], num_gpus: [...]}.
    """
    training: Section | None = None
    """{framework: megatron-core | torch-fsdp | nanotron, task: pretrain | sft | lora, recipe,
    optimizer, overlap, ...}
    """
    inference: Section | None = None
    """Serving: {input_length, output_length, concurrency or request_rate_per_second, engine: vllm |
    sglang | trtllm, precision}
    """
    parallel: Section | None = None
    """{tensor_parallel_size, pipeline_parallel_size, virtual_pipeline_parallel_size,
    context_parallel_size, expert_parallel_size, micro_batch_size, sequence_parallel, recompute:
    none | selective | full, zero_stage}. estimate and why_not: one configuration. recommend and
    searches: a value or a list narrows that axis; leave it out to let it vary.
    """
    objective: str | None = None
    """throughput (default), days, cost, min_gpus; serving: throughput_per_gpu, ttft, tpot,
    min_gpus, cost.
    """
    constraints: Section | None = None
    """{max_days, max_cost, memory_headroom_fraction}"""
    targets: Section | None = None
    """Serving: {ttft_s, tpot_s, ttft_p99_s, ...}"""

    def mapping(self) -> dict[str, Any]:
        """The query as a mapping, short keys at their places."""
        return as_mapping(None, **self.model_dump(exclude_none=True))


class ImportArgument(ImportRequest):
    """Someone's run: its script or file as text; over standard streams `command`, `log` and `files`
    may also be paths.
    """

    gpu: str | None = None
    """Catalogue name of the device, which scripts seldom say."""

    def options(self) -> dict[str, Any]:
        """The request's fields beside the command."""
        options = self.model_dump(exclude={"command", "gpu"})
        if self.gpu is not None:
            options["overrides"] = {**self.overrides, "cluster.gpu": self.gpu}
        return options
