"""Frames of the decoder stream: one safetensors blob each, tensors beside a small JSON header.

A frame describes its own dtypes and shapes, so the sequence length may change from batch to batch. Nothing in
it is ever unpickled, and whatever is malformed is refused with a reason. No tensor has a dimension of zero: then none
has more elements than the frame has bytes, and what is computed of its shape is bounded by what was sent.

Up, from a CU::

    hello        version, token, round, cluster, codec (absent: none)
    tied         round, step, name, start (first row), attempt                  rows [R,...]
    micro_batch  round, step, micro_batch, num_micro_batches, weight, seed,   hidden [B,T,D], mask [B,T],
                 total_weight (first of a step), attempt, names               target.<name> [B,...]
    recall       as micro_batch
    forward      round, step, micro_batch, num_micro_batches, weight, seed,   hidden [B,T,D], mask [B,T]
                 total_weight (first of a step), attempt
    states_gradient round, step, micro_batch, attempt                         gradient [B,T,D]
    step_end     round, step, scale
    bye
    leave        reason; token, round, cluster (as first frame)
    news         token, round, cluster, text (a call of its own, beside the stream)
    pull         token, node, sha256, offset, size (a call of its own, before round 1; its answer is the bytes)

Down, from the decoder::

    welcome      version, decoder_sync, resume, step, closed, store
    gradient     round, step, micro_batch, loss_sum, norm_sq (last of a step),  gradient [B,T,D]
                 attempt
    loss         round, step, micro_batch, loss_sum, norm_sq (last of a step),
                 attempt, kept
    states       round, step, micro_batch, attempt                              states [B,T,D]
    tied_gradient round, step, name, start (first row), attempt                 rows [R,...]
    step_applied round, step
    goodbye

Where labels stay in the clusters, ``forward`` takes the place of ``micro_batch``. The decoder answers with ``states``
after its blocks, and with ``gradient`` once ``states_gradient``, of the loss that the control unit computes, has come;
its ``loss_sum`` is 0: no loss is sent.

Where no TEB of a cluster is trained and the server keeps activations, ``micro_batch`` names its examples (``names``,
separated by commas), and the answer is ``loss``: no gradient comes back, and ``kept`` says (1) that they may be asked
for. ``recall`` then takes the place of ``micro_batch`` and brings the names alone. ``store`` of the welcome names the
store.

``tied`` frames come before the first micro-batch of every step after a round's first: with the first the decoder knows
the value, which is that of the round. ``tied_gradient`` frames come after the last gradient of a step. ``hidden``,
``states`` and ``gradient`` are float32, or bytes [B,T,row] of the codec that hello declares
(:mod:`client_pipeline.link.activation_codec`). ``mask`` is bool, or int16 where sequences have several examples
(:mod:`client_pipeline.partition.packed_mask`).

``attempt`` counts how often a step was begun before (absent: 0). A stream that was cut is opened again with a hello
whose token is ``resume`` of the last welcome, good until the frame after that hello. ``step`` of the new welcome is the
step in progress: unless ``closed`` is 1, all its frames are sent again. ``leave`` takes a cluster out of the round at
once, on its own stream or, with the round's token, on another one: when the process that held the stream is gone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from client_pipeline.documents import without_repeats
from client_pipeline.link.frame_limits import DEFAULT_MAX_BYTES, LARGEST_INT, MAX_DIMENSIONS, MAX_HEADER_BYTES

PROTOCOL_VERSION = 2
TARGET_PREFIX = "target."

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_read_blob: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize

_Fields = dict[str, tuple[type, float | None]]
_MICRO_BATCH: _Fields = {
    "round": (int, 1),
    "step": (int, 1),
    "micro_batch": (int, 0),
    "num_micro_batches": (int, 1),
    "weight": (float, 0),
    "seed": (int, None),
    "total_weight?": (float, 0),
    "attempt?": (int, 0),
}
_STATES: _Fields = {"round": (int, 1), "step": (int, 1), "micro_batch": (int, 0), "attempt?": (int, 0)}
_ROWS: _Fields = {"round": (int, 1), "step": (int, 1), "name": (str, None), "start": (int, 0), "attempt?": (int, 0)}
# Header fields of each kind: type and smallest value; a trailing "?" marks what may be left out.
_FIELDS: dict[str, _Fields] = {
    "hello": {"version": (int, 0), "token": (str, None), "round": (int, 1), "cluster": (int, 0), "codec?": (str, None)},
    "tied": _ROWS,
    "micro_batch": {**_MICRO_BATCH, "names?": (str, None)},
    "recall": {**_MICRO_BATCH, "names": (str, None)},
    "forward": _MICRO_BATCH,
    "states_gradient": _STATES,
    "step_end": {"round": (int, 1), "step": (int, 1), "scale": (float, 0)},
    "bye": {},
    "leave": {"reason": (str, None), "token?": (str, None), "round?": (int, 1), "cluster?": (int, 0)},
    "news": {"token": (str, None), "round": (int, 1), "cluster": (int, 0), "text": (str, None)},
    "pull": {"token": (str, None), "node": (int, 0), "sha256": (str, None), "offset": (int, 0), "size": (int, 1)},
    "welcome": {
        "version": (int, 0),
        "decoder_sync": (str, None),
        "resume?": (str, None),
        "step?": (int, 1),
        "closed?": (int, 0),
        "store?": (str, None),
    },
    "gradient": {**_STATES, "loss_sum": (float, None), "norm_sq?": (float, 0)},
    "loss": {**_STATES, "loss_sum": (float, None), "norm_sq?": (float, 0), "kept": (int, 0)},
    "states": _STATES,
    "tied_gradient": _ROWS,
    "step_applied": {"round": (int, 1), "step": (int, 1)},
    "goodbye": {},
}
_TENSORS = {
    "tied": ("rows",),
    "micro_batch": ("hidden", "mask"),
    "forward": ("hidden", "mask"),
    "states_gradient": ("gradient",),
    "states": ("states",),
    "gradient": ("gradient",),
    "tied_gradient": ("rows",),
}


class FrameError(ValueError):
    """A frame is malformed or too large; the message says what was expected and found."""


@dataclass(frozen=True)
class Frame:
    """One message of the stream."""

    header: dict[str, Any]
    """``kind`` and the fields of that kind."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """One of the kinds in the module's table."""
        return str(self.header["kind"])

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def targets(self) -> dict[str, Tensor]:
        """The tensors named ``target.<name>``, by ``<name>``."""
        return {k.removeprefix(TARGET_PREFIX): v for k, v in self.tensors.items() if k.startswith(TARGET_PREFIX)}


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Write one frame.

    Raises
    ------
    FrameError
        If the header lacks a field of its kind, has one too many or a value out of range.
    """
    tensors = tensors or {}
    _check_header(header, tensors)
    # Written here rather than by safetensors.torch.save, which copies the data three times: 1 ms a MiB.
    entries: dict[str, Any] = {"__metadata__": {"header": json.dumps(dict(header), allow_nan=False)}}
    chunks: list[Any] = [b"", b""]
    end = 0
    # Wide types first, so that every tensor starts at a multiple of its item size.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _DTYPE_NAMES:
            raise FrameError(f"tensor {name!r}: expected one of {', '.join(_DTYPES)}, found {tensor.dtype}")
        _check_shape(name, tensor.shape)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
        chunks.append(data)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    chunks[:2] = [len(text).to_bytes(8, "little"), text]
    return b"".join(chunks)


def decode(data: bytes | bytearray | memoryview, max_bytes: int = DEFAULT_MAX_BYTES) -> Frame:
    """Read and check one frame.

    Parameters
    ----------
    data : what came over the network
    max_bytes : largest frame that is accepted [byte]

    Raises
    ------
    FrameError
        If it is too large, no safetensors blob, or its header or tensors are not those of its kind.
    """
    if len(data) > max_bytes:
        raise FrameError(
            f"a frame has {len(data)} bytes, at most {max_bytes} are accepted; "
            "raise decoder.max-frame-bytes or use smaller micro-batches"
        )
    data = bytes(data)
    header = _read_header(data)
    try:
        tensors = {name: _tensor(name, view) for name, view in _read_blob(data)}
    except SafetensorError as error:
        raise FrameError(f"a frame is no safetensors blob: {error}") from None
    _check_header(header, tensors)
    return Frame(header, tensors)


def _read_header(data: bytes) -> dict[str, Any]:
    """Return the JSON header, which travels as text in the blob's ``__metadata__``."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise FrameError(f"a frame of {len(data)} bytes is cut short")
    if size > MAX_HEADER_BYTES:
        raise FrameError(f"a frame's header has {size} bytes, at most {MAX_HEADER_BYTES} are accepted")
    try:
        table = json.loads(data[8 : 8 + size], object_pairs_hook=without_repeats)
        text = table["__metadata__"]["header"]
        header = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=without_repeats)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FrameError("a frame has no readable JSON header in its safetensors metadata") from None
    if not isinstance(header, dict):
        raise FrameError(f"a frame's header: expected a JSON object, found {type(header).__name__}")
    return header


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _tensor(name: str, view: dict[str, Any]) -> Tensor:
    dtype = _DTYPES.get(view["dtype"])
    shape = view["shape"]
    if dtype is None or len(shape) > MAX_DIMENSIONS:
        raise FrameError(
            f"tensor {name!r}: expected one of {', '.join(_DTYPES)} with at most {MAX_DIMENSIONS} dimensions, "
            f"found {view['dtype']} with {len(shape)}"
        )
    _check_shape(name, shape)
    try:
        if dtype is torch.bool and torch.frombuffer(view["data"], dtype=torch.uint8).max() > 1:
            raise FrameError(f"tensor {name!r}: a bool must be 0 or 1")  # torch's behaviour is undefined for others
        return torch.frombuffer(view["data"], dtype=dtype).reshape(shape)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise FrameError(f"tensor {name!r} of shape {shape}: {error}") from None


