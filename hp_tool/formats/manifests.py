"""Convert Kubernetes manifests and values of llm-d's chart to the shell commands of their
containers.
"""

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
"""Matches the commands of supported engines."""
_TRAINER_COMMAND = re.compile(
    r"(?<![\w/.-])(torchrun|deepspeed|accelerate launch)\b|\bpretrain_\w+\.py\b"
)
"""Matches the commands that start a training."""
_MOUNTED_MODEL = re.compile(r"(?<![^\s'\"=])/mnt/models/?(?![^\s'\"])")
"""Path at which KServe mounts the checkpoint of `spec.model.uri`."""
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
_REFERENCE = re.compile(r"\$\$\(|\$\(([A-Za-z_][\w.-]*)\)")
"""`$(NAME)` in a container's words, which Kubernetes expands; `$$(` is an escaped `$(`."""
_NAME = re.compile(r"[A-Za-z_]\w*")
MAX_DOCUMENTS = 50
"""Maximum number of objects read from one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCommand:
    """The command that the pods of a manifest run."""

    script: str
    """Variables and command, as lines of a shell script."""
    replicas: int
    """Number of pods."""
    trains: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the container with values in the manifest."""
    unknown: tuple[str, ...] = ()
    """Variables of its container with values defined elsewhere."""
    prefill: "PodCommand | None" = None
    """The prefill pool, for the command of a decode pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    content: Mapping[str, Any]
    replicas: Any
    role: str
    """Role in disaggregated serving: prefill, decode, or an empty text."""
    model: str
    """Checkpoint in the object; an empty text if it has none."""
    parallelism: Mapping[str, Any]


def pod_command(text: str) -> PodCommand | None:
    """Return the command of the pods in a manifest, for one object or several.

    Return None for other text, for containers that start no supported engine or training, and
    for several commands that are not a prefill and a decode pool.

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
    """Return the data of each ConfigMap among the objects, by its name."""
    maps: dict[str, Mapping[str, str]] = {}
    for manifest_object in objects:
        metadata, data = manifest_object.get("metadata"), manifest_object.get("data")
        if manifest_object.get("kind") == "ConfigMap" and isinstance(metadata, Mapping):
            values = data if isinstance(data, Mapping) else {}
            maps[str(metadata.get("name"))] = {str(key): str(v) for key, v in values.items()}
    return maps


def _object_containers(manifest: Mapping[str, Any]) -> Iterator[_Container]:
    """Yield the containers of an object, or those in values of llm-d's chart."""
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
    """Yield all containers within a specification, with the nearest number of replicas."""
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
    """Return a container's variables, and the names of variables without values."""
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
    """Return the text with $(NAME) replaced by the values of known variables."""
    return _REFERENCE.sub(
        lambda match: "$(" if match[1] is None else values.get(match[1], match[0]), text
    )


def _shell_word(text: str, values: Mapping[str, str]) -> str:
    """Return an argument quoted for the shell; an unknown $(NAME) becomes a shell variable."""
    parts, place = [], 0
    for match in _REFERENCE.finditer(text):
        parts.append(shlex.quote(text[place : match.start()]) if match.start() > place else "")
        value = "$(" if match[1] is None else values.get(match[1])
        parts.append(f'"${{{match[1]}}}"' if value is None else shlex.quote(value))
        place = match.end()
    rest = text[place:]
    return "".join(parts) + (shlex.quote(rest) if rest or not parts else "")


def _shell_line(container: _Container, settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return a container's command as a shell line, or the script that its shell runs."""
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
    """Yield the options that llm-d's chart adds to vLLM's command."""
    for key, option in (("tensor", "--tensor-parallel-size"), ("data", "--data-parallel-size")):
        if parallelism.get(key) not in (None, 1):
            yield from (option, str(parallelism[key]))
