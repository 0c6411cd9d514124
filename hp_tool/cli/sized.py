"""A sizing as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hp_tool.cli.tables import goodput_line, wide_console
from hp_tool.domain.sizing import Choice, Sizing
from hp_tool.render.words import arithmetic


def print_sizing(sizing: Sizing) -> None:
    """The model, its tokens and days; why it looks so; and where to start."""
    console = wide_console()
    model = sizing.model
    total = "" if sizing.parameters == sizing.active_parameters else f" of {_short(sizing.parameters)}"
    experts = f", {model.num_experts} experts, {model.num_experts_per_tok} a token" if model.num_experts else ""
    console.print(
        f"{model.name}: {model.num_hidden_layers} layers x {model.hidden_size} hidden, {model.num_attention_heads} heads, "
        f"{model.kv_heads} key/value heads, {model.ffn_size} MLP, {model.vocab_size} words{experts}"
    )
    console.print(
        f"{_short(sizing.active_parameters)}{total} parameters, {_short(sizing.tokens)} tokens "
        f"({sizing.tokens_per_parameter:.1f} a parameter), {sizing.flops:.3g} model FLOPs"
    )
    over = f", {sizing.compute_overhead:.0%} more compute than the optimum" if sizing.compute_overhead >= 0.01 else ""
    console.print(f"predicted loss {sizing.loss.value:.3f} {sizing.loss.unit}{over}")
    for reason in sizing.reasons:
        console.print(f"[red]{reason.code}[/red]: {reason.message}")
    _print_time(console, sizing)
    _print_choices(console, "the shape, and why", sizing.shape)
    _print_choices(console, "where to start", (sizing.law, *sizing.hyperparameters))


def _print_time(console: Console, sizing: Sizing) -> None:
    kept, chosen = sizing.goodput, sizing.recommendation
    if chosen is None or kept is None or sizing.days is None or sizing.effective_days is None:
        return
    console.print(arithmetic(chosen.parallel))
    cost = f", ${sizing.cost:,.0f}" if sizing.cost is not None else ""
    console.print(
        f"{sizing.effective_days:.1f} days on {sizing.num_gpus:,} devices ({sizing.days:.1f} without failures), "
        f"{sizing.gpu_hours:,.0f} GPU-hours{cost}"
    )
    console.print(goodput_line(kept))


def _print_choices(console: Console, title: str, choices: tuple[Choice, ...]) -> None:
    if not choices:
        return
    table = Table(title=title)
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("rule")
    table.add_column("source")
    for choice in choices:
        outside = " (extrapolated)" if choice.extrapolated else ""
        table.add_row(choice.name, f"{_value(choice.value)} {choice.unit}".strip(), choice.rule, choice.source + outside)
    console.print(table)


def _value(value: float | int | str | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{one:g}" for one in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _short(count: float) -> str:
    """`70.2B`: thousand millions, and so on."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:,.0f}"
