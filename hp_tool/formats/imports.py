"""Any configuration that is read: whose it is, and the query it asks for."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats import engine_commands, megatron_lm, nanotron, torchtitan, trainer, verl, yaml_configs
from hp_tool.formats.detection import detect as detect
from hp_tool.formats.detection import mapping_of, parsed
from hp_tool.formats.interpolation import interpolated
from hp_tool.formats.launch import Launch, launch_of, world_size
from hp_tool.formats.megatron_lm.arguments import TABLE
from hp_tool.formats.megatron_lm.read import OTHER_PROGRAMS
from hp_tool.formats.names import IMPORTS as READ
from hp_tool.formats.reading import Ignored, Read, Reading, Setting, look_up, plain, settings_of, table, whole_number
from hp_tool.formats.renamed import file_settings, of_printed, printed
from hp_tool.formats.shell import Script


@dataclass(frozen=True, kw_only=True)
class Source:
    """A configuration and what is at hand beside it."""

    text: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment of a script; 1, 2, ... are its arguments."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that it sources or names, by the name it gives them."""
    ignore: Sequence[str] = ()
    """Flags and keys to pass over."""
    log: Sequence[str] = ()
    """Lines of the run's log, which completes what the configuration does not say."""
    num_gpus: int | None = None
    vocabulary: Callable[[Mapping[str, Setting]], str] = lambda found: ""
    """What is known of a tokenizer's vocabulary: digits, or an empty text."""
    layers_of: Callable[[str], int] = lambda name: 1
    num_experts_of: Callable[[str], int | None] = lambda name: None
    precision_of: Callable[[str], str | None] = lambda name: None
    """What the weights of a published checkpoint are stored in."""


def read(source: Source, *, format: str | None = None) -> Reading:
    """The query of a configuration, with what became of each of its words. Raises InputError, UnsupportedError."""
    tool = format or detect(source.text, files=source.files)
    if tool not in READ:
        raise InputError(f"no format {tool}; choose one of {', '.join(READ)}", field="format")
    reading = Reading(tool=tool)
    told, facts = printed(source.log)
    if source.num_gpus is None and facts.get("world_size", "").isdecimal():
        reading.num_gpus = whole_number(facts["world_size"], "world_size")
        reading.read.append(Read(flag="world size", value=facts["world_size"], line=None, field="cluster.num_gpus"))
    reading.num_gpus = source.num_gpus or reading.num_gpus
    _READERS[tool](source, reading, told, facts)
    return reading


def _script(source: Source, reading: Reading) -> tuple[Launch, Script]:
    launch, script = launch_of(source.text, reading=reading, variables=dict(source.variables), files=dict(source.files))
    if launch is None:
        ends = next((f" (line {note.line}: {note.reason})" for note in script.notes if "would end" in note.reason), "")
        raise InputError(
            f"the script starts no command that trains or serves{ends}: python, torchrun, srun, deepspeed, accelerate, vllm "
            f"and sglang "
            "lines are looked for; give what it sources with --file and its arguments with --var 1=...",
            field="command",
        )
    reading.num_gpus = reading.num_gpus or world_size(launch, script, reading=reading)
    for word in launch.launchers[:1]:
        reading.ignored.append(Ignored(flag=word, reason="starts the processes", line=launch.line))
    return launch, script


