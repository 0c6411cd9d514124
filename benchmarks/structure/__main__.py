"""`python -m benchmarks.structure COMMIT [--knob NAME ...] [--details]`: lines and branches by folder, at a commit and now.

Branches are if, ternary, for, while, comprehension, except, bool-op and match case; `--details` prints each of them. A knob's
line counts the files that name it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.structure.count import BRANCHES, OTHERS, by_folder, files_now, files_of_commit, naming

ROOT = Path(__file__).parents[2]
ROOTS = ("hp_tool", "service")
KNOBS = ("offload_fraction", "recompute", "zero_stage")


def table(before: Mapping[str, Counter[str]], now: Mapping[str, Counter[str]], *, columns: Sequence[str]) -> Iterator[str]:
    """Yield a row for each folder, "before -> now" in each column; the last column is branches a line."""
    none: Counter[str] = Counter()
    folders = [*sorted({*before, *now} - {"all"}), "all"]
    width = max(map(len, folders))
    yield f"{'':{width}}" + "".join(f"  {name:>16}" for name in (*columns, "branches a line"))
    for folder in folders:
        sides = [side.get(folder, none) for side in (before, now)]
        cells = [" -> ".join(str(side[name]) for side in sides) for name in columns]
        cells.append(" -> ".join(f"{side['branches'] / side['lines']:.3f}" if side["lines"] else "-" for side in sides))
        yield f"{folder:{width}}" + "".join(f"  {cell:>16}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--knob", nargs="+", default=KNOBS, help=f"names to look for (default: {' '.join(KNOBS)})")
    parser.add_argument("--details", action="store_true", help="each kind of branch in its own column")
    arguments = parser.parse_args()
    before, now = files_of_commit(ROOT, arguments.commit, roots=ROOTS), files_now(ROOT, roots=ROOTS)
    columns = ["lines", "branches", *(dict.fromkeys(BRANCHES.values()) if arguments.details else ()), *OTHERS]
    print(*table(by_folder(before), by_folder(now), columns=columns), sep="\n")
    for knob in arguments.knob:
        print(f"files that name {knob}: {len(naming(before, knob))} -> {len(naming(now, knob))}")


if __name__ == "__main__":
    main()
