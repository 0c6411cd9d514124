"""A batch in one table: how many lines were answered, why some were not, which is best."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

MOST = 5
"""Reasons and errors shown of each kind, commonest first."""


class Summary:
    """Counts of answers as they pass; `--summary` also reads them."""

    def __init__(self, *, reading: bool) -> None:
        self.lines = 0
        self.errors = 0
        self._reading = reading
        self._feasible = 0
        self._codes: Counter[tuple[str, str]] = Counter()
        self._best: tuple[float, int, str | None] | None = None

    def add(self, line: str) -> None:
        """Count one answer."""
        self.lines += 1
        error = '"status":"error"' in line or '"status": "error"' in line  # inside a JSON string its quotes are escaped
        self.errors += error
        if self._reading:
            self._read(json.loads(line))

    def _read(self, answer: dict[str, Any]) -> None:
        if answer["status"] == "error":
            self._codes["error", answer["error"]["code"]] += 1
            return
        if "recommendations" in answer:
            found = answer["recommendations"][:1]
            self._codes.update(() if found else [("infeasible", code) for code in answer["rejections"]])
            estimate = (found[0].get("calibrated_estimate") or found[0]["estimate"]) if found else {"feasible": False}
        else:
            estimate = answer.get("calibrated_estimate") or answer["estimate"]
            self._codes.update(("infeasible", reason["code"]) for reason in estimate["reasons"])
        if not estimate["feasible"]:
            return
        self._feasible += 1
        rate = estimate.get("tokens_per_second_per_gpu") or estimate.get("output_tokens_per_second_per_gpu") or 0.0
        if self._best is None or rate > self._best[0]:
            self._best = (rate, self.lines, answer["id"])

    def print(self) -> None:
        """The table, on standard error: standard output may hold the answers."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title="batch", show_header=False)
        table.add_column("what")
        table.add_column("lines", justify="right")
        table.add_row("answered", f"{self.lines:,}")
        table.add_row("feasible", f"{self._feasible:,}")
        table.add_row("infeasible", f"{self.lines - self.errors - self._feasible:,}")
        self._add_codes(table, "infeasible")
        table.add_row("errors", f"{self.errors:,}")
        self._add_codes(table, "error")
        console = Console(stderr=True)
        console.print(table)
        if self._best is not None:
            rate, number, name = self._best
            console.print(f"most tokens/s/GPU: {rate:,.0f}, line {number:,}" + (f" ({name})" if name else ""), markup=False)

    def _add_codes(self, table: Any, kind: str) -> None:
        codes = Counter({code: count for (of, code), count in self._codes.items() if of == kind})
        for code, count in codes.most_common(MOST):
            table.add_row(f"  {code}", f"{count:,}")
