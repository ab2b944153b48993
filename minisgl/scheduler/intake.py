"""From a message to a waiting req: the last check of what no rank could survive."""

import numpy as np

from minisgl.core import InvalidRequest, PromptTooLong
from minisgl.message import AddReq
from minisgl.scheduler.request import Req


def accept(message: AddReq, *, vocab_size: int, most_tokens: int, serial: int) -> Req:
    """A complete waiting req, checked against the engine's real limits as the edge has done before.

    most_tokens: of prompt and answer together. Raises RequestError when it could never run to its
    end.
    """
    tokens = np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32)
    message.sampling.validate(vocab_size)
    if not len(tokens):
        raise InvalidRequest("the prompt is empty", param="prompt")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InvalidRequest(f"a token id is outside 0..{vocab_size - 1}", param="prompt")
    asked = message.sampling.max_tokens
    needed = len(tokens) + (1 if asked is None else asked)
    if needed > most_tokens:
        raise PromptTooLong(
            f"{len(tokens)} prompt tokens and {asked or 1} output tokens exceed the "
            f"{most_tokens} tokens that context and KV pool allow",
            param="prompt",
        )
    seed = message.sampling.seed
    return Req(
        uid=message.uid,
        tokens=tokens,
        prompt_len=len(tokens),
        limit=most_tokens if asked is None else needed,
        sampling=message.sampling,
        # the front end draws a seed for those who gave none; every rank must use the same
        seed=message.uid if seed is None else seed,
        serial=serial,
        cache_salt=message.cache_salt,
    )
