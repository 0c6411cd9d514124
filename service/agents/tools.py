"""Tools for agents over the service's routes, with short answers.

Agents read the docstrings of the tools.
"""

import functools
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, ParamSpec

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from hp_tool.catalog.documents import read_text
from hp_tool.errors import HpToolError
from hp_tool.formats.reading import set_option
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from service.agents import figures
from service.agents.arguments import ImportArgument, QueryArgument
from service.agents.keys import Section, keys_of
from service.api.format_names import Writable
from service.async_client import AsyncClient

P = ParamSpec("P")
Answer = dict[str, Any]
MAX_EXPORT = 60_000
"""Maximum length of an exported text, in characters."""
MAX_QUERY = 8_000
"""Maximum length of a query that is repeated in an answer, in characters."""
FOLLOWED_RUNS = 10
MAX_RECORDINGS = 16
Options = Annotated[dict[str, Any], Field(max_length=100)]
Rows = Annotated[int, Field(ge=1, le=figures.MAX_ROWS)]
WaitS = Annotated[float, Field(ge=0, le=60)]
Text = Annotated[str, Field(max_length=200_000)]


def compact_answers(tool: Callable[P, Awaitable[Answer]]) -> Callable[P, Awaitable[CallToolResult]]:
    """Wrap a tool so that answers become compact JSON and errors include code and field."""

    @functools.wraps(tool)
    async def answered(*args: P.args, **arguments: P.kwargs) -> CallToolResult:
        try:
            answer = schema.to_dict(await tool(*args, **arguments))
            if len(json.dumps(answer.get("query"))) > MAX_QUERY:  # The query includes local files.
                answer["query"] = "omitted because of its length; pass your own query again"
            text = json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
            return CallToolResult(
                content=[TextContent(type="text", text=text)], structured_content=answer
            )
        except HpToolError as error:
            where = f", field {error.field}" if error.field else ""
            raise ToolError(f"{with_tool_arguments(error)} (code {error.code}{where})") from error

    return answered


ARGUMENTS = {"--set": "overrides", "--file": "files", "--ignore": "ignore", "--var": "variables"}
"""Arguments of import_config, by the equivalent `hp-tool import` option."""


def with_tool_arguments(error: HpToolError) -> str:
    """Return the error's message, with import_config's arguments for command-line options."""
    message = error.message
    for missing in error.details.get("missing", ()):
        field, example = missing["field"], missing.get("example")
        if example is not None:
            message = message.replace(set_option(field, example), _argument(field, example))
    return re.sub(
        rf"({'|'.join(ARGUMENTS)})(?![\w-])", lambda option: ARGUMENTS[option[0]], message
    )


