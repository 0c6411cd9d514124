"""A running job held against what it was and what it should be."""

from hp_tool.watch.expected import expected_of as expected_of
from hp_tool.watch.job import Job as Job
from hp_tool.watch.job import Source as Source
