"""A search in one file that opens without a server: its page's contexts, charts and modules, and Plotly, all inlined."""

from __future__ import annotations

import base64
import re
from functools import cache

from hp_tool.domain.ports import Store
from hp_tool.queries import schema
from service.dashboard import plotly
from service.dashboard.building import stored_search_page
from service.dashboard.rendering import STATIC, rendered
from service.dashboard.trials import trial_table

IMPORT = re.compile(r'from "\./([a-z]+\.js)"')
STYLES = ("tokens.css", "app.css")


def report_html(*, store: Store, search_id: str) -> str:
    """The file. Raises NotFoundError."""
    record = store.get_search(search_id=search_id)
    runs = store.runs(search_id=search_id)
    logs = {run.id: run.measurement.log_tail for run in runs if run.measurement and run.measurement.log_tail}
    figures = store.run_figures(search_id=search_id)
    return rendered(
        "report.html",
        page=stored_search_page(record=record, store=store),
        trials=schema.to_dict(trial_table(record=record, runs=figures, logs=logs)),
        styles="\n".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES),
        plotly=plotly.source(),
        module=_module("search.js"),
    )


@cache
def _module(name: str) -> str:
    """A module whose imports stand in it: a file that is opened from a disk may fetch no other."""
    return IMPORT.sub(lambda found: f'from "{_data_url(_module(found[1]))}"', (STATIC / name).read_text(encoding="utf-8"))


def _data_url(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
