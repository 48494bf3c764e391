"""Checkpoint folders of every dense family: logits against transformers, exactness, what config.json may not say."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import byte_level_tokenizer, edit_json, write_folder

from infer.quant.kernels import native
from infer.runtime.batch import build_batch
from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.folder.families import FAMILIES, Family, Translated
from infer.runtime.checkpoint.folder.names import renamed
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request, Sequence
from infer.samplers.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")
Open = Callable[..., LoadedModel]
Written = Callable[..., tuple[Path, Any]]

WINDOW = 16
THETA = {"rope_theta": 10000.0}
#: name → (transformers' model type, its options)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "llama, biased": ("llama", {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama, linear": ("llama", {
        "num_hidden_layers": 2, "rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0},
    }),
    "llama, llama3": ("llama", {"num_hidden_layers": 2, "tie_word_embeddings": True, "rope_parameters": {
        **THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "llama, yarn": ("llama", {"num_hidden_layers": 2, "rope_parameters": {
        **THETA, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5,
    }}),
    "mistral": ("mistral", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"num_hidden_layers": 2}),
    "qwen2, windows": ("qwen2", {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    }),
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "head_dim": 32, "rope_parameters": {
        **THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
    }}),
    "gemma2": ("gemma2", {
        "num_hidden_layers": 3, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3_text", {
        "num_hidden_layers": 7, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 50,
        "rope_parameters": {
            "sliding_attention": {**THETA, "rope_type": "default"},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }),
    "phi3": ("phi3", {
        "num_hidden_layers": 2, "sliding_window": WINDOW, "original_max_position_embeddings": 512,
        "rope_parameters": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    }),
    "phi3, long": ("phi3", {
        "num_hidden_layers": 2, "original_max_position_embeddings": 64,
        "rope_parameters": {
            **THETA, "rope_type": "longrope", "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        },
    }),
    "olmo2": ("olmo2", {"num_hidden_layers": 2}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": WINDOW, "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }}),
    "granite": ("granite", {
        "num_hidden_layers": 3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
        "logits_scaling": 6.0, "tie_word_embeddings": True,
    }),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "rope_parameters": {**THETA, "rope_type": "default"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """`written(case, dtype)`: the folder of a case, and the model that transformers made."""
    from hf_to_gguf import build_model

    root = tmp_path_factory.mktemp("folders")
    made: dict[tuple[str, Any], tuple[Path, Any]] = {}

    def make(case: str, dtype: Any = None) -> tuple[Path, Any]:
        if (case, dtype) not in made:
            kind, options = CASES[case]
            model = build_model(kind, **options)
            made[case, dtype] = write_folder(root / str(len(made)), model, dtype=dtype), model
        return made[case, dtype]

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    models: list[LoadedModel] = []

    def open_folder(path: Path, **settings: object) -> LoadedModel:
        config = EngineConfig(
            **{"device": "cpu", "threads": 1, "ctx": 512, "prefix_cache": False, **settings}
        )
        models.append(load_model(path, config, memo_dir=tmp_path))
        return models[-1]

    yield open_folder
    for model in models:
        model.close()


@pytest.fixture
def copied(written: Written, tmp_path: Path) -> Callable[..., Path]:
    """`copied(case, **changes)`: a folder to change, with keys of its config.json changed already."""

    def copy(case: str = "llama", **changes: Any) -> Path:
        folder = Path(shutil.copytree(written(case)[0], tmp_path / "copy"))
        edit_json(folder / "config.json", **changes)
        return folder

    return copy


def _prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(500) for _ in range(length))


def _logits(model: LoadedModel, ids: tuple[int, ...], steps: list[int]) -> torch.Tensor:
    """[len(ids), vocab]: the logits of every position, computed in steps of so many tokens each."""
    seq = Sequence(Request("0", ids, SamplingParams()), list(ids), block_table=list(range(8)))
    found = []
    for count in steps:
        batch = build_batch([(seq, count)])
        object.__setattr__(batch, "output_rows", torch.arange(count, dtype=torch.int32))
        found.append(model.engine._runner.forward(batch).clone())
        seq.num_computed += count
    return torch.cat(found)


def _error(path: Path) -> InferError:
    with pytest.raises(InferError) as caught:
        load_model(path, EngineConfig(device="cpu", ctx=64), memo_dir=path)
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    return caught.value


@pytest.mark.parametrize("kernel", ["float32", "native"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(written: Written, opened: Open, case: str, kernel: str) -> None:
    if kernel == "native" and not native.available():
        pytest.skip("the native library was not built here")
    path, theirs = written(case)
    ids = _prompt(5 * WINDOW)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = _logits(opened(path, kernel=kernel, kv_type="f32"), ids, [50, *[1] * 30])
    assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())


def test_older_spellings_of_the_rope_mean_the_same(written: Written, opened: Open, copied: Any) -> None:
    """config.json as transformers 4 wrote it."""
    ids = _prompt(60)
    for case in ("llama, yarn", "llama, llama3", "gemma3", "phi3, long"):
        path, _ = written(case)
        new = json.loads((path / "config.json").read_text())["rope_parameters"]
        full = dict(new.get("full_attention", new))
        kind = full.pop("rope_type")
        old = {"rope_theta": full.pop("rope_theta"), "rope_parameters": ...}
        if "sliding_attention" in new:
            old["rope_local_base_freq"] = new["sliding_attention"]["rope_theta"]
        if partial := full.pop("partial_rotary_factor", None):
            old["partial_rotary_factor"] = partial
        folder = copied(case, **old, rope_scaling={**full, "type": kind})
        wanted, found = (_logits(opened(p, kernel="float32"), ids, [60]) for p in (path, folder))
        assert torch.equal(found, wanted), case
        shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_as_it_is(written: Written, opened: Open, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    for case in ("gemma2", "phi3"):
        path, _ = written(case, dtype)
        ids = _prompt(60)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            wanted = theirs(torch.tensor([ids])).logits[0]
        for kernel in ("float32", "native"):
            model = opened(path, kernel=kernel, kv_type="f32")
            found = _logits(model, ids, [50, *[1] * 10])
            assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min()), (case, kernel)
            assert model.quantization.startswith({torch.bfloat16: "BF16", torch.float16: "F16"}[dtype])


def test_shards_are_one_model(written: Written, opened: Open, tmp_path: Path) -> None:
    path, theirs = written("qwen2")
    sharded = write_folder(tmp_path / "sharded", theirs, max_shard_size="150KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    ids = _prompt(40)
    whole, parts = (_logits(opened(p, kernel="float32"), ids, [40]) for p in (path, sharded))
    assert torch.equal(whole, parts)


def _answer(model: LoadedModel, prompts: dict[str, tuple[int, ...]]) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens drawn after prompt "a" beside the others, and the logits of each step that has one row."""
    engine, logits = model.engine, []
    forward = engine._runner.forward

    def watched(batch: Any) -> torch.Tensor:
        found = forward(batch)
        logits.extend(found.clone() if len(prompts) == 1 else [])
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
    written: Written, opened: Open, case: str, quant: str | None
) -> None:
    path, _ = written(case)
    prompt = _prompt(2 * BLOCK_SIZE + 20)
    tokens, logits = _answer(opened(path, quant=quant), {"a": prompt})
    assert len(logits) == 5
    for chunk in (1, 7):
        found = _answer(opened(path, quant=quant, prefill_chunk=chunk), {"a": prompt})
        assert found[0] == tokens
        assert all(map(torch.equal, found[1], logits))
    others = {str(number): _prompt(9 * number + 1, number) for number in range(5)}
    crowd = opened(path, quant=quant, kv_blocks=40, threads=2, prefill_chunk=100)
    assert _answer(crowd, {**others, "a": prompt})[0] == tokens
    warm = opened(path, quant=quant, prefix_cache=True)
    _answer(warm, {"a": (*prompt[:-1], 501)})
    assert _answer(warm, {"a": prompt})[0] == tokens
    assert warm.engine.cached_tokens("a") >= 2 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral, qwen2"),
        ({"model_type": ...}, "model_type is missing"),
        ({"model_type": 7}, "model_type is '7', expected a text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "this version runs LlamaForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}}, "auto_map names code"),
        ({"trust_remote_code": True}, "trust_remote_code is 'True'"),
        ({"num_attention_heads": 0}, "num_attention_heads is '0', expected an integer from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is '1000000000', expected an integer from 1 to 4096"),
        ({"num_hidden_layers": 10**300}, "num_hidden_layers is '1000"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is '2.0'"),
        ({"num_hidden_layers": 3}, "blk.2.attn_norm.weight is missing"),
        ({"num_hidden_layers": 1}, "unexpected tensors blk.1"),
        ({"hidden_size": 128}, "has shape"),
        ({"hidden_size": -1}, "hidden_size is '-1'"),
        ({"vocab_size": 500}, "the embedding has 512 rows, config.json says 500"),
        ({"intermediate_size": ...}, "intermediate_size is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is '0', expected a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is 'True'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; this version runs silu only"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"attention_bias": True}, "attn_k.bias, which config.json announces, is missing"),
        ({"new_gate": 3}, "'new_gate' is not known to this version of infer"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; supported: "),
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 0}, "max_position_embeddings is '0'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is '0', expected a number above 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "'mrope_section' is not known"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor is '-2'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is 'False'"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
         "low_freq_factor 4 is not below"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
         "long_factor is"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
         "rope_factors_short.weight has shape"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 rotates 0 of 16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'; this version reads bitsandbytes"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_run_is_one_line(copied: Any, changes: dict[str, Any], message: str) -> None:
    assert message in str(_error(copied(**changes)))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is not set"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types is not one of"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types is not one of"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is 'True'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
        ("gemma3", {"sliding_window": 0.5}, "sliding_window is '0.5'"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers differs from every fourth layer"),
        ("granite", {"residual_multiplier": 1e-30}, "residual_scale is"),
        ("qwen2", {"model_type": "qwen3", "architectures": None}, "config.json says that there is no bias"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_run_is_one_line(
    copied: Any, case: str, changes: dict[str, Any], message: str
) -> None:
    assert message in str(_error(copied(case, **changes)))


def test_bad_json_is_one_line(copied: Any) -> None:
    folder = copied()
    path = folder / "config.json"
    whole = path.read_text()
    for text, message in {
        whole.replace("10000.0", "NaN"): "NaN is not a number of JSON",
        whole.replace("10000.0", "1e999"): "out of range",
        whole.replace(
            '"hidden_size": 64', '"hidden_size": 64, "hidden_size": 32'
        ): "'hidden_size' is there twice",
        '{"a":' * 100_000: "nested too deeply",
        "": "is no valid JSON",
        "[]": "holds list, not a JSON object",
        "\ud800": "is not UTF-8",
        " " * (1 << 21): "the most that is read",
    }.items():
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert message in str(_error(folder))


def test_code_that_transformers_has_itself_is_not_needed(copied: Any, opened: Open) -> None:
    """Phi 3's repositories name their own classes, from before transformers knew them; the files are never read."""
    folder = copied(
        "phi3",
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "x.Phi3ForCausalLM"},
    )
    (folder / "configuration_phi3.py").write_text("raise SystemExit('run')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert opened(folder).config.architecture == "phi3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "holds no safetensors file"),
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "neither tokenizer.json nor tokenizer.model"),
    ],
)
def test_a_missing_file_is_named(copied: Any, name: str, message: str) -> None:
    folder = copied()
    (folder / name).unlink()
    assert message in str(_error(folder))


