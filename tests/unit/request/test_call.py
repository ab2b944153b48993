"""`Call`: its answers begin with the parts of the prompt that they repeat."""

import json

from minisgl.protocol.requests import COMPLETIONS
from minisgl.request.call import Call, Caller
from minisgl.request.convert import RequestConverter
from minisgl.settings.config import Limits
from tests.unit.server.fakes import CONFIG, FACTS


def test_choices_of_a_prompt_share_its_ids() -> None:
    """Regression: each of 1,024 choices had a list of all ids, which takes 36 bytes for an id."""
    body = {"model": "m", "prompt": [[5, 6, 7], [8]], "n": 3, "return_token_ids": True}
    request = RequestConverter(CONFIG).read(COMPLETIONS, json.dumps(body).encode(), FACTS)
    call = Call(request, Caller(), range(1, 7))
    call.fit([], FACTS, Limits())
    ids = [choice.details.prompt_ids for choice in call.choices if choice.details is not None]
    assert [[*each] for each in ids] == [[5, 6, 7]] * 3 + [[8]] * 3
    assert ids[0] is ids[1] is ids[2]
