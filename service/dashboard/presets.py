"""Example queries; each can be answered or run unchanged."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from service.dashboard.new_search_form import to_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A query that fills the form."""

    label: str
    about: str
    query: dict[str, Any] = field(repr=False)

    @property
    def values(self) -> dict[str, str]:
        """Return the form's values."""
        return to_values(self.query)

    @property
    def href(self) -> str:
        """Return the address of the form with its values."""
        return f"/searches/new?{urlencode(self.values)}"


PRESETS: dict[str, Preset] = {
    "this-machine": Preset(
        label="Small GPT on this machine",
        about="A small GPT on two processes of a worker's processor: real runs, a few minutes, no "
        "GPU.",
        query={
            "kind": "training",
            "model": {
                "name": "gpt-quickstart",
                "num_hidden_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "vocab_size": 4096,
            },
            "cluster": {"gpu": "cpu", "num_gpus": 2, "gpus_per_node": 2},
            "training": {"sequence_length": 64, "global_batch_size": 64, "precision": "bf16"},
            "parallel": {
                "sequence_parallel": [False, True],
                "recompute": ["none", "selective", "full"],
            },
            "search": {
                "launcher": "local",
                "baseline": {
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                    "micro_batch_size": 1,
                    "recompute": "none",
                },
                "budget_runs": 7,
                "budget_gpu_seconds": 260,
                "configurations_per_job": 4,
                "run_timeout_s": 120,
                "steps": 8,
                "warmup_steps": 1,
            },
        },
    ),
    "llama-3-70b": Preset(
        label="Llama 3 70B on 64 H100",
        about="Predictions alone: read the ranking. A search would need a worker on such a "
        "cluster.",
        query={
            "kind": "training",
            "model": "llama-3-70b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64, "gpus_per_node": 8},
            "training": {"sequence_length": 8192, "global_batch_size": 128, "precision": "bf16"},
        },
    ),
}
"""Presets by name; the first is examples/quickstart.yaml."""
