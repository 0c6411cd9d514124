"""A vLLM deployment as KServe's LLMInferenceService (serving.kserve.io/v1alpha1), which llm-d's router and scheduler serve.

Its controller mounts the checkpoint at /mnt/models and merges this container over its own of the name `main`.
"""

import re

import yaml

from hp_tool.errors import UnsupportedError
from hp_tool.formats.engines import refuse_unsaid
from hp_tool.formats.registry import Format, register
from hp_tool.formats.setup import ServingSetup, headline, option_words
from hp_tool.formats.tools import vllm

PORT = 8000
MOUNTED = "/mnt/models"


def text(setup: ServingSetup) -> str:
    """The manifest. Raises UnsupportedError for replicas that span nodes, which want pods of their own for workers."""
    c, cluster = setup.parallel, setup.cluster
    refuse_unsaid(setup)
    ranks = setup.gpus_per_replica
    if ranks > cluster.gpus_per_node:
        raise UnsupportedError(
            f"a replica of {ranks} GPUs spans nodes of {cluster.gpus_per_node}; the manifest describes replicas of one pod",
            field="parallel",
        )
    _, options = vllm.start(setup)
    arguments = [word for name, words in option_words(options).items() for word in (name, *words)]
    name = re.sub(r"[^a-z0-9-]+", "-", setup.model.name.casefold()).strip("-")[:50] or "model"
    container = {
        "name": "main",
        "command": ["vllm", "serve", MOUNTED],
        "args": ["--served-model-name", name, "--port", str(PORT), *arguments],
        "resources": {"limits": {"nvidia.com/gpu": str(ranks)}},
    }
    manifest = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "LLMInferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"hf://{setup.model_path or 'FILL-IN/checkpoint'}", "name": name},
            "replicas": cluster.num_gpus // ranks,
            "parallelism": {"tensor": c.tensor_parallel_size, "expert": c.expert_parallel_size > 1},
            "template": {"containers": [container]},
            "router": {"gateway": {}, "route": {}, "scheduler": {}},
        },
    }
    written: str = yaml.safe_dump(manifest, sort_keys=False, width=120)
    return f"# {headline(setup)}; {cluster.num_gpus // ranks} replicas\n{written}"


register(
    Format(
        name="llm-d",
        kind="inference",
        write=text,
        writes="a manifest of KServe's LLMInferenceService: vLLM's command in each replica, which is one pod",
        checked="a schema of the fields it uses, after KServe's types",
    )
)
