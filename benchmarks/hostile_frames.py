"""Streams of frames as a hostile cluster, or a hostile server, would send them: good ones with something wrong.

A :class:`Draft` is a frame before it is bytes, so that each mutation knows what it changes: a field of the header, a
shape and whether the bytes agree with it, values, the table of offsets, the order of frames. Everything follows from
the generator that is passed in.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

WIDTH, VOCABULARY, EXAMPLES, LENGTH = 8, 13, 8, 12
"""Sizes of the model and the batches that are served; see :mod:`fuzz`."""
NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, -1, 255, 10**6, 2**30, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 5e-324, 1e-30, 1e30, 1e308, -1e308),
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "1",
    "none",
    "int8",
    "\ud800",
    "\x00\x1b[31m",
    "x" * 5000,
    [],
    [1],
    {},
)
DIMENSIONS = (0, 1, 2, 3, 5, 8, 12, 13, 40, 100, 5000, 2**20, 2**30, 2**31, 2**40, 2**62, 2**63, 2**64, -1)
DTYPES = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
KINDS = (
    *("hello", "tied", "micro_batch", "step_end", "bye", "leave", "welcome", "gradient", "tied_gradient"),
    *("step_applied", "goodbye", "pickle", "__proto__"),
)
FIELDS = (
    *("kind", "version", "token", "round", "cluster", "codec", "step", "name", "start", "micro_batch", "attempt"),
    *("num_micro_batches", "weight", "total_weight", "seed", "scale", "reason", "loss_sum", "norm_sq", "path"),
)
NAMES = ("hidden", "mask", "rows", "gradient", "target.labels", "target.", "target.x", "/etc/passwd", "__metadata__")


FILLER = bytes(2**24 - 2048)
"""Makes a frame nearly as large as is accepted; made once, as the process may not grow."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a frame."""

    dtype: str
    shape: list[int]
    data: bytes
    offsets: tuple[int, int] | None = None
    """Claimed place of its data; None: the true one."""


