"""The detokenizer: turns the tokens of each scheduler step into text and finds stop strings.

API server -- StartText(uid, options) --> Detokenizer -- StepText --> API server
scheduler  -- StepOutput ---------------> Detokenizer
"""

import logging
from collections import deque
from collections.abc import Callable

from minisgl.core import FinishReason
from minisgl.message import messages
from minisgl.tokenizer.request_text import CallParser, RequestText
from minisgl.tokenizer.vocab import Vocabulary

logger = logging.getLogger(__name__)

OpenCallParser = Callable[[messages.ToolOptions], CallParser]


class Detokenizer:
    """Holds the text of every open request. It does no I/O.

    open_parser: makes the parser of a request with tools.

    I1  Each request has exactly one StartText, one PrefillDone and one Finished: the API server
        sends the StartText before the AddReq. The scheduler sends the other two messages for each
        AddReq, also when it refuses or aborts the request. The detokenizer holds state of a request
        from the first of the three messages to the last.
    I2  Steps are applied in order. A step with the PrefillDone of a request waits for the StartText
        of this request, and all later steps wait for this step. The API server sends the StartText
        before the AddReq, so the wait is short and always ends.
    I3  Each request gets exactly one update with `finish`: at its stop string or at its Finished.
    """

    def __init__(self, vocabulary: Vocabulary, open_parser: OpenCallParser | None = None) -> None:
        self._vocabulary = vocabulary
        self._open_parser = open_parser
        # Text options by uid, for requests whose PrefillDone has not arrived.
        self._options: dict[int, messages.TextOptions] = {}
        self._open: dict[int, RequestText] = {}
        self._waiting: deque[messages.StepOutput] = deque()

    def handle(self, message: messages.StartText | messages.StepOutput) -> messages.StepText | None:
        """Apply one message and every step that waited for it. Returns None if no text is new.

        The lists of a StepOutput must agree, for example `uids` and `token_ids` in length. If they
        do not, or if a parser of tool calls has a bug, the requests of this step end with an error.
        Other requests continue.
        """
        if isinstance(message, messages.StartText):
            self._options[message.uid] = message.options
        else:
            self._waiting.append(message)
        updates: list[messages.TextUpdate] = []
        while self._waiting and self._has_options(self._waiting[0]):
            output = self._waiting.popleft()
            try:
                updates += self._apply(output)
            # A parser reads text that the client can make the model write. Its bug must not end the
            # service.
            except Exception:
                logger.exception("step failed step_id=%d", output.step_id)
                updates += self._fail(output)
        return messages.StepText(updates=updates) if updates else None

    def _has_options(self, output: messages.StepOutput) -> bool:
        return all(done.uid in self._options for done in output.prefill_done)

    def _apply(self, output: messages.StepOutput) -> list[messages.TextUpdate]:
        """Return the updates of one step, at most one per request, in the order of the tokens."""
        for done in output.prefill_done:
            options = self._options.pop(done.uid)
            parser = None
            if options.tools is not None and self._open_parser is not None:
                parser = self._open_parser(options.tools)
            self._open[done.uid] = RequestText(self._vocabulary, options, done, parser)
        touched: dict[int, RequestText] = {}
        for prompt in output.prompt_logprobs:
            if prompt.uid in self._open:
                touched[prompt.uid] = self._open[prompt.uid]
                touched[prompt.uid].push_prompt(prompt)
        predicted = dict(output.predicted)  # how many of the next tokens of a request
        ended = {finished.uid: finished for finished in output.finished}
        logprobs: dict[int, list[messages.TokenLogprobs]] = {}
        for found in output.logprobs:
            logprobs.setdefault(found.uid, []).append(found)
        # A step may hold several tokens of a request. Only the last one can be the stop token.
        stopped = {end.uid for end in output.finished if end.reason is FinishReason.STOP}
        last = {uid: index for index, uid in enumerate(output.uids)} if stopped else {}
        for index, (uid, token_id) in enumerate(zip(output.uids, output.token_ids, strict=True)):
            text = self._open.get(uid)
            logprob = logprobs[uid].pop(0) if logprobs and logprobs.get(uid) else None
            # The scheduler launches a step before it reads the tokens of the step before. A step
            # may therefore produce a token of a request that has ended (text is None) or whose text
            # has reached a stop string (stopped). The token is dropped, because it would follow
            # the end of the text.
            if text is None or (text.kept is None and text.stream.stopped):
                continue
            if predicted and predicted.get(uid):  # The predicted tokens of a step come first.
                predicted[uid] -= 1
                text.predicted += 1
            if text.kept is not None:
                text.kept.append(token_id)
                continue
            touched[uid] = text
            text.push(token_id, uid not in stopped or last[uid] != index, logprob)
        updates = [text.take(ended.get(uid)) for uid, text in touched.items()]
        for uid, finished in ended.items():
            text = self._open.pop(uid, None)
            # A request that stopped earlier has reported its end with its stop string.
            if text is not None and uid not in touched and not text.stream.stopped:
                updates.append(text.take(finished))
        return [update for update in updates if update is not None]

    def _fail(self, output: messages.StepOutput) -> list[messages.TextUpdate]:
        """End all requests of a step that cannot be applied, with an error, so that I3 holds."""
        new = {done.uid for done in output.prefill_done}
        ended = []
        for uid in sorted(new.union(output.uids, (end.uid for end in output.finished))):
            self._options.pop(uid, None)
            text = self._open.pop(uid, None)
            if uid in new or (text is not None and not text.stream.stopped):
                ended.append(uid)
        reason = "the output tokens of this request could not be converted to text"
        return [
            messages.TextUpdate(uid=uid, finish=FinishReason.ERROR, error=reason, stopped=True)
            for uid in ended
        ]
