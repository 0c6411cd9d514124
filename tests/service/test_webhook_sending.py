"""One webhook: signed, sent within a deadline, to the owner of a certificate, and never to where
only insiders reach.
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpcore
import pytest

from hp_tool.errors import InputError
from service.settings import from_environment
from service.webhooks import delivery, verify
from service.webhooks.delivery import DeliveryError, send_message
from service.webhooks.signing import signed_headers
from tests.service.webhook_receiver import HERE, PUBLIC, SECRET, Receiver, settings_of


def test_signatures_are_the_specifications(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"test": 2432232314}'
    headers = signed_headers(
        key=PUBLIC.key, message_id="msg_p5jXN8AQM9LWM0D4loKWxJek", timestamp=1614265330, body=body
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    monkeypatch.setattr(time, "time", lambda: 1614265330.0 + 299)
    verify(secret=SECRET, headers=headers, body=body)
    verify(
        secret=SECRET,
        headers=headers | {"webhook-signature": f"v1,x {headers['webhook-signature']}"},
        body=body,
    )
    later = {"webhook-timestamp": "1614265331"}
    for changed, content in (
        ({}, body + b" "),
        ({"webhook-id": "other"}, body),
        (later, body),
        ({"webhook-signature": ""}, body),
        ({"webhook-timestamp": "9" * 5000}, body),
    ):
        with pytest.raises(InputError):
            verify(secret=SECRET, headers=headers | changed, body=content)
    with pytest.raises(InputError):
        verify(secret="whsec_" + "A" * 32, headers=headers, body=body)
    monkeypatch.setattr(time, "time", lambda: 1614265330.0 + 301)
    with pytest.raises(InputError, match="too old"):
        verify(secret=SECRET, headers=headers, body=body)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "https://",
        "https://user:pass@example.com/",
        "https://example.com/#part",
        "https://127.0.0.1/",
        "https://10.1.2.3/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/",
        "https://0.0.0.0/",
        "https://[::ffff:10.0.0.1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[2002:a00:1::]/",
        "https://100.64.0.1/",
        "https://224.0.0.1/",
        "https://[::a00:1]/",
        "https://[::ffff:0:a00:1]/",
        "http://127.0.0.1/",
        "http://localhost/",
        "x",
        "https://a\nb/",
        "https://192.0.0.8/",
        "https://192.0.0.1/",
        "https://192.88.99.1/",
        "https://198.18.0.1/",
        "https://[3fff::1]/",
        "https://[5f00::1]/",
        "https://[2001:2::1]/",
    ],
)
def test_what_only_insiders_reach_is_refused(url: str) -> None:
    with pytest.raises(InputError) as caught:
        PUBLIC.check(url)
    assert (caught.value.field, caught.value.code) == ("webhook", "webhook_refused")


def test_settings_admit_what_they_name() -> None:
    for url in (
        "https://example.com/a?b=c",
        "https://8.8.8.8/",
        "https://[2606:4700::1]/",
        "https://192.0.0.9/",
        "https://192.0.1.1/",
    ):
        assert str(PUBLIC.check(url)) == url
    for url in (
        "http://127.0.0.1:8080/x",
        "http://localhost/x",
        "http://[::1]/x",
        "https://127.0.0.2/",
    ):
        HERE.check(url)
    for url in ("http://10.0.0.1/", "http://example.com/"):
        with pytest.raises(InputError, match="https"):
            settings_of("10.0.0.0/8,127.0.0.0/8").check(url)
    for name in ("http://127.0.0.1/", "http://localhost/"):
        with pytest.raises(InputError):
            settings_of("10.0.0.0/8").check(name)
    assert not HERE.admits(ipaddress.ip_address("93.184.216.34"), encrypted=False)
    assert HERE.admits(ipaddress.ip_address("::ffff:127.0.0.1"), encrypted=False)


@pytest.mark.parametrize(
    "answers",
    [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"]],
)
def test_a_name_for_a_private_address_is_not_connected_to(
    answers: list[str], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = receiver.server_address[1]
    found = [(0, 0, 0, "", (address, port)) for address in answers]
    monkeypatch.setattr(delivery.socket, "getaddrinfo", lambda *given, **options: found)
    with pytest.raises(DeliveryError, match="not public"):
        send_message(
            PUBLIC.check(f"https://rebound.example:{port}/"),
            settings=PUBLIC,
            body=b"{}",
            headers={},
        )
    assert receiver.came == []


def test_a_name_that_nobody_answers_for_ends_with_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, answered = threading.Event(), threading.Event()

    def nobody_answers(*arguments: object, **options: object) -> list[Any]:
        stop.wait(30)
        answered.set()
        return []

    monkeypatch.setattr(delivery.socket, "getaddrinfo", nobody_answers)
    with pytest.raises(DeliveryError, match="name lookup timed out"):
        send_message(
            PUBLIC.check("https://silent.example/"),
            settings=PUBLIC,
            body=b"{}",
            headers={},
            limit_s=1.0,
        )
    assert not answered.is_set()
    stop.set()


def test_a_receiver_that_drips_ends_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop, whole = threading.Event(), threading.Event()

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                for _ in range(600):
                    if stop.wait(0.05):
                        return
                    connection.sendall(b"x: y\r\n")
                whole.set()
                connection.sendall(b"\r\n")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(DeliveryError, match="Timeout"):
            url = HERE.check(f"http://127.0.0.1:{listening.getsockname()[1]}/")
            send_message(url, settings=HERE, body=b"{}", headers={}, limit_s=0.4)
        assert not whole.is_set()
        stop.set()
        thread.join()


def test_certificates_are_held_against_the_name(receiver: Receiver, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = (
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
    )
    command = ["openssl", "req", "-x509", *made, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    receiver.socket = serving.wrap_socket(receiver.socket, server_side=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    port = receiver.server_address[1]
    here = settings_of("127.0.0.0/8,::1/128")

    def send(host: str, context: ssl.SSLContext | None) -> None:
        send_message(
            here.check(f"https://{host}:{port}/"),
            settings=here,
            body=b"{}",
            headers={},
            ssl_context=context,
        )

    send("localhost", trusting)
    assert receiver.came[0][1]["Host"] == f"localhost:{port}"
    for host, context in (
        ("localhost", None),
        ("127.0.0.1", trusting),
    ):  # unknown issuer; another name
        with pytest.raises(DeliveryError, match="CERTIFICATE_VERIFY_FAILED"):
            send(host, context)
    assert len(receiver.came) == 1


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    assert from_environment({}).webhooks is None
    (tmp_path / "secret").write_text(SECRET + "\n")
    environment = {
        "HP_WEBHOOK_SECRET_FILE": str(tmp_path / "secret"),
        "HP_WEBHOOK_NETWORKS": "10.0.0.0/8",
    }
    settings = from_environment(environment)
    assert settings.webhooks == settings_of("10.0.0.0/8")
    assert str(PUBLIC.key) not in repr(settings) and SECRET not in repr(settings)
    for wrong in (
        {"HP_WEBHOOK_SECRET": "short"},
        {"HP_WEBHOOK_SECRET": "whsec_?"},
        environment | {"HP_WEBHOOK_NETWORKS": "10.0.0.1/8"},
    ):
        with pytest.raises(InputError):
            from_environment(wrong)


def test_a_deadline_is_passed_when_no_time_is_left() -> None:
    assert 0.0 < delivery.left_s(time.monotonic() + 0.5) <= 0.5
    with pytest.raises(httpcore.ReadTimeout):
        delivery.left_s(time.monotonic() - 0.001)
