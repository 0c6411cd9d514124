"""Readers of what jobs leave are built when they are first needed, in whatever thread that is."""

from __future__ import annotations

import subprocess
import sys

TOGETHER = """
import gc, sys, threading, time
from hp_tool.domain.measurement import JobResult, Measurement
from hp_tool.domain.query import Query
from hp_tool.cluster.launchers import jobs, readback
from hp_tool.questions import schema

sys.setswitchinterval(1e-6)
gc.callbacks.append(lambda *_: time.sleep(0))  # a collection lets other threads run, in the middle of a parse too
gc.set_threshold(200)
start, errors = threading.Barrier(4), []

def build(make):
    start.wait()
    try:
        make()
    except SystemError as error:
        errors.append(error)

makes = (
    lambda: readback.json_adapter(Measurement), lambda: readback.json_adapter(JobResult), jobs.request_json, lambda: schema.described(Query),
)
threads = [threading.Thread(target=build, args=(make,)) for make in makes]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(errors)
"""  # noqa: E501


def test_many_threads_may_need_their_first_reader_at_once() -> None:
    """Python before 3.11.8 cannot parse docstrings in two threads at once
    (python/cpython#106905).
    """
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
