"""The two worker processes of this package: the tokenizer and the detokenizer.

Each process reads one queue and sends its results to the API server. A tokenizer works on one text
or chat at a time, while another process decodes the images of an earlier chat. An exception that
the data of a request causes becomes an error result of that request, and never ends the process.
"""

import array
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import UnionType
from typing import Any, NoReturn

from minisgl.core import ImageRefused, InvalidRequest
from minisgl.images import ImageDecoder, ImageSpec, image_spec
from minisgl.message import messages
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.tokenizer.detokenizer import Detokenizer, OpenCallParser
from minisgl.tokenizer.images import images_of, packed, with_images
from minisgl.tokenizer.template import MAX_TEMPLATE_CHARS
from minisgl.tokenizer.tokenizer import TextTokenizer, load_vocabulary
from minisgl.tokenizer.vocab import Vocabulary

logger = logging.getLogger(__name__)


def run_tokenizer(
    name: str,
    model_path: str,
    socket_dir: str,
    template_timeout_s: float,
    escape_special_tokens: bool,
    new_decoder: Callable[[ImageSpec], ImageDecoder] | None,
    detect_tools: Callable[[TextTokenizer], str],
    on_checked: Callable[[], None],
    fail: Callable[[Exception], object],
) -> NoReturn:
    """Serve the queue `name` until the process ends. Raises ConfigError for an unusable folder.

    new_decoder: makes the decoder of a model with images. None: the server takes no images.
    detect_tools: returns the tool_format of ModelFacts.
    on_checked: called when the tokenizer of the model has loaded.
    fail: ends the process after an error of another thread.
    """
    # The worker encodes one message at a time. The library's threads would compete for the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    spec = None if new_decoder is None else image_spec(model_path)
    decoder = None if new_decoder is None or spec is None else new_decoder(spec)
    tokenizer = TextTokenizer(
        model_path,
        MAX_TEMPLATE_CHARS,
        escape_special_tokens,
        template_timeout_s,
        spec,
    )
    on_checked()
    ready = messages.Ready(
        role=name,
        tool_format=detect_tools(tokenizer),
        template_variables=tokenizer.template_variables,
        tokenizer=tokenizer.info,
    )
    handle: Callable[[Any], messages.TokenizeResult | None] = partial(tokenize, tokenizer)
    if decoder is not None:
        # A socket of ZMQ belongs to one thread.
        results: Sender[messages.ToApi] = Sender(endpoint(socket_dir, "api"))
        handle = ImageThread(tokenizer, decoder, results.send, fail).handle
    _serve_queue(ready, socket_dir, messages.ToTokenizer, handle)


def run_detokenizer(
    model_path: str, socket_dir: str, call_parsers: Callable[[Vocabulary], OpenCallParser]
) -> NoReturn:
    """Serve the queue `detokenizer`, as `run_tokenizer` does. Raises ConfigError.

    call_parsers: makes the parsers of tool calls for a vocabulary.
    """
    vocabulary = load_vocabulary(model_path)
    detokenizer = Detokenizer(vocabulary, call_parsers(vocabulary))
    ready = messages.Ready(role="detokenizer")
    _serve_queue(ready, socket_dir, messages.ToDetokenizer, detokenizer.handle)


def tokenize(
    tokenizer: TextTokenizer,
    message: messages.TokenizeRequest,
    decoder: ImageDecoder | None = None,
) -> messages.TokenizeResult:
    """Return the result of one message. If the message fails, the result has an `error`.

    decoder: None if the model has no images.
    """
    result = _answered(message.uid, partial(_encode, tokenizer, message))
    if (images := images_of(message)) and result.error is None:
        result = _answered(message.uid, partial(with_images, result, images, decoder))
    return result