def _megatron(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
    lines = source.text.splitlines()
    listed, own = printed(lines) if "arguments ---" in source.text else ([], {})
    if listed:
        facts = {**facts, **own}
        settings = of_printed(listed, reading=reading)
        if reading.num_gpus is None and facts.get("world_size", "").isdecimal():
            reading.num_gpus = whole_number(facts["world_size"], "world_size")
    else:
        launch, script = _script(source, reading)
        _check_program(launch)
        settings = settings_of(launch.words, table=table(TABLE), reading=reading)
        _deepspeed_beside(settings, script, reading)
    if told:
        ours = {each.name for each in settings if not each.unknown}
        from_log = [each for each in of_printed(told, reading=Reading(tool=reading.tool)) if each.name not in ours]
        settings = [each for each in settings if not each.unknown] + from_log
    if "padded_vocab_size" in facts and all(each.name not in ("padded-vocab-size", "vocab-size") for each in settings):
        settings.append(Setting(name="padded-vocab-size", written="padded vocab", values=(facts["padded_vocab_size"],)))
    if known := source.vocabulary({each.name: each for each in settings}):
        reading.hints["model.vocab_size"] = known
    megatron_lm.read(settings, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore)


def _check_program(launch: Launch) -> None:
    name = PurePosixPath(launch.program).name.lower()
    parts = set(re.split(r"[_./-]", name)) if name.startswith(("pretrain", "train", "finetune")) or "." in name else set()
    for part, what in OTHER_PROGRAMS.items():
        if part in parts:
            raise UnsupportedError(
                f"{launch.program} trains {what}; only decoders, as pretrain_gpt.py trains them, are read", field="command"
            )


def _deepspeed_beside(settings: list[Setting], script: Script, reading: Reading) -> None:
    """Megatron-DeepSpeed's own file, if the script writes it or it was given: its ZeRO stage and precision, which DeepSpeed's
    engine takes whatever the flags say."""
    named = next((each for each in settings if each.name == "deepspeed-config" and each.values), None)
    if named is None:
        return
    text = script.files.get(named.values[0], script.files.get(PurePosixPath(named.values[0]).name))
    if text is None:
        reason = "not at hand; give it with --file if it says a ZeRO stage or a precision"
        reading.ignored.append(Ignored(flag=named.values[0], reason=reason, line=named.line))
        return
    content = parsed(text)
    zero = content.get("zero_optimization")
    if isinstance(zero, Mapping) and "stage" in zero:
        written = f"{named.values[0]}: zero_optimization.stage"
        settings.append(Setting(name="zero-stage", written=written, values=(str(zero["stage"]),)))
    kinds = {"fp16": ("fp16",), "bf16": ("bf16", "bfloat16")}
    for kind, keys in kinds.items():
        if any(isinstance(one := content.get(key), Mapping) and one.get("enabled") is True for key in keys):
            settings[:] = [each for each in settings if each.name not in kinds]
            settings.append(Setting(name=kind, written=f"{named.values[0]}: {kind}.enabled", values=()))


def _torchtitan(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
    text = source.text
    if not re.search(r"(?m)^[ \t]*\[\w", text) and re.search(r"--job\.config_file|torchtitan", text):
        launch, script = _script(source, reading)
        named = next((word.text.partition("=")[2] for word in launch.words if word.text.startswith("--job.config_file=")), "")
        words = [word.text for word in launch.words]
        named = named or next(
            (words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--job.config_file", "--job.config-file")), ""
        )
        text = script.files.get(named, script.files.get(PurePosixPath(named).name, ""))
        if not text:
            raise InputError(
                f"the command's file {named or '(none named)'} is not at hand; import it, or give it with --file",
                field="command",
            )
        reading.refused += [
            f"{word}: overrides on the command line are not read; write them into the file"
            for word in words
            if re.match(r"--(model|training|parallelism|activation_checkpoint)\.", word)
        ]
    torchtitan.read(text, reading=reading, num_gpus=reading.num_gpus, layers_of=source.layers_of, spare=source.ignore)


def _trainer(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
    if source.text.lstrip().startswith("{") or mapping_of(source.text) is not None:
        trainer.read(parsed(source.text), text=source.text, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore)
        return
    launch, script = _script(source, reading)
    words = settings_of(launch.words, table=table("trainer"), reading=reading)
    words = [*_recipe(words, script, reading), *(each for each in words if each.name != "config")]
    named = next(
        (
            each.values[0]
            for each in reversed(words)  # the command's own come last, and win
            if each.name in ("deepspeed", "deepspeed-config", "deepspeed-config-file") and each.values
        ),
        None,
    )
    text = None if named is None else script.files.get(named, script.files.get(PurePosixPath(named).name))
    if named is not None and text is None:
        stage = re.search(r"(?:zero|z|stage)[-_]?([0-3])(?!\d)", named)
        reading.lack(
            "parallel.zero_stage",
            f"{named} is not at hand; give it with --file {named}"
            + (f", or add --set parallel.zero_stage={stage[1]}" if stage else ""),
        )
    config = next(
        (script.files.get(word.text, script.files.get(PurePosixPath(word.text).name)) for word in _accelerate_files(script)),
        None,
    )
    content = None if text is None else parsed(text)
    started = [word.text for command in script.commands for word in command.words]
    options = trainer.launch_options(started[started.index("accelerate") + 2 :]) if "accelerate" in started else {}
    fsdp = next((" ".join(each.values).strip() for each in reversed(words) if each.name == "fsdp"), "")  # '' is off
    if fsdp and config is None and not options:
        options = {"distributed_type": "FSDP", "fsdp_config": trainer.own_fsdp(fsdp, reading)}
    if config is not None or (options and text is None):
        laid = {} if config is None else parsed(config)
        for key, value in options.items():
            laid[key] = {**(laid.get(key) or {}), **value} if isinstance(value, dict) else value
        _accelerated(laid, config or "", source, reading, words=words)
        return
    trainer.read(content, text=text or "", words=words, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore)


def _served(words: list[Setting], script: Script, reading: Reading, *, engine: str) -> list[Setting]:
    """Return the options in the file behind a server's --config: switches stand without a value, or are off."""
    options = []
    for each in _recipe(words, script, reading):
        argument = look_up(each.name, table(engine))
        if argument is None or argument.arity != "0":
            options.append(each)
        elif each.values != ("false",):
            options.append(replace(each, values=()))
    return options


def _recipe(words: list[Setting], script: Script, reading: Reading) -> list[Setting]:
    """The arguments in the file behind --config, which TRL's scripts and servers read before those of the command."""
    named = next((each for each in words if each.name == "config" and each.values), None)
    if named is None:
        return []
    text = script.files.get(named.values[0], script.files.get(PurePosixPath(named.values[0]).name))
    if text is None:
        reading.refuse(f"{named.written} {named.values[0]}: the file is not at hand; give it with --file {named.values[0]}")
        return []
    return file_settings(parsed(text), text=text)


def _accelerated(content: dict[str, Any], text: str, source: Source, reading: Reading, **words: Any) -> None:
    reading.tool = "accelerate"
    if reading.num_gpus is None and str(content.get("num_processes", "")).isdecimal():
        reading.num_gpus = whole_number(content["num_processes"], "num_processes")
    trainer.accelerate(content, text=text, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore, **words)


def _accelerate_files(script: Script) -> list[Any]:
    """Words behind --config_file of `accelerate launch`."""
    found = []
    for command in script.commands:
        for word, after in zip(command.words, command.words[1:], strict=False):
            if word.text in ("--config_file", "--config-file"):
                found.append(after)
    return found


def _accelerate(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
    content = mapping_of(source.text)
    if content is None:
        _trainer(source, reading, told, facts)
        return
    _accelerated(content, source.text, source, reading)


def _yaml(read_content: Callable[..., None]) -> Callable[[Source, Reading, list[Setting], Mapping[str, str]], None]:
    def follow(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
        content = parsed(source.text) if source.text.lstrip().startswith("{") else mapping_of(source.text)
        if content is None:
            content = {}
            launch, script = _script(source, reading)
            names = [word.text for word in launch.words if word.text.endswith((".yml", ".yaml", ".json"))]
            for name in names:
                text = script.files.get(name, script.files.get(PurePosixPath(name).name))
                if text is None:
                    raise InputError(f"{name} is not at hand; give it with --file", field="command", code="missing_field")
                content |= parsed(text)
        content = interpolated(content, variables=source.variables)
        if known := source.vocabulary(
            {
                plain(str(key)): Setting(name=plain(str(key)), written=str(key), values=(str(value),))
                for key, value in content.items()
            }
        ):
            reading.hints["model.vocab_size"] = known
        read_content(content, text=source.text, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore)

    return follow


def _verl(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
    content = mapping_of(source.text)
    if content is not None:
        settings = file_settings(interpolated(content, variables=source.variables), text=source.text)
    else:
        launch, _ = _script(source, reading)
        settings = verl.settings_of(launch.words)
        named = re.search(r"--config[-_]name[= ]\S*megatron", " ".join(word.text for word in launch.words))
        if named and all(each.name != verl.STRATEGY for each in settings):
            settings.append(Setting(name=verl.STRATEGY, written=named[0], values=("megatron",)))
        reading.ignored += [
            Ignored(flag=word.text, reason="chooses the trainer's own file", line=word.line)
            for word in launch.words
            if "=" not in word.text
        ]
    verl.read(settings, reading=reading, num_gpus=source.num_gpus, spare=source.ignore)


def _engine(engine: str) -> Callable[[Source, Reading, list[Setting], Mapping[str, str]], None]:
    def follow(source: Source, reading: Reading, told: list[Setting], facts: Mapping[str, str]) -> None:
        launch, script = _script(source, reading)
        words, model = list(launch.words), None
        if engine == "vllm" and words and not words[0].text.startswith("-"):
            model = words.pop(0).text
        if reading.num_gpus != source.num_gpus and "torchrun" not in launch.launchers:
            reading.num_gpus = source.num_gpus  # srun starts one server
        settings = settings_of(words, table=table(engine), reading=reading)
        settings = [*_served(settings, script, reading, engine=engine), *(each for each in settings if each.name != "config")]
        engine_commands.read(
            settings,
            engine=engine,
            model=model,
            reading=reading,
            num_experts_of=source.num_experts_of,
            precision_of=source.precision_of,
            spare=source.ignore,
        )

    return follow


_READERS: dict[str, Callable[[Source, Reading, list[Setting], Mapping[str, str]], None]] = {
    "megatron-lm": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _trainer,
    "accelerate": _accelerate,
    "nemo": _yaml(yaml_configs.nemo),
    "gpt-neox": _yaml(yaml_configs.neox),
    "nanotron": _yaml(nanotron.read),
    "verl": _verl,
    "vllm": _engine("vllm"),
    "sglang": _engine("sglang"),
}
