"""The notebooks of examples/: their code cells run one after another, without Jupyter, and what
each prints.

`python -m tests.notebooks` writes what the cells print now into the notebooks.
"""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def executed(path: Path) -> dict[str, Any]:
    """Return the notebook with what its code cells print. Raises whatever a cell raises."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with patch.dict(os.environ):
        for number, cell in enumerate(code, 1):
            printed = io.StringIO()
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), names)
            lines = printed.getvalue().splitlines(keepends=True)
            cell["execution_count"] = number
            cell["outputs"] = (
                [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            )
    return notebook


def text(notebook: dict[str, Any]) -> str:
    """Return the notebook as its file has it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in NOTEBOOKS:
        each.write_text(text(executed(each)), encoding="utf-8")
