"""docker-compose.yml: safe to publish, and every command in it is one that `hp-tool` has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from hp_tool.cli.main import build
from service.settings import from_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def test_the_layout_is_complete(services: dict[str, Any]) -> None:
    assert set(services) == {"db", "migrate", "api", "worker"}
    assert services["migrate"]["depends_on"] == {"db": {"condition": "service_healthy"}}
    for name in ("api", "worker"):
        assert services[name]["depends_on"] == {
            "migrate": {"condition": "service_completed_successfully"}
        }
    for name in ("db", "api", "worker"):
        assert services[name]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", ["migrate", "api", "worker"])
def test_every_command_parses(services: dict[str, Any], name: str) -> None:
    arguments = list(services[name]["command"])
    command: Any = typer.main.get_command(build())
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context(name, arguments)


def test_the_workers_health_check_is_a_command(services: dict[str, Any]) -> None:
    executable, *arguments = services["worker"]["healthcheck"]["test"][1:]
    assert executable == "hp-tool"
    command: Any = typer.main.get_command(build())
    assert arguments[1] in command.commands[arguments[0]].commands


def test_secrets_have_no_default_and_stand_in_no_url(services: dict[str, Any]) -> None:
    secrets = {"POSTGRES_PASSWORD", "PGPASSWORD", "HP_API_KEY"}
    found = set()
    for service in services.values():
        for variable, value in service["environment"].items():
            if variable in secrets:
                found.add(variable)
                assert value.startswith("${"), variable
                assert ":?" in value, f"{variable} must be required"
            assert (
                "://" not in str(value)
                or "@" not in value
                or ":" not in value.split("//")[1].split("@")[0]
            )
    assert found == secrets


def test_the_webhooks_secret_is_a_file_that_may_be_left_out(services: dict[str, Any]) -> None:
    """Containers without a writable root take secrets from files only."""
    secrets = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["secrets"]
    assert secrets == {"webhook": {"file": "${HP_WEBHOOK_SECRET_FILE:-/dev/null}"}}
    for name in ("api", "worker"):  # the same for who signs and who admits
        assert services[name]["secrets"] == ["webhook"]
        said = services[name]["environment"]["HP_WEBHOOK_SECRET_FILE"]
        assert said == "${HP_WEBHOOK_SECRET_FILE:+/run/secrets/webhook}"
    assert from_environment({"HP_WEBHOOK_SECRET_FILE": ""}).webhooks is None


def test_only_the_api_is_published_and_on_loopback_only(services: dict[str, Any]) -> None:
    assert {
        name: service.get("ports") for name, service in services.items() if service.get("ports")
    } == {"api": ["127.0.0.1:8000:8000"]}


def test_our_containers_run_without_rights(services: dict[str, Any]) -> None:
    for name in ("migrate", "api", "worker"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in services[name]["security_opt"]
        assert services[name]["read_only"] is True
    users = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("USER")
    ]
    assert users == ["USER 10001"]


def test_the_image_takes_what_it_copies() -> None:
    """Every path that the Dockerfile copies exists and is let through by .dockerignore."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignore
