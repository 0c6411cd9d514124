"""The service's endpoints, each declared once as a method of both clients."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO
from urllib.parse import quote

from hp_tool.errors import NotFoundError
from hp_tool.questions import schema
from service.api.views import (
    CalibrationView,
    ImportView,
    MeasurementView,
    PageView,
    RegistrationView,
    SearchView,
    TrialsView,
    WebhookView,
)
from service.clients.calls import Call, Endpoint, JsonObject, without_none


class Endpoints:
    """What both clients can ask for with a single request."""

    @Endpoint
    def estimate(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """{id, status, estimate} for the query's one configuration."""
        return Call(method="POST", path="/v1/estimates", answer=JsonObject, json=query)

    @Endpoint
    def recommend(self, *, query: Mapping[str, Any], top: int = 10) -> Call[JsonObject]:
        """{id, status, recommendations, space, rejections}, best first."""
        return Call(
            method="POST",
            path="/v1/recommendations",
            answer=JsonObject,
            json=query,
            params={"top": top},
        )

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
        """A script or configuration file as a query, what became of its words, its prediction, and
        the better configuration's changes. `options`: format, num_gpus, overrides, variables,
        files, ignore, log.
        """
        return Call(
            method="POST",
            path="/v1/imports",
            answer=JsonObject,
            json={"command": command, **options},
        )

    @Endpoint
    def explain(
        self, *, traces: Sequence[BinaryIO], query: Mapping[str, Any] | None = None
    ) -> Call[JsonObject]:
        """What `hp-tool explain --json` says of traces, open as binary files, one for each rank;
        the server keeps nothing.
        """
        files = [
            *(("trace", each) for each in traces),
            *(() if query is None else [("query", (None, schema.to_json(query)))]),
        ]
        return Call(
            method="POST", path="/v1/explanations", answer=JsonObject, files=files, timeout=120.0
        )

    @Endpoint
    def export(
        self, *, result: Mapping[str, Any], format: str, rank: int = 1, rerank: bool = False
    ) -> Call[JsonObject]:
        """{format, text}: a configuration in another tool's words; with `rerank` also what choosing
        it costs.
        """
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
        """Queue a search. Sending the same key again answers the same search, so that a lost answer
        makes no second one.

        `priority`: -100 to 100, higher runs first; above 0 for administrators. `webhook`: https URL
        that is notified when the search ends; check its messages with `service.webhooks.verify`.
        """
        params = {"webhook": webhook, "priority": priority or None}
        headers = _idempotent(idempotency_key)
        return Call(
            method="POST",
            path="/v1/searches",
            answer=SearchView,
            json=query,
            headers=headers,
            params=params,
        )

    @Endpoint
    def webhook(self, *, search_id: str) -> Call[WebhookView]:
        """State of the search's webhook: delivered, pending or given up."""
        return Call(path=f"/v1/searches/{part(search_id)}/webhook", answer=WebhookView)

    @Endpoint
    def searches(
        self,
        /,
        *,
        state: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        **filters: str,
    ) -> Call[PageView[SearchView]]:
        """A page of searches, newest first; filters: owner, since, until, order, kind, model,
        words.
        """
        params = {"state": state, "limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/searches", answer=PageView[SearchView], params=params)

    @Endpoint
    def search(self, *, search_id: str) -> Call[SearchView]:
        """One search and its state."""
        return Call(path=f"/v1/searches/{part(search_id)}", answer=SearchView)

    @Endpoint
    def trials(
        self,
        /,
        *,
        search_id: str,
        limit: int | None = None,
        cursor: str | None = None,
        **filters: str,
    ) -> Call[TrialsView]:
        """Profile runs of a search, predicted and measured side by side; filters: state, status,
        since, until, order.
        """
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
        self,
        *,
        search_id: str,
        budget_runs: int | None = None,
        budget_gpu_seconds: float | None = None,
    ) -> Call[SearchView]:
        """Let a search spend more or less from now on."""
        budget = without_none(
            {"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds}
        )
        return Call(
            method="PATCH", path=f"/v1/searches/{part(search_id)}", answer=SearchView, json=budget
        )

    @Endpoint
    def label(
        self, *, search_id: str, name: str = "", tags: Sequence[str] = (), note: str = ""
    ) -> Call[SearchView]:
        """Name, tag and annotate a search, in place of what it was called; lists find it by these
        `words`.
        """
        body = {"name": name, "tags": list(tags), "note": note}
        return Call(
            method="PUT", path=f"/v1/searches/{part(search_id)}/label", answer=SearchView, json=body
        )

    @Endpoint
    def result(self, *, search_id: str, wait_s: float = 0.0) -> Call[JsonObject | None]:
        """Result of the search once it has ended, waiting at most `wait_s` seconds; None if it has
        not ended.
        """
        path = f"/v1/searches/{part(search_id)}/result"
        params, timeout = {"wait_s": wait_s}, wait_s + 30.0
        return Call(
            path=path, answer=JsonObject, params=params, timeout=timeout, may_be_pending=True
        )

    @Endpoint
    def report_measurement(
        self, *, report: Mapping[str, Any], idempotency_key: str | None = None
    ) -> Call[MeasurementView]:
        """Store what a real training measured: {query, parallel, measurement}."""
        headers = _idempotent(idempotency_key)
        return Call(
            method="POST",
            path="/v1/measurements",
            answer=MeasurementView,
            json=report,
            headers=headers,
        )

    @Endpoint
    def report_measurements(
        self, *, reports: Sequence[Mapping[str, Any]], idempotency_key: str | None = None
    ) -> Call[ImportView]:
        """Store many, each by itself: what was stored, and what was refused with its place, field
        and reason.
        """
        headers = _idempotent(idempotency_key)
        return Call(
            method="POST",
            path="/v1/measurements",
            answer=ImportView,
            json=list(reports),
            headers=headers,
        )

    @Endpoint
    def measurement(self, *, measurement_id: str) -> Call[MeasurementView]:
        """One stored measurement."""
        return Call(path=f"/v1/measurements/{part(measurement_id)}", answer=MeasurementView)

    @Endpoint
    def change_measurement(self, *, measurement_id: str, state: str) -> Call[MeasurementView]:
        """Let it teach (`accepted`, also one that was held or deleted) or not (`excluded`); a
        calibration follows at once.
        """
        path = f"/v1/measurements/{part(measurement_id)}"
        return Call(method="PATCH", path=path, answer=MeasurementView, json={"state": state})

    @Endpoint
    def delete_measurement(self, *, measurement_id: str) -> Call[MeasurementView]:
        """Leave it out of lists and calibrations, until it is `accepted` again."""
        return Call(
            method="DELETE", path=f"/v1/measurements/{part(measurement_id)}", answer=MeasurementView
        )

    @Endpoint
    def calibrate(
        self, *, gpu: str | None = None, framework: str | None = None
    ) -> Call[PageView[CalibrationView]]:
        """Fit the stored measurements: the newest version of every series."""
        params = {"gpu": gpu, "framework": framework}
        return Call(
            method="POST", path="/v1/calibrations", answer=PageView[CalibrationView], params=params
        )

    @Endpoint
    def calibrations(
        self, /, *, limit: int = 50, cursor: str | None = None, **filters: str
    ) -> Call[PageView[CalibrationView]]:
        """Calibrations, newest first; filters: cluster_key, framework."""
        params = {"limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/calibrations", answer=PageView[CalibrationView], params=params)

    @Endpoint
    def measurements(
        self, /, *, limit: int = 100, cursor: str | None = None, **filters: str
    ) -> Call[PageView[MeasurementView]]:
        """Stored measurements, newest first; filters: gpu, model, framework, source, status, state,
        search_id, since, until, order.
        """
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
        body = without_none({"name": name, "query": query, "webhook": webhook})
        headers = _idempotent(idempotency_key)
        return Call(
            method="POST", path="/v1/watches", answer=JsonObject, json=body, headers=headers
        )

    @Endpoint
    def report_steps(self, *, watch_id: str, batch: Mapping[str, Any]) -> Call[JsonObject]:
        """Report the newest steps of one process; those up to `acknowledged` are stored."""
        return Call(
            method="POST", path=f"/v1/watches/{part(watch_id)}/steps", answer=JsonObject, json=batch
        )

    @Endpoint
    def watched(self, *, watch_id: str) -> Call[JsonObject]:
        """A watched job with its verdict."""
        return Call(path=f"/v1/watches/{part(watch_id)}", answer=JsonObject)

    @Endpoint
    def after_loss(self, *, query: Mapping[str, Any], lost_nodes: int = 1) -> Call[JsonObject]:
        """The best configuration of what lost nodes leave of a query's training, and whether
        waiting for them pays.
        """
        return Call(
            method="POST",
            path="/v1/lost-nodes",
            answer=JsonObject,
            json=query,
            params={"lost_nodes": lost_nodes},
        )

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
        """The `models`, `gpus`, `clusters`, `recipes`, `trainers` or `traces` that a query may
        name, by name.
        """
        return Call(path=f"/v1/{part(kind)}", answer=JsonObject, params=paging)

    @Endpoint
    def register(
        self, *, kind: str, name: str, spec: Mapping[str, Any], shared: bool = False
    ) -> Call[RegistrationView]:
        """Register a spec under a name; `kind`: models, clusters or traces."""
        body = {"name": name, "spec": spec, "shared": shared}
        return Call(method="POST", path=f"/v1/{part(kind)}", answer=RegistrationView, json=body)


def part(name: str) -> str:
    """Return an id or a name as one part of a path. Raises NotFoundError for one that no part can
    be.
    """
    if name in ("", ".", ".."):
        raise NotFoundError(f"{name!r} is no id")
    return quote(name, safe="")


def _action(search_id: str, action: str) -> Call[SearchView]:
    """An action repeated has no further effect, so it needs no key; a clone does."""
    headers = _idempotent(None) if action == "clone" else None
    return Call(
        method="POST",
        path=f"/v1/searches/{part(search_id)}/{part(action)}",
        answer=SearchView,
        headers=headers,
    )


def _idempotent(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid.uuid4().hex}
