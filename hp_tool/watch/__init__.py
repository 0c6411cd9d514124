"""Watch a running job: compare its step times with earlier ones and with the prediction."""

from hp_tool.watch.expected import expected_pace as expected_pace
from hp_tool.watch.job import Job as Job
from hp_tool.watch.job import Source as Source