def _check_shape(name: str, shape: Sequence[int]) -> None:
    """Refuse an empty tensor: without bytes it would bring dimensions of any size."""
    if 0 in shape:
        raise FrameError(f"tensor {name!r}: expected dimensions of at least 1, found {list(shape)}")


def _check_header(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    kind = header.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise FrameError(f"kind of a frame: expected one of {', '.join(_FIELDS)}, found {kind!r}")
    fields = {name.removesuffix("?"): rule for name, rule in _FIELDS[kind].items()}
    missing = sorted(name for name in _FIELDS[kind] if not name.endswith("?") and name not in header)
    unknown = sorted(header.keys() - fields.keys() - {"kind"})
    if missing or unknown:
        raise FrameError(f"header of a {kind} frame: missing {missing}, unknown {unknown}")
    for name, (wanted, least) in fields.items():
        if name in header:
            _check_value(kind, name, header[name], wanted, least)
    required = _TENSORS.get(kind, ())
    has_targets = kind == "micro_batch"
    names = {name for name in tensors if not (has_targets and name.startswith(TARGET_PREFIX))}
    if names != set(required) or (has_targets and len(tensors) == len(names)):
        expected = [*required, *([f"{TARGET_PREFIX}<name>"] if has_targets else [])]
        raise FrameError(f"tensors of a {kind} frame: expected {expected}, found {sorted(tensors)}")


def _check_value(kind: str, name: str, value: Any, expected_type: type, least: float | None) -> None:
    allowed = (int, float) if expected_type is float else expected_type
    is_valid = isinstance(value, allowed) and not isinstance(value, bool)
    if is_valid and isinstance(value, int | float):
        # A whole number may be too large to be made a float: its size comes first.
        is_valid = abs(value) <= LARGEST_INT if isinstance(value, int) else math.isfinite(value)
        is_valid = is_valid and (least is None or value >= least)
    if not is_valid:
        bound = "" if least is None else f" of at least {least}"
        raise FrameError(
            f"{name} of a {kind} frame: expected a finite {expected_type.__name__}{bound}, found {value!r:.40}"
        )
