"""The search of examples/quickstart.yaml, which runs on any machine."""

from typing import Any
from urllib.parse import urlencode

from service.dashboard.new_search_form import to_values

QUICKSTART: dict[str, Any] = {
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
}
QUICKSTART_HREF = f"/searches/new?{urlencode(to_values(QUICKSTART))}"
"""URL of the form that starts this search."""
