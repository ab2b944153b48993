"""Generators of committed files; tests check that what is committed is what they write."""
