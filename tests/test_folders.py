"""Checkpoint folders of every family: logits against transformers, exactness, what config.json may not say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import CASES, EXPERTS, WINDOW, write_folder
from logits import as_tensor, logits_of, prompt_ids

from infer.quant.kernels import native
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.errors import UsageError
from infer.runtime.loader import LoadedModel
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")
Open = Callable[..., LoadedModel]
Written = Callable[..., tuple[Path, Any]]


@pytest.fixture
def opened(open_model: Open) -> Open:
    return partial(open_model, ctx=512, prefix_cache=False)


@pytest.mark.parametrize("kernel", ["float32", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(hf_folder: Written, opened: Open, case: str, kernel: str) -> None:
    path, theirs = hf_folder(case)
    ids = prompt_ids(5 * WINDOW)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = logits_of(opened(path, kernel=kernel, kv_type="f32"), ids, [50, *[1] * 30])
    assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())


def test_older_spellings_of_the_rope_mean_the_same(
    hf_folder: Written, opened: Open, hf_folder_copy: Any
) -> None:
    """config.json as transformers 4 wrote it."""
    ids = prompt_ids(60)
    for case in ("llama, yarn", "llama, llama3", "gemma3", "phi3, long"):
        path, _ = hf_folder(case)
        new = json.loads((path / "config.json").read_text())["rope_parameters"]
        full = dict(new.get("full_attention", new))
        kind = full.pop("rope_type")
        old = {"rope_theta": full.pop("rope_theta"), "rope_parameters": ...}
        if "sliding_attention" in new:
            old["rope_local_base_freq"] = new["sliding_attention"]["rope_theta"]
        if partial := full.pop("partial_rotary_factor", None):
            old["partial_rotary_factor"] = partial
        folder = hf_folder_copy(case, **old, rope_scaling={**full, "type": kind})
        wanted, found = (logits_of(opened(p, kernel="float32"), ids, [60]) for p in (path, folder))
        assert torch.equal(found, wanted), case
        shutil.rmtree(folder)


def test_dynamic_rope_scaling_ends_at_the_context(hf_folder: Written, open_model: Open) -> None:
    path, _ = hf_folder("llama, dynamic")
    with pytest.raises(UsageError, match=r"--ctx 513 is past the 512 positions .* give --ctx 512 or less"):
        open_model(path, ctx=513)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_as_it_is(hf_folder: Written, opened: Open, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    for case in ("gemma2", "phi3", "gpt-oss"):
        path, _ = hf_folder(case, dtype)
        ids = prompt_ids(60)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            wanted = theirs(torch.tensor([ids])).logits[0]
        for kernel in ("float32", "native"):
            model = opened(path, kernel=kernel, kv_type="f32")
            found = logits_of(model, ids, [50, *[1] * 10])
            assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min()), (case, kernel)
            assert model.quantization.startswith({torch.bfloat16: "BF16", torch.float16: "F16"}[dtype])


def test_shards_are_one_model(hf_folder: Written, opened: Open, tmp_path: Path) -> None:
    path, theirs = hf_folder("qwen2")
    sharded = write_folder(tmp_path / "sharded", theirs, max_shard_size="150KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    ids = prompt_ids(40)
    whole, parts = (logits_of(opened(p, kernel="float32"), ids, [40]) for p in (path, sharded))
    assert torch.equal(whole, parts)


def _answer(model: LoadedModel, prompts: dict[str, tuple[int, ...]]) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens drawn after prompt "a" beside the others, and the logits of each step that has one row."""
    engine, logits = model.engine, []
    forward = engine._runner.forward

    def watched(batch: Any) -> torch.Tensor:
        found = forward(batch)
        logits.extend(as_tensor(found) if len(prompts) == 1 else [])
        return found

    engine._runner.forward = watched
    try:
        for name, prompt in prompts.items():
            sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True)
            engine.add(Request(name, prompt, sampling))
        tokens: list[int] = []
        while engine.has_unfinished():
            tokens += [t for out in engine.step() if out.request_id == "a" for t in out.new_ids]
    finally:
        del engine._runner.forward
    return tokens, logits


@pytest.mark.skipif(not native.available(), reason="the native library was not built here")
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("case", ["llama, llama3", "gemma3", "phi3"])
def test_chunks_company_and_a_cache_hit_change_no_bit(
    hf_folder: Written, opened: Open, case: str, quant: str | None
) -> None:
    path, _ = hf_folder(case)
    prompt = prompt_ids(2 * BLOCK_SIZE + 20)
    tokens, logits = _answer(opened(path, quant=quant), {"a": prompt})
    assert len(logits) == 5
    for chunk in (1, 7):
        found = _answer(opened(path, quant=quant, prefill_chunk=chunk), {"a": prompt})
        assert found[0] == tokens
        assert all(map(torch.equal, found[1], logits))
    others = {str(number): prompt_ids(9 * number + 1, number) for number in range(5)}
    crowd = opened(path, quant=quant, kv_blocks=40, threads=2, prefill_chunk=100)
    assert _answer(crowd, {**others, "a": prompt})[0] == tokens
    warm = opened(path, quant=quant, prefix_cache=True)
    _answer(warm, {"a": (*prompt[:-1], 501)})
    assert _answer(warm, {"a": prompt})[0] == tokens
    assert warm.engine.cached_tokens("a") >= 2 * BLOCK_SIZE


