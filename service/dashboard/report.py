"""A search as one HTML file without external resources: data, styles and scripts are inlined."""

import base64
import re
from functools import cache

from hp_tool.domain.ports import Store
from hp_tool.questions import schema
from service.dashboard.page import STATIC, render_html
from service.dashboard.search import search_page
from service.dashboard.trials import trial_table

IMPORT = re.compile(r'from "\./([a-z]+\.js)"')
STYLES = ("tokens.css", "app.css", "search.css", "schedule.css")


def report_html(*, store: Store, search_id: str) -> str:
    """Return the report as HTML.

    Raises:
        NotFoundError: There is no such search.
    """
    record = store.get_search(search_id=search_id)
    runs = store.runs(search_id=search_id)
    logs = {
        run.id: run.measurement.log_tail
        for run in runs
        if run.measurement and run.measurement.log_tail
    }
    figures = store.run_figures(search_id=search_id)
    trials = trial_table(record=record, runs=figures, logs=logs)
    return render_html(
        "report.html",
        page=search_page(record, store=store),
        trials=schema.to_dict(trials),
        csv=trials.listed.csv(),
        styles="\n".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES),
        module=_module("search.js"),
    )


@cache
def _module(name: str) -> str:
    """Return a module's source with its imports inlined.

    A page that is opened from a file cannot fetch other files.
    """

    def inlined(match: re.Match[str]) -> str:
        return (
            "from "
            f'"data:text/javascript;base64,{base64.b64encode(_module(match[1]).encode()).decode()}"'
        )

    return IMPORT.sub(inlined, (STATIC / name).read_text(encoding="utf-8"))
