"""Generators of committed files. Tests check that the committed files are up to date."""
