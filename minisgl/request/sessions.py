"""The session of a client to which a request belongs.

Agents name it in a header, or in a field of the body. Once the client has
ended a session, evictions begin with the pages that only this session has used.
"""

import hashlib
from collections.abc import Mapping

# Of Claude Code, of Codex (two spellings), of opencode for its own and for other providers.
HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-opencode-session",
    "x-session-affinity",
    "x-session-id",
)


def session_name(headers: Mapping[str, str], field: str) -> str:
    """The client's name of the session of a request; "" if it names none.

    headers: as Starlette decodes them, in Latin-1.
    field: the name in the body. A header goes before it.
    """
    found = next((value for name in HEADERS if (value := headers.get(name))), None)
    # UTF-8, as in bodies and in the path that ends a session. Servers decode paths with "replace".
    return field if found is None else found.encode("latin-1").decode(errors="replace")


def session_key(client: str, name: str) -> str:
    """The key of a session, as in AddReq; "" for the name "".

    It has 32 characters, however long the name is. Clients with different API keys never share one.
    """
    if not name:
        return ""
    return hashlib.blake2b(f"{client}\n{name}".encode(), digest_size=16).hexdigest()