def test_pickles_are_refused(copied: Any) -> None:
    folder = copied()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = _error(folder)
    assert isinstance(error, UnsupportedModelError)
    assert "'pytorch_model.bin', a pickle" in str(error)


def test_a_file_cut_after_opening_is_an_error(copied: Any) -> None:
    folder = copied()
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors["output_norm.weight"]
        buffer = bytearray(tensor.nbytes)
        checkpoint.read_into(tensor, memoryview(buffer))
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="ended at byte"):
            checkpoint.read_into(tensor, memoryview(buffer))


def test_the_models_settings_are_the_defaults(copied: Any, opened: Open) -> None:
    folder = copied()
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


def test_the_fingerprint_follows_every_file(copied: Any, opened: Open) -> None:
    folder = copied()
    seen = {opened(folder).fingerprint}
    for name, old, new in [
        ("config.json", "1e-06", "1e-05"),
        ("tokenizer.json", '"single_word": true', '"single_word": false'),
    ]:
        path = folder / name
        path.write_text(path.read_text().replace(old, new) + " ")
        seen.add(opened(folder).fingerprint)
    assert len(seen) == 3


def _experts(count: int, **changes: Any) -> dict[str, RawTensor]:
    stored = {}
    for number in range(count):
        name = f"model.layers.0.mlp.experts.{number}.up_proj.weight"
        stored[name] = RawTensor(name, (2, 3), "F16", 12, Path("x"), 12 * number)
    return stored


