"""The service's endpoints, declared once for both clients."""

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
from service.clients.calls import Call, Endpoint, JsonObject, drop_none


class Endpoints:
    """Methods that each make a single request."""

    @Endpoint
    def estimate(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """Estimate the configuration of a query: {id, status, estimate}."""
        return Call(method="POST", path="/v1/estimates", answer=JsonObject, json=query)

    @Endpoint
    def recommend(self, *, query: Mapping[str, Any], top: int = 10) -> Call[JsonObject]:
        """Rank configurations, best first: {id, status, recommendations, space, rejections}."""
        return Call(
            method="POST",
            path="/v1/recommendations",
            answer=JsonObject,
            json=query,
            params={"top": top},
        )

    @Endpoint
    def size(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """Size a training for a budget: {id, status, sizing}."""
        return Call(method="POST", path="/v1/sizings", answer=JsonObject, json=query)

    @Endpoint
    def plan(self, *, query: Mapping[str, Any]) -> Call[JsonObject]:
        """Estimate what a search would cost: {id, status, plan}."""
        return Call(method="POST", path="/v1/plans", answer=JsonObject, json=query)

    @Endpoint
    def import_configuration(self, /, *, command: str, **options: Any) -> Call[JsonObject]:
        """Convert a script or configuration file to a query, with prediction and better flags.

        Options: format, num_gpus, overrides, variables, files, ignore, log.
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
        """Explain traces like `hp-tool explain --json`; pass one open binary file per rank.

        The server does not store them.
        """
        files = [
            *(("trace", trace) for trace in traces),
            *(() if query is None else [("query", (None, schema.to_json(query)))]),
        ]
        return Call(
            method="POST", path="/v1/explanations", answer=JsonObject, files=files, timeout=120.0
        )

    @Endpoint
    def export(
        self, *, result: Mapping[str, Any], format: str, rank: int = 1, rerank: bool = False
    ) -> Call[JsonObject]:
        """Export a configuration in a tool's format: {format, text}; its cost with `rerank`."""
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
        """Queue a search. Repeated calls with one key return the same search.

        Args:
            query: The query.
            idempotency_key: Identifies the submission; default: a random key.
            webhook: https URL notified when the search ends; check its messages with
                `service.webhooks.verify`.
            priority: -100 to 100, higher runs first; above 0 for administrators.
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
        """Return the delivery state of a search's webhook."""
        return Call(path=f"/v1/searches/{path_segment(search_id)}/webhook", answer=WebhookView)

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
        """List searches, newest first.

        Filters: owner, since, until, order, kind, model, words.
        """
        params = {"state": state, "limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/searches", answer=PageView[SearchView], params=params)

    @Endpoint
    def search(self, *, search_id: str) -> Call[SearchView]:
        """Return a search and its state."""
        return Call(path=f"/v1/searches/{path_segment(search_id)}", answer=SearchView)

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
        """List a search's profile runs with predictions and measurements.

        Filters: state, status, since, until, order.
        """
        params = {"limit": limit, "cursor": cursor, **filters}
        return Call(
            path=f"/v1/searches/{path_segment(search_id)}/trials", answer=TrialsView, params=params
        )

    @Endpoint
    def act(self, *, search_id: str, action: str) -> Call[SearchView]:
        """Apply an action (cancel, pause, resume or clone) and return the search."""
        return _action(search_id, action)

    @Endpoint
    def cancel(self, *, search_id: str) -> Call[SearchView]:
        """Cancel a search."""
        return _action(search_id, "cancel")

    @Endpoint
    def pause(self, *, search_id: str) -> Call[SearchView]:
        """Pause a search until `resume`."""
        return _action(search_id, "pause")

    @Endpoint
    def resume(self, *, search_id: str) -> Call[SearchView]:
        """Queue a paused or failed search again."""
        return _action(search_id, "resume")

    @Endpoint
    def clone(self, *, search_id: str) -> Call[SearchView]:
        """Create a search with the same query."""
        return _action(search_id, "clone")

    @Endpoint
    def change_budget(
        self,
        *,
        search_id: str,
        budget_runs: int | None = None,
        budget_gpu_seconds: float | None = None,
    ) -> Call[SearchView]:
        """Change a search's budget."""
        budget = drop_none({"budget_runs": budget_runs, "budget_gpu_seconds": budget_gpu_seconds})
        return Call(
            method="PATCH",
            path=f"/v1/searches/{path_segment(search_id)}",
            answer=SearchView,
            json=budget,
        )

    @Endpoint
    def label(
        self, *, search_id: str, name: str = "", tags: Sequence[str] = (), note: str = ""
    ) -> Call[SearchView]:
        """Replace a search's name, tags and note, by which `searches(words=...)` finds it."""
        body = {"name": name, "tags": list(tags), "note": note}
        return Call(
            method="PUT",
            path=f"/v1/searches/{path_segment(search_id)}/label",
            answer=SearchView,
            json=body,
        )

    @Endpoint
    def result(self, *, search_id: str, wait_s: float = 0.0) -> Call[JsonObject | None]:
        """Return the result, waiting up to `wait_s` seconds; None if the search has not ended."""
        path = f"/v1/searches/{path_segment(search_id)}/result"
        params, timeout = {"wait_s": wait_s}, wait_s + 30.0
        return Call(
            path=path, answer=JsonObject, params=params, timeout=timeout, may_be_pending=True
        )

    @Endpoint
    def report_measurement(
        self, *, report: Mapping[str, Any], idempotency_key: str | None = None
    ) -> Call[MeasurementView]:
        """Store a real training's measurement: {query, parallel, measurement}."""
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
        """Store many measurements; returns the stored ones, and the rejected ones with reasons."""
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
        """Return a stored measurement."""
        return Call(path=f"/v1/measurements/{path_segment(measurement_id)}", answer=MeasurementView)

    @Endpoint
    def change_measurement(self, *, measurement_id: str, state: str) -> Call[MeasurementView]:
        """Include a measurement in calibration (`accepted`) or not (`excluded`)."""
        path = f"/v1/measurements/{path_segment(measurement_id)}"
        return Call(method="PATCH", path=path, answer=MeasurementView, json={"state": state})

    @Endpoint
    def delete_measurement(self, *, measurement_id: str) -> Call[MeasurementView]:
        """Remove a measurement from lists and calibrations, until `accepted` again."""
        return Call(
            method="DELETE",
            path=f"/v1/measurements/{path_segment(measurement_id)}",
            answer=MeasurementView,
        )

    @Endpoint
    def calibrate(
        self, *, gpu: str | None = None, framework: str | None = None
    ) -> Call[PageView[CalibrationView]]:
        """Fit the stored measurements; return the newest version of each series."""
        params = {"gpu": gpu, "framework": framework}
        return Call(
            method="POST", path="/v1/calibrations", answer=PageView[CalibrationView], params=params
        )

    @Endpoint
    def calibrations(
        self, /, *, limit: int = 50, cursor: str | None = None, **filters: str
    ) -> Call[PageView[CalibrationView]]:
        """List calibrations, newest first. Filters: cluster_key, framework."""
        params = {"limit": limit, "cursor": cursor, **filters}
        return Call(path="/v1/calibrations", answer=PageView[CalibrationView], params=params)

    @Endpoint
    def measurements(
        self, /, *, limit: int = 100, cursor: str | None = None, **filters: str
    ) -> Call[PageView[MeasurementView]]:
        """List measurements, newest first.

        Filters: gpu, model, framework, source, status, state, search_id, since, until, order.
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
        """Create a watch; reporters need its `id`."""
        body = drop_none({"name": name, "query": query, "webhook": webhook})
        headers = _idempotent(idempotency_key)
        return Call(
            method="POST", path="/v1/watches", answer=JsonObject, json=body, headers=headers
        )

    @Endpoint
    def report_steps(self, *, watch_id: str, batch: Mapping[str, Any]) -> Call[JsonObject]:
        """Report the newest steps of one process; those up to `acknowledged` are stored."""
        return Call(
            method="POST",
            path=f"/v1/watches/{path_segment(watch_id)}/steps",
            answer=JsonObject,
            json=batch,
        )

    @Endpoint
    def watched(self, *, watch_id: str) -> Call[JsonObject]:
        """Return a watched job with its verdict."""
        return Call(path=f"/v1/watches/{path_segment(watch_id)}", answer=JsonObject)

    @Endpoint
    def after_loss(self, *, query: Mapping[str, Any], lost_nodes: int = 1) -> Call[JsonObject]:
        """Find the best configuration after losing nodes, and how long waiting is worthwhile."""
        return Call(
            method="POST",
            path="/v1/lost-nodes",
            answer=JsonObject,
            json=query,
            params={"lost_nodes": lost_nodes},
        )

    @Endpoint
    def watches(self, /, **paging: Any) -> Call[JsonObject]:
        """List watched jobs, newest first, without verdicts."""
        return Call(path="/v1/watches", answer=JsonObject, params=paging)

    @Endpoint
    def workers(self) -> Call[JsonObject]:
        """List live workers, their devices and their searches."""
        return Call(path="/v1/workers", answer=JsonObject)

    @Endpoint
    def catalog(self, /, *, kind: str, **paging: Any) -> Call[JsonObject]:
        """List `models`, `gpus`, `clusters`, `recipes`, `trainers` or `traces`, by name."""
        return Call(path=f"/v1/{path_segment(kind)}", answer=JsonObject, params=paging)

    @Endpoint
    def register(
        self, *, kind: str, name: str, spec: Mapping[str, Any], shared: bool = False
    ) -> Call[RegistrationView]:
        """Register a spec under a name; `kind`: models, clusters or traces."""
        body = {"name": name, "spec": spec, "shared": shared}
        return Call(
            method="POST", path=f"/v1/{path_segment(kind)}", answer=RegistrationView, json=body
        )


def path_segment(name: str) -> str:
    """Quote an ID or name as a path segment; raise NotFoundError if it cannot be one."""
    if name in ("", ".", ".."):
        raise NotFoundError(f"{name!r} is not a valid id or name.")
    return quote(name, safe="")


def _action(search_id: str, action: str) -> Call[SearchView]:
    headers = _idempotent(None) if action == "clone" else None
    return Call(
        method="POST",
        path=f"/v1/searches/{path_segment(search_id)}/{path_segment(action)}",
        answer=SearchView,
        headers=headers,
    )


def _idempotent(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid.uuid4().hex}
