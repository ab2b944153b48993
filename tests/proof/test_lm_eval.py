"""lm-eval scores the server as it scores transformers, sample by sample."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demo.evaluate import load_evaluation, transformers_answers
from minisgl.demo import model_path
from minisgl.tokenizer import TextTokenizer
from tests.process.harness import ServerProcess
from tests.proof.venvs import make_venv

pytestmark = pytest.mark.proof

LIMIT_S = 1800
GENERATE = """
task: demo_generate
output_type: generate_until
generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: demo_choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{target}}"
"""


def write_tasks(folder: Path) -> list[dict]:
    tokenizer = TextTokenizer(model_path())
    prompts = [p for p in load_evaluation() if p.task in ("arithmetic", "spelling")][:24]
    rows = []
    for index, prompt in enumerate(prompts):
        choices = [prompt.answer, prompts[index - 1].answer, "seven"]
        text = tokenizer.render_chat(prompt.messages)
        rows.append({"prompt": text, "target": prompt.answer, "choices": choices})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = COMMON.replace("DATA", str(data))
    (folder / "generate.yaml").write_text(common + GENERATE)
    chosen = common.replace("{{target}}", "0").replace('"0"', "0")
    (folder / "choose.yaml").write_text(chosen + CHOOSE)
    return rows


def samples(folder: Path, task: str) -> list[dict]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"])


def test_lm_eval_agrees_with_transformers(demo_server: ServerProcess, tmp_path: Path) -> None:
    rows = write_tasks(tmp_path)
    tool = make_venv(tmp_path / "venv", "lm-eval[api]", "transformers") / "lm_eval"
    arguments = {
        "model": "minisgl-demo",
        "base_url": demo_server.url + "/v1/completions",
        "tokenizer": str(model_path()),
        "num_concurrent": "4",
        "max_retries": "1",
    }
    joined = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(tool), "--model", "local-completions", "--model_args", joined]
    command += ["--tasks", "demo_generate,demo_choose", "--include_path", str(tmp_path)]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    check_generations(samples(tmp_path / "out", "demo_generate"))
    check_likelihoods(samples(tmp_path / "out", "demo_choose"), rows)


def check_generations(found: list[dict]) -> None:
    prompts = [p for p in load_evaluation() if p.task in ("arithmetic", "spelling")][:24]
    expected = transformers_answers(prompts, model_path(), "cpu", "float32")
    assert [row["resps"][0][0].strip() for row in found] == [text.strip() for text in expected]


def check_likelihoods(found: list[dict], rows: list[dict]) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path())
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    for sample, row in zip(found, rows, strict=True):
        # lm-eval scores the context's last line break with the continuation
        context = tokenizer(row["prompt"].rstrip())["input_ids"]
        for choice, response in zip(row["choices"], sample["resps"], strict=True):
            ids = tokenizer(row["prompt"] + choice)["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores = [logprobs[i - 1, ids[i]].item() for i in range(len(context), len(ids))]
            greedy = [
                logprobs[i - 1].argmax().item() == ids[i] for i in range(len(context), len(ids))
            ]
            assert float(response[0][0]) == pytest.approx(sum(scores), abs=2e-3)
            assert str(response[0][1]) == str(all(greedy))