def test_experts_become_one_tensor() -> None:
    family = Family("llama", "Llama", stacks={"up_proj": "ffn_up_exps"})
    config = Translated({"llama.vocab_size": 512}, {}, frozenset(), tied=True)
    stored = _experts(12)
    tensors, parts = renamed(stored, family, config)
    stacked = tensors["blk.0.ffn_up_exps.weight"]
    assert (stacked.shape, stacked.nbytes) == ((12, 2, 3), 144)
    assert [part.offset for part in parts[stacked.name]] == [12 * number for number in range(12)]
    lost = {name: tensor for name, tensor in stored.items() if ".7." not in name}
    with pytest.raises(CheckpointError, match="has 11 of 12 experts"):
        renamed(lost, family, config)
    with pytest.raises(CheckpointError, match="is not one of a Llama model"):
        renamed(stored, FAMILIES["llama"], config)


def _infer(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; from infer.cli.start import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], input=stdin, capture_output=True, text=True,
        env={"INFER_HOME": str(home), "PATH": "", "PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip


def test_the_commands_take_a_folder(copied: Any, tmp_path: Path) -> None:
    folder = str(copied("qwen3"))
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


_PEAK = """
import resource, sys
from pathlib import Path
import torch
from infer.runtime.config import EngineConfig
from infer.runtime.loader import load_model
small, large, quant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def load(path):
    config = EngineConfig(device="cpu", threads=1, ctx=64, quant=quant, prefix_cache=False)
    model = load_model(path, config, memo_dir=small)
    return model, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first, before = load(small)
first.close()
second, after = load(large)
print(after - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of bfloat16 in two files."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    width, inner, layers = 1024, 4096, 6
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=16, vocab_size=512
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    shapes = {"model.embed_tokens": (512, width), "lm_head": (512, width), "model.norm": (width,)}
    for layer in range(layers):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}self_attn.{part}_proj": (width, width) for part in "qkvo"}
        shapes |= {f"{block}mlp.gate_proj": (inner, width), f"{block}mlp.up_proj": (inner, width)}
        shapes |= {f"{block}mlp.down_proj": (width, inner), f"{block}input_layernorm": (width,)}
        shapes[f"{block}post_attention_layernorm"] = (width,)
    names, weight_map = sorted(shapes), {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        tensors = {f"{name}.weight": torch.rand(shapes[name]).sub_(0.5).to(torch.bfloat16) for name in some}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="counts KiB as Linux does")
@pytest.mark.parametrize(("quant", "bits"), [("int8", 8.5), ("int4", 5.0), ("nf4", 4.5)])
def test_the_peak_of_quantizing_on_load_is_the_result_and_one_tensor(
    large: Path, written: Written, quant: str, bits: float
) -> None:
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert size > 190_000_000
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(written("llama")[0]), str(large), quant],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    tensor = 2 * 1024 * 4096
    assert int(done.stdout) * 1024 <= size / 16 * bits + tensor + 24_000_000, done.stdout
