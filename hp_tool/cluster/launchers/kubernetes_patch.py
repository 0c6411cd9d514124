"""A strategic merge patch, as kubectl applies one to a pod template: maps merge, lists of named
things merge by their key.
"""

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
"""`patchMergeKey` of the lists in PodSpec (k8s.io/api/core/v1); other lists are replaced."""
_DIRECTIVE = "$patch"


def merged(base: Any, patch: Any, *, name: str = "") -> Any:
    """`base` with `patch`: null removes a key, `$patch: delete` an entry of a list; `$patch:
    replace` in a map, or in an entry of a list, starts it anew.

    `name`: the key that both stand under.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        changes = {key: value for key, value in patch.items() if key != _DIRECTIVE}
        if patch.get(_DIRECTIVE) == "replace":
            return changes
        kept = {key: value for key, value in base.items() if key not in changes}
        return kept | {
            key: merged(base.get(key), value, name=key)
            for key, value in changes.items()
            if value is not None
        }
    if name in _KEYS and isinstance(base, Sequence) and isinstance(patch, Sequence):
        return _merged_lists(base, patch, key=_KEYS[name])
    return patch


def _merged_lists(
    base: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], *, key: str
) -> list[Any]:
    if any(each.get(_DIRECTIVE) == "replace" for each in patch):
        return [each for each in patch if _DIRECTIVE not in each]
    entries = {each.get(key): each for each in base}
    for each in patch:
        if each.get(_DIRECTIVE) == "delete":
            entries.pop(each.get(key), None)
        else:
            entries[each.get(key)] = merged(entries.get(each.get(key), {}), each)
    return list(entries.values())
