"""Benchmark a running server with local jobs that send requests and time the responses."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from hp_tool.cluster.launchers import torchrun
from hp_tool.cluster.launchers.local import LocalLauncher
from hp_tool.cluster.launchers.options import EndpointOptions
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.requests import InferenceRequest, RunRequest
from hp_tool.errors import InputError, LauncherError

ENDPOINT = "endpoint.json"
API_KEY_VARIABLE = "HP_ENDPOINT_API_KEY"
"""Environment variable that passes the API key to the job's processes;
`hp_tool.cluster.profiler.endpoint` reads it.
"""


class EndpointLauncher(LocalLauncher):
    """Launch local jobs, one at a time, that benchmark an endpoint.

    The server's devices are declared in the options.
    """

    name = "endpoint"

    def __init__(
        self,
        *,
        options: EndpointOptions | Mapping[str, Any] | None = None,
        root: Path | str | None = None,
    ) -> None:
        super().__init__(root=root)
        self._options = EndpointOptions.create(options)
        self.lock = f"~endpoint-{self._options.name}"
        self._key = _key(self._options)

    def hardware(self) -> Hardware:
        return self.part(num_gpus=self._options.num_gpus)

    def part(self, *, num_gpus: int) -> Hardware:
        return replace(self._options.hardware(num_gpus=num_gpus), declared=True)

    def answers(self) -> str:
        """Return the endpoint's models and its declared devices.

        Raises:
            LauncherError: The endpoint lists no models.
        """
        request = Request(f"{self._options.url}/models")  # noqa: S310  # the options take http and https alone
        if self._key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            with urlopen(request, timeout=10.0) as response:  # noqa: S310
                models = [str(model["id"]) for model in json.load(response)["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LauncherError(f"No response from {self._options.url}/models: {error}") from None
        return f"{', '.join(models)} on {self._options.num_gpus} x {self._options.gpu}, as declared"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        if not isinstance(request, InferenceRequest) or request.runner != "endpoint":
            raise InputError(
                "Endpoints support only inference queries. Use another launcher.",
                code="launcher_mismatch",
                field="search.launcher",
            )
        options, plan = self._options, torchrun.job_plan(request, job_name=job_name)
        settings = {name: getattr(options, name) for name in ("url", "model", "prompts", "body")}
        return replace(
            plan,
            command=(sys.executable, "-m", "hp_tool.cluster.profiler.endpoint"),
            files={**plan.files, ENDPOINT: json.dumps(settings | {"hosts": [options.name]})},
        )

    def environment(self, plan: LaunchPlan) -> dict[str, str]:
        return super().environment(plan) | (
            {} if self._key is None else {API_KEY_VARIABLE: self._key}
        )


def _key(options: EndpointOptions) -> str | None:
    """Return the bearer token from the options, or from the environment variable that they name.

    Raises:
        InputError: The variable is not set, or the token has invalid characters.
    """
    variable = options.api_key_variable
    if variable is not None and variable not in os.environ:
        raise InputError(
            f"{variable}, the variable for the endpoint's key, is not set. Set it where the "
            "search runs.",
            field="endpoint.api_key_variable",
        )
    key = options.api_key if variable is None else os.environ[variable].strip()
    # Checked here, because an HTTP error would print the header and with it the token.
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError(
            "The endpoint's key contains characters that are invalid in an HTTP header.",
            field="endpoint.api_key",
        )
    return key
