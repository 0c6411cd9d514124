"""Register the formats of vLLM, SGLang and TensorRT-LLM server commands."""

from collections.abc import Callable
from functools import partial

from hp_tool.domain.setups import ServingSetup
from hp_tool.formats.engine_commands import command_reader
from hp_tool.formats.engines import option_values, replica_script
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, matches_pattern
from hp_tool.formats.writing import Values


def register_engine(
    *,
    name: str,
    title: str,
    version: str,
    command: str,
    rank: int,
    start: Callable[[ServingSetup], tuple[str, Values]],
    reads: str,
    writes: str,
    signs: tuple[Sign, ...] = (),
    place: int = 1,
    write: Callable[[ServingSetup], str] | None = None,
    write_pools: Callable[[ServingSetup, ServingSetup], str] | None = None,
) -> None:
    """Register the format of an engine's server command.

    Scripts match if they contain the pattern `command`; `rank` is the rank of this sign. `start`
    returns the command of one replica, and `write` returns the exported text.
    """
    register(
        Format(
            name=name,
            title=title,
            kind="inference",
            place=place,
            signs=(*signs, Sign(place="script", rank=rank, matches=matches_pattern(command))),
            read=command_reader(name),
            write=write or partial(replica_script, tool=f"{name} {version}", start=start),
            write_pools=write_pools,
            options=lambda setup: option_values(start(setup)[1]),
            usual_of=name,
            reads=reads,
            writes=writes,
            checked="options and values recorded from the engine's parser; read back by `import`",
        )
    )
