"""200 schemas of MaskBench. `make proof` runs all of them (tests/proof/test_maskbench.py)."""

import json
from pathlib import Path

from llguidance import LLTokenizer

from tests.unit.structured.maskbench import MaskBench

DATA = Path(__file__).with_name("maskbench.jsonl")


def test_schemas_of_maskbench_are_enforced_or_refused(tokenizer: LLTokenizer) -> None:
    lines = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 200
    report = MaskBench(tokenizer).run([(line["name"], line) for line in lines])
    assert report.wrongly_taken == []
    assert report.wrongly_refused == []
    assert {name: reason.split(":")[0] for name, reason in report.refused.items()} == {
        line["name"]: line["refused"] for line in lines if line["refused"] is not None
    }
