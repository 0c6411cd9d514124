"""What the gate lets through, what it refuses and with which problem."""

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from hp_tool.domain.access import KeyRecord
from hp_tool.errors import InputError, NotFoundError
from service.api import problems
from service.http.security import Gate
from service.keys import Keyring
from service.settings import Settings, from_environment
from tests.service.routes import every_route

KEY = "correct horse"


def no_stored_key(key_id: str) -> KeyRecord:
    raise NotFoundError(f"no key {key_id!r}")


def client(**settings: object) -> TestClient:
    app = FastAPI()
    problems.install(app)

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.get("/healthz")
    async def healthz() -> str:
        return "ok"

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("secret")

    given = Settings(**settings)  # type: ignore[arg-type]
    app.add_middleware(
        Gate, settings=given, keyring=Keyring(find=no_stored_key, api_key=given.api_key)
    )
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def code(response: object) -> tuple[int, str]:
    assert response.headers["content-type"] == problems.MEDIA_TYPE  # type: ignore[attr-defined]
    return response.status_code, response.json()["code"]  # type: ignore[attr-defined]


def test_without_a_key_it_listens_on_loopback_only() -> None:
    with pytest.raises(InputError, match="HP_API_KEY") as caught:
        Settings(host="0.0.0.0")
    assert caught.value.code == "api_key_required"
    assert Settings(host="0.0.0.0", api_key=KEY).hosts == ("*",)
    assert Settings(host="::1").is_loopback
    assert not Settings(host="example.org", api_key=KEY).is_loopback


def test_secrets_are_not_printed() -> None:
    settings = from_environment(
        {"HP_API_KEY": KEY, "HP_DATABASE_URL": "postgresql://u:hunter2@h/d", "HP_PORT": "9"}
    )
    assert settings.api_key == KEY
    assert settings.port == 9
    assert KEY not in repr(settings)
    assert "hunter2" not in repr(settings)


def test_flags_win_over_the_environment() -> None:
    assert (
        from_environment({"HP_PORT": "9", "HP_HOST": "127.0.0.2"}, host="localhost", port=1).port
        == 1
    )
    empty = from_environment(
        {"HP_PORT": "", "HP_HOST": ""}
    )  # as compose files pass on what nobody set
    assert (empty.host, empty.port) == ("127.0.0.1", 8000)
    with pytest.raises(InputError, match="HP_PORT"):
        from_environment({"HP_PORT": "http"})


def test_a_key_is_asked_for_on_everything_but_health() -> None:
    http = client(api_key=KEY)
    refused = http.post("/echo", content=b"x")
    assert code(refused) == (401, "unauthorized")
    assert refused.headers["www-authenticate"].startswith("Basic")
    basic = base64.b64encode(f"me:{KEY}".encode()).decode()
    for good in (f"Bearer {KEY}", f"Basic {basic}"):
        assert http.post("/echo", content=b"x", headers={"Authorization": good}).status_code == 200
    for bad in ("Bearer ", f"Bearer {KEY}x", "Bearer é".encode(), "Basic !!!", "Digest x"):
        assert code(http.post("/echo", content=b"x", headers={"Authorization": bad})) == (
            401,
            "unauthorized",
        )
    assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_change_anything(headers: dict[str, str], status: int) -> None:
    assert client().post("/echo", content=b"x", headers=headers).status_code == status


def test_a_foreign_host_name_is_refused() -> None:
    assert code(client().get("/healthz", headers={"Host": "rebound.example"})) == (
        421,
        "unknown_host",
    )
    assert client().get("/healthz", headers={"Host": "localhost:8000"}).status_code == 200
    assert (
        client(allowed_hosts=("hp.example",))
        .get("/healthz", headers={"Host": "hp.example"})
        .status_code
        == 200
    )


