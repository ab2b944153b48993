"""A plan against engines, against recorded starts, and as a command."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.__main__ import main
from minisgl.benchmark.models import write_model
from minisgl.core import ConfigError, EngineConfig, OutOfMemory
from minisgl.cost.floor import cost_of
from minisgl.cost.gpus import GPUS, Gpu, find_gpu
from minisgl.demo import model_path
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine, memory
from minisgl.models.config import engine_model, load_model_spec
from minisgl.planning.plan import Plan, make_plan

H200 = GPUS["H200"]


class Shown(msgspec.Struct):
    model: str
    plans: list[Plan]


def plan(folder: str, gpu: Gpu = H200, **changes: Any):
    config = EngineConfig(model_path=folder, **changes)
    model = load_model_spec(folder, drafts=config.speculative == "mtp")
    return make_plan(config, model, gpu)


@pytest.mark.parametrize(("shape", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_mxfp4_weights_have_the_size_of_the_published_files(
    shape: str, gib: float, tmp_path: Path
) -> None:
    """The model card names 12.8 GiB and 60.8 GiB. The sizes hold the biases and scales too.

    The engine pads the rows of the experts to whole chunks, which adds up to 2.2 %.
    """
    found = plan(write_model(shape, tmp_path))
    assert found.quantization == "mxfp4"
    assert 0.99 * gib < found.weight_bytes / 2**30 < 1.03 * gib
    assert found.tokens > 131072


def test_the_states_of_requests_take_half_of_the_memory_beside_the_weights(
    tmp_path: Path,
) -> None:
    """The weights of Qwen3.6-27B take 50 GiB of bfloat16, and the states of a request 183 MB."""
    folder = write_model("qwen3.6-27b", tmp_path)
    found = plan(folder)
    row = found.state_bytes / (found.max_running_reqs + 1)
    assert row / 1e6 == pytest.approx(183, abs=1)
    beside = 0.9 * found.gpu_bytes - found.weight_bytes
    assert beside / 2 - row < found.state_bytes <= beside / 2
    assert found.max_running_reqs < 256 == plan(folder, quantization="fp8").max_running_reqs
    drafting = plan(folder, speculative="ngram")
    assert drafting.max_running_reqs < found.max_running_reqs


@pytest.mark.parametrize("kv_mib", [3, 40, 10_000])
def test_pages_are_those_of_an_engine_with_the_same_memory(
    kv_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs on a CPU with the memory for KV pages that the plan predicts for a GPU."""
    folder = str(model_path())
    settings = {"dtype": "bfloat16", "max_running_reqs": 8, "max_seq_len": 512, "page_size": 8}
    whole = plan(folder, **settings)
    memory_bytes = int((whole.weight_bytes + whole.remainder_bytes + kv_mib * 2**20) / 0.9) + 1
    found = plan(folder, H200._replace(memory_bytes=memory_bytes), **settings)
    config = EngineConfig(model_path=folder, device="cpu", **settings)
    weights = found.weight_bytes + found.remainder_bytes
    left = memory.kv_bytes_left(config, memory_bytes, weights)
    engine = Engine(msgspec.structs.replace(config, cpu_kv_bytes=left), SingleCommunicator(), 64)
    assert engine.num_pages == found.pages
    if kv_mib == 10_000:
        assert found.pages == 8 * 64, "no more than all requests can fill"
    (pool,) = engine._launcher.runner.pools
    assert pool.num_bytes == found.kv_bytes + found.kv_token_bytes * 8, "and a dummy page"
    loaded = {id(p): p.nbytes for p in engine._launcher.runner.model.parameters()}
    assert found.weight_bytes == sum(loaded.values())
    engine.close()


def test_windows_have_pages_for_as_many_requests_as_full_attention(tmp_path: Path) -> None:
    folder = write_model("gemma-3-12b", tmp_path)
    found = plan(folder)
    assert (found.window, found.kv_token_bytes, found.window_token_bytes) == (1024, 65_536, 327_680)
    needed = 4096 * 65_536 + 66 * 16 * 327_680  # window + one page + one page in quarantine
    assert found.requests[4096] == pytest.approx(found.kv_bytes / needed, rel=0.01)
    assert found.window_pages / found.pages == pytest.approx(66 / 256, rel=0.001)
    long = plan(folder, kv_request_tokens=16_384)
    assert found.requests[16_384] < 64 < long.requests[16_384]
    # The windows of 64 requests of 16,000 tokens, against the pages that the engine holds for them.
    computed = 16_000 * 65_536 + 1024 * 327_680
    held = 16_000 * 65_536 + 65 * 16 * 327_680
    assert held <= 1.1 * computed
    assert plan(folder, max_seq_len=1024).window is None, "the window holds the whole context"
    assert plan(folder, speculative="ngram").window == 1024


