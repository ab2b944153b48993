"""Compare the ids and the decoded text of each folder with transformers.

usage: published_tokenizers.py CACHE FOLDER ...
"""

import os
import sys
from pathlib import Path

TEXTS = [
    "Hello world",
    "  two  spaces\n\n\ttab",
    "é 你好 🙂 Ω≈ç√",
    "def f(x: int) -> str:\n    return f'{x:>8}'\n",
    "1234567890 3.14159",
    "",
]


def main(cache: str, *folders: str) -> None:
    os.environ["HF_HOME"] = cache  # read when the libraries are imported
    from transformers import AutoTokenizer
    from transformers.integrations.mistral import convert_tekken_tokenizer

    from minisgl.tokenizer.tokenizer import TextTokenizer

    for folder in folders:
        ours = TextTokenizer(folder)
        tekken = Path(folder) / "tekken.json"
        theirs = (
            convert_tekken_tokenizer(str(tekken))
            if tekken.is_file()
            else AutoTokenizer.from_pretrained(folder)
        )
        for text in TEXTS:
            ids = ours.encode_text(text)
            assert ids == theirs(text).input_ids, (folder, text)
            assert ours.vocabulary.decode(ids) == text, (folder, text)
        print("equal", folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
