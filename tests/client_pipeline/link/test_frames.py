import json

import pytest
import torch
from safetensors.torch import load, save

from client_pipeline.link import frame_limits
from client_pipeline.link.frames import FrameError, decode, encode

STEP_END = {"kind": "step_end", "round": 3, "step": 2, "scale": 0.5}
MICRO_BATCH = {
    "kind": "micro_batch",
    "round": 1,
    "step": 1,
    "micro_batch": 0,
    "num_micro_batches": 2,
    "weight": 3.0,
    "total_weight": 7.0,
    "seed": 11,
}


def micro_batch_tensors(dtype=torch.float32, examples=2, length=3):
    return {
        "hidden": torch.randn(examples, length, 4).to(dtype),
        "mask": torch.ones(examples, length, dtype=torch.bool),
        "target.labels": torch.arange(examples),
    }


def blob(header, tensors=None):
    """A safetensors blob whose header nobody checked."""
    return save(tensors or {}, metadata={"header": header if isinstance(header, str) else json.dumps(header)})


def laid_out(tensors):
    """A micro-batch whose tensors, where they are on ``meta``, come without their data."""
    entries, data = {}, b""
    for name, tensor in tensors.items():
        raw = b"" if tensor.is_meta else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = {torch.float32: "F32", torch.bool: "BOOL", torch.int64: "I64"}[tensor.dtype]
        place = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": place}
        data += raw
    table = json.dumps({**entries, "__metadata__": {"header": json.dumps(MICRO_BATCH)}}).encode()
    return len(table).to_bytes(8, "little") + table + data


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_micro_batch_survives_the_trip(dtype):
    tensors = micro_batch_tensors(dtype)
    frame = decode(encode(MICRO_BATCH, tensors))
    assert frame.header == MICRO_BATCH
    assert frame.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert frame.tensors[name].dtype == tensor.dtype
        assert torch.equal(frame.tensors[name], tensor)
    assert torch.equal(frame.targets["labels"], tensors["target.labels"])


