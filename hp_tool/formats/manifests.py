"""Kubernetes manifests as the shell command that their container starts."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_tool.errors import UnsupportedError
from hp_tool.formats.source import mapping_of

_SERVES = re.compile(
    r"(?<![\w/.-])vllm serve\b|vllm\.entrypoints\.(openai\.)?api_server|sglang\.launch_server"
    r"|(?<![\w/.-])sglang serve\b|trtllm-serve|dynamo\.(vllm|sglang)\b"
)
"""Commands of the engines that are read."""
_MOUNTED = re.compile(r"(?<![^\s'\"=])/mnt/models/?(?![^\s'\"])")
"""Where KServe mounts the checkpoint that `spec.model.uri` names."""
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingManifest:
    """The server that a manifest starts."""

    script: str
    """Its command, as a line of a shell script."""
    replicas: int
    """How many pods start it."""


def serving_manifest(text: str) -> ServingManifest | None:
    """Return the server that a manifest of one object starts.

    None for any other text, and for a manifest whose containers start no engine that is read, or
    several servers.

    Raises:
        UnsupportedError: The number of pods is not a positive integer.
    """
    content = mapping_of(text) if "apiVersion" in text else None
    if content is None or "apiVersion" not in content:
        return None
    spec = content.get("spec")
    if not isinstance(spec, Mapping):
        return None
    commands = [each for each in map(_command, _containers(spec)) if _SERVES.search(each)]
    if len(commands) != 1:
        return None
    [command], replicas = commands, spec.get("replicas", 1)
    if not isinstance(replicas, int) or replicas < 1:
        raise UnsupportedError(
            f"the manifest's spec.replicas is {replicas!r}; write the number of pods, at least 1",
            field="spec.replicas",
        )
    model = spec.get("model")
    uri = str(model.get("uri", "")) if isinstance(model, Mapping) else ""
    if uri.startswith("hf://"):
        name = shlex.quote(uri.removeprefix("hf://"))
        command = _MOUNTED.sub(lambda _: name, command)
    return ServingManifest(script=f"{command}\n", replicas=replicas)


def _containers(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the containers anywhere in a specification."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "containers" and isinstance(value, list):
                yield from (each for each in value if isinstance(each, Mapping))
            else:
                yield from _containers(value)
    elif isinstance(node, list):
        for each in node:
            yield from _containers(each)


def _command(container: Mapping[str, Any]) -> str:
    """Return a container's command and arguments in one shell line, or the script that its shell
    is given.
    """
    parts = (container.get("command"), container.get("args"))
    words = [str(word) for part in parts if isinstance(part, list) for word in part]
    if words and words[0] in _SHELLS and len(words) > 2 and words[1].endswith("c"):
        return words[2]
    if words and words[0].startswith("-") and "vllm-openai" in str(container.get("image", "")):
        words = ["vllm", "serve", *words]
    return shlex.join(words)
