"""The service's endpoints, each declared once as a method of both clients, and their answers as types and errors."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, Generic, ParamSpec, TypeVar, cast, overload
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from hp_tool.errors import (
    ConflictError,
    HpToolError,
    InputError,
    LauncherError,
    LimitError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from hp_tool.queries import schema
from service.api.views import (
    STATUS_BY_CLASS,
    CalibrationView,
    ImportView,
    MeasurementView,
    PageView,
    RegistrationView,
    SearchView,
    TrialsView,
    WebhookView,
)
from service.clients.retries import AWAY

if TYPE_CHECKING:
    from service.async_client import AsyncClient
    from service.client import Client

JsonObject = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

ERROR_BY_STATUS: dict[int, type[HpToolError]] = {
    **{status: kind for kind, status in STATUS_BY_CLASS if kind is not LimitError},  # which also needs a wait
    **dict.fromkeys((401, 403, 413), InputError),
}
ERROR_BY_CODE: dict[str, type[HpToolError]] = {
    **{kind.code: kind for kind in (InputError, NotFoundError, UnsupportedError, ConflictError, LauncherError, StoreError)},
    "launcher_mismatch": InputError,
    "cancelled": ConflictError,
}
"""A failed search stores only the code of its error; this maps the code back to a class."""
PROBLEM_KEYS = {"type", "title", "status", "detail", "code", "field"}
"""What every problem has; any other key is of the error's details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request, and the type of its answer."""

    method: str = "GET"
    path: str
    answer: Any
    """The type T, for pydantic."""
    json: Mapping[str, Any] | list[Mapping[str, Any]] | None = None
    files: Sequence[tuple[str, Any]] | None = None
    """Parts of a form, as httpx takes them: open files are streamed."""
    params: Mapping[str, Any] | None = None
    """Parameters of the query string; None leaves one out."""
    headers: Mapping[str, str] | None = None
    timeout: Any = httpx.USE_CLIENT_DEFAULT
    """Seconds or an httpx.Timeout."""
    may_be_pending: bool = False
    """A 202 has no answer yet: it is read as None."""

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request as `http` sends it."""
        params = None if self.params is None else _without_none(self.params)
        sent: JsonObject = {"json": self.json, "files": self.files, "params": params, "headers": self.headers}
        return http.build_request(self.method, self.path, timeout=self.timeout, **sent)

    def read(self, response: httpx.Response) -> T:
        """The answer in `response`; raises the error that a problem in it stands for."""
        raise_problem(response)
        if self.may_be_pending and response.status_code == httpx.codes.ACCEPTED:
            return cast(T, None)
        return cast(T, parsed(self.answer, response.content))


class Endpoint(Generic[P, T]):
    """A method of both clients, written as the call it makes: `Client` returns the answer, `AsyncClient` an awaitable of it."""

    def __init__(self, call: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self._call = call
        functools.update_wrapper(cast(Any, self), call)

    @overload
    def __get__(self, client: None, owner: type) -> Endpoint[P, T]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self

        @functools.wraps(self._call)
        def method(*args: P.args, **arguments: P.kwargs) -> T | Awaitable[T]:
            return client.send(self._call(client, *args, **arguments))

        return method


class Endpoints:
    """What both clients can ask for with a single request."""

    @Endpoint
    def estimate(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """{id, status, estimate} for the query's one configuration."""
        return Call(method="POST", path="/v1/estimates", answer=JsonObject, json=query)

    @Endpoint
    def recommend(self, *, query: Mapping[str, Any], top: int = 10) -> Call[JsonObject]:
        """{id, status, recommendations, space, rejections}, best first."""
        return Call(method="POST", path="/v1/recommendations", answer=JsonObject, json=query, params={"top": top})

    @Endpoint
    def size(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """{id, status, sizing}: the training that a budget buys."""
        return Call(method="POST", path="/v1/sizings", answer=JsonObject, json=query)

    @Endpoint
    def plan(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """{id, status, plan}: what a search would cost, before anything runs."""
        return Call(method="POST", path="/v1/plans", answer=JsonObject, json=query)

    @Endpoint
    def import_configuration(self, /, *, command: str, **options: Any) -> Call[JsonObject]:
        """A script or configuration file as a query, what became of its words, its prediction, and the better configuration's
        changes. `options`: format, num_gpus, overrides, variables, files, ignore, log.
        """
        return Call(method="POST", path="/v1/imports", answer=JsonObject, json={"command": command, **options})

    @Endpoint
    def explain(self, *, traces: Sequence[BinaryIO], query: Mapping[str, Any] | None = None) -> Call[JsonObject]:
        """What `hp-tool explain --json` says of traces, open as binary files, one for each rank; the server keeps nothing."""
        files = [*(("trace", each) for each in traces), *(() if query is None else [("query", (None, schema.to_json(query)))])]
        return Call(method="POST", path="/v1/explanations", answer=JsonObject, files=files, timeout=120.0)

    @Endpoint
    def export(self, *, result: Mapping[str, Any], format: str, rank: int = 1, rerank: bool = False) -> Call[JsonObject]:
        """{format, text}: a configuration in another tool's words; with `rerank` also what choosing it costs."""
        body = {"result": result, "format": format, "rank": rank, "rerank": rerank}
        return Call(method="POST", path="/v1/exports", answer=JsonObject, json=body)

    @Endpoint
    def submit_search(
        self,
        *,
        query: Mapping[str, Any],
        idempotency_key: str | None = None,
        webhook: str | None = None,
        priority: int = 0,
    ) -> Call[SearchView]:
        """Queue a search. Sending the same key again answers the same search, so that a lost answer makes no second one.

        `priority`: -100 to 100, higher runs first; above 0 for administrators.
        `webhook`: https URL that is notified when the search ends; check its messages with `service.webhooks.verify`.
        """
        params = {"webhook": webhook, "priority": priority or None}
        headers = _idempotent(idempotency_key)
        return Call(method="POST", path="/v1/searches", answer=SearchView, json=query, headers=headers, params=params)

    @Endpoint
    def webhook(self, *, search_id: str) -> Call[WebhookView]:
        """State of the search's webhook: delivered, pending or given up."""
        return Call(path=f"/v1/searches/{part(search_id)}/webhook", answer=WebhookView)

    @Endpoint
    def searches(
        self, /, *, state: str | None = None, limit: int = 50, cursor: str | None = None, **filters: str
    ) -> Call[PageView[SearchView]]:
        """A page of searches, newest first; filters: owner, since, until, order, kind, model, words."""
        params = {"state": state, "limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/searches", answer=PageView[SearchView], params=params)

    @Endpoint
    def search(self, *, search_id: str) -> Call[SearchView]:
        """One search and its state."""
        return Call(path=f"/v1/searches/{part(search_id)}", answer=SearchView)

    @Endpoint
    def trials(
        self, /, *, search_id: str, limit: int | None = None, cursor: str | None = None, **filters: str
    ) -> Call[TrialsView]:
        """Profile runs of a search, predicted and measured side by side; filters: state, status, since, until, order."""
        params = {"limit": limit, "cursor": cursor, **filters}
        return Call(path=f"/v1/searches/{part(search_id)}/trials", answer=TrialsView, params=params)

    @Endpoint
    def act(self, *, search_id: str, action: str) -> Call[SearchView]:
        """The search after `action`: cancel, pause, resume or clone."""
        return _action(search_id, action)

    @Endpoint
    def cancel(self, *, search_id: str) -> Call[SearchView]:
        """Ask the worker to stop for good."""
        return _action(search_id, "cancel")

    @Endpoint
    def pause(self, *, search_id: str) -> Call[SearchView]:
        """Ask the worker to put the search aside until `resume`."""
        return _action(search_id, "pause")

    @Endpoint
    def resume(self, *, search_id: str) -> Call[SearchView]:
        """Queue a paused or failed search again."""
        return _action(search_id, "resume")

    @Endpoint
    def clone(self, *, search_id: str) -> Call[SearchView]:
        """A new search with the same query."""
        return _action(search_id, "clone")

    @Endpoint
    def change_budget(
        self, *, search_id: str, budget_runs: int | None = None, budget_gpu_seconds: float | None = None
    ) -> Call[SearchView]:
        """Let a search spend more or less from now on."""
        budget = _without_none({"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds})
        return Call(method="PATCH", path=f"/v1/searches/{part(search_id)}", answer=SearchView, json=budget)

    @Endpoint
    def label(self, *, search_id: str, name: str = "", tags: Sequence[str] = (), note: str = "") -> Call[SearchView]:
        """Name, tag and annotate a search, in place of what it was called; lists find it by these `words`."""
        body = {"name": name, "tags": list(tags), "note": note}
        return Call(method="PUT", path=f"/v1/searches/{part(search_id)}/label", answer=SearchView, json=body)

    @Endpoint
    def result(self, *, search_id: str, wait_s: float = 0.0) -> Call[JsonObject | None]:
        """Result of the search once it has ended, waiting at most `wait_s` seconds; None if it has not ended."""
        path = f"/v1/searches/{part(search_id)}/result"
        params, timeout = {"wait_s": wait_s}, wait_s + 30.0
        return Call(path=path, answer=JsonObject, params=params, timeout=timeout, may_be_pending=True)

    @Endpoint
    def report_measurement(self, *, report: Mapping[str, Any], idempotency_key: str | None = None) -> Call[MeasurementView]:
        """Store what a real training measured: {query, parallel, measurement}."""
        headers = _idempotent(idempotency_key)
        return Call(method="POST", path="/v1/measurements", answer=MeasurementView, json=report, headers=headers)

    @Endpoint
    def report_measurements(
        self, *, reports: Sequence[Mapping[str, Any]], idempotency_key: str | None = None
    ) -> Call[ImportView]:
        """Store many, each by itself: what was stored, and what was refused with its place, field and reason."""
        headers = _idempotent(idempotency_key)
        return Call(method="POST", path="/v1/measurements", answer=ImportView, json=list(reports), headers=headers)

    @Endpoint
    def measurement(self, *, measurement_id: str) -> Call[MeasurementView]:
        """One stored measurement."""
        return Call(path=f"/v1/measurements/{part(measurement_id)}", answer=MeasurementView)

    @Endpoint
    def change_measurement(self, *, measurement_id: str, state: str) -> Call[MeasurementView]:
        """Let it teach (`accepted`, also one that was held or deleted) or not (`excluded`); a calibration follows at once."""
        path = f"/v1/measurements/{part(measurement_id)}"
        return Call(method="PATCH", path=path, answer=MeasurementView, json={"state": state})

    @Endpoint
    def delete_measurement(self, *, measurement_id: str) -> Call[MeasurementView]:
        """Leave it out of lists and calibrations, until it is `accepted` again."""
        return Call(method="DELETE", path=f"/v1/measurements/{part(measurement_id)}", answer=MeasurementView)

    @Endpoint
    def calibrate(self, *, gpu: str | None = None, framework: str | None = None) -> Call[PageView[CalibrationView]]:
        """Fit the stored measurements: the newest version of every series."""
        params = {"gpu": gpu, "framework": framework}
        return Call(method="POST", path="/v1/calibrations", answer=PageView[CalibrationView], params=params)

    @Endpoint
    def calibrations(self, /, *, limit: int = 50, cursor: str | None = None, **filters: str) -> Call[PageView[CalibrationView]]:
        """Calibrations, newest first; filters: cluster_key, framework."""
        params = {"limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/calibrations", answer=PageView[CalibrationView], params=params)

    @Endpoint
    def measurements(
        self, /, *, limit: int = 100, cursor: str | None = None, **filters: str
    ) -> Call[PageView[MeasurementView]]:
        """Stored measurements, newest first; filters: gpu, model, framework, source, status, state, search_id, since,
        until, order."""
        params = {"limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/measurements", answer=PageView[MeasurementView], params=params)

    @Endpoint
    def watch_job(
        self,
        *,
        name: str = "",
        query: Mapping[str, Any] | None = None,
        webhook: str | None = None,
        idempotency_key: str | None = None,
    ) -> Call[JsonObject]:
        """Begin to watch a job: its `id`, which reporters need."""
        body = _without_none({"name": name, "query": query, "webhook": webhook})
        headers = _idempotent(idempotency_key)
        return Call(method="POST", path="/v1/watches", answer=JsonObject, json=body, headers=headers)

    @Endpoint
    def report_steps(self, *, watch_id: str, batch: Mapping[str, Any]) -> Call[JsonObject]:
        """Report the newest steps of one process; those up to `acknowledged` are stored."""
        return Call(method="POST", path=f"/v1/watches/{part(watch_id)}/steps", answer=JsonObject, json=batch)

    @Endpoint
    def watched(self, *, watch_id: str) -> Call[JsonObject]:
        """A watched job with its verdict."""
        return Call(path=f"/v1/watches/{part(watch_id)}", answer=JsonObject)

    @Endpoint
    def after_loss(self, *, query: Mapping[str, Any], lost_nodes: int = 1) -> Call[JsonObject]:
        """The best configuration of what lost nodes leave of a query's training, and whether waiting for them pays."""
        return Call(method="POST", path="/v1/lost-nodes", answer=JsonObject, json=query, params={"lost_nodes": lost_nodes})

    @Endpoint
    def watches(self, /, **paging: Any) -> Call[JsonObject]:
        """Watched jobs, newest first, without their verdicts."""
        return Call(path="/v1/watches", answer=JsonObject, params=paging)

    @Endpoint
    def workers(self) -> Call[JsonObject]:
        """Live workers: what they can run, and which searches they run."""
        return Call(path="/v1/workers", answer=JsonObject)

    @Endpoint
    def catalog(self, /, *, kind: str, **paging: Any) -> Call[JsonObject]:
        """The `models`, `gpus`, `clusters`, `recipes`, `trainers` or `traces` that a query may name, by name."""
        return Call(path=f"/v1/{part(kind)}", answer=JsonObject, params=paging)

    @Endpoint
    def register(self, *, kind: str, name: str, spec: Mapping[str, Any], shared: bool = False) -> Call[RegistrationView]:
        """Register a spec under a name; `kind`: models, clusters or traces."""
        body = {"name": name, "spec": spec, "shared": shared}
        return Call(method="POST", path=f"/v1/{part(kind)}", answer=RegistrationView, json=body)


def with_result(answer: JsonObject) -> JsonObject:
    """The answer if it holds a result, even beside an error; raises the error of a search that measured nothing."""
    if "recommendations" in answer:
        return answer
    error = answer["error"]
    raise ERROR_BY_CODE.get(error["code"], HpToolError)(error["message"], code=error["code"], field=error.get("field"))


def unreachable(server: object, error: httpx.TransportError | str) -> StoreError:
    """The error for a server that does not answer."""
    return StoreError(f"{server} does not answer: {error}", field="server", code="server_unreachable")


def raise_problem(response: httpx.Response) -> None:
    """Raise the error that a complete response stands for, as the library would have raised it in this process."""
    if response.is_success:
        return
    kind = ERROR_BY_STATUS.get(response.status_code, HpToolError)
    try:
        body = response.json()
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            wait_s = float(response.headers["Retry-After"])
            raise LimitError(body["detail"], code=body["code"], field=body.get("field"), retry_after_s=wait_s)
        error = kind(body["detail"], code=body["code"], field=body.get("field"))
        error.details = {name: value for name, value in body.items() if name not in PROBLEM_KEYS}
        raise error
    except (ValueError, KeyError, TypeError):
        if response.status_code in AWAY:  # a proxy's own page: nobody answers behind it
            kind = StoreError
        raise kind(f"{response.url} answered {response.status_code} {response.reason_phrase}", code="http_error") from None


def parsed(kind: Any, text: str | bytes) -> Any:
    """`text` as the type `kind`; raises HpToolError where the server sends something else."""
    try:
        return schema.adapter(kind).validate_json(text)
    except ValidationError as error:
        raise HpToolError(f"the server's answer is not understood: {error.errors()[0]['msg']}", code="bad_answer") from error


def part(name: str) -> str:
    """Return an id or a name as one part of a path. Raises NotFoundError for one that no part can be."""
    if name in ("", ".", ".."):
        raise NotFoundError(f"{name!r} is no id")
    return quote(name, safe="")


def _action(search_id: str, action: str) -> Call[SearchView]:
    """An action repeated has no further effect, so it needs no key; a clone does."""
    headers = _idempotent(None) if action == "clone" else None
    return Call(method="POST", path=f"/v1/searches/{part(search_id)}/{part(action)}", answer=SearchView, headers=headers)


def _idempotent(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid.uuid4().hex}


def _without_none(values: Mapping[str, Any]) -> JsonObject:
    return {name: value for name, value in values.items() if value is not None}
