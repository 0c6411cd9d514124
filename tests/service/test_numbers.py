"""Numbers read the same whether a page was rendered with them or a script put them in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

import service
from service.dashboard import formats

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MODULE = Path(service.__file__).with_name("dashboard") / "static" / "numbers.js"
SECONDS = (
    None,
    0.0,
    0.000123456,
    0.4,
    0.99951,
    1.0,
    1.2345,
    12.51,
    99.94,
    99.96,
    1234.6,
    -3.436,
    9_000.0,
    2e5,
)
VALUES = {
    "seconds": SECONDS,
    "count": (None, 0, 0.0004567, 0.5, 3.14159, 64, 99.96, 1280.4, 5_000_000),
    "gib": (None, 0, 1234567, 0.05 * 2**30, 0.1 * 2**30, 63.82 * 2**30),
    "percent": (None, 0.0, 0.0312, -0.117, 1.5, -0.00049),
}


@pytest.mark.parametrize("name", VALUES)
def test_scripts_write_numbers_as_pages_do(browser: Browser, name: str) -> None:
    page = browser.new_page()
    source = f"data:text/javascript,{quote(MODULE.read_text(encoding='utf-8'))}"
    script = (
        "async ([source, name, values]) => { const module = await import(source); return "
        "values.map(module[name]); }"
    )
    written = page.evaluate(script, [source, name, list(VALUES[name])])
    page.close()
    assert written == [getattr(formats, name)(value) for value in VALUES[name]]


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("parallel.tensor_parallel_size", "tensor parallel"),
        ("inference.input_length", "input tokens"),
        ("training.unheard_of", "unheard of"),
        ("search.num_unheard_of", "search num unheard of"),
    ],
)
def test_a_field_has_its_forms_label_or_its_name_in_words(path: str, label: str) -> None:
    assert formats.field_label(path) == label
