"""`minisgl scripted FOLDER`: writes a model with scripted weights, on which agents can be tried.

The model answers each task with one call of the agent's shell tool, and the result of the call with
a sentence. It needs no download, has a context for the long prompts of agents, and runs on a CPU.

Each answer is a chain of tokens. The only weights that are not 0 are the embeddings and the output
layer: the embedding of a token is a unit vector, and the row of its successor in the output layer
is the same vector. The chat template ends the prompt with a token that begins the right chain.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from minisgl.core import ConfigError
from minisgl.demo import model_path

CONTEXT_TOKENS = 131_072
COMMAND = "echo hello > minisgl.txt"
DONE = "The command has run: see the result of the tool."
_NO_SHELL = "This model only calls a shell tool, and the request has none that it knows."
# The arguments of the shell tool of each agent, by the name of the tool.
SHELLS: dict[str, dict[str, Any]] = {
    "bash": {"command": COMMAND, "description": "Write a file"},  # opencode
    "Bash": {"command": COMMAND, "description": "Write a file"},  # Claude Code
    "exec_command": {"cmd": COMMAND},  # Codex CLI
    "run_shell_command": {"command": COMMAND, "is_background": False},  # qwen-code
}
_END = 2  # the id of <|im_end|>
_PIECE_CHARS = 8  # of one token of an answer, at least
_SIZE = 256  # of the hidden state: one dimension for each token of the chains
_HEAD = 64
_SCALE = 8.0  # With it, the right token has a probability of 1 at each usual temperature.


def main(arguments: Sequence[str]) -> int:
    """Run `minisgl scripted` and return the exit code. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="minisgl scripted",
        description="Write a model with scripted weights, on which coding agents can be tried.",
        epilog="Then: minisgl serve FOLDER. docs/api.md has the settings of each agent.",
    )
    parser.add_argument("folder", type=Path, help="new folder for the model")
    folder: Path = parser.parse_args(arguments).folder
    write_model(folder)
    sys.stdout.write(f"wrote {folder}; serve it with: minisgl serve {folder}\n")
    return 0


def write_model(folder: Path) -> None:
    """Write the model into a new folder. Raises ConfigError if the folder cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}; give a new folder") from None
    tokenizer = _read("tokenizer.json")
    vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    chains = _chains(vocabulary)
    added = dict.fromkeys(token for chain in chains for token in chain)
    ids = {token: len(vocabulary) + number for number, token in enumerate(added)}
    starts = {chain[0] for chain in chains}
    tokenizer["added_tokens"] += [_added_token(t, ids[t], t in starts) for t in ids]
    size = len(vocabulary) + len(ids)
    embeddings, output = np.zeros((2, size, _SIZE), np.float32)
    for place, token in enumerate(ids):
        embeddings[ids[token], place] = 1
    for chain in chains:
        successors = [*(ids[token] for token in chain[1:]), _END]
        for token, successor in zip(chain, successors, strict=True):
            output[successor] += _SCALE * embeddings[ids[token]]
    save_file(_weights(embeddings, output), folder / "model.safetensors", {"format": "pt"})
    settings = _read("tokenizer_config.json")
    settings |= {"model_max_length": CONTEXT_TOKENS, "chat_template": _template()}
    files = {"config": _config(size), "tokenizer": tokenizer, "tokenizer_config": settings}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1))
    shutil.copy(model_path() / "generation_config.json", folder)


def _chains(vocabulary: dict[str, int]) -> list[list[str]]:
    """Each answer as its start token and its pieces. No piece occurs twice, or in `vocabulary`."""
    answers = {"done": DONE, "text": _NO_SHELL}
    for name, arguments in SHELLS.items():
        call = json.dumps({"name": name, "arguments": arguments})
        answers[name] = f"I run a command with {name}.\n<tool_call>\n{call}\n</tool_call>"
    known = {*vocabulary, ""}
    return [[f"<|{name}|>", *_pieces(text, known)] for name, text in answers.items()]


def _pieces(text: str, known: set[str]) -> list[str]:
    """Cut a text into pieces that are not in `known`, and add them to it."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARS
        while text[start:end] in known and end < len(text):
            end += 1
        if text[start:end] in known:  # the rest of the text; the piece before it becomes longer
            start -= len(pieces[-1])
            known.discard(pieces.pop())
            end = len(text)
        pieces.append(text[start:end])
        known.add(pieces[-1])
        start = end
    return pieces


def _added_token(content: str, number: int, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": is_special}


def _template() -> str:
    """The chat template in scripted.jinja, with the names of the tools in place of SHELLS."""
    text = Path(__file__).with_suffix(".jinja").read_text(encoding="utf-8")
    return text.replace("SHELLS", json.dumps([*SHELLS]))


def _config(vocabulary_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        "hidden_size": _SIZE,
        "intermediate_size": _HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": _END,
        "torch_dtype": "float32",
    }


def _weights(embeddings: Any, output: Any) -> dict[str, Any]:
    """All tensors of the model. Attention and MLP add 0 to the embedding of the last token."""
    layer = "model.layers.0."
    shapes = {
        **{f"{layer}self_attn.{name}_proj.weight": (_HEAD, _SIZE) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": (_SIZE, _HEAD),
        f"{layer}mlp.gate_proj.weight": (_HEAD, _SIZE),
        f"{layer}mlp.up_proj.weight": (_HEAD, _SIZE),
        f"{layer}mlp.down_proj.weight": (_SIZE, _HEAD),
    }
    norms = [f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"]
    return {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": output,
        **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
        **{f"{name}.weight": np.ones(_SIZE, np.float32) for name in norms},
    }


def _read(name: str) -> dict[str, Any]:
    """A file of the demo model, whose tokenizer this model extends."""
    found: dict[str, Any] = json.loads((model_path() / name).read_text())
    return found
