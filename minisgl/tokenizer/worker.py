"""The tokenizer worker: one process, one request at a time, nothing that a client sends ends it."""

import array
import json
import logging
import os
from functools import partial

from minisgl.message import DecodeIds, TokenizeRequest, TokenizeResult, TokenizeText, ToTokenizer
from minisgl.tokenizer.pump import serve_queue
from minisgl.tokenizer.template import MAX_TEMPLATE_CHARS, TemplateError
from minisgl.tokenizer.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


def handle(
    tokenizer: TextTokenizer, message: TokenizeRequest, timeout_s: float | None
) -> TokenizeResult:
    """Answer one message; what goes wrong becomes the answer's `error`."""
    try:
        if isinstance(message, DecodeIds):
            ids = array.array("i", message.token_ids).tolist()
            text = tokenizer.vocabulary.decode(ids, message.skip_special)
            return TokenizeResult(uid=message.uid, text=text)
        if isinstance(message, TokenizeText):
            ids = tokenizer.encode_text(message.text, message.add_special)
        else:
            messages = json.loads(message.messages_json)
            options = json.loads(message.template_kwargs_json)
            ids = tokenizer.encode_chat(messages, options, timeout_s)
        return TokenizeResult(uid=message.uid, token_ids=array.array("i", ids).tobytes())
    except TemplateError as error:
        return TokenizeResult(uid=message.uid, error=str(error), limit=error.limit)
    except RecursionError:
        return TokenizeResult(uid=message.uid, error="the chat is nested too deeply")
    # tokenizers raises Exception itself; this request needs an answer, the next a worker (W12).
    except Exception:
        logger.exception("tokenizing failed uid=%d", message.uid)
        reason = "the prompt could not be tokenized"
        return TokenizeResult(uid=message.uid, error=reason, internal=True)


def run_tokenizer(name: str, model_path: str, socket_dir: str, template_timeout_s: float) -> None:
    """Serve the queue `name` for ever. Raises ConfigError when the folder cannot be used."""
    # One message at a time: the library's thread pool would only fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = TextTokenizer.load(model_path, MAX_TEMPLATE_CHARS)
    answer = partial(handle, tokenizer, timeout_s=template_timeout_s)
    serve_queue(name, socket_dir, ToTokenizer, answer)
