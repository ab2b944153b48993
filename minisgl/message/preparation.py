"""The questions to the tokenizers and to the compiler of grammars, and their answers."""

from minisgl.core import Grammar, GrammarKind
from minisgl.message.images import PromptImage, SourceImage
from minisgl.message.wire import WireMessage


class TokenizeText(WireMessage, frozen=True, kw_only=True):
    """Encode plain text. Text that spells a special token is encoded as that token.

    uid          number of the request. The engine client sets it when it sends the request.
    add_special  also add the special tokens that the tokenizer adds by itself, such as BOS.
    """

    uid: int = 0
    text: str
    add_special: bool = True


class TokenizeChat(WireMessage, frozen=True, kw_only=True):
    """Render a chat with the model's template and encode the result without a second BOS.

    messages_json, template_kwargs_json and tools_json are JSON that the API server has validated.
    They stay JSON until the template reads them, so no data of a client becomes one of our types.

    tools_json  the tools that the template describes to the model; null: none.
    images      in the order of their places in the messages.
    """

    uid: int = 0
    messages_json: bytes
    template_kwargs_json: bytes = b"{}"
    tools_json: bytes = b"null"
    images: tuple[SourceImage, ...] = ()


class DecodeIds(WireMessage, frozen=True, kw_only=True):
    """Decode token ids (int32 little-endian) to text: /detokenize, or the echo of prompt ids.

    each: the result has the bytes of each id and no text.
    """

    uid: int = 0
    token_ids: bytes
    skip_special: bool = True
    each: bool = False


class CompileGrammar(WireMessage, frozen=True, kw_only=True):
    """Check the grammar of a request: a JSON schema, regex, JSON list of choices, Lark or GBNF.

    For tool calls, `text` is the JSON of a tool_calls.ToolGrammar.

    uid                 number of the request. The grammar pool sets it when it sends the request.
    whitespace_pattern  regex of the white space between two tokens of JSON; "": no white space.
    client              the client that the API key names; clients take turns.
    """

    uid: int = 0
    kind: GrammarKind
    text: str
    whitespace_pattern: str = ""
    client: str = ""


class TokenizeResult(WireMessage, frozen=True, kw_only=True):
    """token_ids (int32 little-endian), or the text of DecodeIds.

    pieces    the bytes of each id, for DecodeIds with `each`.
    thinks    the model may begin its answer with thinking, for TokenizeChat.
    prefixes  as in AddReq, for TokenizeChat.
    images    as in AddReq, for TokenizeChat. In token_ids, the image token of the model stands for
              each pad.
    padded    token_ids with the pads; b"" without images.
    decode_s  time of the decoding of the images in seconds.
    error     a sentence for the client. The other fields are then empty.
    param     the place in the body of the image at fault.
    refused   the reason of an ImageRefused.
    internal  True if the error is a fault of the server and not of the client.
    limit     the name of the limit that the request exceeded.
    """

    uid: int
    token_ids: bytes = b""
    text: str = ""
    pieces: tuple[bytes, ...] = ()
    thinks: bool = False
    prefixes: tuple[int, int] = (0, 0)
    images: tuple[PromptImage, ...] = ()
    padded: bytes = b""
    decode_s: float = 0.0
    error: str | None = None
    param: str | None = None
    refused: str = ""
    internal: bool = False
    limit: str | None = None


class GrammarResult(WireMessage, frozen=True, kw_only=True):
    """The result of CompileGrammar. The error and the fields after it are as in TokenizeResult.

    grammar: without the `thinking`, which depends on the prompt. None: there is an error.
    """

    uid: int
    grammar: Grammar | None = None
    error: str | None = None
    internal: bool = False
    limit: str | None = None