def test_a_large_body_is_refused_whether_announced_or_not() -> None:
    http = client(max_body_bytes=100)

    def chunks() -> Iterator[bytes]:
        yield from [b"x" * 60] * 2

    assert http.post("/echo", content=b"x" * 100).json() == 100
    assert code(http.post("/echo", content=b"x" * 101)) == (413, "payload_too_large")
    assert code(http.post("/echo", content=chunks())) == (413, "payload_too_large")
    assert code(http.post("/echo", content=b"x", headers={"Content-Length": "-1"})) == (
        422,
        "bad_request",
    )


def test_every_answer_carries_the_security_headers() -> None:
    for response in (
        client().get("/healthz"),
        client().get("/nowhere"),
        client(api_key=KEY).get("/nowhere"),
    ):
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


def test_a_bug_tells_nothing_of_its_inside() -> None:
    response = client().get("/bug")
    assert code(response) == (500, "internal")
    assert "secret" not in response.text
    assert code(client().get("/nowhere")) == (404, "not_found")
    assert code(client().get("/echo")) == (405, "method_not_allowed")


def test_a_key_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert from_environment({"HP_API_KEY_FILE": str(file)}).api_key == KEY
    file.write_text("\n")
    for wrong in (
        str(file),
        str(tmp_path / "none"),
    ):  # an operator who names a file does not want to run without a key
        with pytest.raises(InputError) as caught:
            from_environment({"HP_API_KEY_FILE": wrong})
        assert caught.value.field == "HP_API_KEY_FILE"


@pytest.mark.parametrize(("key", "why"), [("", "empty"), ("secret", "fewer than 8")])
def test_a_key_that_guards_nothing_is_refused(key: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        from_environment({"HP_API_KEY": key})
    assert caught.value.field == "HP_API_KEY" and "secret" not in caught.value.message.replace(
        "secrets", ""
    )


@pytest.mark.parametrize("amount", ["0", "-1", "nan", "inf", "many"])
def test_ceilings_are_amounts(amount: str) -> None:
    with pytest.raises(InputError, match=r"(?i)max_gpu_seconds_per_day"):
        from_environment({"HP_MAX_GPU_SECONDS_PER_DAY": amount})


def test_head_is_answered_as_get_without_the_body(server: str) -> None:
    for path, status in (
        ("/healthz", 200),
        ("/v1/gpus", 200),
        ("/searches", 200),
        ("/v1/models/none", 404),
        ("/nowhere", 404),
    ):
        asked, got = httpx.head(server + path, timeout=30), httpx.get(server + path, timeout=30)
        assert (asked.status_code, asked.content) == (status, b"")
        assert asked.headers.get("content-type") == got.headers["content-type"], path
    assert (
        httpx.head(f"{server}/v1/searches/none/events", timeout=30).status_code == 405
    )  # it would never end


def test_a_method_that_a_path_does_not_have_is_answered_with_those_it_has(server: str) -> None:
    for path, methods in (("bulk", "POST"), ("some", "DELETE, GET, PATCH")):
        answer = httpx.put(f"{server}/v1/measurements/{path}", timeout=30)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


WRONG = (b"[]", b'{"x": 1}', b"- a\n- b: [")


def test_every_422_names_its_field(http: TestClient) -> None:
    """Of whatever route, whatever is wrong: the body as a whole is `body`."""
    nothing = dict.fromkeys(
        ("search_id", "key_id", "name", "run_id", "measurement_id", "watch_id"), "nope"
    ) | {"action": "cancel"}
    unnamed, seen = [], 0
    for address in every_route(http.app):
        if not address.pattern.startswith("/v1"):
            continue
        path = address.at(**nothing)
        for content in WRONG if address.method in ("POST", "PATCH") else (None,):
            answer = http.request(
                address.method,
                path if content is not None else f"{path}?limit=%00",
                content=content,
            )
            if (
                answer.status_code == 422
                and answer.headers["content-type"] == "application/problem+json"
            ):
                seen += 1
                unnamed += [] if answer.json()["field"] else [(address, content, answer.text)]
    assert seen > 60 and unnamed == []
