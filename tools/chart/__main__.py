"""Writes the chart's generated files. With --check, only reports the files that are out of date."""

import sys

from tools.chart.dashboards import write_dashboards
from tools.chart.schema import write_schema


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 if --check found a difference."""
    stale = 0
    for path, text in {**write_schema(), **write_dashboards()}.items():
        if path.is_file() and path.read_text() == text:
            continue
        stale = 1
        if arguments != ["--check"]:
            path.write_text(text)
        sys.stdout.write(f"{path.name} differs\n" if "--check" in arguments else f"{path.name}\n")
    return stale if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
