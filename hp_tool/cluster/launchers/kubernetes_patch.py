"""Strategic merge patches as kubectl applies them: maps merge, lists merge by their key."""

from collections.abc import Mapping, Sequence
from typing import Any

_KEYS = {
    **dict.fromkeys(
        ("containers", "initContainers", "volumes", "env", "imagePullSecrets", "resourceClaims"),
        "name",
    ),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""`patchMergeKey` of lists in PodSpec (k8s.io/api/core/v1); other lists are replaced."""
_DIRECTIVE = "$patch"


def merge_patch(base: Any, patch: Any, *, name: str = "") -> Any:
    """Apply `patch` to `base`.

    null removes a key, `$patch: delete` removes a list entry, and `$patch: replace` replaces a map
    or a list.

    Args:
        base: Original value.
        patch: Patch.
        name: Key of both values.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        changes = {key: value for key, value in patch.items() if key != _DIRECTIVE}
        if patch.get(_DIRECTIVE) == "replace":
            return changes
        unchanged = {key: value for key, value in base.items() if key not in changes}
        return unchanged | {
            key: merge_patch(base.get(key), value, name=key)
            for key, value in changes.items()
            if value is not None
        }
    if name in _KEYS and isinstance(base, Sequence) and isinstance(patch, Sequence):
        return _merge_lists(base, patch, key=_KEYS[name])
    return patch


def _merge_lists(
    base: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], *, key: str
) -> list[Any]:
    if any(entry.get(_DIRECTIVE) == "replace" for entry in patch):
        return [entry for entry in patch if _DIRECTIVE not in entry]
    entries = {entry.get(key): entry for entry in base}
    for entry in patch:
        if entry.get(_DIRECTIVE) == "delete":
            entries.pop(entry.get(key), None)
        else:
            entries[entry.get(key)] = merge_patch(entries.get(entry.get(key), {}), entry)
    return list(entries.values())
