"""The explorer's controls: what each may be set to for this model on so many devices."""

from __future__ import annotations

from collections.abc import Iterable

from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from service.dashboard.explorer.contexts import Control, Option, Settings

MAX_SIZE = 64
"""Largest tensor, pipeline and context size that is offered; the address takes any."""
MAX_CHUNKS = 16
LENGTHS = tuple(1024 * 2**k for k in range(11))
RECOMPUTATION = {"none": "none", "selective": "selective (attention core)", "full": "full"}
SWITCH = {"off": "off", "on": "on"}
ZERO = {"0": "0, nothing", "1": "1, optimizer", "2": "2, and gradients", "3": "3, and weights"}


def controls(settings: Settings, *, model: ModelSpec, shown: ParallelConfig) -> tuple[Control, ...]:
    """One for each axis; `shown` is the configuration they stand at."""
    n, c = settings.num_gpus, shown
    layers = model.num_hidden_layers
    sizes = [size for size in _powers(MAX_SIZE) if size <= n]
    stages = [size for size in _divisors(layers) if size <= min(n, MAX_SIZE)]
    each = layers // c.pipeline_parallel_size if layers % c.pipeline_parallel_size == 0 else layers
    chunks = [size for size in _divisors(each) if size <= MAX_CHUNKS]
    heads = [size for size in sizes if size <= model.num_attention_heads]
    found = [
        _numbers("sequence_length", "Sequence length", settings.sequence_length, LENGTHS, help="tokens"),
        _numbers("tp", "Tensor parallel (TP)", c.tensor_parallel_size, heads),
        _numbers("pp", "Pipeline parallel (PP)", c.pipeline_parallel_size, stages),
        _numbers("vpp", "Model chunks per rank", c.virtual_pipeline_parallel_size, chunks),
        _numbers("cp", "Context parallel (CP)", c.context_parallel_size, sizes),
    ]
    if model.num_experts:
        experts = [size for size in _divisors(model.num_experts) if size <= n]
        found.append(_numbers("ep", "Expert parallel (EP)", c.expert_parallel_size, experts))
    found += [
        _numbers("mbs", "Micro-batch", c.micro_batch_size, _powers(16), help="sequences"),
        _words("recompute", "Recomputation", recompute_name(c.recompute).split()[0], RECOMPUTATION, slider=True),
        _words("sp", "Sequence parallel (SP)", "on" if c.sequence_parallel else "off", SWITCH, slider=False),
        _words("zero", "ZeRO stage", str(c.zero_stage), ZERO, slider=False),
    ]
    return tuple(found)


def _numbers(name: str, label: str, value: int, known: Iterable[int], *, help: str = "") -> Control:
    values = sorted({*known, value})
    options = tuple(Option(value=str(each), label=f"{each:,}") for each in values)
    return Control(name=name, label=label, value=str(value), options=options, slider=True, help=help)


def _words(name: str, label: str, value: str, known: dict[str, str], *, slider: bool) -> Control:
    options = tuple(Option(value=each, label=said) for each, said in known.items())
    return Control(name=name, label=label, value=value, options=options, slider=slider)


def _powers(largest: int) -> list[int]:
    return [2**k for k in range(largest.bit_length())]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
