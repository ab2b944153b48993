"""Runs the schemas of MaskBench through the server's own edge: body, checks, compiler and masks.

A file of MaskBench has a schema, and instances that are valid or invalid. README.md names the
source and the licence of the schemas in maskbench.jsonl.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from minisgl.core import EngineConfig, InvalidRequest, SchedulerConfig
from minisgl.protocol.requests import CHAT
from minisgl.request.convert import RequestConverter
from minisgl.settings.config import ServerConfig
from minisgl.structured.library import parser_limits
from minisgl.structured.source import GrammarCompiler
from tests.process.stub_scheduler import FACTS


@dataclass(slots=True)
class Report:
    """Counts, with the names of the schemas that they count.

    refused         schemas that the server refuses, with the reason.
    wrongly_taken   schemas with an invalid instance that the masks allow.
    wrongly_refused schemas with a valid instance that the masks do not allow.
    """

    schemas: int = 0
    instances: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    wrongly_taken: list[str] = field(default_factory=list)
    wrongly_refused: list[str] = field(default_factory=list)


class MaskBench:
    """Checks files of MaskBench with one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        config = ServerConfig(
            engine=EngineConfig(model_path="."), scheduler=SchedulerConfig(), served_names=("m",)
        )
        self._converter = RequestConverter(config)
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer)

    def run(self, files: Iterable[tuple[str, dict[str, Any]]]) -> Report:
        """files: the name and the contents of each file."""
        report = Report()
        for name, file in files:
            report.schemas += 1
            try:
                source = self._source(file["schema"])
            except InvalidRequest as error:
                report.refused[name] = error.message
                continue
            tests = file.get("tests", [])
            report.instances += len(tests)
            wrong = [t["valid"] for t in tests if self._allows(source, t["data"]) != t["valid"]]
            if False in wrong:
                report.wrongly_taken.append(name)
            if True in wrong:
                report.wrongly_refused.append(name)
        return report

    def _source(self, schema: Any) -> str:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": True},
            },
        }
        request = self._converter.read(CHAT, json.dumps(body).encode(), FACTS)
        assert request.grammar is not None
        return self._compiler.check(request.grammar.message).source

    def _allows(self, source: str, instance: Any) -> bool:
        matcher = LLMatcher(
            self._tokenizer, source, log_level=0, limits=parser_limits("json_schema")
        )
        for token in self._tokenizer.tokenize_str(json.dumps(instance, ensure_ascii=False)):
            mask = matcher.compute_bitmask()
            if matcher.is_error() or not mask[token >> 3] & (1 << (token & 7)):
                return False
            matcher.consume_token(token)
        return bool(matcher.is_accepting())