@pytest.mark.parametrize(
    ("shape", "key_bytes", "keys"),
    [
        ("gemma-3-12b", 2 * 8 * 256 * 2, 131_072 + 8192 + 1024),
        ("gpt-oss-20b", 2 * 8 * 64 * 2, 131_072),  # a copy for windows of 128 tokens never pays
    ],
)
def test_layers_that_copy_contexts_have_memory_for_the_copy(
    shape: str, key_bytes: int, keys: int, tmp_path: Path
) -> None:
    folder = write_model(shape, tmp_path)
    copying, not_copying = (plan(folder, H200._replace(copies=each)) for each in (True, False))
    added = copying.remainder_bytes - not_copying.remainder_bytes
    assert added == pytest.approx(1.1 * key_bytes * keys, abs=2), "the copy is in the block"


def test_pages_of_windows_are_those_of_an_engine_with_the_same_memory(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"]
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": 32, "dtype": "bfloat16"}
    config["layer_types"] = ["full_attention"] + ["sliding_attention"] * (layers - 1)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"max_running_reqs": 8, "max_seq_len": 512, "page_size": 8}
    whole = plan(str(folder), **settings)
    memory_bytes = int((whole.weight_bytes + whole.remainder_bytes + 2**20) / 0.9) + 1
    found = plan(str(folder), H200._replace(memory_bytes=memory_bytes), **settings)
    own = EngineConfig(model_path=str(folder), device="cpu", dummy_weight=True, **settings)
    left = memory.kv_bytes_left(own, memory_bytes, found.weight_bytes + found.remainder_bytes)
    own = msgspec.structs.replace(own, dtype="bfloat16", cpu_kv_bytes=left)
    engine = Engine(own, SingleCommunicator(), 64)
    assert engine.window is not None
    assert (engine.num_pages, engine.window.num_pages) == (found.pages, found.window_pages)
    assert found.window_pages < found.pages
    assert sum(pool.num_bytes for pool in engine._launcher.runner.pools) == found.kv_bytes + 8 * (
        found.kv_token_bytes + found.window_token_bytes
    ), "and a dummy page of each pool"
    few = msgspec.structs.replace(own, cpu_kv_bytes=4 * found.window_token_bytes * 8)
    with pytest.raises(OutOfMemory, match="at least 6 pages are needed"):
        Engine(few, SingleCommunicator(), 64)
    engine.close()


def test_drafts_need_memory_for_their_graphs_and_logits(tmp_path: Path) -> None:
    folder = write_model("qwen3-8b", tmp_path)

    def added(**changes: int) -> int:
        """Return the bytes that drafts add."""
        without = plan(folder, **changes).remainder_bytes
        return plan(folder, speculative="ngram", **changes).remainder_bytes - without

    graph = 36 * int(0.25 * 2**20) + 4 * 2**20
    assert added() == (35 - 13) * graph, "the logits have room for 256 tokens either way"
    assert added(max_running_reqs=8) == (16 - 4) * graph + (8 * 8 - 8) * 151_936 * 2
    assert added(cuda_graph_max_bs=0) == 0


def test_a_host_cache_needs_memory_for_its_copies(tmp_path: Path) -> None:
    """Regression: a start of an engine counts these buffers, and its plan did not."""
    folder = write_model("qwen3-8b", tmp_path)
    added = plan(folder, host_cache_gb=16).remainder_bytes - plan(folder).remainder_bytes
    assert added == 2 * 64 * 2**20, "a piece in each direction"


def test_ranks_share_weights_and_kv_heads(tmp_path: Path) -> None:
    folder = write_model("qwen3-30b-a3b", tmp_path)
    one, two, eight = (plan(folder, tp_size=size) for size in (1, 2, 8))
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.001)
    assert (one.kv_token_bytes, two.kv_token_bytes) == (98_304, 49_152)
    assert eight.kv_token_bytes == 24_576, "4 KV heads: two ranks store a copy of one"
    weights_ms = [cost_of(load_model_spec(folder), tp).read_bytes(1) / 4.25e9 for tp in (2, 8)]
    assert two.floor_ms[1] - weights_ms[0] > 97 * 6.4e-3, "the time of 97 all-reduces"
    assert eight.floor_ms[1] - weights_ms[1] < 0.01, "all-reduces of 8 GPUs were not measured"
    with pytest.raises(ConfigError, match="cannot be split over tensor-parallel 3"):
        plan(folder, tp_size=3)


