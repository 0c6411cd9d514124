"""`python -m benchmarks.recipes [--data DIR]`: recipes of the catalogue from a table of
presets, and how well rules alone know a model.

--write replaces the catalogue's file; without it the command compares, and fails where the file
differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.recipes.check import left_out, score
from benchmarks.recipes.layouts import layouts
from benchmarks.recipes.presets import presets
from benchmarks.recipes.rules import releases
from benchmarks.recipes.write import recipes
from hp_tool import catalog, formats

CATALOGUE = Path(catalog.__file__).parent / "data" / "recipes" / "megatron_bridge.yaml"

LAYOUTS = Path(formats.__file__).parent / "tables" / "bridge-presets.csv"
"""What `import` reads presets by."""


def main(arguments: list[str] | None = None) -> int:
    """Print both scores; 1 if the catalogue's file is not what the table gives."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    add_data_argument(parser)
    parser.add_argument(
        "--write", action="store_true", help=f"write {CATALOGUE.name} of the catalogue"
    )
    parser.add_argument(
        "--seen-only",
        action="store_true",
        help="leave the models' presets in: seconds instead of a minute",
    )
    options = parser.parse_args(arguments)
    listed = presets(data_folder(options))
    text = recipes(releases(listed))
    table = layouts(data_folder(options))
    same = CATALOGUE.read_text() == text and LAYOUTS.read_text() == table
    if options.write:
        CATALOGUE.write_text(text)
        LAYOUTS.write_text(table)
    seen = score(listed, text)
    print(
        f"{len(listed)} presets, {seen.of.total():,} values: {seen.right.total():,} as the release "
        "has them"
    )
    if not options.seen_only:
        scores = left_out(listed)
        whole = next(iter(scores.values()))
        for name, each in list(scores.items()):
            print(f"{name}, its presets left out: {each.share:.1%} of {each.of.total():,} values")
            if each is not whole:
                whole.add(each)
        print(
            f"by rule alone, a model's presets left out: {whole.share:.1%} of {whole.of.total():,} "
            "values"
        )
        print("; ".join(f"{key} {share:.0%}" for key, share in whole.by_key().items()))
    if not (same or options.write):
        print(
            f"{CATALOGUE} or {LAYOUTS} is not what this table gives; --write replaces them",
            file=sys.stderr,
        )
    return 0 if same or options.write else 1


if __name__ == "__main__":
    raise SystemExit(main())
