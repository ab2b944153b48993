"""`Paths`: the names that errors give to the fields of a body."""

from collections.abc import Mapping


class Paths:
    """Maps the path of a field in a chat to its path in the client's body.

        Paths({"messages": "input"})["messages[3].content"] == "input[3].content"

    The longest matching entry also counts for the fields below it. A path without an entry is the
    same in both bodies.
    """

    def __init__(self, client_paths: Mapping[str, str]) -> None:
        self._client_paths = client_paths

    def __getitem__(self, path: str) -> str:
        end = len(path)
        while end > 0:
            if path[:end] in self._client_paths:
                return self._client_paths[path[:end]] + path[end:]
            end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))
        return path


SAME_PATHS = Paths({})  # of a body of OpenAI's chat or completions