def test_the_models_settings_are_the_defaults(hf_folder_copy: Any, opened: Open) -> None:
    folder = hf_folder_copy()
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [3, 4]}))
    model = opened(folder)
    assert model.sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "repeat_penalty": 1.1, "top_k": 20}
    assert {3, 4} <= model.tokenizer.stop_ids
    assert model.name == "copy"
    assert model.chat_template is not None
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    model = opened(folder)
    assert model.sampling_defaults == {"temperature": 0.0}
    assert model.chat_template is not None
    assert model.chat_template.render_text([{"role": "user", "content": "hi"}]) == "hi!"


def test_the_fingerprint_follows_every_file(hf_folder_copy: Any, opened: Open) -> None:
    folder = hf_folder_copy()
    seen = {opened(folder).fingerprint}
    for name, old, new in [
        ("config.json", "1e-06", "1e-05"),
        ("tokenizer.json", '"single_word": true', '"single_word": false'),
    ]:
        path = folder / name
        path.write_text(path.read_text().replace(old, new) + " ")
        seen.add(opened(folder).fingerprint)
    assert len(seen) == 3


def _infer(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; from infer.cli.start import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], input=stdin, capture_output=True, text=True,
        env={"INFER_HOME": str(home), "PATH": "", "PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip


def test_the_commands_take_a_folder(hf_folder_copy: Any, tmp_path: Path) -> None:
    folder = str(hf_folder_copy("qwen3"))
    home = tmp_path / "home"
    shown = _infer(home, "show", folder, "--json")
    facts = json.loads(shown.stdout)
    assert (facts["architecture"], facts["supported"], facts["quantization"]) == ("qwen3", True, "F32")
    assert (facts["vocab_size"], facts["tokenizer"]) == (512, "tokenizer.json")
    ids = _infer(home, "tokenize", "-m", folder, "the quick <|im_end|>").stdout.split()
    assert len(ids) > 3
    run = _infer(
        home, "run", "-m", folder, "--raw", "-n", "5", "--temp", "0", "--json", "--ctx", "128", "the quick"
    )
    answer = json.loads(run.stdout)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["model"]["fingerprint"] == facts["fingerprint"]
    failed = _infer(home, "run", "-m", str(Path(folder) / "model.safetensors"), "x")
    assert failed.returncode == 3
    assert "give its folder" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize("case", sorted({*EXPERTS} - {"gpt-oss"}))
def test_experts_stored_together_are_the_same_model(
    hf_folder: Written, opened: Open, tmp_path: Path, case: str
) -> None:
    path, theirs = hf_folder(case)
    fused = write_folder(tmp_path / "fused", theirs, save_original_format=False)
    ids = prompt_ids(40)
    apart, together = (logits_of(opened(p, kernel="float32"), ids, [40]) for p in (path, fused))
    assert torch.equal(apart, together)


def test_layers_that_predict_further_tokens_are_not_read(opened: Open, hf_folder_copy: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = hf_folder_copy("deepseek3")
    ids = prompt_ids(20)
    wanted = logits_of(opened(folder, kernel="float32"), ids, [20])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, file)
    assert torch.equal(logits_of(opened(folder, kernel="float32"), ids, [20]), wanted)


@pytest.mark.parametrize("kernel", ["float32", pytest.param("native", marks=pytest.mark.native)])
def test_gpt_oss_in_mxfp4(opened: Open, hf_folder_copy: Any, kernel: str) -> None:
    """Against transformers' own expansion of the blocks; the native kernel within its precision."""
    from hf_to_gguf import build_model
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kind, options = CASES["gpt-oss"]
    theirs = build_model(kind, **options)
    folder = hf_folder_copy(
        "gpt-oss", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    file = folder / "model.safetensors"
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(121, 124, blocks.shape[:-1], generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            theirs.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, file)
    ids = prompt_ids(60)
    found = logits_of(opened(folder, kernel=kernel, kv_type="f32"), ids, [50, *[1] * 10])
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    spread = wanted.max() - wanted.min()
    if kernel == "native":  # rounds activations where weights are quantized
        assert (found - wanted).abs().mean() <= 0.02 * spread
    else:
        assert (found - wanted).abs().max() <= 1e-4 * spread
