"""Arguments of the tools: queries with descriptions of common keys, and imported runs."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hp_tool.api import as_mapping
from service.api.estimates import ImportRequest

Section = dict[str, Any]


class QueryArgument(BaseModel):
    """What to train or serve, and on which hardware.

    You can pass back a `query` from an earlier answer. The tool query_keys lists the keys of each
    section; an unknown key returns the nearest one. Example: {"model": "llama-3-70b", "gpu":
    "h100-sxm-80gb", "num_gpus": 64, "sequence_length": 8192, "global_batch_size": 128, "parallel":
    {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "micro_batch_size": 1}}
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    model: str | Section | None = None
    """Catalogue name (tool catalogue), a Hugging Face config.json's fields, or fields such as
    num_hidden_layers.
    """
    gpu: str | None = None
    """Catalogue name of the device, such as h100-sxm-80gb; or give `cluster`."""
    num_gpus: int | None = None
    """Total number of devices."""
    sequence_length: int | None = None
    """Training: tokens per sequence."""
    global_batch_size: int | None = None
    """Training: sequences per optimizer step."""
    precision: str | None = None
    """Training: bf16 (default), fp16, fp8, mxfp8, nvfp4."""
    total_tokens: float | None = None
    """Training: adds days, GPU-hours and cost."""
    kind: Literal["training", "inference"] | None = None
    """Default: inference if that section is given, else training."""
    cluster: str | Section | list[str | Section] | None = None
    """A registered cluster's name, or {gpu, num_gpus, gpus_per_node, price_per_gpu_hour, ...}. Only
    recommend compares machines, by cost and days: pass a list of these, or the price list
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
    searches: a value or list restricts an axis; omitted axes vary.
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
        """Return the query as a mapping, with the short keys moved to their sections."""
        return as_mapping(None, **self.model_dump(exclude_none=True))


class ImportArgument(ImportRequest):
    """A run's script or file, as text. Over stdio, `command`, `log` and `files` may be paths."""

    gpu: str | None = None
    """Catalogue name of the device, which scripts rarely contain."""

    def options(self) -> dict[str, Any]:
        """Return the fields of the request, without the command."""
        options = self.model_dump(exclude={"command", "gpu"})
        if self.gpu is not None:
            options["overrides"] = {**self.overrides, "cluster.gpu": self.gpu}
        return options
