"""A chat in the terminal. It uses only the public HTTP API of a server."""
