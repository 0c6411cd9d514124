"""Read a configuration of any supported tool."""

from hp_tool.errors import InputError
from hp_tool.formats.detection import detect_format
from hp_tool.formats.megatron_names import read_printed_arguments
from hp_tool.formats.reading import Read, Reading, parse_whole_number
from hp_tool.formats.registry import formats, readable
from hp_tool.formats.source import Source
from hp_tool.formats.stated_release import read_release


def read_source(source: Source, *, format: str | None = None) -> Reading:
    """Convert a configuration to a query, and record how each setting is used.

    Raises:
        InputError: The format is unknown or the text invalid.
        UnsupportedError: A setting is not modelled.
    """
    tool = format or detect_format(source.text, files=source.files)
    reader = next((tool_format.read for tool_format in formats() if tool_format.name == tool), None)
    if reader is None:
        raise InputError(
            f"no format is named {tool}; choose one of: {', '.join(readable())}", field="format"
        )
    reading = Reading(tool=tool, overrides=source.overrides)
    _, facts = read_printed_arguments(source.log)
    if source.num_gpus is None and facts.get("world_size", "").isdecimal():
        reading.num_gpus = parse_whole_number(facts["world_size"], "world_size")
        reading.read.append(
            Read(flag="world size", value=facts["world_size"], line=None, field="cluster.num_gpus")
        )
    reading.num_gpus = source.num_gpus or reading.num_gpus
    reader(source, reading)
    read_release(source.text, reading)
    return reading
