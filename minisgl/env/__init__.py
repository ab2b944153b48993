"""Settings from MINISGL_* environment variables, parsed and checked once."""
