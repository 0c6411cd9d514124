"""`python -m tests.formats.record_megatron_arguments FOLDER`: the arguments of Megatron-LM's
training loop, as data.

FOLDER has an unpacked wheel of each release from 0.17 on, which bring the loop's own parser (`pip
download --no-deps megatron-core==0.17.1`), in folders named by release. The parser is built and
asked, with stand-ins for Triton.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("megatron_arguments.json")
STAND_INS = """
import torch, torch._inductor.compile_fx, torch._inductor.codegen.triton, torch._inductor.runtime.triton_heuristics
import typing_extensions
typing.override = typing_extensions.override
class Module(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return "3.5.0" if name == "__version__" else unittest.mock.MagicMock(name=name)
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Finder())
sys.path.insert(0, sys.argv[1])
"""  # noqa: E501
"""Python that makes the folder in sys.argv[1] importable on a host without Triton, and under Python
3.11.
"""
ASK = f"""
import argparse, importlib.abc, importlib.machinery, json, sys, types, typing, unittest.mock
{STAND_INS}
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
print(json.dumps([[name[2:], 1 if each.nargs is None else each.nargs, getattr(each.type, "__name__", None),
    [getattr(choice, "name", choice) for choice in each.choices or ()]]
    for each in parser._actions for name in each.option_strings if name.startswith("--")]))
"""  # noqa: E501


def record(folder: Path) -> dict[str, Any]:
    """Return each argument's forms: words behind it, type and choices, and the releases that have
    it so.
    """
    arguments: dict[str, list[dict[str, Any]]] = {}
    releases = sorted(each.name for each in folder.iterdir() if (each / "megatron").is_dir())
    for release in releases:
        asked = subprocess.run(
            [sys.executable, "-c", ASK, str(folder / release)],
            capture_output=True,
            text=True,
            check=True,
        )
        for name, words, kind, choices in json.loads(asked.stdout.splitlines()[-1]):
            form = {"words": words, "type": kind, "choices": choices}
            same = next(
                (each for each in arguments.setdefault(name, []) if each["form"] == form), None
            )
            if same is None:
                arguments[name].append(same := {"form": form, "releases": []})
            same["releases"].append(release)
    return {
        "source": [f"megatron-core {release}" for release in releases],
        "arguments": dict(sorted(arguments.items())),
    }


if __name__ == "__main__":
    DATA.write_text(json.dumps(record(Path(sys.argv[1])), separators=(",", ":")) + "\n")
