"""Runs against a server that serves already: jobs on this host that send it requests, and time its
answers.
"""

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
KEY = "HP_ENDPOINT_API_KEY"
"""Environment variable of the job's processes alone; `hp_tool.cluster.profiler.endpoint` reads
it.
"""


class EndpointLauncher(LocalLauncher):
    """Jobs as on one host, of which one at a time asks the endpoint. The devices behind it are
    those its entry declares.
    """

    name = "endpoint"

    def __init__(
        self,
        *,
        options: EndpointOptions | Mapping[str, Any] | None = None,
        root: Path | str | None = None,
    ) -> None:
        super().__init__(root=root)
        self._options = EndpointOptions.of(options)
        self.lock = f"~endpoint-{self._options.name}"
        self._key = _key(self._options)

    def hardware(self) -> Hardware:
        return self.part(num_gpus=self._options.num_gpus)

    def part(self, *, num_gpus: int) -> Hardware:
        return replace(self._options.hardware(num_gpus=num_gpus), declared=True)

    def answers(self) -> str:
        """Its models, and the devices declared. LauncherError where it lists none to this key."""
        request = Request(f"{self._options.url}/models")  # noqa: S310  # the options take http and https alone
        if self._key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            with urlopen(request, timeout=10.0) as response:  # noqa: S310
                models = [str(each["id"]) for each in json.load(response)["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LauncherError(f"{self._options.url}/models does not answer: {error}") from None
        return f"{', '.join(models)} on {self._options.num_gpus} x {self._options.gpu}, as declared"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        if not isinstance(request, InferenceRequest) or request.runner != "endpoint":
            raise InputError(
                "an endpoint only serves; ask a query of kind inference, or choose another "
                "launcher",
                code="launcher_mismatch",
                field="search.launcher",
            )
        options, plan = self._options, torchrun.job_plan(request, job_name=job_name)
        where = {name: getattr(options, name) for name in ("url", "model", "prompts", "body")}
        return replace(
            plan,
            command=(sys.executable, "-m", "hp_tool.cluster.profiler.endpoint"),
            files={**plan.files, ENDPOINT: json.dumps(where | {"hosts": [options.name]})},
        )

    def environment(self, plan: LaunchPlan) -> dict[str, str]:
        return super().environment(plan) | ({} if self._key is None else {KEY: self._key})


def _key(options: EndpointOptions) -> str | None:
    """The bearer token of the entry, or of the variable that it names. Raises InputError where that
    is not set.
    """
    variable = options.api_key_variable
    if variable is not None and variable not in os.environ:
        raise InputError(
            f"the endpoint's key is to be in {variable}, which is not set in this process; set it "
            "where the search runs",
            field="endpoint.api_key_variable",
        )
    key = options.api_key if variable is None else os.environ[variable].strip()
    if key is not None and not (
        key.isascii() and key.isprintable()
    ):  # an error about its header would show it
        raise InputError(
            "the endpoint's key has characters that no header may have", field="endpoint.api_key"
        )
    return key
