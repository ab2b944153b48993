"""`encrypted_content` of the Responses API: the reasoning of an answer, encoded for the way back.

Clients that store nothing send reasoning back in this field only. The text is not secret, because
the answer has it too, so it is not encrypted.
"""

import base64
import binascii

_MARK = "minisgl-"


def seal(text: str) -> str:
    """The field for this reasoning."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning in the field; None if another server wrote it."""
    if not sealed.startswith(_MARK):
        return None
    try:
        return base64.urlsafe_b64decode(sealed[len(_MARK) :]).decode()
    except (binascii.Error, ValueError):
        return None