def test_targets_of_every_integer_type_and_no_dimension_survive_the_trip():
    extra = {
        f"target.{i}": torch.tensor(i % 2).to(dtype)
        for i, dtype in enumerate([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
    }
    frame = decode(encode(MICRO_BATCH, {**micro_batch_tensors(), **extra}))
    for name, tensor in extra.items():
        assert frame.tensors[name].shape == () and frame.tensors[name].dtype == tensor.dtype
        assert torch.equal(frame.tensors[name], tensor)


@pytest.mark.parametrize("shape", [[2**30, 0, 1], [0], [2**62, 0], [0, 2**62]])
def test_a_dimension_of_zero_is_refused_as_it_brings_others_of_any_size(shape):
    """A mask of 2^30 rows without a byte made the server sum them: 9.4 GB for a frame of 416 bytes."""
    tensors = micro_batch_tensors()
    with pytest.raises(FrameError, match="'mask': expected dimensions of at least 1"):
        decode(laid_out({**tensors, "mask": torch.zeros(shape, dtype=torch.bool, device="meta")}))
    with pytest.raises(FrameError, match="'hidden': expected dimensions of at least 1"):
        encode(MICRO_BATCH, {**tensors, "hidden": torch.zeros(0, 3, 4)})


@pytest.mark.parametrize("header", ['{"kind": "bye", "kind": "bye"}', json.dumps(STEP_END)[:-1] + ', "scale": 1.0}'])
def test_a_key_that_comes_twice_is_refused(header):
    with pytest.raises(FrameError, match="no readable JSON header"):
        decode(blob(header))
    twice = json.dumps({"header": json.dumps(STEP_END)})
    table = f'{{"__metadata__": {twice}, "__metadata__": {twice}}}'.encode()
    with pytest.raises(FrameError, match="no readable JSON header"):
        decode(len(table).to_bytes(8, "little") + table)


@pytest.mark.parametrize(
    "offsets",
    [[(0, 96), (48, 144)], [(0, 96), (104, 128)], [(8, 104), (104, 128)], [(96, 0), (0, 24)], [(0, 96), (96, 200)]],
    ids=["overlap", "gap", "a gap before", "backward", "beyond"],
)
def test_tensors_that_overlap_or_leave_gaps_are_refused(offsets):
    entries = {
        name: {"dtype": "F32", "shape": [len_ // 4], "data_offsets": list(pair)}
        for (name, len_), pair in zip({"rows": 96, "more": 24}.items(), offsets, strict=True)
    }
    table = json.dumps({**entries, "__metadata__": {"header": json.dumps(STEP_END)}}).encode()
    with pytest.raises(FrameError, match="no safetensors blob"):
        decode(len(table).to_bytes(8, "little") + table + bytes(128))


def test_views_and_tensors_that_share_memory_survive_the_trip():
    ids = torch.arange(12).reshape(3, 4)
    tensors = {**micro_batch_tensors(examples=4), "target.labels": ids.t(), "target.ids": ids.t()}
    frame = decode(encode(MICRO_BATCH, tensors))
    assert torch.equal(frame.targets["labels"], ids.t())
    assert torch.equal(frame.targets["ids"], ids.t())


def test_a_frame_is_a_safetensors_blob_that_other_readers_understand():
    tensors = micro_batch_tensors(torch.bfloat16)
    read = load(encode(MICRO_BATCH, tensors))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_decoded_tensor_can_be_written_to_and_is_the_receivers_own():
    data = encode(MICRO_BATCH, micro_batch_tensors())
    decode(data).tensors["hidden"].zero_()
    assert decode(data).tensors["hidden"].abs().sum() > 0


def test_a_buffer_of_another_type_is_read_too():
    data = encode(STEP_END)
    assert decode(memoryview(data)).header == decode(bytearray(data)).header == STEP_END


def test_an_oversized_frame_is_refused_with_both_numbers():
    data = encode(MICRO_BATCH, micro_batch_tensors())
    with pytest.raises(FrameError, match=f"{len(data)} bytes, at most 100 .*max-frame-bytes"):
        decode(data, max_bytes=100)


def test_an_oversized_header_is_refused():
    with pytest.raises(FrameError, match="header has .* bytes, at most"):
        decode(blob({"kind": "bye", "pad": "x" * 100_000}))


def test_a_frame_cut_short_anywhere_is_refused():
    data = encode(MICRO_BATCH, micro_batch_tensors())
    header = 8 + int.from_bytes(data[:8], "little")
    for length in [0, 1, 7, 8, 9, 50, header - 1, header, len(data) - 1]:
        with pytest.raises(FrameError, match="is cut short" if length < header else "no safetensors blob"):
            decode(data[:length])
    with pytest.raises(FrameError, match="no safetensors blob"):
        decode(data + b"\0")


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 64, b"\0" * 64, (8).to_bytes(8, "little") + b"[[[[[[[[", (2).to_bytes(8, "little") + b"{}"],
    ids=["length", "empty", "nested", "no-metadata"],
)
def test_what_is_no_safetensors_blob_is_refused(data):
    with pytest.raises(FrameError):
        decode(data)


@pytest.mark.parametrize("header", ["", "[", "[]", "3", "null", '{"kind": NaN}', "[" * 30_000])
def test_a_header_that_is_no_json_object_is_refused(header):
    with pytest.raises(FrameError, match="header|kind"):
        decode(blob(header))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "pickle"}, "kind of a frame: expected one of hello"),
        ({"kind": ["step_end"]}, "kind of a frame"),
        ({"scale": None}, "scale of a step_end frame: expected a finite float of at least 0, found None"),
        ({"scale": -0.1}, "at least 0, found -0.1"),
        ({"scale": True}, "found True"),
        ({"step": 0}, "step of a step_end frame: expected a finite int of at least 1, found 0"),
        ({"step": 1.5}, "found 1.5"),
        ({"step": 2**70}, "step of a step_end frame"),
        ({"step": 10**400}, "step of a step_end frame"),
        ({"scale": 10**400}, "scale of a step_end frame"),
        ({"round": "1"}, "round of a step_end frame"),
        ({"more": 1}, r"missing \[\], unknown \['more'\]"),
    ],
)
def test_a_header_with_a_wrong_field_is_refused_with_its_name(change, message):
    with pytest.raises(FrameError, match=message):
        decode(blob({**STEP_END, **change}))
    with pytest.raises(FrameError, match=message):
        encode({**STEP_END, **change})


