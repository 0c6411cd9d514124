"""Query fields shown by forms, the explorer, the documentation and `hp-tool fields`, derived from
the field declarations (`domain.fields.Shown`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hp_tool.domain.query import Kind, Query
from hp_tool.questions import schema
from hp_tool.questions.schema import schemas_at, union_branches

Suggested = Literal["models", "gpus", "clusters", "frameworks", "recipes", "trainers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field shown to users."""

    name: str
    """Dotted path in a query, also used in error messages."""
    label: str
    suggested: Suggested | None = None
    """Kind of catalogue names suggested for the field."""
    placeholder: str = ""
    """An example, or the default."""
    left_out: str = ""
    """Default value; empty if the field is required or has none."""
    options: tuple[str, ...] = ()
    """All accepted values, if the schema lists them."""
    minimum: float | None = None
    maximum: float | None = None
    step: str = "any"
    """Step of a number input: 1 for an integer."""
    several: bool = False
    """Whether the field accepts several values, separated by commas."""
    text: bool = False
    """Whether the value is always text, even if it looks like a number."""
    help: str = ""
    hint: str = ""
    """Text shown below the field."""
    default: str = ""

    @property
    def unset(self) -> str:
        """Return the text shown for an omitted field."""
        return self.placeholder or self.default or "any"

    @property
    def takes(self) -> str:
        """Return a description of the accepted values, such as `a number from 0 to 1`."""
        if self.options:
            return ", ".join(self.options)
        if self.maximum is None:
            return "a name" if self.suggested else "text"
        return (
            f"{'a whole number' if self.step == '1' else 'a number'} from {self.minimum:,.10g} "
            f"to {self.maximum:,.10g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled group of fields."""

    title: str
    fields: tuple[Field, ...]
    folded: bool = False
    """Whether the section is collapsed, because most queries do not need it."""


RECIPE = "training.recipe"
RECOMPUTE = "parallel.recompute"
BASELINE = "search.baseline."
MAX_DEPTH = 3
"""Maximum nesting depth of mappings whose fields are shown."""
OPEN_SECTIONS = ("Model", "Cluster", "Training", "Serving", "Goal")
"""Sections that most queries use. Other sections are collapsed."""
SECTIONS = (
    *OPEN_SECTIONS,
    *(
        "Parallelism",
        "Precision and kernels",
        "Experts",
        "Pools for prefill and decoding",
        "Fine-tuning",
        "NVLink",
    ),
    *("Your current layout (baseline)", "Profile runs"),
)
"""Display order of the sections. Fields of other sections come last."""
OTHER_KIND: dict[Kind, tuple[str, ...]] = {
    "training": ("inference", "targets"),
    "inference": ("training",),
}
SUGGESTED: dict[str, Suggested] = {
    "model": "models",
    "cluster.gpu": "gpus",
    "cluster": "clusters",
    "training.framework": "frameworks",
    RECIPE: "recipes",
    "trainer": "trainers",
}
HINTS = {RECOMPUTE: "In detail: selective layernorm+mlp, full block 4"}
"""Additional text shown below a field."""


@cache
def form_sections(kind: Kind) -> tuple[Section, ...]:
    """Return the form sections for a kind of query, derived from the declarations of its fields."""
    titled: dict[str, list[Field]] = {title: [] for title in SECTIONS}
    for path, declared in _shown_fields(kind):
        title = SECTIONS[-2] if path.startswith(BASELINE) else declared["x-section"]
        titled.setdefault(title, []).append(_form_field(path, declared))
    return tuple(
        Section(title=title, fields=tuple(known), folded=title not in OPEN_SECTIONS)
        for title, known in titled.items()
        if known
    )


def _shown_fields(kind: Kind) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, JSON schema) of each shown field. The fields of a mapping precede the
    mapping.
    """
    query = schema.described_adapter(Query)

    def below(node: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for option in union_branches(query, node) if depth < MAX_DEPTH else ():
            for name, declared in option.get("properties", {}).items():
                if depth == 0 and name in OTHER_KIND[kind]:
                    continue
                yield from below(declared, f"{path}{name}.", depth + 1)
                if (
                    "x-section" in declared
                    and declared.get("x-kind", kind) == kind
                    and f"{path}{name}." != BASELINE
                ):
                    yield f"{path}{name}", declared

    (root,) = schemas_at(query, ())
    return below(root, "", 0)


@cache
def form_fields(kind: Kind) -> dict[str, Field]:
    """Return the form fields by path."""
    return {field.name: field for section in form_sections(kind) for field in section.fields}


def _form_field(path: str, declared: dict[str, Any]) -> Field:
    kinds = union_branches(schema.described_adapter(Query), declared)
    number = next((each for each in kinds if "maximum" in each), {})
    options = next((tuple(map(str, each["enum"])) for each in kinds if "enum" in each), ())
    if not options and any(each.get("type") == "boolean" for each in kinds):
        options = ("true", "false")
    one = (
        "oneOf" in declared
    )  # Only rankings accept a list; a search has a single workload and cluster.

    def listed(kind: dict[str, Any]) -> bool:
        return one and kind.get("type") == "array"

    value = declared.get("default")
    default = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return Field(
        name=path,
        label=f"Baseline: {declared['title']}" if path.startswith(BASELINE) else declared["title"],
        suggested=SUGGESTED.get(path),
        placeholder=""
        if path.startswith(BASELINE)
        else declared.get("x-example") or declared.get("x-unset", ""),
        left_out=declared.get("x-unset") or default,
        options=options,
        minimum=number.get("minimum"),
        maximum=number.get("maximum"),
        step="1" if number.get("type") == "integer" else "any",
        several=not one and any(each.get("type") == "array" for each in kinds),
        text=all(
            each.get("type") in ("string", "null", "object") or listed(each) for each in kinds
        ),
        help=str(declared.get("description", "")),
        hint=HINTS.get(path, ""),
        default=default,
    )
