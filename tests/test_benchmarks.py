"""The scripts under benchmarks/: they run, and count what they say they count. Never how fast anything is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import CORPUS

from infer.runtime.config import EngineConfig
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.perplexity import cut_windows, measure_perplexity

FOLDER = Path(__file__).parent.parent / "benchmarks"
Tiny = Callable[..., Path]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def quality(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("quality")


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!{sys.executable}\n{body}", encoding="utf-8")
    path.chmod(0o755)


def test_divergence_of_a_model_from_itself_and_from_another(
    quality: ModuleType, tiny_llama: Tiny, tmp_path: Path
) -> None:
    path = tiny_llama(quant="Q8_0")

    def load(kernel: str) -> LoadedModel:
        config = EngineConfig(device="cpu", threads=1, kernel=kernel, kv_type="f32", ctx=600)
        return load_model(path, config, memo_dir=tmp_path)

    reference, test = load("float32"), load("reference")
    windows = cut_windows(test.tokenizer, CORPUS * 8, 600, 2)
    same = quality.compare(reference, reference, windows)
    assert len(same.kl) == same.same_top == 2 * 299
    assert max(map(abs, same.kl)) < 1e-12
    found = quality.compare(reference, test, windows)
    assert 0 < sum(found.kl) / len(found.kl) < 0.05
    *_, expected = measure_perplexity(test.engine, windows)
    assert found.test_nll / len(found.kl) == pytest.approx(expected.nll, rel=1e-6)
    reference.close()
    test.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_same_file_through_transformers(
    script: Callable[[str], ModuleType], tiny_llama: Tiny, arch: str
) -> None:
    path, real_models = tiny_llama(quant="Q4_K", arch=arch), script("real_models")
    windows = cut_windows(real_models.tokenizer_of(path), CORPUS * 4, 64, 2)
    expected = real_models.reference_logits(path, windows)
    kl = {}
    for kernel in ("float32", "reference"):
        config = EngineConfig(device="cpu", threads=1, kernel=kernel, kv_type="f32", ctx=64)
        found = real_models.compare(path, config, windows, expected)
        assert len(found.kl) == 2 * 31
        kl[kernel] = sum(found.kl) / len(found.kl)
        row = [cell.strip() for cell in real_models.line("tiny", kernel, found).split("|")]
        assert float(row[3]) == pytest.approx(float(row[4]), rel=0.05)
    assert kl["float32"] < 1e-8 < kl["reference"] < 0.05


def test_the_float32_file_is_the_same_model(quality: ModuleType, tiny_llama: Tiny, tmp_path: Path) -> None:
    source, target = tiny_llama(quant="Q4_K", types={"*.attn_v.weight": "Q6_K"}), tmp_path / "dense.gguf"
    quality.write_float32(source, target)
    scores = []
    for path in (source, target):
        config = EngineConfig(device="cpu", threads=1, kernel="float32", kv_type="f32", ctx=64)
        model = load_model(path, config, memo_dir=tmp_path)
        assert path == source or model.quantization.startswith("F32 100")
        *_, found = measure_perplexity(model.engine, cut_windows(model.tokenizer, CORPUS, 64, 1))
        scores.append(found.nll)
        model.close()
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_the_summary_of_llama_perplexity_is_read(quality: ModuleType) -> None:
    text = (
        "Mean PPL(Q)                   :  95.521197 ±  13.010000\n"
        "Mean PPL(base)                :  95.726001 ±  13.040000\n"
        "Mean    KLD:   0.003593 ±   0.000102\n"
        "Same top p: 93.922 ± 1.059 %\n"
    )
    assert (
        quality.parse_divergence(text) == "| llama.cpp | 95.7260 | 95.5212 | 0.003593 ± 0.000102 | 93.92% |"
    )
    with pytest.raises(SystemExit, match="printed no line"):
        quality.parse_divergence("nothing")


def test_the_comparison_runs_both_in_turn(tiny_llama: Tiny, tmp_path: Path) -> None:
    tests = [
        {"n_prompt": 16, "n_gen": 0, "samples_ts": [1.0, 2.0, 4.0], "build_number": 1, "build_commit": "c"},
        {"n_prompt": 0, "n_gen": 2, "samples_ts": [3.0], "build_number": 1, "build_commit": "c"},
    ]
    log = tmp_path / "log"
    log.touch()
    _program(
        tmp_path / "llama-bench",
        f"import sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\nprint({json.dumps(tests)!r})\n",
    )
    command = [
        sys.executable,
        str(FOLDER / "compare_llama_cpp.py"),
        "--llama-bin",
        str(tmp_path),
        "--threads",
        "1",
    ]
    model = tiny_llama(quant="Q8_0")
    sizes = ["-m", str(model), "-p", "16", "-n", "2", "--runs", "1", "--no-start"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {model.name}")]
    assert [row.split("|")[2].strip() for row in rows] == ["prefill 16", "decode 2"]
    assert [row.split("|")[4].strip() for row in rows] == ["2.0", "3.0"]
    assert str(tmp_path) not in done.stdout
    assert log.read_text().split() == ["-m", str(model), "-t", "1", "-ngl", "0", "-p", "16", "-n", "2", "-d", "0",
                                       "-r", "1", "-o", "json"]  # fmt: skip
    _program(tmp_path / "llama-bench", "import sys\nsys.exit('no such model')\n")
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("exit code 1: no such model")


def test_closeness_is_measured_in_nats(quality: ModuleType) -> None:
    found = quality.Divergence()
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    found.add(p.log(), q.log(), torch.tensor([1]))
    assert found.kl == pytest.approx([0.5 * torch.tensor(4 / 3).log().item()], rel=1e-6)
    assert found.test_nll == pytest.approx(-torch.tensor(0.75).log().item())


def test_what_storing_costs(tiny_llama: Tiny) -> None:
    sizes = ["--tokens", "200", "--decode", "4", "--runs", "2", "--pause", "0"]
    command = [sys.executable, str(FOLDER / "storing.py"), "-m", str(tiny_llama(quant="Q8_0")), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = {
        name.strip(): row.split()
        for name, _, row in (line.partition("median") for line in done.stdout.splitlines())
    }
    assert [name for name in rows if "storing / without" in name] == [
        f"{how}, {what}: storing / without"
        for how in ("alone", "back to back")
        for what in ("prefill", "per token")
    ]
    assert float(rows["all written after, ms"][0]) > 0
