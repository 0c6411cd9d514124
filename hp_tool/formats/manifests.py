"""Convert Kubernetes manifests and llm-d Helm values to the shell commands of their containers."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from hp_tool.catalog import documents
from hp_tool.errors import UnsupportedError
from hp_tool.formats.source import MAX_YAML

_SERVER_COMMAND = re.compile(
    r"(?<![\w/.-])vllm serve\b|vllm\.entrypoints\.(openai\.)?api_server|sglang\.launch_server"
    r"|(?<![\w/.-])sglang serve\b|trtllm-serve|dynamo\.(vllm|sglang)\b"
)
"""Matches the server commands of supported engines."""
_TRAINER_COMMAND = re.compile(
    r"(?<![\w/.-])(torchrun|deepspeed|accelerate launch)\b|\bpretrain_\w+\.py\b"
)
"""Matches commands that start a training."""
_MOUNTED_MODEL = re.compile(r"(?<![^\s'\"=])/mnt/models/?(?![^\s'\"])")
"""Path at which KServe mounts the checkpoint in `spec.model.uri`."""
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
_REFERENCE = re.compile(r"\$\$\(|\$\(([A-Za-z_][\w.-]*)\)")
"""Matches `$(NAME)` in a container's command, which Kubernetes expands, and the escape `$$(`."""
_NAME = re.compile(r"[A-Za-z_]\w*")
MAX_DOCUMENTS = 50
"""Maximum number of YAML documents read from one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCommand:
    """The command that the pods of a manifest run."""

    script: str
    """Environment and command, as lines of a shell script."""
    replicas: int
    """Number of pods."""
    trains: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the container whose values are in the manifest."""
    unknown: tuple[str, ...] = ()
    """Environment variables whose values are defined elsewhere, such as in a Secret."""
    prefill: "PodCommand | None" = None
    """Command of the prefill pool, if this command is that of a decode pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    content: Mapping[str, Any]
    replicas: Any
    role: str
    """Role in disaggregated serving: `prefill`, `decode`, or empty."""
    model: str
    """Checkpoint that the manifest names; empty if none."""
    parallelism: Mapping[str, Any]


def pod_command(text: str) -> PodCommand | None:
    """Return the command of the pods in a manifest of one or several objects.

    Return None if the text is not a manifest, if no container starts a supported engine or
    training, or if there are several commands other than one prefill and one decode pool.

    Raises:
        UnsupportedError: The number of pods is not a positive integer.
    """
    if "apiVersion" not in text and "modelArtifacts" not in text:
        return None
    objects = _parse_objects(text)
    settings = _config_maps(objects)
    found = []
    for container in (
        each for manifest_object in objects for each in _object_containers(manifest_object)
    ):
        command = _shell_line(container, settings)
        if _SERVER_COMMAND.search(command) or _TRAINER_COMMAND.search(command):
            found.append((container, command))
    served = [(each, command) for each, command in found if _SERVER_COMMAND.search(command)]
    if len(served) == len(found) == 2:
        by_role = {each.role: (each, command) for each, command in served}
        if "prefill" not in by_role or len(by_role) != 2:
            return None
        first = by_role.pop("prefill")
        (second,) = by_role.values()
        return _container_command(*second, settings, prefill=_container_command(*first, settings))
    if len(found) != 1:
        return None
    return _container_command(*found[0], settings)


def _container_command(
    container: _Container,
    command: str,
    settings: Mapping[str, Mapping[str, str]],
    *,
    prefill: PodCommand | None = None,
) -> PodCommand:
    replicas = container.replicas
    if not isinstance(replicas, int) or replicas < 1:
        raise UnsupportedError(
            f"spec.replicas of the manifest is {replicas!r}; it must be a number of "
            "pods, at least 1",
            field="spec.replicas",
        )
    if container.model:
        name = shlex.quote(container.model)
        command = _MOUNTED_MODEL.sub(lambda _: name, command)
    values, unknown = _container_variables(container.content, settings)
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in values.items()
        if _NAME.fullmatch(name) and name in command
    )
    return PodCommand(
        script=f"{exports}{command}\n",
        replicas=replicas,
        trains=_SERVER_COMMAND.search(command) is None,
        environment=values,
        unknown=unknown,
        prefill=prefill,
    )


def _parse_objects(text: str) -> list[dict[str, Any]]:
    """Return the mappings in a text of YAML documents; an empty list for other text."""
    parts = re.split(r"(?m)^---(?:[ \t].*)?$", text)
    if len(text) > MAX_YAML or len(parts) > MAX_DOCUMENTS or text.startswith("#!"):
        return []
    try:
        loaded = [documents.load_yaml(part) for part in parts]
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    return [each for each in loaded if isinstance(each, dict)]


def _config_maps(objects: list[dict[str, Any]]) -> dict[str, Mapping[str, str]]:
    """Return the data of each ConfigMap by name."""
    maps: dict[str, Mapping[str, str]] = {}
    for manifest_object in objects:
        metadata, data = manifest_object.get("metadata"), manifest_object.get("data")
        if manifest_object.get("kind") == "ConfigMap" and isinstance(metadata, Mapping):
            values = data if isinstance(data, Mapping) else {}
            maps[str(metadata.get("name"))] = {str(key): str(v) for key, v in values.items()}
    return maps


def _object_containers(manifest: Mapping[str, Any]) -> Iterator[_Container]:
    """Yield the containers of an object, or those in llm-d's Helm values."""
    if isinstance(artifacts := manifest.get("modelArtifacts"), Mapping):
        uri = str(artifacts.get("uri", "")).replace('"', "")
        name = str(artifacts.get("name", ""))
        model = uri.removeprefix("hf://") if uri.startswith("hf://") and "{{" not in uri else name
        for role in ("decode", "prefill"):
            side = manifest.get(role)
            if isinstance(side, Mapping) and side.get("create", True) is not False:
                yield from _nested_containers(
                    side, replicas=side.get("replicas", 1), role=role, model=model
                )
        return
    spec = manifest.get("spec")
    if "apiVersion" not in manifest or not isinstance(spec, Mapping):
        return
    source = spec.get("model")
    uri = str(source.get("uri", "")) if isinstance(source, Mapping) else ""
    model = uri.removeprefix("hf://") if uri.startswith("hf://") else ""
    pods = 1 if manifest.get("kind") == "Job" else spec.get("replicas", 1)
    yield from _nested_containers(spec, replicas=pods, role=_pool_role(manifest), model=model)