def test_a_missing_field_is_named():
    with pytest.raises(FrameError, match=r"missing \['scale'\]"):
        decode(blob({"kind": "step_end", "round": 1, "step": 1}))


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(FrameError):
        encode({**STEP_END, "scale": float("nan")})
    with pytest.raises(FrameError):
        decode(blob(json.dumps(STEP_END).replace("0.5", "Infinity")))
    with pytest.raises(FrameError):
        decode(blob(json.dumps(STEP_END).replace("0.5", "1e999")))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_json_does_not_have_make_a_header_unreadable(word):
    with pytest.raises(FrameError, match="no readable JSON header"):
        decode(blob(json.dumps(STEP_END).replace("0.5", word)))


def test_missing_and_unknown_tensors_are_refused():
    tensors = micro_batch_tensors()
    for wrong in [{}, {"hidden": tensors["hidden"]}, {**tensors, "weights": torch.zeros(1)}]:
        with pytest.raises(FrameError, match="tensors of a micro_batch frame: expected .* found"):
            decode(blob(MICRO_BATCH, wrong))
    with pytest.raises(FrameError, match="tensors of a step_end frame"):
        decode(blob(STEP_END, {"hidden": torch.zeros(1)}))


def test_a_tensor_type_or_bool_that_torch_cannot_trust_is_refused():
    tensors = micro_batch_tensors()
    with pytest.raises(FrameError, match="tensor 'hidden': expected one of F64"):
        decode(blob(MICRO_BATCH, {**tensors, "hidden": torch.zeros(1, dtype=torch.complex64)}))
    with pytest.raises(FrameError, match="tensor 'hidden': expected one of F64"):
        encode(MICRO_BATCH, {**tensors, "hidden": torch.zeros(1, dtype=torch.complex64)})
    # The mask is the only tensor of single bytes, so its data ends the blob.
    data = encode(MICRO_BATCH, tensors)
    with pytest.raises(FrameError, match="'mask': a bool must be 0 or 1"):
        decode(data[:-1] + b"\2")
    with pytest.raises(FrameError, match="at most 8 dimensions"):
        decode(blob(MICRO_BATCH, {**tensors, "hidden": torch.zeros([1] * 9)}))


ROWS = {"round": 1, "step": 1, "name": "out", "start": 0, "attempt": 0}
PLACE = {"token": "t", "round": 1, "cluster": 0}
LARGEST = 2**63 - 1
LEAST = {
    "hello": {**PLACE, "version": 0, "codec": "int8"},
    "tied": ROWS,
    "micro_batch": {**MICRO_BATCH, "num_micro_batches": 1, "weight": 0.0, "total_weight": 0.0, "seed": -LARGEST}
    | {"attempt": 0},
    "step_end": {"round": 1, "step": 1, "scale": 0.0},
    "bye": {},
    "leave": {**PLACE, "reason": "r"},
    "news": {**PLACE, "text": "x"},
    "pull": {"token": "t", "node": 0, "sha256": "a", "offset": 0, "size": 1},
    "welcome": {"version": 0, "decoder_sync": "step", "resume": "t", "step": 1, "closed": 0},
    "gradient": {"round": 1, "step": 1, "micro_batch": 0, "loss_sum": -LARGEST, "norm_sq": 0.0, "attempt": 0},
    "tied_gradient": ROWS,
    "step_applied": {"round": 1, "step": 1},
    "goodbye": {},
}
"""The smallest numbers of each kind of frame."""
TENSORS = {"gradient": ("gradient",), "tied": ("rows",), "tied_gradient": ("rows",)}


@pytest.mark.parametrize("kind", LEAST)
def test_the_least_numbers_of_a_header_pass_and_smaller_ones_are_refused(kind):
    header = LEAST[kind] | {"kind": kind}
    names = TENSORS.get(kind, ())
    tensors = micro_batch_tensors() if kind == "micro_batch" else {name: torch.ones(1) for name in names}
    assert decode(encode(header, tensors)).header == header
    for name, value in header.items():
        if not isinstance(value, str):
            with pytest.raises(FrameError, match=f"^{name} of a {kind} frame"):
                decode(blob({**header, name: value - 1}, tensors))


def test_both_ends_of_a_stream_agree_on_its_limits():
    limits = (frame_limits.DEFAULT_MAX_BYTES, frame_limits.MAX_HEADER_BYTES, frame_limits.PULLED_BYTES)
    assert limits == (67_108_864, 65_536, 1_048_576)
    assert (frame_limits.MAX_DIMENSIONS, frame_limits.LARGEST_INT) == (8, LARGEST)
