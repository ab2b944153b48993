"""Checks a model before its weights are downloaded: `python -m minisgl.launch.model_check`.

Standard input is an EngineConfig as JSON. The fault is written to standard output in one line, and
the exit code is then CONFIG_EXIT.
"""

import sys

import msgspec

from minisgl.core import ConfigError, EngineConfig
from minisgl.engine.check import check_before_weights
from minisgl.quantization import with_quantizations
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.utils import supervise


def main() -> int:
    """Check the configuration, the memory and the tokenizer, and return the exit code."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        check_before_weights(config, with_quantizations())
        TextTokenizer(config.model_path).close()
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return supervise.CONFIG_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