class ImageThread:
    """Tokenizes the chats with images of one process, beside the texts that follow them.

    The caller's thread makes the ids. Another thread waits for the process that decodes the images,
    for one chat after the other. Meanwhile the caller goes on with the messages of its queue.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        decoder: ImageDecoder,
        send: Callable[[messages.TokenizeResult], object],
        fail: Callable[[Exception], object],
    ) -> None:
        """Start the thread, which ends with the process.

        send: sends the result of a chat with images. Only the thread of this object calls it.
        fail: ends the process after an error of `send`. Otherwise all later chats would hang.
        """
        self._tokenizer, self._decoder = tokenizer, decoder
        self._send, self._fail = send, fail
        self._chats: SimpleQueue[tuple[messages.TokenizeResult, Sequence[messages.SourceImage]]]
        self._chats = SimpleQueue()
        threading.Thread(target=self._run, name="images", daemon=True).start()

    def handle(self, message: messages.TokenizeRequest) -> messages.TokenizeResult | None:
        """Return the result of one message. None: the thread sends it after the decoding."""
        images = images_of(message)
        result = _answered(message.uid, partial(_encode, self._tokenizer, message))
        if not images or result.error is not None:
            return result
        self._chats.put((result, images))
        return None

    def _run(self) -> None:
        try:
            while True:
                result, images = self._chats.get()
                work = partial(with_images, result, images, self._decoder)
                self._send(_answered(result.uid, work))
        # The outermost handler of the thread. A thread that ends does not end its process.
        except Exception as error:  # noqa: BLE001
            self._fail(error)


def _answered(uid: int, work: Callable[[], messages.TokenizeResult]) -> messages.TokenizeResult:
    """Return the result of `work`, or a result with the error that it raises."""
    try:
        return work()
    except ImageRefused as error:
        return messages.TokenizeResult(
            uid=uid,
            error=error.message,
            param=error.param,
            refused=error.reason,
            limit=error.limit,
        )
    except InvalidRequest as error:
        return messages.TokenizeResult(uid=uid, error=error.message, limit=error.limit)
    except RecursionError:
        return messages.TokenizeResult(uid=uid, error="the chat is nested too deeply")
    # The tokenizers library raises the class Exception. The worker must send a result for this
    # request, and must stay alive: without it, every later request would hang.
    except Exception:
        logger.exception("tokenizing failed uid=%d", uid)
        reason = "the prompt could not be tokenized"
        return messages.TokenizeResult(uid=uid, error=reason, internal=True)


def _encode(tokenizer: TextTokenizer, message: messages.TokenizeRequest) -> messages.TokenizeResult:
    """The result of a message. A chat has one image token for each image."""
    if isinstance(message, messages.DecodeIds):
        ids = array.array("i", message.token_ids).tolist()
        vocabulary, skip = tokenizer.vocabulary, message.skip_special
        if message.each:
            pieces = tuple(vocabulary.token_bytes(token_id, skip) for token_id in ids)
            return messages.TokenizeResult(uid=message.uid, pieces=pieces)
        text = vocabulary.decode(ids, skip)
        return messages.TokenizeResult(uid=message.uid, text=text)
    if isinstance(message, messages.TokenizeText):
        ids = tokenizer.encode_text(message.text, message.add_special)
        return messages.TokenizeResult(uid=message.uid, token_ids=packed(ids))
    chat = json.loads(message.messages_json)
    options = json.loads(message.template_kwargs_json)
    options["tools"] = json.loads(message.tools_json)
    ids = tokenizer.encode_chat(chat, options)
    return messages.TokenizeResult(
        uid=message.uid,
        token_ids=packed(ids),
        thinks=tokenizer.thinks(ids, options),
        prefixes=tokenizer.prefixes.find(ids, chat, options),
    )


def _serve_queue(
    ready: messages.Ready,
    socket_dir: str,
    union: UnionType,
    handle: Callable[[Any], messages.ToApi | None],
) -> NoReturn:
    """Send `ready`, then handle each message of the queue in turn, and answer each Ping with Alive.

    The queue has the name of the role. `handle` returns the message for the API server, or None.
    It never raises.
    """
    name = ready.role
    receiver: Receiver[Any] = Receiver(endpoint(socket_dir, name), union)
    api: Sender[messages.ToApi] = Sender(endpoint(socket_dir, "api"))
    api.send(ready)
    while True:
        receiver.poll(None)
        for message in receiver.drain():
            is_ping = isinstance(message, messages.Ping)
            result = messages.Alive(role=name) if is_ping else handle(message)
            if result is not None:
                api.send(result)
