"""`python -m tests.formats.record_engine_options {vllm|sglang} FOLDER`: an engine's own argument
parser, as data for tests.

FOLDER has an unpacked wheel (`pip download --no-deps vllm==0.12.0`, 470 MB). Its Python is
imported, its parser built; packages that it imports and that are not installed are empty stubs.
First install msgspec, gguf, cbor2, openai, jiter, distro, sniffio, partial-json-parser, cachetools,
blake3 and pybase64 (`pip install --no-deps --target`). Of each option its names, the words it takes
(0 or 1, or argparse's letter), its type and its choices are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tests.formats.test_engine_options import VERSIONS

DATA = Path(__file__).with_name("engine_options")
COMPILED = ("vllm._C", "vllm._moe_C")
OF_OTHER_DEVICES = (
    "libtpu",
    "tpu_inference",
    "tpu_info",
    "amdsmi",
    "pynvml",
    "torch_npu",
    "habana_frameworks",
)
"""Their absence is what says that a host has none."""


class Anything(type):
    """A class that stands for a missing name: it may be inherited, called, used as a decorator or
    as a type.
    """

    def __getattr__(cls, name: str) -> Any:
        if name == "__get_pydantic_core_schema__":
            from pydantic_core import core_schema

            return lambda *_: core_schema.any_schema()
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *words: Any, **_: Any) -> Any:
        return words[0] if len(words) == 1 and callable(words[0]) else Anything("result", (), {})

    def __or__(cls, _: Any) -> Anything:
        return cls

    __ror__ = __or__  # type: ignore[assignment]


class Stub(ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Missing(MetaPathFinder, Loader):
    """Stubs for what an engine's own module asks for and nobody else finds."""

    def __init__(self, engine: str) -> None:
        self.engine, self.stubs = engine, set[str]()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asker = "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]
        ours = (
            fullname in COMPILED
            if top == self.engine
            else asker == self.engine or top in self.stubs
        )
        if not ours or top in sys.stdlib_module_names or top in OF_OTHER_DEVICES:
            return None
        self.stubs.add(top)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is empty."""


def vllm() -> argparse.ArgumentParser:
    import vllm.platforms  # type: ignore[import-not-found]
    from vllm.platforms.cuda import NonNvmlCudaPlatform  # type: ignore[import-not-found]

    vllm.platforms._current_platform = vllm.platforms.current_platform = NonNvmlCudaPlatform()
    from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def sglang() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {"vllm": vllm, "sglang": sglang}


def main() -> None:
    engine, folder = sys.argv[1:]
    sys.path.insert(0, folder)
    missing = Missing(engine)
    sys.meta_path.append(missing)
    version = next(each.version for each in distributions(path=[folder]) if each.name == engine)
    assert version == VERSIONS[engine]
    options = [
        {
            "names": action.option_strings,
            "words": 1 if action.nargs is None else action.nargs,
            "type": getattr(action.type, "__qualname__", None),
            "choices": None if action.choices is None else sorted(map(str, action.choices)),
        }
        for action in PARSERS[engine]()._actions
        if action.option_strings
    ]
    head = {
        "source": f"the parser of {engine} {version}'s wheel",
        "command": f"python -m tests.formats.record_engine_options {engine} FOLDER",
        "stubs": sorted(missing.stubs - {engine}),
    }
    lines = ",\n".join(f"  {json.dumps(each)}" for each in options)
    (DATA / f"{engine}.json").write_text(
        f'{json.dumps(head, indent=1)[:-2]},\n "options": [\n{lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
