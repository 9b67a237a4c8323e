"""Property tests take as long as the machine needs; where a change is judged, their examples are the same each time."""

import os
import signal

from hypothesis import settings
from sweep_table import sweep_lines

settings.register_profile("people", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they run beside them ignore it


def pytest_terminal_summary(terminalreporter):
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for line in sweep_lines(report for report in reports if report.when == "call"):
        terminalreporter.write_line(line)