def _argument(field: str, example: str) -> str:
    """Return the argument that sets a field, such as `overrides {"model": "llama-3-8b"}`."""
    argument = {"cluster.gpu": "gpu", "cluster.num_gpus": "num_gpus"}.get(field)

    value = json.dumps(example) if field == "model" else example
    return (
        f"overrides {{{json.dumps(field)}: {value}}}"
        if argument is None
        else f"{argument} {example}".rstrip()
    )


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools for one connection to a service."""

    connect: Callable[[Context], AbstractAsyncContextManager[AsyncClient]]
    """Opens a client with the rights of the tool's caller."""
    own_files: bool = False
    """True if arguments may name local files, which is allowed only for the machine's own user."""
    run: Callable[[str], None] = lambda search_id: None
    """Runs a queued search if there is no worker."""

    def request(self, query: QueryArgument) -> Answer:
        """Return the query for the service, with local files replaced by their content."""
        mapping = query.mapping()
        return schema.query_mapping(schema.parse_own_query(mapping)) if self.own_files else mapping

    def text(self, argument: str) -> str:
        """Return the argument, or the content of the local file that it names."""
        names_file = (
            self.own_files
            and "\n" not in argument
            and len(argument) < 4096
            and Path(argument).is_file()
        )
        return read_text(Path(argument)) if names_file else argument

    @compact_answers
    async def estimate(self, context: Context, query: QueryArgument) -> Answer:
        """Estimate memory, step time, MFU, days and cost of a training configuration.

        For serving: latencies and throughput. Needs one configuration in `query.parallel`. Each
        figure has a 90% interval and a basis: fitted (on similar runs) or extrapolated (see
        `extrapolated_because`). An infeasible one has `reasons` and `fixes`; why_not evaluates the
        fixes.
        """
        async with self.connect(context) as client:
            answer = await client.estimate(query=self.request(query))
        estimate = figures.calibrated_estimate(answer)
        fixes = [fix["change"] for fix in estimate.get("fixes", ())]
        return (
            figures.estimate(estimate)
            | ({"fixes": fixes} if fixes else {})
            | {"query": answer["query"]}
        )

    @compact_answers
    async def recommend(self, context: Context, query: QueryArgument, top: Rows = 5) -> Answer:
        """Rank all legal configurations that fit by the cost model. Takes about a second, no GPU.

        Rows with the same `group` cannot be distinguished by prediction: try rank 1, or run a
        search to decide. Axes missing from `query.parallel` vary. Pass `query` and
        `recommendations` to export_config. If nothing fits, see `nearest_misses` and `rejections`.
        """
        async with self.connect(context) as client:
            answer = await client.recommend(query=self.request(query), top=top)
        ranking = {
            "recommendations": [figures.recommendation(row) for row in answer["recommendations"]],
            "nearest_misses": [figures.recommendation(row) for row in answer["nearest_misses"][:3]],
            "pools": (answer.get("disaggregated") or [])[:top],
            "space": {name: answer["space"][name] for name in ("legal", "feasible")},
            "rejections": answer["rejections"],
        }
        return {name: value for name, value in ranking.items() if value} | {
            "query": answer["query"]
        }

    @compact_answers
    async def why_not(self, context: Context, query: QueryArgument) -> Answer:
        """Explain why a configuration is infeasible or slower than the best.

        If infeasible: each reason, and the smallest changes that fix it, with figures and the
        resulting `parallel` for the next query. If feasible: how much slower it is than the best,
        and which parts of the step differ.
        """
        async with self.connect(context) as client:
            answer = await client.estimate(query=self.request(query))
            estimate = figures.calibrated_estimate(answer)
            if not estimate["feasible"]:
                fixes = [
                    await self._evaluate_fix(client, answer["query"], fix)
                    for fix in estimate.get("fixes", ())
                ]
                return figures.estimate(estimate) | {"fixes": fixes}
            free = {name: part for name, part in answer["query"].items() if name != "parallel"}
            rows = (await client.recommend(query=free, top=1))["recommendations"]
        if not rows:
            return figures.estimate(estimate)
        best = figures.calibrated_estimate(rows[0])
        parts_s, best_parts_s = (
            (row.get("time") or row).get("parts_s") or {} for row in (estimate, best)
        )
        extra_parts_s = {
            name: seconds - best_parts_s.get(name, 0.0) for name, seconds in parts_s.items()
        }
        extra_parts_s = {
            name: float(f"{seconds:.4g}")
            for name, seconds in sorted(extra_parts_s.items(), key=lambda item: -abs(item[1]))
            if seconds
        }
        return figures.estimate(estimate) | {
            "best": figures.recommendation(rows[0]),
            "seconds_more_than_best_by_part": extra_parts_s,
        }

    @staticmethod
    async def _evaluate_fix(client: AsyncClient, query: Answer, fix: Answer) -> Answer:
        fixed = Configuration.read(
            {"query": query, "recommendations": [fix]}, rank=1, parse=schema.parse_query
        )
        estimate = figures.calibrated_estimate(await client.estimate(query=fixed.mapping()))
        change = {name: fix[name] for name in ("change", "num_gpus", "set") if fix.get(name)}
        remaining = [reason["message"] for reason in fix.get("remaining", ())]
        shown = figures.estimate(estimate)
        return (
            change
            | {name: shown[name] for name in ("parallel", "figures") if name in shown}
            | ({"remaining": remaining} if remaining else {})
        )

    @compact_answers
    async def import_config(self, context: Context, run: ImportArgument) -> Answer:
        """Read another tool's training or serving script and suggest better flags.

        Converts it to a query, predicts it, compares it with its log, and lists flags to change for
        the best configuration of the same work (`changes`: flag, from, to). One error lists all
        that is missing or not understood: call again with gpu, overrides, files or ignore.
        """
        options = run.options() | {
            "files": {name: self.text(file) for name, file in run.files.items()}
        }
        options |= {"log": None if run.log is None else self.text(run.log)}
        async with self.connect(context) as client:
            answer = await client.import_configuration(command=self.text(run.command), **options)
        better = answer.get("better")
        reading = {
            "format": answer["format"],
            "running": figures.estimate(answer["estimate"]),
            "logged": _logged(answer.get("logged") or {}, answer.get("step_gap_fraction")),
            "better": figures.recommendation(better) if better else None,
            "gain_fraction": answer.get("gain_fraction"),
            "gain_interval": answer.get("gain_interval"),
            "changes": figures.limit_items(answer["changes"], max_items=100),
            "switched_on": answer["switched_on"],
            "read": figures.limit_items(
                f"{row['flag']} {row['value']} -> {row['field']}" for row in answer["read"]
            ),
            "ignored": figures.limit_items(
                f"{row['flag']}: {row['reason']}" for row in answer["ignored"]
            ),
        }
        return {name: value for name, value in reading.items() if value not in (None, {}, [])} | {
            "query": answer["query"]
        }

    @compact_answers
    async def export_config(
        self,
        context: Context,
        query: QueryArgument,
        format: Writable,
        rank: Annotated[
            int, Field(ge=1, le=1000, description="Rank of the recommendation to export.")
        ] = 1,
        rerank: Annotated[
            bool,
            Field(
                description="Rank again among configurations that the format's tool can run, "
                "instead of rejecting others; the answer reports the cost and what was left out."
            ),
        ] = False,
    ) -> Answer:
        """Write a configuration as a script, file or manifest of another tool.

        If `query.parallel` fixes everything, it writes that configuration, else the recommendation
        of this rank. A list at the top names values to fill in.
        """
        async with self.connect(context) as client:
            answer = await client.export(
                result=self.request(query), format=format, rank=rank, rerank=rerank
            )
        if len(answer["text"]) > MAX_EXPORT:
            raise ToolError(
                f"The text has {len(answer['text']):,} characters, more than {MAX_EXPORT:,}. Use "
                "hp-tool export."
            )
        return {name: value for name, value in answer.items() if value not in (None, [])}

    @compact_answers
    async def size(
        self,
        context: Context,
        query: Annotated[
            Options,
            Field(
                description='Given values: {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64}, '
                '"days": 7}; also model, parameters, tokens, flops, law, style, sequence_length '
                "(query_keys: sizing)."
            ),
        ],
    ) -> Answer:
        """Choose model, tokens and starting hyperparameters for a cluster and a deadline.

        Or find the fewest devices that train a given model in given days. Values come from
        published laws; `extrapolated` ones are outside the range of their fits.
        """
        async with self.connect(context) as client:
            return figures.sizing((await client.size(query=query))["sizing"])

    @compact_answers
    async def explain_run(
        self,
        context: Context,
        recordings: Annotated[
            list[Text],
            Field(
                min_length=1,
                max_length=MAX_RECORDINGS,
                description="torch.profiler traces, one per rank, or one log with Megatron's "
                "timers; each as text, or under `hp-tool mcp` as a local path.",
            ),
        ],
        query: QueryArgument | None = None,
    ) -> Answer:
        """Explain where the time of a recorded training step went, by part.

        With a `query`, compares it with the prediction. Returns findings sorted by seconds, slow
        ranks and links, and the time that changes would save. Nothing is stored.
        """
        with ExitStack() as stack:
            traces = [stack.enter_context(self.recording(text)) for text in recordings]
            async with self.connect(context) as client:
                answer = await client.explain(
                    traces=traces, query=None if query is None else self.request(query)
                )
        return figures.explanation(answer)

    def recording(self, argument: str) -> BinaryIO:
        """Return the text as an open file, or open the local file that it names."""
        path = (
            Path(argument)
            if self.own_files and "\n" not in argument and len(argument) < 4096
            else None
        )
        return BytesIO(argument.encode()) if path is None or not path.is_file() else path.open("rb")

    @compact_answers
    async def watched_jobs(
        self,
        context: Context,
        watch_id: Annotated[
            str | None, Field(description="One job with its verdict; default: all jobs.")
        ] = None,
        lost_nodes: Annotated[
            int | None,
            Field(
                ge=1,
                le=10_000,
                description="Also recommend a configuration without this many nodes.",
            ),
        ] = None,
    ) -> Answer:
        """List running jobs that report their steps, or return the verdict on one.

        The verdict: whether the job is slower than it was or should be, since when, by how much,
        which ranks or parts explain it, and the daily cost.
        """
        async with self.connect(context) as client:
            if watch_id is None:
                jobs = (await client.watches(limit=figures.MAX_ITEMS))["items"]
                return {
                    "jobs": [
                        {name: job[name] for name in ("id", "name", "status", "updated_at")}
                        for job in jobs
                    ]
                }
            job = await client.watched(watch_id=watch_id)
            answer = figures.watched(job)
            if lost_nodes is None:
                return answer
            if job["query"] is None:
                raise ToolError(
                    "This watched job has no query, so its nodes are unknown. Register it "
                    "again with a query."
                )
            recommendation = await client.after_loss(query=job["query"], lost_nodes=lost_nodes)
        advice = {
            "text": recommendation["text"],
            "idle_gpus": recommendation["idle_gpus"],
            **figures.recommendation(recommendation["recommendation"]),
        }
        return answer | {"after_loss": advice, "query": recommendation["query"]}

    @compact_answers
    async def start_search(
        self,
        context: Context,
        query: QueryArgument,
        budget_runs: Annotated[
            int, Field(ge=1, le=1000, description="Maximum number of profile runs.")
        ] = 8,
        budget_gpu_seconds: Annotated[
            float | None, Field(gt=0, description="Maximum GPU-seconds.")
        ] = None,
    ) -> Answer:
        """Run a few real profiling jobs and rank configurations by measurement. Uses GPU time.

        The jobs run on the cluster of query.search.launcher (local, slurm, ray, kubernetes). Call
        recommend first; search if its first group has several rows or figures are extrapolated.
        Returns the search's id at once; then call follow_search.
        """
        budget = {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds}
        limits = {f"search.{name}": value for name, value in budget.items() if value is not None}
        async with self.connect(context) as client:
            search = await client.submit_search(query=schema.set_paths(self.request(query), limits))
        self.run(search.id)
        return {"search_id": search.id, "state": search.state}

    @compact_answers
    async def follow_search(self, context: Context, search_id: str, wait_s: WaitS = 20.0) -> Answer:
        """Wait up to `wait_s` seconds for a search to end, and return its state.

        Includes its cost, what it waits for, and its last runs with predictions and measurements.
        Repeat until `ended`, then call search_result.
        """
        async with self.connect(context) as client:
            has_ended = await client.result(search_id=search_id, wait_s=wait_s) is not None
            search = await client.search(search_id=search_id)
            trials = (
                await client.trials(search_id=search_id, limit=FOLLOWED_RUNS, order="newest")
            ).trials
        runs = [figures.run(schema.to_dict(trial)) for trial in reversed(trials)]
        details = {
            "error": search.error,
            "stopped_because": search.stopped_because,
            "runs": runs,
            "progress": search.progress,
        }
        return {"state": search.state, "ended": has_ended} | {
            name: value for name, value in details.items() if value
        }

    @compact_answers
    async def search_result(self, context: Context, search_id: str, top: Rows = 5) -> Answer:
        """Return the ranking of an ended search, and its cost.

        Measured rows have their measurements, others have predictions corrected by the search's
        runs. Before the end, returns the state.
        """
        async with self.connect(context) as client:
            result = await client.result(search_id=search_id)
            if result is None:
                return {"state": (await client.search(search_id=search_id)).state, "ended": False}
        if "recommendations" not in result:
            return {"ended": True, **result}
        rows = [figures.recommendation(row) for row in result["recommendations"][:top]]
        return {
            "ended": True,
            "search": result["search"],
            "recommendations": rows,
            "query": result.get("query"),
        }

    @compact_answers
    async def cancel_search(self, context: Context, search_id: str) -> Answer:
        """Cancel a search and its running jobs; measurements are kept."""
        async with self.connect(context) as client:
            search = await client.cancel(search_id=search_id)
        return {"search_id": search.id, "state": search.state, "requested": search.requested}

    @compact_answers
    async def catalogue(
        self,
        context: Context,
        kind: Literal["models", "gpus", "clusters", "recipes", "trainers"],
        name: Annotated[str | None, Field(description="Return this entry in full.")] = None,
        contains: Annotated[
            str, Field(max_length=100, description="Only names that contain this.")
        ] = "",
    ) -> Answer:
        """List names for queries, or return one entry.

        Kinds: models, gpus (with datasheet figures), clusters (servers, and clusters registered by
        users), recipes (named settings for training.recipe) and trainers (commands registered by an
        administrator).
        """
        async with self.connect(context) as client:
            items = (await client.catalog(kind=kind))["items"]
        if name is None:
            return {
                kind: figures.limit_items(
                    (item["name"] for item in items if contains.lower() in item["name"]),
                    max_items=300,
                )
            }
        entry = next((item for item in items if item["name"] == name.lower()), None)
        if entry is None:
            raise ToolError(
                f"No {kind.removesuffix('s')} is called {name}. Call catalogue with `contains` to "
                "find its name."
            )
        return {key: value for key, value in entry.items() if value is not None}

    @compact_answers
    async def query_keys(self, context: Context, section: Section) -> Answer:
        """List all keys of one section of a query, with type, choices and description.

        The tools' `query` takes these beside the common keys. `top` is the query itself, `sizing`
        the query of size.
        """
        return keys_of(section)


def _logged(logged: Answer, gap: float | None) -> Answer:
    names = ("step_s", "tokens_per_second_per_gpu", "allocated_bytes", "reserved_bytes")
    measured = {
        name: figures.figure(logged[name], None, "measured")
        for name in names
        if logged.get(name) is not None
    }
    other = {
        "steps": logged.get("steps"),
        "out_of_memory": logged.get("out_of_memory"),
        "step_gap_fraction": gap,
    }
    return measured | {name: value for name, value in other.items() if value}
