"""lm-eval scores the server as it scores transformers, and runs its jsonschema_bench."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demo.evaluate import load_evaluation, transformers_answers
from minisgl.demo import model_path
from minisgl.tokenizer.tokenizer import TextTokenizer
from tests.patience import patience
from tests.process.harness import ServerProcess
from tests.proof.venvs import make_venv

pytestmark = pytest.mark.proof

LIMIT_S = 1800
MOST_TOKENS = 512
MASKBENCH = Path(__file__).parents[1] / "unit" / "structured" / "maskbench.jsonl"
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


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program lm_eval."""
    folder = tmp_path_factory.mktemp("lm-eval") / "venv"
    return make_venv(folder, "lm-eval[api]", "transformers", "jsonschema[format]") / "lm_eval"


def run_tasks(tool: Path, url: str, folder: Path, tasks: list[str], **arguments: str) -> str:
    """Run tasks whose files are in `folder`; the samples get into `folder`/out. Returns stdout."""
    arguments = {
        "model": "minisgl-demo",
        "base_url": url + "/v1/completions",
        "tokenizer": str(model_path()),
        "num_concurrent": "4",
        "max_retries": "1",
        **arguments,
    }
    joined = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(tool), "--model", "local-completions", "--model_args", joined]
    command += ["--tasks", ",".join(tasks), "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(LIMIT_S), cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_lm_eval_agrees_with_transformers(
    demo_server: ServerProcess, tool: Path, tmp_path: Path
) -> None:
    rows = write_tasks(tmp_path)
    run_tasks(tool, demo_server.url, tmp_path, ["demo_generate", "demo_choose"])
    check_generations(samples(tmp_path / "out", "demo_generate"))
    check_likelihoods(samples(tmp_path / "out", "demo_choose"), rows)


def write_schema_tasks(tool: Path, folder: Path) -> list[str]:
    """Write lm-eval's own task with schemas of MaskBench: once as it is, and once per schema.

    lm-eval has generation arguments per task, not per document. A task of one document gives the
    document's schema to the server. lm-eval groups requests by their arguments, and takes objects
    with the same keys for equal; the schema is therefore a string.
    """
    (original,) = tool.parents[1].rglob("jsonschema_bench_easy.yaml")
    lines = MASKBENCH.read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if case["name"].startswith("Github_easy")]
    rows = [{"json_schema": json.dumps(c["schema"])} for c in cases if c["refused"] is None]
    tasks = {"schemas_plain": (rows, {})}
    for index, row in enumerate(rows):
        tasks[f"schemas_guided_{index}"] = ([row], {"guided_json": row["json_schema"]})
    for name, (part, options) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in part))
        splits = {"data_files": {"test": str(data)}}
        arguments = {
            "until": ["<|im_end|>"],
            "max_gen_toks": MOST_TOKENS,
            "temperature": 1,
            **options,
        }
        task = {
            "include": str(original),
            "tag": [],
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": splits,
            "training_split": None,
            "validation_split": None,
            "generation_kwargs": arguments,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return list(tasks)


def test_jsonschema_bench_scores_answers_by_schema(
    demo_server: ServerProcess, tool: Path, tmp_path: Path
) -> None:
    names = write_schema_tasks(tool, tmp_path)
    sys.stdout.write(run_tasks(tool, demo_server.url, tmp_path, names, max_length="4096"))
    plain = samples(tmp_path / "out", "schemas_plain")
    guided = [row for name in names[1:] for row in samples(tmp_path / "out", name)]
    assert len(plain) == len(guided) == len(names) - 1
    # An answer that MOST_TOKENS cuts off is no JSON. Each whole answer follows its schema.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path())
    sizes = [len(tokenizer(row["resps"][0][0])["input_ids"]) for row in guided]
    # The server's own split of a text may have more tokens than the canonical one.
    whole = [row for row, size in zip(guided, sizes, strict=True) if size < 0.75 * MOST_TOKENS]
    assert all(row["json_validity"] and row["schema_compliance"] for row in whole)
    assert len(whole) >= len(guided) / 3  # The demo model repeats itself in free strings.
    assert sum(row["schema_compliance"] for row in plain) < len(whole)


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
