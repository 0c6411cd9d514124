"""Run by torchrun on every rank: profiles each request of a folder in this one process, so that
imports are paid once.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from hp_tool.cluster.profiler.__main__ import (
    free_previous_model,
    profile,
    read_request,
    write_measurement,
)


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.request.json")):
        measurement = profile(read_request(path))
        if os.environ["RANK"] == "0":
            write_measurement(
                path.with_name(path.name.replace(".request.", ".result.")), measurement
            )
        from torch import distributed

        free_previous_model()
        # each later collection would go over all of torch and Megatron: half of what a small run
        # takes
        gc.freeze()
        # One world for all: a second one would read the first one's keys in torchrun's store.
        distributed.init_process_group = lambda *_, **__: None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own shutdown
