"""The chart's generated parts: `python -m tools.chart` writes them, `--check` compares."""
