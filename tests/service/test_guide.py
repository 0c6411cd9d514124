"""The guide: the documentation as pages of the service, whose links lead to something."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from service.dashboard.guide import guide_folder, guide_sections
from service.dashboard.page import SECTIONS

NAMES = [entry.name for section in guide_sections() for entry in section.entries]


def test_the_index_lists_every_page(shared_http: TestClient) -> None:
    index = shared_http.get("/guide").text
    assert sorted(NAMES) == sorted(path.stem for path in guide_folder().glob("*.md"))
    assert all(f'href="/guide/{name}"' in index for name in NAMES)


@pytest.fixture(scope="module")
def pages(shared_http: TestClient) -> dict[str, str]:
    return {name: shared_http.get(f"/guide/{name}").text for name in NAMES}


def test_links_within_the_guide_lead_to_their_headings(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        for target, anchor in re.findall(r'<a href="/guide/([\w-]+)#?([\w-]*)"', page):
            assert target in pages, (name, target)
            assert not anchor or f'id="{anchor}"' in pages[target], (name, target, anchor)
        assert not [
            href
            for href in re.findall(r'href="([^"]*)"', page)
            if ".md" in href and "://" not in href
        ], name


def test_a_page_is_text_and_its_json_markdown(
    shared_http: TestClient, pages: dict[str, str]
) -> None:
    assert (
        "<h1" in pages["glossary"]
        and "<table>" in pages["queries"]
        and "<pre tabindex=0>" in pages["tutorial"]
    )
    twin = shared_http.get("/guide/glossary.json").json()
    assert twin["title"] == "Glossary" and twin["text"].startswith("# Glossary")


def test_pictures_are_served(shared_http: TestClient, pages: dict[str, str]) -> None:
    pictures = re.findall(r'<img src="([^"]+)"', "".join(pages.values()))
    assert pictures and all(shared_http.get(address).status_code == 200 for address in pictures)


def test_every_section_has_its_page(shared_http: TestClient) -> None:
    guides = {name: guide for _, name, _, guide in SECTIONS}
    assert guides.pop("Guide") == ""
    assert set(guides.values()) <= set(NAMES)
    assert f'href="/guide/{guides["Calibration"]}"' in shared_http.get("/calibration").text


@pytest.mark.parametrize(
    "name", ["no-such", "..%2Fpyproject", "mkdocs.yml", "pictures%2F..%2F..%2FREADME"]
)
def test_nothing_else_is_read(shared_http: TestClient, name: str) -> None:
    assert shared_http.get(f"/guide/{name}").status_code == 404
