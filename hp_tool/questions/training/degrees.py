"""Reject degrees of parallelism that a framework does not support."""

from hp_tool.domain.frameworks import DEGREES, framework_facts
from hp_tool.domain.parallel import ParallelQuery, axis_values
from hp_tool.errors import InputError


def check_degrees(parallel: ParallelQuery, *, framework: str) -> None:
    """Check that the framework supports each degree above 1.

    Raises:
        InputError: The framework does not support a degree.
    """
    known = framework_facts(framework).degrees
    for name in DEGREES:
        if name not in known and any(size > 1 for size in axis_values(getattr(parallel, name))):
            raise InputError(
                f"{framework} does not support {name}; set it to 1, or choose another "
                "training.framework",
                field=f"parallel.{name}",
            )
