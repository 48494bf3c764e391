"""Where the compiled kernels meet torch: matrices that are packed from decoded rows, and single products, for tests."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.native import ActBuffer, NativeKernel
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.strips import STORED, NativeWeight, Planes, grid_address
from infer.quant.kernels.weight import PackedWeight


def planes_of(part: QuantizedTensor) -> Planes:
    """The layout that holds a part of a matrix exactly."""
    scale = {torch.float16: abi.SCALE_F16, torch.float32: abi.SCALE_F32}.get(
        part.scales.dtype, abi.SCALE_SUPER
    )
    signed = part.scales.dtype == torch.int8
    table = () if part.table is None else tuple(part.table.tolist())
    elem = abi.ELEM_TABLE if table else abi.ELEM_CODES
    return Planes(elem, part.bits, part.group, part.zero, scale, signed, part.mins is not None, table)


def pack(kernel: NativeKernel, source: WeightSource) -> NativeWeight:
    """What NativeKernel.pack promises."""
    if 0 in source.shape:
        raise ValueError(f"{source.name}: an empty matrix {list(source.shape)} cannot be loaded")
    weight: NativeWeight | None = None
    if not kernel.decodes(source):
        weight = NativeWeight.empty(source.shape, STORED[source.format.rows_as], kernel.arena)
        for start, stop in source.chunks():
            _pack_stored(kernel, source, weight, start, stop)
        return weight
    for start, stop in source.chunks():
        part = source.decode(start, stop)
        if not isinstance(part, QuantizedTensor):
            raise ValueError(f"{source.name}: {source.format.name} is not a type the native kernels can hold")
        if weight is None:
            weight = NativeWeight.empty(source.shape, planes_of(part), kernel.arena)
        _pack_codes(kernel, source, weight, part, start)
    if weight is None:
        raise ValueError(f"{source.name}: nothing to load")
    return weight


def matmul(kernel: NativeKernel, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    packed = _native(weight)
    n, k = packed.shape
    x = x.to(torch.float32).contiguous()
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"a matrix [M, {k}] is needed, not {list(x.shape)}")
    out = torch.empty((x.shape[0], n), dtype=torch.float32)
    product = abi.MatmulOp(count=1, x=x.data_ptr())
    product.w[0] = ctypes.pointer(packed.struct)
    product.out[0] = out.data_ptr()
    ops: list[abi.Op] = [product]
    if packed.struct.elem == abi.ELEM_CODES:
        acts = ActBuffer.empty(x.shape[0], k)
        product.acts = ctypes.pointer(acts.struct)
        ops.insert(0, abi.QuantizeOp(x=x.data_ptr(), acts=ctypes.pointer(acts.struct), width=k))
    if x.shape[0]:
        kernel.run(ops, abi.Batch(tokens=x.shape[0]))
    return out


def rows(kernel: NativeKernel, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
    packed = _native(weight)
    n, k = packed.shape
    ids = ids.to(torch.int32).contiguous()
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < n):
        raise IndexError(f"row ids must be in [0, {n})")
    out = torch.empty((ids.numel(), k), dtype=torch.float32)
    if ids.numel():
        op = abi.EmbedOp(table=ctypes.pointer(packed.struct), out=out.data_ptr(), scale=1.0)
        kernel.run([op], abi.Batch(tokens=ids.numel(), ids=ids.data_ptr()))
    return out


def _pack_stored(
    kernel: NativeKernel, source: WeightSource, weight: NativeWeight, start: int, stop: int
) -> None:
    raw = source.read(start, stop).contiguous()
    expected = (stop - start) * source.format.row_bytes(source.shape[1])
    if raw.dtype != torch.uint8 or raw.numel() != expected:
        raise ValueError(f"{source.name}: {raw.numel()} bytes were read where {expected} are expected")
    status = kernel.library.infer_pack(
        kernel.pool.handle,
        source.format.rows_as.encode(),
        raw.data_ptr(),
        byref(weight.struct),
        start,
        stop - start,
        grid_address(source.format.rows_as),
    )
    _check_packed(status, source)


def _pack_codes(
    kernel: NativeKernel, source: WeightSource, weight: NativeWeight, part: QuantizedTensor, start: int
) -> None:
    parts = [part.unpacked_codes(), part.scales, part.mins, part.super_scales, part.super_mins]
    held = [None if t is None else t.contiguous() for t in parts]
    pointers = [None if t is None else t.data_ptr() for t in held]
    status = kernel.library.infer_pack_codes(
        kernel.pool.handle, *pointers, byref(weight.struct), start, part.shape[0]
    )
    _check_packed(status, source)


def _native(weight: PackedWeight) -> NativeWeight:
    if not isinstance(weight, NativeWeight):
        raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
    return weight


def _check_packed(status: int, source: WeightSource) -> None:
    if status:
        raise ValueError(f"{source.name}: {source.format.name} {list(source.shape)} cannot be packed")
