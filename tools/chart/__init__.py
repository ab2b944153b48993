"""Generates parts of the chart: `python -m tools.chart` writes them, `--check` compares them."""
