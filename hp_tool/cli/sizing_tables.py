"""Terminal output of a sizing: the model, tokens, days, and the rule behind each choice."""

from rich.console import Console
from rich.text import Text

from hp_tool.cli.layout import make_console
from hp_tool.cli.tables import goodput_line, print_reasons
from hp_tool.domain.sizing import Choice, Sizing
from hp_tool.domain.units import format_decimal, format_whole
from hp_tool.wording.words import layout_arithmetic


def print_sizing(sizing: Sizing) -> None:
    """Print the model, its tokens and days, the reasons for its shape, and starting
    hyperparameters.
    """
    console = make_console()
    model = sizing.model
    total = (
        ""
        if sizing.parameters == sizing.active_parameters
        else f" of {_format_short_count(sizing.parameters)}"
    )
    experts = (
        f", {model.num_experts} experts, {model.num_experts_per_tok} per token"
        if model.num_experts
        else ""
    )
    console.print(
        f"{model.name}: {model.num_hidden_layers} layers x {model.hidden_size} hidden, "
        f"{model.num_attention_heads} heads, "
        f"{model.kv_heads} key/value heads, {model.ffn_size} MLP, vocabulary "
        f"{model.vocab_size}{experts}"
    )
    console.print(
        f"{_format_short_count(sizing.active_parameters)}{total} parameters, "
        f"{_format_short_count(sizing.tokens)} tokens "
        f"({sizing.tokens_per_parameter:.1f} per parameter), {sizing.flops:.3g} model FLOPs"
    )
    over = (
        f", {sizing.compute_overhead:.0%} more compute than the optimum"
        if sizing.compute_overhead >= 0.01
        else ""
    )
    console.print(f"predicted loss {sizing.loss.value:.3f} {sizing.loss.unit}{over}")
    print_reasons(console, sizing.reasons)
    _print_time(console, sizing)
    _print_choices(console, "shape, with reasons", sizing.shape)
    _print_choices(console, "starting hyperparameters", (sizing.law, *sizing.hyperparameters))


def _print_time(console: Console, sizing: Sizing) -> None:
    goodput, chosen = sizing.goodput, sizing.recommendation
    if chosen is None or goodput is None or sizing.days is None or sizing.effective_days is None:
        return
    console.print(layout_arithmetic(chosen.parallel))
    cost = f", ${sizing.cost:,.0f}" if sizing.cost is not None else ""
    console.print(
        f"{format_decimal(sizing.effective_days)} days on {sizing.num_gpus:,} devices "
        f"({format_decimal(sizing.days)} without failures), "
        f"{format_whole(sizing.gpu_hours or 0.0)} GPU-hours{cost}"
    )
    console.print(goodput_line(goodput))


def _print_choices(console: Console, title: str, choices: tuple[Choice, ...]) -> None:
    """Print one paragraph per choice, because rules and sources do not fit in a column."""
    if not choices:
        return
    console.print(f"{title}:", style="bold")
    for choice in choices:
        value = f"{_format_value(choice.value)} {choice.unit}".strip()
        outside = ", extrapolated" if choice.extrapolated else ""
        console.print(
            Text.assemble(
                f"  {choice.name} ",
                (value, "bold"),
                f": {choice.rule} ",
                (f"({choice.source}{outside})", "dim"),
            )
        )


def _format_value(value: float | int | str | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{each:g}" for each in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _format_short_count(count: float) -> str:
    """Return `70.2B` for 70.2 billion."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:,.0f}"