def test_stored_formats_count_their_bytes_and_scales(tmp_path: Path) -> None:
    folder = write_model("qwen3-8b", tmp_path)
    wide, narrow = plan(folder), plan(folder, quantization="fp8", kv_cache_dtype="fp8")
    assert narrow.kv_token_bytes == 36 * 2 * 8 * (128 + 2)
    vocabulary = 2 * 2 * 151_936 * 4096  # embedding and head stay in bfloat16
    linear = wide.weight_bytes - vocabulary
    assert narrow.weight_bytes - vocabulary == pytest.approx(linear / 2, rel=0.002)
    int4 = plan(folder, quantization="int4").weight_bytes
    assert int4 - vocabulary == pytest.approx(linear * 4.25 / 16, rel=0.002)
    config = json.loads((tmp_path / "config.json").read_text())
    for method, says in (("fp8", None), ("hqq", "quantization_config \\(hqq\\) is not supported")):
        config["quantization_config"] = {"quant_method": method}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if says is None:
            assert plan(folder).weight_bytes == narrow.weight_bytes
        else:
            with pytest.raises(ConfigError, match=says):
                plan(folder)


def test_an_fp8_pool_needs_memory_for_copies_of_contexts_on_every_gpu(tmp_path: Path) -> None:
    """Hopper copies contexts with any pool, other GPUs with an FP8 pool only."""
    folder = write_model("qwen3-8b", tmp_path)
    added = {
        name: plan(folder, GPUS[name], kv_cache_dtype="fp8").remainder_bytes
        - plan(folder, GPUS[name]).remainder_bytes
        for name in ("H200", "L40S")
    }
    assert added["H200"] == 0
    assert added["L40S"] == pytest.approx(1.1 * 2 * plan(folder).context * 8 * 128 * 2, abs=2)


def test_every_part_of_a_shared_expert_counts(tmp_path: Path) -> None:
    folder = write_model("qwen3-30b-a3b", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 768}
    path.write_text(json.dumps(config))
    narrow = plan(folder)
    path.write_text(json.dumps(config | {"shared_expert_intermediate_size": 27 * 768}))
    added = 26 * (768 + 2048)
    assert plan(folder).remainder_bytes - narrow.remainder_bytes == pytest.approx(
        1.1 * (8192 + 257 + 4096) * added * 2, abs=2
    )


def test_a_kv_dtype_that_the_engine_refuses_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype bf16 needs dtype bfloat16"):
        plan(write_model("qwen3-8b", tmp_path), dtype="float16", kv_cache_dtype="bf16")


def test_floor_of_one_token_is_its_bytes(tmp_path: Path) -> None:
    folder = write_model("qwen3-8b", tmp_path)
    found, cost = plan(folder), cost_of(load_model_spec(folder))
    read = cost.read_bytes(1) + 1024 * cost.kv_bytes
    assert found.floor_ms[1] == pytest.approx(1e3 * read / 4.25e12)
    assert list(found.floor_ms) == [1, 8, 32, 64, 128, 256]
    small = plan(folder, GPUS["RTX4090"])
    assert (small.floor_ms[8] is None, small.floor_ms[32] is None) == (False, True)


def test_settings_bound_the_context_and_the_requests_to_what_fits(tmp_path: Path) -> None:
    folder = write_model("qwen3-8b", tmp_path)
    small = plan(folder, GPUS["RTX4090"])
    assert 0 < small.tokens < small.context == 40_960
    expected = [f"--max-seq-len-override={small.tokens}"]
    assert small.settings == [*expected, f"--max-running-requests={small.tokens // 1024}"]
    bounded = plan(folder, GPUS["RTX4090"], max_seq_len=small.tokens, max_running_reqs=24)
    assert bounded.tokens >= small.tokens
    assert bounded.settings == []
    assert plan(folder).settings == []