def _pool_role(manifest: Mapping[str, Any]) -> str:
    """Return `prefill` or `decode` for an object's pods, from their label or name."""
    labels = re.findall(r"'llm-d\.ai/role': '(prefill|decode)'", str(manifest))
    metadata = manifest.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
    ends = re.search(r"-(prefill|decode)$", name)
    return str(labels[0]) if labels else ends[1] if ends else ""


def _nested_containers(node: Any, *, replicas: Any, role: str, model: str) -> Iterator[_Container]:
    """Yield all containers within a specification, each with its nearest replica count."""
    if isinstance(node, list):
        for each in node:
            yield from _nested_containers(each, replicas=replicas, role=role, model=model)
    if not isinstance(node, Mapping):
        return
    replicas = node.get("replicas", replicas)
    parallelism = node.get("parallelism")
    for key, value in node.items():
        if key == "containers" and isinstance(value, list):
            for each in (each for each in value if isinstance(each, Mapping)):
                yield _Container(
                    content=each,
                    replicas=replicas,
                    role=role,
                    model=model,
                    parallelism=parallelism if isinstance(parallelism, Mapping) else {},
                )
        else:
            within = "prefill" if key == "prefill" else role
            pods = value.get("replicas", 1) if within != role else replicas
            yield from _nested_containers(value, replicas=pods, role=within, model=model)


def _container_variables(
    container: Mapping[str, Any], settings: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a container's environment variables, and the names of those without known values."""
    values: dict[str, str] = {}
    unknown: list[str] = []
    for each in _only_mappings(container.get("envFrom")):
        source = each.get("configMapRef")
        name = str(source.get("name", "")) if isinstance(source, Mapping) else ""
        values |= settings.get(name, {})
    for each in _only_mappings(container.get("env")):
        name = str(each.get("name", ""))
        source = each.get("valueFrom")
        if source is None:
            values[name] = _expand_references(_text(each.get("value", "")), values)
            continue
        key = source.get("configMapKeyRef") if isinstance(source, Mapping) else None
        data = settings.get(str(key.get("name")), {}) if isinstance(key, Mapping) else {}
        value = data.get(str(key.get("key"))) if isinstance(key, Mapping) else None
        if value is not None:
            values[name] = value
        else:
            values.pop(name, None)
            unknown.append(name)
    return values, tuple(unknown)


def _only_mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (
        (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else ()
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _expand_references(text: str, values: Mapping[str, str]) -> str:
    """Return the text with $(NAME) replaced for known variables."""
    return _REFERENCE.sub(
        lambda match: "$(" if match[1] is None else values.get(match[1], match[0]), text
    )


def _shell_word(text: str, values: Mapping[str, str]) -> str:
    """Return an argument quoted for the shell. An unknown $(NAME) becomes a shell variable."""
    parts, place = [], 0
    for match in _REFERENCE.finditer(text):
        parts.append(shlex.quote(text[place : match.start()]) if match.start() > place else "")
        value = "$(" if match[1] is None else values.get(match[1])
        parts.append(f'"${{{match[1]}}}"' if value is None else shlex.quote(value))
        place = match.end()
    rest = text[place:]
    return "".join(parts) + (shlex.quote(rest) if rest or not parts else "")


def _shell_line(container: _Container, settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return a container's command as a shell line; for `sh -c SCRIPT`, the script."""
    content = container.content
    parts = (content.get("command"), content.get("args"))
    words = [_text(word) for part in parts if isinstance(part, list) for word in part]
    values, _ = _container_variables(content, settings)
    if words and words[0] in _SHELLS and len(words) > 2 and words[1].endswith("c"):
        return _expand_references(words[2], values)
    if content.get("modelCommand") == "vllmServe":
        words = ["vllm", "serve", container.model, *words, *_chart_options(container.parallelism)]
    elif words and words[0].startswith("-") and "vllm-openai" in str(content.get("image", "")):
        words = ["vllm", "serve", *words]
    return " ".join(_shell_word(word, values) for word in words)


def _chart_options(parallelism: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that llm-d's Helm chart adds to vLLM's command."""
    for key, option in (("tensor", "--tensor-parallel-size"), ("data", "--data-parallel-size")):
        if parallelism.get(key) not in (None, 1):
            yield from (option, str(parallelism[key]))
