"""Quantization formats against `gguf.quants`, bit for bit, and round-to-nearest against its error bound."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import HALVES_AT, put_scales

from infer.quant.base import SUPER, QuantizedTensor, get_format
from infer.quant.iquant_grids import grid
from infer.quant.rtn import quantize_rtn

LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FP4 = ("MXFP4", "NVFP4")
U8, I8, F16, F32 = torch.uint8, torch.int8, torch.float16, torch.float32
#: type → bits, group, zero, dtype of the scales, whether there are super scales, whether there are minimums
FORMS: dict[str, tuple[int, int, int, torch.dtype, bool, bool]] = {
    "Q4_0": (4, 32, 8, F16, False, False), "Q4_1": (4, 32, 0, F16, False, True),
    "Q5_0": (5, 32, 16, F16, False, False), "Q5_1": (5, 32, 0, F16, False, True),
    "Q8_0": (8, 32, 128, F16, False, False),
    "Q2_K": (4, 16, 0, U8, True, True), "Q3_K": (4, 16, 4, I8, True, False),
    "Q4_K": (4, 32, 0, U8, True, True), "Q5_K": (5, 32, 0, U8, True, True), "Q6_K": (6, 16, 32, I8, True, False),
    "IQ1_S": (5, 32, 16, F32, False, False), "IQ1_M": (5, 16, 16, F32, False, False),
    "IQ2_XXS": (8, 32, 128, F32, False, False), "IQ2_XS": (8, 16, 128, F32, False, False),
    "IQ2_S": (8, 16, 128, F32, False, False),
    "IQ3_XXS": (6, 32, 32, F32, False, False), "IQ3_S": (5, 32, 16, U8, True, False),
    "IQ4_NL": (8, 32, 128, F16, False, False), "IQ4_XS": (8, 32, 128, I8, True, False),
    "MXFP4": (5, 32, 16, F32, False, False), "NVFP4": (5, 16, 16, F16, False, False),
    "TQ1_0": (4, 128, 8, F16, False, False), "TQ2_0": (4, 128, 8, F16, False, False),
    "Q1_0": (4, 128, 8, F16, False, False),
}  # fmt: skip
QUANTIZED = tuple(FORMS)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def random_bits(name: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """uint8 [rows, row bytes]: every bit random: scales include infinities, NaN, subnormals and -0."""
    return np.random.default_rng(seed).integers(
        0, 256, (shape[0], get_format(name).row_bytes(shape[1])), dtype=np.uint8
    )


def with_scales(name: str, raw: np.ndarray, bits: int) -> np.ndarray:
    """The same blocks with all their float16 scales and minimums set to one bit pattern; FP4 has none."""
    if name in FP4:
        return raw
    blocks = raw.reshape(-1, get_format(name).type_size).copy()
    scale = np.array([bits], dtype="<u2").view("<f2")
    put_scales(name, blocks, np.tile(scale, (len(blocks), len(HALVES_AT.get(name, (0,))))))
    return blocks.reshape(raw.shape)


def decode(name: str, raw: np.ndarray, shape: tuple[int, int]) -> QuantizedTensor:
    decoded = get_format(name).decode(torch.from_numpy(raw.reshape(-1)), shape)
    assert isinstance(decoded, QuantizedTensor)
    return decoded


def assert_bit_equal(found: torch.Tensor, expected: np.ndarray) -> None:
    """Same bits, except that a NaN may differ in sign and payload."""
    assert found.dtype == torch.float32
    values = found.numpy()
    assert values.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def reference(name: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        if name == "Q1_0":  # gguf cannot: d where a bit is set, else -d
            blocks = raw.reshape(-1, 18)
            signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
            return (signs * blocks[:, :2].copy().view("<f2").astype(np.float32)).reshape(len(raw), -1)
        return gguf.quants.dequantize(raw, GGMLQuantizationType[name])


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", [(1, 256), (7, 768), (301, 1024)])
def test_random_blocks_decode_to_the_reference_bits(name: str, shape: tuple[int, int]) -> None:
    raw = random_bits(name, shape, seed=shape[0])
    assert_bit_equal(decode(name, raw, shape).dequantize(), reference(name, raw))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    "scale", [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00]
)
def test_edge_scales_decode_to_the_reference_bits(name: str, scale: int) -> None:
    raw = with_scales(name, random_bits(name, (3, 512), seed=5), scale)
    assert_bit_equal(decode(name, raw, (3, 512)).dequantize(), reference(name, raw))


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_block_decodes_to_the_reference_bits(name: str, data: st.DataObject) -> None:
    size = get_format(name).row_bytes(SUPER)
    raw = (
        np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8)
        .reshape(1, -1)
        .copy()
    )
    assert_bit_equal(decode(name, raw, (1, SUPER)).dequantize(), reference(name, raw))


@pytest.mark.parametrize("name", [*LEGACY, "TQ1_0", "TQ2_0", "MXFP4"])
def test_weights_quantized_by_the_reference_come_back_as_it_reads_them(name: str) -> None:
    weights = np.random.default_rng(1).standard_normal((16, 768)).astype(np.float32)
    raw = gguf.quants.quantize(weights, GGMLQuantizationType[name])
    assert_bit_equal(decode(name, raw, (16, 768)).dequantize(), reference(name, raw))


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_are_the_references(name: str) -> None:
    theirs = gguf.quants._type_traits[GGMLQuantizationType[name]]
    theirs.init_grid()
    values = tuple(int(value) % 256 for value in theirs.grid_map)  # -1 as a byte
    mine = grid(name, values, theirs.grid_shape[1])
    np.testing.assert_array_equal(mine, theirs.grid[0, 0].astype(np.int64) % 256)


@pytest.mark.parametrize("name", FP4)
def test_every_stored_scale_of_fp4(name: str) -> None:
    size, columns = get_format(name).type_size, get_format(name).block
    blocks = np.full((256, size), 0x71, dtype=np.uint8)  # 0.5 and 6
    blocks[:, : 1 if name == "MXFP4" else 4] = np.arange(256, dtype=np.uint8)[:, None]
    assert_bit_equal(decode(name, blocks, (256, columns)).dequantize(), reference(name, blocks))


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_internal_form_has_the_documented_planes(name: str) -> None:
    n, k = 5, 512
    tensor = decode(name, random_bits(name, (n, k), seed=2), (n, k))
    bits, group, zero, scale_dtype, supers, mins = FORMS[name]
    assert (tensor.bits, tensor.group, tensor.zero) == (bits, group, zero)
    assert get_format(name).bits == bits
    assert tensor.codes.shape == (n, k // 2 if bits == 4 else k)
    assert tensor.codes.dtype == torch.uint8
    assert (tensor.scales.dtype, tensor.scales.shape) == (scale_dtype, (n, k // group))
    assert (tensor.super_scales is not None) == supers
    assert (tensor.mins is not None) == mins
    assert (tensor.super_mins is not None) == (supers and mins)
    if tensor.super_scales is not None:
        assert (tensor.super_scales.dtype, tensor.super_scales.shape) == (torch.float16, (n, k // SUPER))
    planes = (tensor.codes, tensor.scales, tensor.mins, tensor.super_scales, tensor.super_mins)
    assert all(plane.is_contiguous() and plane.data_ptr() % 16 == 0 for plane in planes if plane is not None)
    assert int(tensor.unpacked_codes().max()) < 1 << tensor.bits


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_range_of_rows_is_that_range_of_the_whole(name: str) -> None:
    raw = with_scales(name, random_bits(name, (9, 256), seed=3), 0x2E66)
    tensor = decode(name, raw, (9, 256))
    assert torch.equal(tensor.rows(2, 7).dequantize(), tensor.dequantize()[2:7])
    assert tensor.rows(2, 7).codes.data_ptr() == tensor.codes[2:].data_ptr()


@pytest.mark.parametrize("name", QUANTIZED)
def test_raw_bytes_may_start_anywhere(name: str) -> None:
    raw = random_bits(name, (4, 256), seed=4)
    padded = torch.zeros(raw.size + 1, dtype=torch.uint8)
    padded[1:] = torch.from_numpy(raw.reshape(-1))
    moved = get_format(name).decode(padded[1:], (4, 256))
    assert isinstance(moved, QuantizedTensor)
    assert_bit_equal(moved.dequantize(), reference(name, raw))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_plain_weights_keep_their_dtype_and_bits(name: str, offset: int) -> None:
    bits = np.random.default_rng(6).integers(0, 256, 3 * 5 * PLAIN[name].itemsize, dtype=np.uint8)
    padded = torch.zeros(bits.size + offset, dtype=torch.uint8)
    padded[offset:] = torch.from_numpy(bits)
    found = get_format(name).decode(padded[offset:], (3, 5))
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.shape) == (PLAIN[name], (3, 5))
    assert found.view(torch.uint8).flatten().tolist() == bits.tolist()
    assert_bit_equal(found.to(torch.float32), reference(name, bits.reshape(3, -1)))


@pytest.mark.parametrize("name", [*PLAIN, *QUANTIZED])
def test_sizes_match_the_format(name: str) -> None:
    found = get_format(name)
    assert (found.block, found.type_size) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    assert found.name == name
    assert found.row_bytes(3 * 256) == 3 * 256 // found.block * found.type_size


@pytest.mark.parametrize("name", [*PLAIN, *QUANTIZED])
def test_input_that_does_not_fit_is_refused(name: str) -> None:
    found = get_format(name)
    raw = torch.zeros(found.row_bytes(256) * 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"takes \d+ bytes, not"):
        found.decode(raw[:-1], (2, 256))
    with pytest.raises(ValueError, match=r"takes \d+ bytes, not"):
        found.decode(raw.to(torch.int16), (2, 256))
    with pytest.raises(ValueError, match="empty"):
        found.decode(raw[:0], (0, 256))
    if found.block > 1:
        with pytest.raises(ValueError, match=f"not a multiple of {name}'s block"):
            found.decode(raw, (2, 255))


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I8", "", "q4_0"])
def test_an_unsupported_type_lists_the_supported_ones(name: str) -> None:
    with pytest.raises(ValueError, match="is not supported") as caught:
        get_format(name)
    assert all(supported in str(caught.value) for supported in (*PLAIN, *QUANTIZED))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_format_expands_where_codes_are_wider_than_stored(name: str) -> None:
    found = get_format(name)
    assert found.expands == (name not in (*LEGACY, "Q4_K", "Q5_K", "Q6_K"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_decoding_in_chunks_equals_decoding_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_bits(name, (33, 512), seed=7)
    whole = decode(name, raw, (33, 512))
    monkeypatch.setattr("infer.quant.base._CHUNK_BYTES", 1000)
    chunked = decode(name, raw, (33, 512))
    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.scales.view(torch.uint8), chunked.scales.view(torch.uint8))


@pytest.mark.model
def test_real_tensors_decode_to_the_reference_bits(smollm2_path: Path) -> None:
    tensors = gguf.GGUFReader(smollm2_path).tensors
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    chosen = [tensor for tensor in matrices if tensor.name.startswith(("blk.0.", "blk.17."))]
    assert {tensor.tensor_type.name for tensor in chosen} == {"Q4_1"}
    for tensor in chosen:
        shape = (int(tensor.shape[1]), int(tensor.shape[0]))
        raw = np.array(tensor.data)
        assert_bit_equal(decode("Q4_1", raw, shape).dequantize(), reference("Q4_1", raw))
    (embedding,) = (tensor for tensor in matrices if tensor.name == "token_embd.weight")
    raw = np.array(embedding.data[1000:3000])
    assert_bit_equal(
        decode("Q8_0", raw, (2000, int(embedding.shape[0]))).dequantize(), reference("Q8_0", raw)
    )


def assert_within_half_a_scale(weight: torch.Tensor, quantized: QuantizedTensor) -> None:
    error = (quantized.dequantize().double() - weight.double()).abs()
    bound = quantized.group_scales().double().repeat_interleave(quantized.group, dim=1) / 2
    rounding = weight.double().abs() * 2.0**-22 + 2.0**-149
    assert bool((error <= bound + rounding).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_off_by_at_most_half_a_scale(bits: int, group: int, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(8)).to(dtype)
    quantized = quantize_rtn(weight, bits, group)
    assert (quantized.shape, quantized.bits, quantized.group) == ((40, 256), bits, group)
    assert quantized.codes.shape == (40, 256 * bits // 8)
    assert quantized.scales.dtype == torch.float16
    assert_within_half_a_scale(weight, quantized)
    grouped = weight.double().reshape(40, -1, group)
    extent = grouped.abs().amax(-1) / 127 if bits == 8 else (grouped.amax(-1) - grouped.amin(-1)) / 15
    assert bool((quantized.scales.double() <= extent * 1.005).all())


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=60, deadline=None)
@given(
    exponent=st.integers(-40, 13),
    offset=st.sampled_from([0.0, 1.0, -1.0, 1000.0, -1000.0]),
    seed=st.integers(0, 1000),
)
def test_the_bound_holds_at_any_magnitude(bits: int, exponent: int, offset: float, seed: int) -> None:
    noise = torch.rand(4, 64, generator=torch.Generator().manual_seed(seed)) - 0.5
    weight = noise * 2.0**exponent + offset
    assert_within_half_a_scale(weight, quantize_rtn(weight, bits))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -0.1, 1e-7, -1e-9, 3e4])
def test_constant_weights_are_kept(bits: int, value: float) -> None:
    weight = torch.full((2, 64), value)
    quantized = quantize_rtn(weight, bits)
    assert_within_half_a_scale(weight, quantized)
    torch.testing.assert_close(quantized.dequantize(), weight, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("spread", [1.0, 0.02, 300.0])
def test_rounding_twice_is_rounding_once(bits: int, spread: float) -> None:
    weight = spread * torch.randn(64, 512, generator=torch.Generator().manual_seed(9))
    once = quantize_rtn(weight, bits)
    twice = quantize_rtn(once.dequantize(), bits)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.scales, twice.scales)
    assert once.mins is None or torch.equal(once.mins, twice.mins)  # type: ignore[arg-type]


def test_rounding_in_chunks_equals_rounding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(10))
    whole = quantize_rtn(weight, 4)
    monkeypatch.setattr("infer.quant.rtn._CHUNK_WEIGHTS", 200)
    assert torch.equal(whole.dequantize(), quantize_rtn(weight, 4).dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e9, -1e9])
def test_weights_that_have_no_scale_are_refused(bits: int, bad: float) -> None:
    weight = torch.ones(3, 64)
    weight[1, 40] = bad
    with pytest.raises(ValueError, match="not finite or too large"):
        quantize_rtn(weight, bits)


def test_arguments_of_rounding_are_checked() -> None:
    weight = torch.ones(2, 64)
    for bits in (0, 3, 5, 16):
        with pytest.raises(ValueError, match="8 or 4 bits"):
            quantize_rtn(weight, bits)
    for group in (0, -32, 3, 48, 128):
        with pytest.raises(ValueError, match="groups of"):
            quantize_rtn(weight, 4, group)
    for wrong in (torch.ones(64), torch.ones(2, 64, dtype=torch.int8)):
        with pytest.raises(ValueError, match="floating-point matrix"):
            quantize_rtn(wrong, 8)
