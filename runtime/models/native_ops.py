"""The operations as a program for the native library: a model's maths, recorded once, replayed in one call a step.

Recording runs `Model.forward` with values that stand for buffers. A buffer goes back to the recorder when the last
value naming it is gone, so the layers share a handful of them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.arena import empty
from infer.quant.kernels.native import ActBuffer, NativeKernel
from infer.quant.kernels.strips import NativeWeight
from infer.quant.kernels.weight import PackedWeight
from infer.runtime.batch import ForwardBatch
from infer.runtime.kvcache.paged import BlockArray, LayerArrays, PagedKVCache
from infer.runtime.models.ops import AttentionSpec, Experts, Linear, Norm, Ops, RopeTable, Router

if TYPE_CHECKING:
    from infer.runtime.models.base import Model

PAIRINGS = {"adjacent": 0, "halves": 1}
ACTIVATIONS = {"silu": abi.ACT_SILU, "gelu_tanh": abi.ACT_GELU_TANH, "swiglu_oai": abi.ACT_SWIGLU_OAI}
GATES = {"softmax": abi.GATE_SOFTMAX, "sigmoid": abi.GATE_SIGMOID, "chosen_softmax": abi.GATE_CHOSEN_SOFTMAX}
KV_TYPES = {"f16": abi.KV_F16, "bf16": abi.KV_BF16, "f32": abi.KV_F32, "int8": abi.KV_INT8}


Floats = npt.NDArray[np.float32]


class NativeValue:
    """Rows of `width` floats that an operation makes, as floats, quantized, or both: whichever the consumers ask for.

    Both buffers are reserved when the value is made (asking later could hand out memory that the producing operation
    still reads), but the operation writes only those asked for; untouched memory costs nothing.
    """

    def __init__(
        self, width: int, floats: Floats, acts: ActBuffer | None, producer: abi.Op | None, outputs: bool
    ) -> None:
        self.width = width
        self.outputs = outputs
        self._floats = floats
        self._acts = acts
        self._producer = producer

    def floats(self) -> int:
        """Address of the float rows."""
        if isinstance(self._producer, abi.NormOp | abi.AttentionOp | abi.GluOp):
            self._producer.out = self._floats.ctypes.data
        return self._floats.ctypes.data

    def acts(self) -> ctypes._Pointer[abi.Acts] | None:
        """The quantized rows, or None when the producer cannot quantize."""
        if self._acts is None or not isinstance(self._producer, abi.NormOp | abi.AttentionOp | abi.GluOp):
            return None
        pointer = ctypes.pointer(self._acts.struct)
        self._producer.acts = pointer
        return pointer


@dataclass(frozen=True)
class Program:
    """code: what the library runs. logits: float32 [capacity, vocab]. ropes: tables that must reach the batch's last
    position. keep: everything else the code points to."""

    code: bytes
    capacity: int
    logits: Floats
    ropes: list[RopeTable]
    keep: list[object]


class NativeOps(Ops):
    """Exact: a row's logits depend on nothing but its own sequence. `run` returns a view that the next run changes."""

    def __init__(self, kernel: NativeKernel, cache: PagedKVCache) -> None:
        self._kernel = kernel
        self._caches = [_kv(cache, layer) for layer in cache.layers]
        self._program: Program | None = None
        self._recorder = _Recorder(0)

    def run(self, model: Model, batch: ForwardBatch) -> Floats:
        tokens, outputs = len(batch.ids), len(batch.output_rows)
        program = self._program
        if program is None or program.capacity < tokens:
            program = self._program = self._record(model, max(64, 1 << (tokens - 1).bit_length()))
        last = int(batch.positions.max())
        for rope in program.ropes:
            rope.ready(last + 1)
        struct = abi.Batch(
            tokens=tokens, sequences=len(batch.context_lens), max_blocks=batch.block_tables.shape[1], outputs=outputs,
            ids=_address(batch.ids), positions=_address(batch.positions), slots=_address(batch.slots),
            query_start=_address(batch.query_start), context_len=_address(batch.context_lens),
            block_tables=_address(batch.block_tables), output_rows=_address(batch.output_rows),
        )  # fmt: skip
        self._kernel.run(program.code, struct)
        return program.logits[:outputs]

    def embed(self, table: PackedWeight, scale: float = 1.0) -> NativeValue:
        weight = _native(table)
        op = abi.EmbedOp(table=ctypes.pointer(weight.struct), scale=scale)
        return self._emit(op, weight.shape[1], outputs=False)

    def norm(self, x: NativeValue, norm: Norm) -> NativeValue:
        op = abi.NormOp(x=x.floats(), weight=_address(norm.weight), eps=norm.eps, width=x.width)
        return self._emit(op, x.width, outputs=x.outputs, quantized=True, keep=norm.weight)

    def linear(self, x: NativeValue, *layers: Linear, softcap: float = 0.0) -> tuple[NativeValue, ...]:
        op = abi.MatmulOp(count=len(layers), softcap=softcap)
        values = [self._recorder.value(_native(layer.weight).shape[0], op, x.outputs) for layer in layers]
        self._matmul(op, x, layers, values)
        return tuple(values)

    def linear_add(self, x: NativeValue, layer: Linear, residual: NativeValue) -> NativeValue:
        self._matmul(abi.MatmulOp(count=1, accumulate=1), x, (layer,), [residual])
        return residual

    def attention(
        self, q: NativeValue, k: NativeValue, v: NativeValue | None, spec: AttentionSpec
    ) -> NativeValue:
        cache = ctypes.pointer(self._caches[spec.layer])
        norms = [spec.q_norm, spec.k_norm]
        eps = next((norm.eps for norm in norms if norm is not None), 0.0)
        weights = [None if norm is None else _address(norm.weight) for norm in norms]
        rope = spec.rope
        if rope is not None and rope not in self._recorder.ropes:
            self._recorder.ropes.append(rope)
        self._recorder.add(
            abi.RopeStoreOp(
                q=q.floats(), k=k.floats(), v=v and v.floats(), q_norm=weights[0], k_norm=weights[1],
                cos=rope and _address(rope.cos), sin=rope and _address(rope.sin), kv=cache, eps=eps,
                heads=spec.heads, norm_dim=spec.norm_dim, rope_at=spec.rope_at, rope_dim=rope.dim if rope else 0,
                pairing=PAIRINGS[rope.pairing] if rope else 1,
            ),
            q.outputs, keep=spec,
        )  # fmt: skip
        op = abi.AttentionOp(
            q=q.floats(), sinks=_address(spec.sinks), kv=cache, scale=spec.scale, softcap=spec.softcap,
            heads=spec.heads, window=spec.window,
        )  # fmt: skip
        width = spec.heads * (spec.latent_dim or spec.head_dim)
        return self._emit(op, width, outputs=q.outputs, quantized=True)

    def heads(self, x: NativeValue, weights: tuple[PackedWeight, ...]) -> NativeValue:
        heads, (rows, columns) = len(weights), weights[0].shape
        array = _array(weights)
        op = abi.HeadsOp(x=x.floats(), w=array, heads=heads, width=x.width // heads)
        return self._emit(op, x.width + heads * (rows - columns), outputs=x.outputs, keep=(array, weights))

    def glu(self, gate: NativeValue, up: NativeValue, activation: str) -> NativeValue:
        op = abi.GluOp(gate=gate.floats(), up=up.floats(), width=gate.width, act=ACTIVATIONS[activation])
        return self._emit(op, gate.width, outputs=gate.outputs, quantized=True)

    def route(self, x: NativeValue, router: Router) -> NativeValue:
        (logits,) = self.linear(x, router.layer)
        rule = router.rule
        op = abi.RouteOp(
            logits=logits.floats(), bias=_address(router.bias), experts=rule.experts, used=rule.used,
            groups=rule.groups, groups_used=rule.groups_used, gate=GATES[rule.gate], normalize=rule.normalize,
            scale=rule.scale,
        )  # fmt: skip
        words = rule.used * ctypes.sizeof(abi.Choice) // 4
        return self._emit(op, words, outputs=x.outputs, keep=router)

    def experts(self, x: NativeValue, choices: NativeValue, experts: Experts) -> NativeValue:
        weights = [_array(part) for part in (experts.gate, experts.up, experts.down)]
        inputs = [part[0].elem for part in weights[:2]]
        op = abi.ExpertsOp(
            choices=choices.floats(),
            acts=x.acts() or self._quantized(x) if abi.ELEM_CODES in inputs else None,
            x=x.floats() if inputs != [abi.ELEM_CODES] * 2 else None,
            gate=weights[0], up=weights[1], down=weights[2], gate_bias=_address(experts.gate_bias),
            up_bias=_address(experts.up_bias), down_bias=_address(experts.down_bias), experts=len(experts.gate),
            used=choices.width * 4 // ctypes.sizeof(abi.Choice), act=ACTIVATIONS[experts.activation],
        )  # fmt: skip
        return self._emit(op, experts.down[0].shape[0], outputs=x.outputs, keep=(weights, experts))

    def add(self, x: NativeValue, residual: NativeValue) -> NativeValue:
        self._recorder.add(abi.AddOp(x=x.floats(), y=residual.floats(), width=x.width), x.outputs)
        return residual

    def outputs(self, x: NativeValue) -> NativeValue:
        return self._emit(abi.GatherOp(x=x.floats(), width=x.width), x.width, outputs=True)

    def _record(self, model: Model, capacity: int) -> Program:
        self._recorder = recorder = _Recorder(capacity)
        logits: NativeValue = model.forward(self)
        logits.floats()
        code = b"".join(abi.program(op, output_rows=outputs) for op, outputs in recorder.ops)
        self._recorder = _Recorder(0)
        return Program(code, capacity, logits._floats, recorder.ropes, [recorder, self._caches, model])

    def _emit(
        self, op: abi.Op, width: int, *, outputs: bool, quantized: bool = False, keep: object = None
    ) -> NativeValue:
        value = self._recorder.value(width, op, outputs, quantized=quantized)
        if isinstance(op, abi.EmbedOp | abi.GatherOp | abi.RouteOp | abi.ExpertsOp | abi.HeadsOp):
            op.out = value.floats()
        self._recorder.add(op, outputs, keep)
        return value

    def _matmul(
        self, op: abi.MatmulOp, x: NativeValue, layers: tuple[Linear, ...], values: list[NativeValue]
    ) -> None:
        for index, (layer, value) in enumerate(zip(layers, values, strict=True)):
            weight = _native(layer.weight)
            if weight.struct.elem == abi.ELEM_CODES:
                op.acts = op.acts or x.acts() or self._quantized(x)
            else:
                op.x = x.floats()
            op.w[index] = ctypes.pointer(weight.struct)
            op.bias[index] = _address(layer.bias)
            op.out[index] = value.floats()
        self._recorder.add(op, x.outputs, keep=layers)

    def _quantized(self, x: NativeValue) -> ctypes._Pointer[abi.Acts]:
        pointer = ctypes.pointer(self._recorder.scratch(x.width).struct)
        self._recorder.add(abi.QuantizeOp(x=x.floats(), acts=pointer, width=x.width), x.outputs)
        return pointer


class _Recorder:
    """The operations so far, and the buffers they share, each `capacity` rows."""

    def __init__(self, capacity: int) -> None:
        self.ops: list[tuple[abi.Op, bool]] = []
        self.ropes: list[RopeTable] = []
        self._capacity = capacity
        self._keep: list[object] = []
        self._scratch: dict[int, ActBuffer] = {}
        self._free: dict[int, list[tuple[Floats, ActBuffer | None]]] = defaultdict(list)

    def add(self, op: abi.Op, outputs: bool, keep: object = None) -> None:
        self.ops.append((op, outputs))
        self._keep.append(keep)

    def acts(self, width: int) -> ActBuffer:
        return ActBuffer.empty(self._capacity, width)

    def scratch(self, width: int) -> ActBuffer:
        """Quantized rows for the next operation only: one buffer of each width serves them all."""
        if width not in self._scratch:
            self._scratch[width] = self.acts(width)
        return self._scratch[width]

    def value(self, width: int, producer: abi.Op, outputs: bool, *, quantized: bool = False) -> NativeValue:
        free = self._free[width]
        if free:
            buffers = free.pop()
        else:
            acts = self.acts(width) if width % abi.BLOCK == 0 else None
            buffers = (empty((self._capacity, width), np.float32), acts)
            self._keep.append(buffers)
        value = NativeValue(width, buffers[0], buffers[1] if quantized else None, producer, outputs)
        weakref.finalize(value, free.append, buffers).atexit = False
        return value


def _kv(cache: PagedKVCache, layer: LayerArrays) -> abi.Kv:
    def address(part: BlockArray | None) -> int | None:
        return None if part is None else cache.address + part.offset

    return abi.Kv(
        k=address(layer.keys), v=address(layer.values), k_scale=address(layer.key_scales),
        v_scale=address(layer.value_scales or layer.key_scales), type=KV_TYPES[cache.kv_type],
        kv_heads=cache.kv_heads, head_dim=cache.head_dim, value_dim=cache.value_dim, blocks=cache.blocks,
        stride=cache.block_bytes,
    )  # fmt: skip


def _array(weights: tuple[PackedWeight, ...]) -> ctypes.Array[abi.Weight]:
    return (abi.Weight * len(weights))(*(_native(weight).struct for weight in weights))


def _address(array: npt.NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _native(weight: PackedWeight) -> NativeWeight:
    if not isinstance(weight, NativeWeight):
        raise TypeError(f"not a native weight: {type(weight).__name__}")
    return weight
