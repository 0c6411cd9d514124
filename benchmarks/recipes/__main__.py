"""Generate the catalogue's recipes from a table of presets, and score the rules.

`python -m benchmarks.recipes [--data DIR]` prints how many values of presets the rules reproduce,
also for models whose presets the rules have not seen. It fails if the catalogue's file differs from
the table. --write replaces the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.recipes.check import score, score_unseen
from benchmarks.recipes.layouts import render_layouts
from benchmarks.recipes.presets import read_presets
from benchmarks.recipes.rules import release_rules
from benchmarks.recipes.write import render_recipes
from hp_tool import catalog, formats

CATALOGUE = Path(catalog.__file__).parent / "data" / "recipes" / "megatron_bridge.yaml"

LAYOUTS = Path(formats.__file__).parent / "tables" / "bridge-presets.csv"
"""File from which `import` reads the layouts of presets."""


def main(arguments: list[str] | None = None) -> int:
    """Print both scores; return 1 if the catalogue's file differs from what the table generates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    add_data_argument(parser)
    parser.add_argument(
        "--write", action="store_true", help=f"write {CATALOGUE.name} of the catalogue"
    )
    parser.add_argument(
        "--seen-only",
        action="store_true",
        help="skip the score without the model's presets, which takes a minute",
    )
    options = parser.parse_args(arguments)
    listed = read_presets(data_folder(options))
    text = render_recipes(release_rules(listed))
    table = render_layouts(data_folder(options))
    same = CATALOGUE.read_text() == text and LAYOUTS.read_text() == table
    if options.write:
        CATALOGUE.write_text(text)
        LAYOUTS.write_text(table)
    seen = score(listed, text)
    print(
        f"{len(listed)} presets, {seen.compared.total():,} values: the rules reproduce "
        f"{seen.equal.total():,}"
    )
    if not options.seen_only:
        scores = score_unseen(listed)
        total = next(iter(scores.values()))
        for name, each in list(scores.items()):
            print(
                f"{name}, without its presets: {each.share:.1%} of {each.compared.total():,} values"
            )
            if each is not total:
                total.add(each)
        print(
            f"all models, each without its presets: {total.share:.1%} of "
            f"{total.compared.total():,} values"
        )
        print("; ".join(f"{key} {share:.0%}" for key, share in total.by_key().items()))
    if not (same or options.write):
        print(
            f"{CATALOGUE} or {LAYOUTS} differs from the generated one; --write replaces both",
            file=sys.stderr,
        )
    return 0 if same or options.write else 1


if __name__ == "__main__":
    raise SystemExit(main())
