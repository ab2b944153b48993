"""The program that test_cold_start runs without compilers: every sampler, many batch sizes and
chunk lengths.

    python -m tests.gpu.cold_engine MODEL KERNEL_CACHE KV_CACHE_DTYPE

The last line of its output is JSON: the seconds until the engine was ready, and the FlashInfer
modules that were loaded by then. The number of pages is given, so only the warm-up has run.
"""

import json
import random
import sys
import time
from itertools import cycle, islice

from minisgl.core import FinishReason, SamplingParams
from minisgl.llm import LLM

BATCHES = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 100, 129, 255, 256, 300)
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 100, 255, 257)
LONG = (8191, 8193, 12000)  # around the longest chunk, and longer than it
VARIANTS = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "seed": 5},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5, "temperature": 0.0},
    {"repetition_penalty": 1.3, "top_k": 3},
    {"logit_bias": {7: 5.0}},
    {"logprobs": 5},
    {"logprobs": 0, "top_p": 0.5},
    {"prompt_logprobs": 3},
    {"min_tokens": 2},
)


def main() -> None:
    model, kernel_cache, kv = sys.argv[1:]
    began_s = time.monotonic()
    options = {"kernel_cache": kernel_cache, "kv_cache_dtype": kv, "num_pages": 8192}
    llm = LLM(model, dummy_weight=True, **options)
    ready_s = time.monotonic() - began_s
    from flashinfer.jit import jit_spec_registry

    modules = sorted(jit_spec_registry.get_all_specs())
    rng = random.Random(0)
    kinds = [SamplingParams(max_tokens=4, ignore_eos=True, **kind) for kind in VARIANTS]
    alone = [[kind] for kind in kinds]
    mixed = [list(islice(cycle(kinds), reqs)) for reqs in BATCHES]
    plain = [[kinds[0]] * reqs for reqs in BATCHES]
    for params in (*alone, *mixed, *plain):
        prompts = [rng.choices(range(1000), k=rng.choice(LENGTHS)) for _ in params]
        _check(llm, prompts, params)
    _check(llm, [rng.choices(range(1000), k=length) for length in LONG], kinds[6:9])
    assert sorted(jit_spec_registry.get_all_specs()) == modules, "a request loaded another module"
    print(json.dumps({"ready_s": round(ready_s, 1), "flashinfer": modules}))


def _check(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    done = llm.generate(prompts, params, progress=False)
    assert isinstance(done, list)
    assert {one.finish_reason for one in done} == {FinishReason.LENGTH}, [o.error for o in done]


if __name__ == "__main__":
    main()
