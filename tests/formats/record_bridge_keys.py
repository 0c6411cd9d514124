"""`python -m tests.formats.record_bridge_keys FOLDER`: the keys that Megatron Bridge's and verl's
configurations know, as data.

FOLDER has unpacked wheels (`pip download --no-deps megatron-bridge==0.6.2`), each in a folder of
its name and version. Nothing of them is imported: fields of Bridge's classes are read with those of
the Megatron Core that they inherit, and verl's files.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).with_name("bridge_keys.json")
BRIDGE = {"0.3.1": "0.16.1", "0.6.2": "0.19.2"}
"""Releases of Megatron Bridge, each with the Megatron Core that it is read with."""
SECTIONS = {
    "model": ("GPTModelProvider", "MLAModelProvider"),
    "train": ("TrainingConfig",),
    "ddp": ("DistributedDataParallelConfig",),
    "optimizer": ("OptimizerConfig",),
    "dataset": ("GPTDatasetConfig",),
    "dist": ("DistributedInitConfig",),
    "comm_overlap": ("CommOverlapConfig",),
    "mixed_precision": ("MixedPrecisionConfig",),
    "peft": ("LoRA",),
}
"""Classes of the sections that exports write."""
VERL = ("0.6.1", "0.9.1")
SECTIONS_OF_VERL = ("actor_rollout_ref", "algorithm", "data", "trainer")
TRAINERS = {
    "fsdp": "_generated_ppo_trainer.yaml",
    "megatron": "_generated_ppo_megatron_trainer.yaml",
}
Classes = dict[str, ast.ClassDef]


def classes(folder: Path) -> Classes:
    """The classes of a package's files, by name; of several, the first in the order of paths that
    has fields.
    """
    defined: Classes = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, node)
    return defined


def fields(name: str, *, bridge: Classes, core: Classes) -> dict[str, list[Any]]:
    """A class's own and inherited fields, each with its choices."""
    of_core = name.startswith(("MCore", "MTrain"))
    node = (
        core.get(name.removeprefix("MCore").removeprefix("MTrain"))
        if of_core
        else bridge.get(name) or core.get(name)
    )
    if node is None:
        return {}
    own_core = of_core or name not in bridge
    found: dict[str, list[Any]] = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            found |= fields(base.id, bridge={} if own_core else bridge, core=core)
    lines = (line for line in node.body if isinstance(line, ast.AnnAssign))
    own = {
        line.target.id: choices(line.annotation)
        for line in lines
        if isinstance(line.target, ast.Name)
    }
    return found | {key: values for key, values in own.items() if not key.startswith("_")}


def choices(annotation: ast.expr) -> list[Any]:
    """The values of an annotation's Literal; none where anything else is taken too."""
    literals = [
        each
        for each in ast.walk(annotation)
        if isinstance(each, ast.Subscript) and getattr(each.value, "id", "") == "Literal"
    ]
    names = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
    if len(literals) != 1 or names - {"Literal", "Optional", "None"}:
        return []
    return (
        list(ast.literal_eval(literals[0].slice))
        if isinstance(literals[0].slice, ast.Tuple)
        else []
    )


def recipes(folder: Path) -> list[str]:
    """The registered names of mixed precision."""
    tree = ast.parse(
        (folder / "megatron/bridge/training/mixed_precision.py").read_text(encoding="utf-8")
    )
    return sorted(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(each, "id", "") == "register" for each in node.decorator_list)
    )


def leaves(content: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a YAML file's sections that exports write; a mapping that is empty ends in a
    star, as it takes any.
    """
    for key, value in content.items():
        if not prefix and key not in SECTIONS_OF_VERL:
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}.*" if value == {} else f"{prefix}{key}"


def record(folder: Path) -> dict[str, Any]:
    bridge: dict[str, Any] = {}
    for release, core_release in BRIDGE.items():
        own, core = (
            folder / f"megatron_bridge-{release}",
            classes(folder / f"megatron_core-{core_release}"),
        )
        known = classes(own)
        bridge[release] = {
            section: {
                key: value
                for name in names
                for key, value in fields(name, bridge=known, core=core).items()
            }
            for section, names in SECTIONS.items()
        } | {"recipes": recipes(own)}
    verl = {
        release: {
            trainer: sorted(
                leaves(
                    yaml.safe_load(
                        (folder / f"verl-{release}/verl/trainer/config" / name).read_text()
                    )
                )
            )
            for trainer, name in TRAINERS.items()
        }
        for release in VERL
    }
    return {"megatron-bridge": bridge, "verl": verl}


if __name__ == "__main__":
    source = [
        f"megatron-bridge {bridge} on Megatron Core {core}" for bridge, core in BRIDGE.items()
    ]
    content = {"source": [*source, *(f"verl {each}" for each in VERL)], **record(Path(sys.argv[1]))}
    DATA.write_text(json.dumps(content, separators=(",", ":")) + "\n")
