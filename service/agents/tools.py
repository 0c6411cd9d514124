"""The tools: each asks routes of the service, as its clients do, and answers in few words. Agents
read their docstrings.
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
from hp_tool.formats.reading import option
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
"""Characters of an exported text; the largest, a manifest for Kubernetes, has a tenth."""
MAX_QUERY = 8_000
"""Characters of a query that an answer repeats."""
FOLLOWED_RUNS = 10
MAX_RECORDINGS = 16
Options = Annotated[dict[str, Any], Field(max_length=100)]
Rows = Annotated[int, Field(ge=1, le=figures.MAX_ROWS)]
WaitS = Annotated[float, Field(ge=0, le=60)]
Text = Annotated[str, Field(max_length=200_000)]


def answering(tool: Callable[P, Awaitable[Answer]]) -> Callable[P, Awaitable[CallToolResult]]:
    """The tool, whose answers an agent reads as JSON without spaces, and whose errors with their
    code and field.
    """

    @functools.wraps(tool)
    async def answered(*args: P.args, **arguments: P.kwargs) -> CallToolResult:
        try:
            answer = schema.to_dict(await tool(*args, **arguments))
            if len(json.dumps(answer.get("query"))) > MAX_QUERY:  # one's own files are part of it
                answer["query"] = "left out, as it is long: give yours again"
            text = json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
            return CallToolResult(
                content=[TextContent(type="text", text=text)], structured_content=answer
            )
        except HpToolError as error:
            where = f", field {error.field}" if error.field else ""
            raise ToolError(f"{in_arguments(error)} (code {error.code}{where})") from error

    return answered


ARGUMENTS = {"--set": "overrides", "--file": "files", "--ignore": "ignore", "--var": "variables"}
"""Options of `hp-tool import` and the arguments of import_config that do the same."""


def in_arguments(error: HpToolError) -> str:
    """The error's message with arguments of import_config in place of the command line's
    options.
    """
    message = error.message
    for missing in error.details.get("missing", ()):
        field, example = missing["field"], missing.get("example")
        if example is not None:
            message = message.replace(option(field, example), _argument(field, example))
    return re.sub(
        rf"({'|'.join(ARGUMENTS)})(?![\w-])", lambda option: ARGUMENTS[option[0]], message
    )


def _argument(field: str, example: str) -> str:
    """The argument of import_config that gives a field, such as `overrides {"model": "llama-3-8b"}`
    or `gpu h200`.
    """
    own = {"cluster.gpu": "gpu", "cluster.num_gpus": "num_gpus"}.get(field)
    value = json.dumps(example) if field == "model" else example
    return (
        f"overrides {{{json.dumps(field)}: {value}}}"
        if own is None
        else f"{own} {example}".rstrip()
    )


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools over one way to reach a service."""

    connect: Callable[[Context], AbstractAsyncContextManager[AsyncClient]]
    """A client of the service as whoever calls the tool may use it."""
    own_files: bool = False
    """Whether a model, lengths, a script or a log may be a file of this machine: only for its own
    user.
    """
    run: Callable[[str], None] = lambda search_id: None
    """Begin to work on a queued search, where no worker does."""

    def request(self, query: QueryArgument) -> Answer:
        """The query as the service takes it, with one's own files in place of their names."""
        mapping = query.mapping()
        return schema.query_mapping(schema.parse_own_query(mapping)) if self.own_files else mapping

    def text(self, argument: str) -> str:
        """The argument, or the content of the file that it names."""
        named = (
            self.own_files
            and "\n" not in argument
            and len(argument) < 4096
            and Path(argument).is_file()
        )
        return read_text(Path(argument)) if named else argument

    @answering
    async def estimate(self, context: Context, query: QueryArgument) -> Answer:
        """Memory, step time, MFU, days and cost of one training configuration (`query.parallel`),
        or latencies and throughput of one serving configuration. Each figure has its 90 % interval
        and its basis: fitted (constants come from runs like it) or extrapolated
        (`extrapolated_because` says what no run covers). An infeasible one has `reasons` and
        `fixes`; ask why_not for what they cost.
        """
        async with self.connect(context) as client:
            answer = await client.estimate(query=self.request(query))
        estimate = figures.predicted(answer)
        fixes = [each["change"] for each in estimate.get("fixes", ())]
        return (
            figures.estimate(estimate)
            | ({"fixes": fixes} if fixes else {})
            | {"query": answer["query"]}
        )

    @answering
    async def recommend(self, context: Context, query: QueryArgument, top: Rows = 5) -> Answer:
        """The best of all legal configurations that fit, ranked by the cost model in about a
        second, no GPU needed. Rows of the same `group` cannot be told apart by the predictions:
        rank 1 is the one to try, a search with real runs decides. Axes that `query.parallel` leaves
        out vary. Give `query` and `recommendations` to export_config. If nothing fits,
        `nearest_misses` and `rejections` say why.
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

    @answering
    async def why_not(self, context: Context, query: QueryArgument) -> Answer:
        """Why not this configuration? If it is illegal, does not fit or misses a target: each
        reason, and the smallest changes that fix it, each with its figures and its whole `parallel`
        for the next query. If it is feasible: how much slower it is than the best, and which parts
        of the step cost the difference.
        """
        async with self.connect(context) as client:
            answer = await client.estimate(query=self.request(query))
            estimate = figures.predicted(answer)
            if not estimate["feasible"]:
                fixes = [
                    await self._fixed(client, answer["query"], fix)
                    for fix in estimate.get("fixes", ())
                ]
                return figures.estimate(estimate) | {"fixes": fixes}
            free = {name: part for name, part in answer["query"].items() if name != "parallel"}
            rows = (await client.recommend(query=free, top=1))["recommendations"]
        if not rows:
            return figures.estimate(estimate)
        best = figures.predicted(rows[0])
        ours, theirs = (
            (each.get("time") or each).get("parts_s") or {} for each in (estimate, best)
        )
        lost = {name: seconds - theirs.get(name, 0.0) for name, seconds in ours.items()}
        lost = {
            name: float(f"{seconds:.4g}")
            for name, seconds in sorted(lost.items(), key=lambda each: -abs(each[1]))
            if seconds
        }
        return figures.estimate(estimate) | {
            "best": figures.recommendation(rows[0]),
            "seconds_more_than_best_by_part": lost,
        }

    @staticmethod
    async def _fixed(client: AsyncClient, query: Answer, fix: Answer) -> Answer:
        """A fix with the figures of the query it leads to."""
        fixed = Configuration.read(
            {"query": query, "recommendations": [fix]}, rank=1, parse=schema.parse_query
        )
        estimate = figures.predicted(await client.estimate(query=fixed.mapping()))
        kept = {name: fix[name] for name in ("change", "num_gpus", "set") if fix.get(name)}
        left = [each["message"] for each in fix.get("remaining", ())]
        shown = figures.estimate(estimate)
        return (
            kept
            | {name: shown[name] for name in ("parallel", "figures") if name in shown}
            | ({"remaining": left} if left else {})
        )

    @answering
    async def import_config(self, context: Context, run: ImportArgument) -> Answer:
        """Script in, better flags out: read a training or serving script of another tool as a
        query, predict it, compare with its log, and say which flags to change for the best
        configuration of the same work (`changes`: flag, from, to). What is missing or not
        understood comes as one error that lists all of it: call again with gpu, overrides, files or
        ignore.
        """
        options = run.options() | {
            "files": {name: self.text(each) for name, each in run.files.items()}
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
            "changes": figures.bounded(answer["changes"], most=100),
            "switched_on": answer["switched_on"],
            "read": figures.bounded(
                f"{each['flag']} {each['value']} -> {each['field']}" for each in answer["read"]
            ),
            "ignored": figures.bounded(
                f"{each['flag']}: {each['reason']}" for each in answer["ignored"]
            ),
        }
        return {name: value for name, value in reading.items() if value not in (None, {}, [])} | {
            "query": answer["query"]
        }

    @answering
    async def export_config(
        self,
        context: Context,
        query: QueryArgument,
        format: Writable,
        rank: Annotated[
            int, Field(ge=1, le=1000, description="Which recommendation of the query.")
        ] = 1,
        rerank: Annotated[
            bool,
            Field(
                description="Rank again among what the format's tool can run instead of refusing; "
                "the answer "
                "says what that costs and what was left out."
            ),
        ] = False,
    ) -> Answer:
        """A configuration as another tool's script, file or manifest that starts. With all of
        `query.parallel` fixed it writes that configuration, else the recommendation of this rank.
        What is left to fill in stands in a list at its top.
        """
        async with self.connect(context) as client:
            answer = await client.export(
                result=self.request(query), format=format, rank=rank, rerank=rerank
            )
        if len(answer["text"]) > MAX_EXPORT:
            raise ToolError(
                f"the text has {len(answer['text']):,} characters, more than {MAX_EXPORT:,}; use "
                "hp-tool export"
            )
        return {name: value for name, value in answer.items() if value not in (None, [])}

    @answering
    async def size(
        self,
        context: Context,
        query: Annotated[
            Options,
            Field(
                description='What is fixed: {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64}, '
                '"days": 7}; '
                "also model, parameters, tokens, flops, law, style, sequence_length (query_keys: "
                "sizing)."
            ),
        ],
    ) -> Answer:
        """Before a query: which model, how many tokens, which starting hyperparameters suit a
        cluster and a deadline; or the fewest devices that train a given model in given days. Values
        by published laws; `extrapolated` ones lie outside their fits.
        """
        async with self.connect(context) as client:
            return figures.sizing((await client.size(query=query))["sizing"])

    @answering
    async def explain_run(
        self,
        context: Context,
        recordings: Annotated[
            list[Text],
            Field(
                min_length=1,
                max_length=MAX_RECORDINGS,
                description="Traces of torch.profiler, one for each rank, or one log with "
                "Megatron's timers: each as its text, "
                "or under `hp-tool mcp` as a path of this machine.",
            ),
        ],
        query: QueryArgument | None = None,
    ) -> Answer:
        """Where the seconds of a recorded training step went, part by part, beside the prediction
        for `query`'s one configuration where it is given: sentences ordered by seconds, slow ranks
        and links, and which changes would win how much. Nothing is kept.
        """
        with ExitStack() as opened:
            traces = [opened.enter_context(self.recording(each)) for each in recordings]
            async with self.connect(context) as client:
                answer = await client.explain(
                    traces=traces, query=None if query is None else self.request(query)
                )
        return figures.explanation(answer)

    def recording(self, argument: str) -> BinaryIO:
        """The argument as an open file, or the file that it names."""
        path = (
            Path(argument)
            if self.own_files and "\n" not in argument and len(argument) < 4096
            else None
        )
        return BytesIO(argument.encode()) if path is None or not path.is_file() else path.open("rb")

    @answering
    async def watched_jobs(
        self,
        context: Context,
        watch_id: Annotated[
            str | None, Field(description="One job with its verdict; left out: all of them.")
        ] = None,
        lost_nodes: Annotated[
            int | None,
            Field(
                ge=1,
                le=10_000,
                description="Also: what to run without so many nodes, and whether to wait.",
            ),
        ] = None,
    ) -> Answer:
        """Running jobs that report their steps: whether one became slower than it was or is slower
        than it should be, since when, by how much, which ranks or parts explain it, and what it
        costs a day.
        """
        async with self.connect(context) as client:
            if watch_id is None:
                jobs = (await client.watches(limit=figures.MAX_ITEMS))["items"]
                return {
                    "jobs": [
                        {name: each[name] for name in ("id", "name", "status", "updated_at")}
                        for each in jobs
                    ]
                }
            job = await client.watched(watch_id=watch_id)
            answer = figures.watched(job)
            if lost_nodes is None:
                return answer
            if job["query"] is None:
                raise ToolError("this job was begun without a query: nobody knows its nodes")
            left = await client.after_loss(query=job["query"], lost_nodes=lost_nodes)
        advice = {
            "text": left["text"],
            "idle_gpus": left["idle_gpus"],
            **figures.recommendation(left["recommendation"]),
        }
        return answer | {"after_loss": advice, "query": left["query"]}

    @answering
    async def start_search(
        self,
        context: Context,
        query: QueryArgument,
        budget_runs: Annotated[
            int, Field(ge=1, le=1000, description="Real profile runs at most.")
        ] = 8,
        budget_gpu_seconds: Annotated[
            float | None, Field(gt=0, description="Device seconds at most.")
        ] = None,
    ) -> Answer:
        """Spend GPU time: run a few real profiling jobs on the cluster that query.search.launcher
        names (local, slurm, ray, kubernetes) and rank by what they measure. Ask recommend first;
        search where its first group has several rows, or figures are extrapolated. Answers the
        search's id at once; then follow_search.
        """
        budget = {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds}
        limits = {f"search.{name}": value for name, value in budget.items() if value is not None}
        async with self.connect(context) as client:
            search = await client.submit_search(query=schema.lay(self.request(query), limits))
        self.run(search.id)
        return {"search_id": search.id, "state": search.state}

    @answering
    async def follow_search(self, context: Context, search_id: str, wait_s: WaitS = 20.0) -> Answer:
        """State of a search after at most `wait_s` seconds, sooner if it ends: what it spent, what
        it waits for, and its last runs with prediction and measurement. Call it until `ended`, then
        search_result.
        """
        async with self.connect(context) as client:
            ended = await client.result(search_id=search_id, wait_s=wait_s) is not None
            search = await client.search(search_id=search_id)
            trials = (
                await client.trials(search_id=search_id, limit=FOLLOWED_RUNS, order="newest")
            ).trials
        runs = [figures.run(schema.to_dict(each)) for each in reversed(trials)]
        details = {
            "error": search.error,
            "stopped_because": search.stopped_because,
            "runs": runs,
            "progress": search.progress,
        }
        return {"state": search.state, "ended": ended} | {
            name: value for name, value in details.items() if value
        }

    @answering
    async def search_result(self, context: Context, search_id: str, top: Rows = 5) -> Answer:
        """The ranked answer of a search that has ended: measured rows with what ran, the others by
        predictions that its runs corrected, and what the search cost. Before the end: its state.
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

    @answering
    async def cancel_search(self, context: Context, search_id: str) -> Answer:
        """End a search and its running jobs; what was measured stays."""
        async with self.connect(context) as client:
            search = await client.cancel(search_id=search_id)
        return {"search_id": search.id, "state": search.state, "requested": search.requested}

    @answering
    async def catalogue(
        self,
        context: Context,
        kind: Literal["models", "gpus", "clusters", "recipes", "trainers"],
        name: Annotated[str | None, Field(description="One entry in full.")] = None,
        contains: Annotated[
            str, Field(max_length=100, description="Only names that hold this.")
        ] = "",
    ) -> Answer:
        """Names that a query may use: models, gpus (with the figures of their datasheets), clusters
        (servers, and what this service's users registered), recipes (named sets of knobs for
        training.recipe) and trainers (commands that an administrator registered for searches).
        """
        async with self.connect(context) as client:
            items = (await client.catalog(kind=kind))["items"]
        if name is None:
            return {
                kind: figures.bounded(
                    (each["name"] for each in items if contains.lower() in each["name"]), most=300
                )
            }
        entry = next((each for each in items if each["name"] == name.lower()), None)
        if entry is None:
            raise ToolError(
                f"no {kind.removesuffix('s')} is called {name}; call catalogue with contains to "
                "find its name"
            )
        return {key: value for key, value in entry.items() if value is not None}

    @answering
    async def query_keys(self, context: Context, section: Section) -> Answer:
        """Every key of one section of a query, with its type, its choices and what it means: what
        `query` of the other tools takes beyond the common keys. `top` is the query itself, `sizing`
        the query of size.
        """
        return keys_of(section)


def _logged(logged: Answer, gap: float | None) -> Answer:
    """What a log printed, and by how much it differs from the prediction."""
    names = ("step_s", "tokens_per_second_per_gpu", "allocated_bytes", "reserved_bytes")
    measured = {
        name: figures.figure(logged[name], None, "measured")
        for name in names
        if logged.get(name) is not None
    }
    more = {
        "steps": logged.get("steps"),
        "out_of_memory": logged.get("out_of_memory"),
        "step_gap_fraction": gap,
    }
    return measured | {name: value for name, value in more.items() if value}
