"""The detokenizer: tokens of each scheduler step to text. One process, one message per step."""

import logging
from dataclasses import dataclass

from minisgl.core import FinishReason
from minisgl.message import (
    Finished,
    Opened,
    Ready,
    Receiver,
    Sender,
    StepOutput,
    StepText,
    TextUpdate,
    ToApi,
    endpoint,
)
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.vocab import Vocabulary

__all__ = ["Detokenizer", "run_detokenizer"]

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _OpenReq:
    stream: TextStream
    prompt_tokens: int
    cached_tokens: int
    announced: bool = False  # the API server has had a first update


class Detokenizer:
    """State of every open req, and nothing else. No sockets.

    I1  a req has state from its Opened to its Finished; no other message creates or keeps any.
    I2  each req gets exactly one update with `finish`: at its stop string or at its Finished.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._open: dict[int, _OpenReq] = {}

    @property
    def open_reqs(self) -> int:
        return len(self._open)

    def step(self, output: StepOutput) -> StepText:
        """The text of one step: at most one update per req, in the order of the step's tokens."""
        for opened in output.opened:
            self._open[opened.uid] = self._begin(opened)
        ended = {finished.uid: finished for finished in output.finished}
        texts: dict[int, str] = {}
        for uid, token_id in zip(output.uids, output.token_ids, strict=True):
            req = self._open.get(uid)
            # Ended or stopped already: a token that the overlapped step still made (W8b).
            if req is None or (req.stream.stopped and uid not in texts):
                continue
            end = ended.get(uid)
            is_text = end is None or end.reason is not FinishReason.STOP
            texts[uid] = texts.get(uid, "") + req.stream.push(token_id, is_text)
        updates = [self._update(uid, text, ended.get(uid)) for uid, text in texts.items()]
        for uid, finished in ended.items():
            if uid not in texts and uid in self._open:
                updates.append(self._end_without_token(uid, finished))
            self._open.pop(uid, None)
        return StepText(updates=[update for update in updates if update is not None])

    def _begin(self, opened: Opened) -> _OpenReq:
        spec = opened.text
        if spec is None:
            stream = TextStream(self._vocabulary)
        else:
            stream = TextStream(
                self._vocabulary,
                spec.prompt_tail,
                spec.stop,
                spec.skip_special_tokens,
                spec.include_stop,
                spec.min_tokens,
            )
        return _OpenReq(stream, opened.prompt_tokens, opened.cached_tokens)

    def _update(self, uid: int, text: str, finished: Finished | None) -> TextUpdate | None:
        req = self._open[uid]
        stopped = req.stream.stopped
        if finished is not None and not stopped:
            text += req.stream.finish()
            stopped = req.stream.stopped  # a stop string completed by the last, cut character
        ends = stopped or finished is not None
        if not text and req.announced and not ends:
            return None
        req.announced = True
        finish = None
        if stopped:
            finish = FinishReason.STOP
        elif finished is not None:
            finish = finished.reason
        return TextUpdate(
            uid=uid,
            text=text,
            completion_tokens=req.stream.tokens,
            prompt_tokens=req.prompt_tokens,
            cached_tokens=req.cached_tokens,
            finish=finish,
            error=finished.error if finished is not None else None,
            stopped=stopped and finished is None,
        )

    def _end_without_token(self, uid: int, finished: Finished) -> TextUpdate | None:
        if self._open[uid].stream.stopped:  # its end has been told at the stop string
            return None
        return self._update(uid, "", finished)


def run_detokenizer(model_path: str, socket_dir: str) -> None:
    """Serve `detokenizer` for ever."""
    detokenizer = Detokenizer(TextTokenizer.load(model_path).vocabulary)
    receiver: Receiver[StepOutput] = Receiver(endpoint(socket_dir, "detokenizer"), StepOutput)
    api: Sender[ToApi] = Sender(endpoint(socket_dir, "api"))
    api.send(Ready(role="detokenizer"))
    while True:
        receiver.poll(None)
        for output in receiver.drain():
            try:
                text = detokenizer.step(output)
            # The gate of this pump: a step that makes no sense is dropped, the others go on (W35).
            except Exception:
                logger.exception("step dropped step_id=%d", output.step_id)
                continue
            if text.updates:
                api.send(text)