@dataclass(frozen=True)
class Draft:
    """A frame before it is bytes."""

    header: dict[str, Any]
    tensors: dict[str, Entry] = field(default_factory=dict)
    finish: Callable[[bytes], bytes] = bytes
    """Last change to the bytes."""
    text: str | None = None
    """The header as text, where it is no plain JSON object."""

    def to_bytes(self) -> bytes:
        """Lay it out as a safetensors blob, whatever is in it."""
        table: dict[str, Any] = {}
        data = b""
        for name, entry in self.tensors.items():
            offsets = entry.offsets or (len(data), len(data) + len(entry.data))
            table[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": list(offsets)}
            data += entry.data
        table["__metadata__"] = {"header": json.dumps(self.header) if self.text is None else self.text}
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return self.finish(len(text).to_bytes(8, "little") + text + data)


_NORMAL = struct.pack("<4096f", *(random.Random(0).gauss(0, 1) for _ in range(4096)))


def floats(rng: random.Random, number: int) -> bytes:
    """Float32 values of a normal distribution, from a fixed list."""
    first = rng.randrange(4096 - number)
    return _NORMAL[4 * first : 4 * (first + number)]


def labels_of(values: list[int]) -> bytes:
    """Labels as they travel."""
    return struct.pack(f"<{len(values)}q", *values)


def good_step(rng: random.Random, round_: int, step: int = 1) -> list[Draft]:
    """Build the micro-batches and the end of one step."""
    number, length, target = rng.choice((1, 1, 2)), rng.randint(1, LENGTH), rng.randint(1, LENGTH)
    batches = []
    for _ in range(number):
        examples = rng.randint(1, EXAMPLES // 2)
        labels = [rng.choice((-100, *range(VOCABULARY))) for _ in range(examples * target)]
        labels[0] = 3
        tensors = {
            "target.labels": Entry("I64", [examples, target], labels_of(labels)),
            "hidden": Entry("F32", [examples, length, WIDTH], floats(rng, examples * length * WIDTH)),
            "mask": Entry("BOOL", [examples, length], b"\1" * (examples * length)),
        }
        batches.append((float(sum(label != -100 for label in labels)), tensors))
    total = sum(weight for weight, _ in batches)
    frames = []
    for i, (weight, tensors) in enumerate(batches):
        header = {"kind": "micro_batch", "round": round_, "step": step, "micro_batch": i, "num_micro_batches": number}
        header |= {"weight": weight, "seed": 1} | ({} if i else {"total_weight": total})
        frames.append(Draft(header, tensors))
    return [*frames, Draft({"kind": "step_end", "round": round_, "step": step, "scale": rng.choice((1.0, 0.25))})]


def good_answers(rng: random.Random, shape: list[int], round_: int) -> list[Draft]:
    """Build what a server answers to one micro-batch of ``shape``, and to its step's end."""
    count = shape[0] * shape[1] * shape[2]
    place = {"round": round_, "step": 1}
    gradient = {"kind": "gradient", **place, "micro_batch": 0, "loss_sum": 1.5, "norm_sq": 2.0}
    return [
        Draft(gradient, {"gradient": Entry("F32", shape, floats(rng, count))}),
        Draft({"kind": "step_applied", **place}),
        Draft({"kind": "goodbye"}),
    ]


# What can be wrong with one frame.


def change_field(rng: random.Random, frame: Draft) -> Draft:
    """Give a field another value, take it away, or add one."""
    header = dict(frame.header)
    name = rng.choice(list(header) if header and rng.random() < 0.8 else FIELDS)
    chance = rng.random()
    if chance < 0.1:
        header.pop(name, None)
    elif chance < 0.2 and isinstance(header.get(name), int):
        header[name] += rng.choice((-1, 1))
    elif name == "kind":
        header[name] = rng.choice(KINDS)
    else:
        header[name] = rng.choice(NUMBERS if rng.random() < 0.7 else OTHERS)
    return replace(frame, header=header)


def change_text(rng: random.Random, frame: Draft) -> Draft:
    """Write the header in a way that two readers may read differently, or not at all."""
    text = json.dumps(frame.header)
    name, value = rng.choice(list(frame.header.items()) or [("kind", "bye")])
    again = json.dumps({name: rng.choice((value, 1, 2.0, "x"))})[1:-1]
    broken = (
        text[:-1] + ", " + again + "}",
        text.replace(": 1", ": 1e0", 1),
        text.replace(": 1", ": 01", 1),
        text.replace("1.0", "NaN").replace("0.25", "Infinity"),
        text.replace(":", ": -", 1),
        text[: rng.randrange(len(text))],
        "[" * rng.choice((3, 900, 30_000)),
        '{"kind": ' * 3000,
        rng.choice(("null", "3", '"bye"', "[]", "{}", "")),
    )
    return replace(frame, text=rng.choice(broken))


def claim_shape(rng: random.Random, frame: Draft) -> Draft:
    """Let a tensor say another shape or type than its bytes have."""
    if not frame.tensors:
        return change_field(rng, frame)
    name = rng.choice(list(frame.tensors))
    entry = frame.tensors[name]
    shape = list(entry.shape)
    chance = rng.random()
    if chance < 0.3 and shape:
        shape[rng.randrange(len(shape))] = rng.choice(DIMENSIONS)
    elif chance < 0.7:
        # Nothing in it, and still of any size.
        shape = [rng.choice(DIMENSIONS) for _ in range(rng.randint(1, 4))]
        shape[rng.randrange(len(shape))] = 0
    else:
        shape = [rng.choice(DIMENSIONS) for _ in range(rng.randint(0, 10))]
    data = b"" if 0 in shape and rng.random() < 0.9 else entry.data
    dtype = rng.choice((entry.dtype, entry.dtype, *DTYPES, "C64", "F8_E4M3", "X"))
    return replace(frame, tensors={**frame.tensors, name: Entry(dtype, shape, data)})


def agree_shape(rng: random.Random, frame: Draft) -> Draft:
    """Give a tensor another shape or type, with the bytes that belong to it."""
    if not frame.tensors:
        return change_field(rng, frame)
    name = rng.choice(list(frame.tensors))
    entry = frame.tensors[name]
    dtype = rng.choice((entry.dtype, entry.dtype, *DTYPES))
    chance = rng.random()
    if chance < 0.4 and entry.shape:
        shape = list(entry.shape)
        shape[rng.randrange(len(shape))] = rng.choice((1, 2, 3, 9, 13, 50, 400))
    else:
        shape = [rng.choice((1, 1, 2, 5, 8, 13, 40, 3000)) for _ in range(rng.randint(0, 4))]
    number = 1
    for size in shape:
        number *= size
    if not 0 <= number <= 2**17:
        shape, number = [1, 2**17, 1], 2**17
    value = rng.choice((b"\0", b"\1", b"\1", b"\x7f", b"\xff"))
    changed = replace(
        frame, tensors={**frame.tensors, name: Entry(dtype, shape, value * (number * DTYPES.get(dtype, 1)))}
    )
    return fitting(changed) if rng.random() < 0.7 else changed


def change_values(rng: random.Random, frame: Draft) -> Draft:
    """Put other numbers into a tensor: not finite, huge, no bool, no label."""
    name = rng.choice(list(frame.tensors)) if frame.tensors else ""
    if not name or not frame.tensors[name].data:
        return change_field(rng, frame)
    entry = frame.tensors[name]
    size = DTYPES.get(entry.dtype, 1)
    data = bytearray(entry.data)
    value = rng.choice(
        (
            struct.pack("<f", rng.choice((float("nan"), float("inf"), 3e38, 1e-42))) * 2,
            struct.pack("<q", rng.choice((-1, -99, -101, VOCABULARY, 2**40, -(2**63)))),
            bytes([rng.choice((2, 0x80, 0xFF))]) * 8,
            bytes(8),
        )
    )[:size]
    for _ in range(rng.choice((1, 2, len(data) // size))):
        place = rng.randrange(len(data) // size or 1) * size
        data[place : place + size] = value
    changed = replace(frame, tensors={**frame.tensors, name: replace(entry, data=bytes(data[: len(entry.data)]))})
    return fitting(changed) if rng.random() < 0.7 else changed


def change_table(rng: random.Random, frame: Draft) -> Draft:
    """Let tensors overlap, leave gaps, lie elsewhere, be missing, or be more."""
    tensors = dict(frame.tensors)
    chance = rng.random()
    if not tensors or chance < 0.2:
        tensors[rng.choice(NAMES)] = Entry("F32", [1, 2], bytes(8))
    elif chance < 0.4:
        del tensors[rng.choice(list(tensors))]
    elif chance < 0.5:
        name = rng.choice(list(tensors))
        tensors[rng.choice(NAMES)] = tensors.pop(name)
    else:
        name = rng.choice(list(tensors))
        size = len(tensors[name].data)
        begin = rng.choice((0, 1, 8, size, 2**31, 2**63, 2**64 - 8))
        tensors[name] = replace(tensors[name], offsets=(begin, rng.choice((begin + size, begin, 0, size, 2**64))))
    return replace(frame, tensors=tensors)


def change_bytes(rng: random.Random, frame: Draft) -> Draft:
    """Change, cut out, double or put in bytes; lie about the header's size; make the frame huge."""
    chance, place, number = rng.random(), rng.random(), rng.randint(1, 40)
    size, filler = rng.choice(NUMBERS[:16]), rng.randbytes(number)
    huge = rng.random() < 0.05

    def finish(data: bytes) -> bytes:
        at = int(place * min(len(data), 600))
        if huge:
            return data + FILLER
        if chance < 0.3:
            return data[:at] + filler[:1] + data[at + 1 :]
        if chance < 0.45:
            return data[:at] + data[at + number :]
        if chance < 0.6:
            return data[:at] + data[at : at + number] + data[at:]
        if chance < 0.75:
            return data[:at] + filler + data[at:]
        if chance < 0.85:
            return (abs(size) % 2**64).to_bytes(8, "little") + data[8:]
        return data[: int(place * len(data))]

    return replace(frame, finish=finish)


FRAME_MUTATIONS = (
    *(change_field, change_text, claim_shape, claim_shape, agree_shape, agree_shape, change_values, change_table),
    change_bytes,
)


def fitting(frame: Draft) -> Draft:
    """Let the weights be what the labels say, so that only what is left of a mutation is wrong."""
    labels = frame.tensors.get("target.labels")
    if labels is None or labels.dtype != "I64" or len(labels.data) % 8 or "weight" not in frame.header:
        return frame
    weight = float(len(labels.data) // 8 - labels.data.count(struct.pack("<q", -100)))
    header = {**frame.header, "weight": weight}
    if "total_weight" in header:
        header["total_weight"] = max(weight, 1.0)
    return replace(frame, header=header)


# What can be wrong with the order of frames.


def change_order(rng: random.Random, frames: list[Draft]) -> list[Draft]:
    """Leave out, repeat, swap or put in frames; change contents of one that comes again."""
    frames = list(frames)
    place, chance = rng.randrange(len(frames)), rng.random()
    if chance < 0.2:
        del frames[place]
    elif chance < 0.4:
        again = frames[place]
        frames.insert(place, rng.choice(FRAME_MUTATIONS)(rng, again) if rng.random() < 0.5 else again)
    elif chance < 0.5:
        other = rng.randrange(len(frames))
        frames[place], frames[other] = frames[other], frames[place]
    elif chance < 0.7:
        header = {**frames[place].header, "attempt": rng.choice((1, 2, 2**40, 0))}
        frames[place:place] = [replace(frames[place], header=header)]
    else:
        rows = {"rows": Entry("F32", [1, WIDTH], bytes(4 * WIDTH))}
        strangers = (
            Draft({"kind": "tied", "round": 1, "step": 1, "name": "embedding", "start": 0}, rows),
            Draft({"kind": "leave", "reason": rng.choice(("", "x\n[ERR]", "\ud800", "y" * 9000))}),
            Draft({"kind": "hello", "version": 2, "token": "", "round": 1, "cluster": 0}),
            Draft({"kind": "welcome", "version": 2, "decoder_sync": "step"}),
            Draft({"kind": "step_applied", "round": 1, "step": 1}),
            Draft({"kind": "bye"}),
        )
        frames.insert(place, rng.choice(strangers))
    return frames


def mutated(rng: random.Random, frames: list[Draft]) -> list[Draft]:
    """Make one to three things wrong with a stream."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not frames or rng.random() < 0.25:
            frames = change_order(rng, frames) if frames else [Draft({"kind": "bye"})]
        else:
            place = rng.randrange(len(frames))
            changed = rng.choice(FRAME_MUTATIONS)(rng, frames[place])
            frames = [*frames[:place], changed, *frames[place + 1 :]]
    return frames
