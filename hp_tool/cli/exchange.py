"""`hp-tool export RESULT`: write a configuration in another tool's format. `hp-tool import
COMMAND`: read such a configuration and compare it with its prediction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hp_tool.cli import queries
from hp_tool.errors import InputError
from hp_tool.extras import require

if TYPE_CHECKING:
    from rich.console import Console

    from hp_tool.cluster.logs import ServerStart
    from hp_tool.domain.result import Estimate
    from hp_tool.domain.serving import InferenceEstimate, KvCache
    from hp_tool.formats.exchange import Assessment, LoggedRun, LogSummary


_SEARCH_ID = re.compile(r"[0-9a-f]{16}")


class FormatsCommand(TyperCommand):
    """A command whose help lists the export formats. They are loaded only when the command is
    called.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, with the format names in the help of --format."""
        from hp_tool.formats.registry import listed_readable, listed_writable

        for param in self.params:
            if param.name == "format":
                names = {"readable": listed_readable(), "writable": listed_writable()}
                param.help = param.help.format(**names)  # type: ignore[attr-defined]
        return super().get_params(ctx)


def export(
    result: Annotated[
        str,
        typer.Argument(
            metavar="RESULT",
            help="Output of recommend, estimate or tune with --json, a query, or a search's id; - "
            "reads standard input.",
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option("--format", help="{writable}. Default: the format of the query's framework."),
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, max=1000, help="Rank of the recommendation to export.")
    ] = 1,
    tool: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="FORMAT",
            help="Rank only the layouts that the tool of this format supports, export the "
            "best, and "
            "report the slowdown.",
        ),
    ] = None,
    settings: queries.Setting = None,
    as_json: queries.JsonOption = False,
) -> None:
    """Print the configuration as the flags or the file of another tool. A setting that the tool
    lacks is an error that names the setting.
    """
    from hp_tool.formats.exchange import export_configuration, export_for_tool
    from hp_tool.questions import schema
    from hp_tool.questions.configuration import Configuration

    if tool is not None and format is not None:
        raise InputError(
            "--format exports the result and --for ranks again; pass only one of them",
            field="--format",
        )
    content = _search_result(result) or queries.read_mapping(result)
    if changes := queries.query_overrides({}, settings):
        if tool is None and "kind" not in content:  # Convert the row to a query.
            chosen_row = Configuration.read(content, rank=rank, parse=schema.parse_own_query)
            content, rank = chosen_row.mapping(), 1
        query = content if "kind" in content else content.get("query")
        if not isinstance(query, dict):
            raise InputError("--set requires a query, or a result with its query", field="--set")
        schema.set_paths(query, changes)
    if tool is None:
        chosen = export_configuration(
            result=content, format=format, rank=rank, read=schema.parse_own_query
        )
    else:
        chosen = export_for_tool(result=content, format=tool, read=schema.parse_own_query)
    for note in filter(None, (chosen.cost_in_words(), *chosen.notes)):
        typer.echo(note, err=True)
    if as_json:
        short = {"format": chosen.format, "text": chosen.text, "notes": chosen.notes}
        typer.echo(schema.to_json(short if tool is None else chosen))
        return
    typer.echo(chosen.text, nl=False)


def _search_result(name: str) -> dict[str, Any] | None:
    """Return the result of the local search with this id; None if `name` is not an id or is a
    file.
    """
    if not _SEARCH_ID.fullmatch(name) or Path(name).exists():
        return None
    require("search", by="`hp-tool export` of a search")
    from hp_tool.store import database_url, open_store

    with closing(open_store(database_url())) as store:
        record = store.get_search(search_id=name)
    if record.result is None:
        raise InputError(
            f"search {name} is {record.state} and has no result to export", field="result"
        )
    return record.result


def import_(
    context: typer.Context,
    command: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIGURATION",
            help="A launch script, a configuration file, or a log that begins with Megatron's "
            "arguments; - is standard input. Without it, only the log in --log is summarized.",
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Log of the run, for step times, memory, and values that the script does not set."
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="{readable}. Default: detected.")
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(
            "--var",
            metavar="NAME=VALUE",
            help="Variable of the script's environment; 1=... is its first argument.",
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="File that the script sources or names: FILE, or NAME=FILE. Files in the script's "
            "folder are found automatically.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="FLAG",
            help="A flag or key to ignore because it affects neither time nor memory.",
        ),
    ] = None,
    query_only: Annotated[
        bool, typer.Option("--query", help="Print the query as YAML and stop.")
    ] = False,
    search_only: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Print the query of a search with this configuration as search.baseline, "
            "and stop.",
        ),
    ] = False,
    model: queries.Model = None,
    gpu: queries.Gpu = None,
    num_gpus: queries.NumGpus = None,
    sequence_length: queries.SequenceLength = None,
    total_tokens: queries.TotalTokens = None,
    settings: queries.Setting = None,
    as_json: queries.JsonOption = False,
) -> None:
    """Predict the step time of a launch script, compare it with the log, and print the best
    configuration for the same work as a diff of flags.
    """
    import yaml

    from hp_tool.cli.script_files import add_base_names, find_script_files
    from hp_tool.formats.exchange import assess, read_configuration, search_query, summarize_log
    from hp_tool.formats.megatron_names import PRINTED_ARGUMENTS
    from hp_tool.formats.reading import ImportRefusedError
    from hp_tool.questions import schema

    changes = queries.query_overrides(queries.query_flags(context) | {"num_gpus": None}, settings)
    if log is not None and not Path(log).is_file():
        raise InputError(f"log file {log} does not exist", field="--log")
    lines = Path(log).read_text(errors="replace").splitlines() if log is not None else []
    if command is None and log is None:
        raise InputError(
            "no configuration given; pass a script, a configuration file, or a log with --log",
            field="CONFIGURATION",
        )
    if command is None and not PRINTED_ARGUMENTS.search("\n".join(lines)):
        summary = summarize_log(lines)
        typer.echo(schema.to_json(summary)) if as_json else _print_log_summary(summary, str(log))
        return
    command = command or str(log)
    content = queries.read_text(command)
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    script_files = {} if command == "-" else find_script_files(Path(command), text)
    try:
        reading = read_configuration(
            text,
            format=format,
            num_gpus=num_gpus,
            overrides=changes,
            variables=_parse_pairs(variable, "--var"),
            files=add_base_names(script_files) | _read_files(file),
            ignore=ignore or (),
            log=lines,
        )
    except ImportRefusedError as error:
        if as_json:
            typer.echo(
                schema.to_json(
                    {"status": "error", "error": error.as_dict(), **error.details, "changes": []}
                )
            )
        raise
    parsed = schema.parse_own_query(reading.query)
    if query_only or search_only:
        shown = search_query(parsed, tool=reading.tool) if search_only else parsed
        typer.echo(yaml.safe_dump(schema.query_mapping(shown), sort_keys=False), nl=False)
        return
    own_log = text.splitlines() if log is None and "elapsed time per iteration" in text else None
    assessment = assess(parsed, reading=reading, log=lines if log is not None else own_log)
    if script_files:
        typer.echo(f"read from the script's folder: {', '.join(script_files)}", err=True)
    typer.echo(schema.to_json(assessment)) if as_json else _print_assessment(assessment)
    if not assessment.estimate.feasible:
        raise typer.Exit(3)


def _parse_pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    pairs = [each.partition("=") for each in texts or ()]
    if bad := next((name for name, separator, _ in pairs if not separator), None):
        raise InputError(f"{option} {bad}: write NAME=VALUE", field=option)
    return {name: value for name, _, value in pairs}


def _read_files(names: list[str] | None) -> dict[str, str]:
    """Return the contents of files, by NAME for NAME=FILE, else by file name."""
    from hp_tool.catalog.documents import read_text

    texts: dict[str, str] = {}
    for each in names or ():
        name, separator, path = each.partition("=")
        texts[name if separator else Path(each).name] = read_text(Path(path if separator else each))
    return texts


def _print_assessment(assessment: Assessment) -> None:
    from hp_tool.cli.layout import make_console, print_flags
    from hp_tool.cli.serving_tables import print_inference_estimate
    from hp_tool.cli.tables import print_estimate
    from hp_tool.domain.result import Estimate
    from hp_tool.questions import schema

    console = make_console()
    for line in (*_logged_lines(assessment), *_better_lines(assessment)):
        console.print(line, highlight=False)
    print_flags(console, assessment.changes)
    console.print("\nPrediction", style="bold")
    if isinstance(assessment.estimate, Estimate):
        print_estimate(assessment.estimate)
        _print_saved_parts(console, assessment)
    else:
        print_inference_estimate(assessment.estimate, query=schema.parse_query(assessment.query))
    _print_settings(console, assessment)


def _print_log_summary(summary: LogSummary, log: str) -> None:
    """Print the metrics in a log, and what else a comparison needs."""
    from hp_tool.cluster.logs import ServerStart
    from hp_tool.domain.units import format_duration

    logged = summary.logged
    if isinstance(logged, ServerStart):
        for line in _server_lines(logged, None):
            typer.echo(line)
        needed = "the command that started the server"
    else:
        steps = f"(median of {logged.steps}; log of {summary.reader})"
        if logged.out_of_memory:
            typer.echo("The run ran out of memory.")
        if logged.step_s is not None:
            typer.echo(f"Measured {format_duration(logged.step_s)} per step {steps}.")
        elif logged.tokens_per_second_per_gpu is not None:
            typer.echo(
                f"Measured {logged.tokens_per_second_per_gpu:,.0f} tokens/s per GPU {steps}."
            )
        elif summary.samples_per_second is not None:
            typer.echo(f"Measured {summary.samples_per_second:,.3g} sequences/s {steps}.")
        for line in _peak_lines(logged):
            typer.echo(line)
        needed = "the launch script or the configuration of the run"
    typer.echo(
        f"To compare the log with a prediction, pass {needed}: "
        f"hp-tool import CONFIGURATION --log {log}"
    )


def _server_lines(
    start: ServerStart, estimate: Estimate | InferenceEstimate | None
) -> Iterator[str]:
    from hp_tool.cluster.logs import ServerStart
    from hp_tool.domain.serving import InferenceEstimate
    from hp_tool.domain.units import format_gib

    memory = estimate.memory if isinstance(estimate, InferenceEstimate) else None
    predicted = {} if memory is None else {"weights": memory.weights_bytes}
    if memory is not None:
        predicted["kv_cache"] = memory.kv_cache_capacity_bytes
    for name, label in (
        ("weights", "weights"),
        ("kv_cache", "KV cache"),
        ("graphs", "CUDA graphs"),
    ):
        if (size := getattr(start, f"{name}_bytes")) is not None:
            comparison = f"; predicted {format_gib(predicted[name])}" if name in predicted else ""
            yield f"Logged {label}: {format_gib(size)}{comparison}."
    if start.kv_cache_tokens is not None:
        cache = estimate.kv_cache if isinstance(estimate, InferenceEstimate) else None
        comparison = _compared_tokens(start.kv_cache_tokens, cache)
        yield f"Logged KV cache: {start.kv_cache_tokens:,} tokens{comparison}."
    if start == ServerStart():
        yield "The log has no start-up lines of vLLM or SGLang, so there is nothing to compare."


def _compared_tokens(logged: int, cache: KvCache | None) -> str:
    """Return the predicted number of tokens in a replica's cache, and whether the logged number is
    within the interval.

    Empty for models with sliding windows or recurrent states, because the logged number is then not
    a capacity.
    """
    if cache is None or not cache.alike:
        return ""
    tokens = cache.tokens
    inside = "inside" if tokens.low <= logged <= tokens.high else "outside"
    return (
        f"; predicted {tokens.expected:,} ({tokens.low:,}-{tokens.high:,}), so {inside} the range"
    )


def _logged_lines(assessment: Assessment) -> Iterator[str]:
    from hp_tool.cluster.logs import ServerStart
    from hp_tool.domain.result import Estimate
    from hp_tool.domain.units import format_duration, format_duration_range

    logged = assessment.logged
    if isinstance(logged, ServerStart):
        yield from _server_lines(logged, assessment.estimate)
        return
    if logged is None:
        return
    if logged.out_of_memory:
        yield "The run ran out of memory."
    if logged.step_s is not None:
        gap, estimate = "", assessment.estimate
        if isinstance(estimate, Estimate) and estimate.time and assessment.step_gap_fraction:
            off = assessment.step_gap_fraction
            gap = f"; predicted {format_duration(estimate.time.step_s)}"
            if estimate.intervals is not None:
                low, high = estimate.intervals.step_s
                inside = "inside" if low <= logged.step_s <= high else "outside"
                gap += f" ({format_duration_range(low, high)}), so {inside} the range"
                if inside == "outside":
                    gap += " (hp-tool explain splits a recorded step into parts)"
            gap += f": {abs(off):.1%} {'slower' if off > 0 else 'faster'} than predicted"
        yield f"Measured {format_duration(logged.step_s)} per step (median of {logged.steps}){gap}."
    elif not logged.out_of_memory:
        yield (
            "The log has no step time and no throughput, so there is nothing to compare. Hugging "
            "Face's Trainer prints neither while it runs: add HuggingFaceCallback from "
            "hp_tool.reporter."
        )
    yield from _peak_lines(logged)


def _peak_lines(logged: LoggedRun) -> Iterator[str]:
    from hp_tool.domain.units import format_gib

    peaks = [
        f"{format_gib(size)} {name}"
        for name in ("allocated", "reserved")
        if (size := getattr(logged, f"{name}_bytes")) is not None
    ]
    if peaks:
        yield f"Peak memory: {', '.join(peaks)}."


def _better_lines(assessment: Assessment) -> Iterator[str]:
    from hp_tool.domain.parallel import ParallelConfig
    from hp_tool.domain.result import Recommendation
    from hp_tool.wording.short import (
        layout_words,
        serving_figures_words,
        serving_layout_words,
        training_figures_words,
    )

    better = assessment.better
    if better is None:
        yield "No layout is predicted to be faster."
        return
    if isinstance(better, Recommendation):
        assert isinstance(better.parallel, ParallelConfig)
        what = f"{layout_words(better.parallel)}: {training_figures_words(better.estimate)}"
    else:
        replicas = better.estimate.replicas
        what = (
            f"{serving_layout_words(better.parallel, replicas)}: "
            f"{serving_figures_words(better.estimate)}"
        )
    gain = ""
    if assessment.gain_fraction is not None and assessment.gain_interval is not None:
        low, high = assessment.gain_interval
        gain = f" Throughput {assessment.gain_fraction:+.1%} ({low:+.0%} to {high:+.0%})."
    yield f"Better: {what}.{gain}"
    if assessment.switched_on:
        names = ", ".join(assessment.switched_on)
        yield f"This layout overlaps communication that the command does not overlap: {names}."


def _print_saved_parts(console: Console, assessment: Assessment) -> None:
    from hp_tool.cli.layout import print_table
    from hp_tool.domain.parts import label
    from hp_tool.domain.result import Recommendation

    better = assessment.better
    if not isinstance(better, Recommendation) or better.estimate.time is None:
        return
    rows = [
        (label(name), f"{seconds:+.3f}")
        for name, seconds in sorted(
            assessment.parts_gained_s.items(), key=lambda item: -abs(item[1])
        )
        if abs(seconds) >= 1e-3 * better.estimate.time.step_s
    ]
    print_table(
        console, ("part", "saved, s per step"), rows, title="Where the gain comes from", left=1
    )


def _print_settings(console: Console, assessment: Assessment) -> None:
    read, ignored = len(assessment.read), len(assessment.ignored)
    console.print(
        f"Read as {assessment.format}: {read} settings, {ignored} ignored.", highlight=False
    )
    reasons = Counter(ignored_setting.reason for ignored_setting in assessment.ignored)
    for reason, count in reasons.most_common():
        names = [
            ignored_setting.flag
            for ignored_setting in assessment.ignored
            if ignored_setting.reason == reason
        ]
        more = f" and {count - 6} more" if count > 6 else ""
        console.print(
            f"  ignored, {reason}: "
            f"{', '.join(' '.join(name.split())[:60] for name in names[:6])}{more}",
            markup=False,
            highlight=False,
        )
