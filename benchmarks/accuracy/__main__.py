"""Print predictions and the published figures that they are compared with: `python -m
benchmarks.accuracy [--data DIR] [--json]`.
"""

from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.report import as_dict, evaluate

if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_dict=as_dict)
