"""The detokenizer: tokens of each scheduler step to text. One process, one message per step."""

import logging

from minisgl.core import FinishReason
from minisgl.message import StepOutput, StepText, TextUpdate, ToDetokenizer, TokenLogprobs
from minisgl.tokenizer.answer import OpenAnswer
from minisgl.tokenizer.pump import serve_queue
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.vocab import Vocabulary

logger = logging.getLogger(__name__)


class Detokenizer:
    """State of every open req, and nothing else. No sockets.

    I1  a req has state from its Opened to its Finished; no other message creates or keeps any.
    I2  each req gets exactly one update with `finish`: at its stop string or at its Finished.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._open: dict[int, OpenAnswer] = {}

    def answer(self, output: StepOutput) -> StepText | None:
        """`step`; lengths or positions that do not fit end its reqs alone. None: nothing to say."""
        try:
            text = self.step(output)
        except (LookupError, ValueError):
            logger.exception("step failed step_id=%d", output.step_id)
            text = self.fail(output)
        return text if text.updates else None

    def step(self, output: StepOutput) -> StepText:
        """The text of one step: at most one update per req, in the order of the step's tokens."""
        for opened in output.opened:
            self._open[opened.uid] = OpenAnswer(self._vocabulary, opened)
        touched: dict[int, OpenAnswer] = {}
        for prompt in output.prompt_logprobs:
            if prompt.uid in self._open:
                touched[prompt.uid] = self._open[prompt.uid]
                touched[prompt.uid].push_prompt(prompt)
        ended = {finished.uid: finished for finished in output.finished}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for found in output.logprobs:
            logprobs.setdefault(found.uid, []).append(found)
        for uid, token_id in zip(output.uids, output.token_ids, strict=True):
            answer = self._open.get(uid)
            ours = logprobs[uid].pop(0) if logprobs and logprobs.get(uid) else None
            # Ended or stopped already: a token that the overlapped step still made (W8b).
            if answer is None or answer.stream.stopped:
                continue
            touched[uid] = answer
            end = ended.get(uid)
            answer.push(token_id, end is None or end.reason is not FinishReason.STOP, ours)
        updates = [answer.take(ended.get(uid)) for uid, answer in touched.items()]
        for uid, finished in ended.items():
            left = self._open.pop(uid, None)
            # One that stopped earlier has told its end at the stop string.
            if left is not None and uid not in touched and not left.stream.stopped:
                updates.append(left.take(finished))
        return StepText(updates=[update for update in updates if update is not None])

    def fail(self, output: StepOutput) -> StepText:
        """End with an error every req of a step that could not be read: I2 holds for them too."""
        opened = {message.uid for message in output.opened}
        named = opened.union(output.uids, (finished.uid for finished in output.finished))
        text, updates = "the text of this request could not be made", []
        for uid in sorted(named):
            answer = self._open.pop(uid, None)
            if uid in opened or (answer is not None and not answer.stream.stopped):
                end = TextUpdate(uid=uid, finish=FinishReason.ERROR, error=text, stopped=True)
                updates.append(end)
        return StepText(updates=updates)


def run_detokenizer(model_path: str, socket_dir: str) -> None:
    """Serve `detokenizer` for ever."""
    detokenizer = Detokenizer(TextTokenizer.load(model_path).vocabulary)
    serve_queue("detokenizer", socket_dir, ToDetokenizer, detokenizer.answer)