def test_command_repeats_its_flags_and_bounds_the_times_to_the_running_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: flags of the command line were left out, and 256 requests had a time."""
    folder = write_model("qwen3-8b", tmp_path)
    given = ["--memory-ratio=0.8", "--kv-cache-dtype=fp8", "--max-seq-len-override=4096"]
    further = ["--max-running-requests=16", "--target-step-ms=0"]
    assert main(["plan", folder, "--gpu", "H100", "--json", *given, *further]) == 0
    (found,) = msgspec.json.decode(capsys.readouterr().out, type=Shown).plans
    assert set(found.settings) == {*given, *further}
    assert list(found.floor_ms) == [1, 8, 16]
    given = ["--max-seq-len-override=40960", "--max-running-requests=9"]
    assert main(["plan", folder, "--gpu", "22e9", *given]) == 0
    shown = capsys.readouterr().out
    assert "No shortest times: the bandwidth of this GPU is unknown." in shown
    assert shown.count("--max-seq-len-override") == 1, "the smaller context replaces the given one"


def test_unknown_flag_of_the_command_names_flags_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--jsn"])
    assert capsys.readouterr().err.startswith(
        "minisgl plan: error: unknown argument --jsn; did you mean '--json'?"
    )


@pytest.mark.parametrize(("text", "name"), [("h100", "H100"), ("RTX 4090", "RTX4090")])
def test_gpu_is_found_by_its_name_in_any_case(text: str, name: str) -> None:
    assert find_gpu(text) is GPUS[name]


def test_gpu_may_be_a_number_of_bytes() -> None:
    gpu = find_gpu("24e9")
    assert (gpu.memory_bytes, gpu.ceilings) == (24 * 10**9, None)
    for text in ("H20O", "many", "1000", "inf", "nan"):
        with pytest.raises(ConfigError, match=f"--gpu {text} is neither a known GPU nor"):
            find_gpu(text)


def test_command_prints_one_gpu_or_all_as_text_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model("qwen3-8b", tmp_path)
    assert main(["plan", folder, "--gpu", "H200"]) == 0
    text = capsys.readouterr().out
    for part in ("weights", "144 KiB for each token", "tokens that fit: 784,", "the defaults fit"):
        assert part in text
    assert "H200: minisgl ran on this kind of GPU" in text
    assert main(["plan", "-m", folder, "--json", "--context", "2048", "--tp", "2"]) == 0
    plans = msgspec.json.decode(capsys.readouterr().out, type=Shown).plans
    assert [p.gpu for p in plans] == list(GPUS)
    assert {(p.context, p.tp) for p in plans} == {(2048, 2)}
    assert main(["plan", folder]) == 0
    shown = capsys.readouterr().out
    assert "H200, H100: minisgl ran on this kind of GPU\n" in shown
    assert re.search("^.*A100.*: compiled for, never run$", shown, re.M)


def test_command_says_how_many_gpus_a_model_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model("qwen3-32b", tmp_path)
    assert main(["plan", folder, "--gpu", "RTX4090"]) == 1
    told = capsys.readouterr().out
    assert "The model does not fit.\nIt fits on 4 such GPUs: --tensor-parallel-size=4\n" in told
    assert main(["plan", folder]) == 0
    assert re.search(r"^RTX4090 +none +0 *$", capsys.readouterr().out, re.M), "the table says so"
    assert main(["plan", folder, "--gpu", "H2000"]) == 2
    assert "did you mean 'H200'" in capsys.readouterr().err


def test_command_says_which_formats_of_weights_fit_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model("qwen3-32b", tmp_path)
    assert main(["plan", folder, "--gpu", "L40S"]) == 1
    expected = [plan(folder, GPUS["L40S"], quantization=each).tokens for each in ("fp8", "int4")]
    found = re.search(r"^L40S +none +([\d,]+) +([\d,]+)$", capsys.readouterr().out, re.M)
    assert found is not None
    assert [int(text.replace(",", "")) for text in found.groups()] == expected
    assert 0 < expected[0] < expected[1]
    assert main(["plan", folder, "--gpu", "L40S", "--quantization", "int4"]) == 0
    assert "--quantization)" not in capsys.readouterr().out, "the weights are chosen"


def test_command_says_which_format_does_not_suit_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(write_model("qwen3-0.6b", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 3008}))
    assert main(["plan", str(folder), "--gpu", "L40S"]) == 0
    assert "\nint4: model.layers.0.mlp.down_proj has 3008 columns" in capsys.readouterr().out


def test_a_draft_head_takes_its_weights_and_the_keys_of_one_layer(tmp_path: Path) -> None:
    """Qwen3.6-27B has 16 layers with attention, so the head has the keys of a seventeenth."""
    folder = write_model("qwen3.6-27b", tmp_path)
    without, found = plan(folder, speculative="ngram"), plan(folder, speculative="mtp")
    assert (found.weight_bytes - without.weight_bytes) / 1e9 == pytest.approx(0.85, abs=0.01)
    assert found.kv_token_bytes * 16 == without.kv_token_bytes * 17


def test_images_take_an_encoder_and_a_buffer(tmp_path: Path) -> None:
    folder = write_model("qwen3.5-9b-images", tmp_path)
    config = EngineConfig(model_path=folder, image_cache_tokens=10_000)
    found, without = (
        make_plan(each, engine_model(each), H200)
        for each in (config, msgspec.structs.replace(config, no_images=True))
    )
    buffer = 2 * 10_000 * 4096
    encoder = found.weight_bytes - without.weight_bytes
    assert found.image_bytes == encoder + buffer
    assert encoder / 1e9 == pytest.approx(0.9, abs=0.1)
    assert found.remainder_bytes - without.remainder_bytes >= buffer
    assert without.image_bytes == 0
    assert found.tokens < without.tokens
