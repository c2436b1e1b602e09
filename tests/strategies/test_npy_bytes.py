"""The bytes of arrays: read as numpy reads them, and by no parser that two threads must not use at once."""

import io

import numpy as np
import pytest
from flwr.app import Array

from strategies.npy_bytes import array_values, npy_layout, values_in_place


def npy(values, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, values, version=version)
    return file.getvalue()


def held(content, values):
    return Array(str(values.dtype), values.shape, "numpy.ndarray", content)


VALUES = {
    "of no dimension": np.asarray(3.5, np.float32),
    "of one": np.arange(5, dtype=np.int8),
    "of three": np.arange(24, dtype=np.float64).reshape(2, 3, 4),
    "by columns": np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
    "empty": np.zeros((0, 4), np.int64),
    "of truth values": np.asarray([True, False]),
    "complex": np.asarray([1 + 2j], np.complex64),
}


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_values_are_those_that_numpy_reads(values, version):
    content = npy(values, version)
    layout = npy_layout(content)
    assert (layout.kind, layout.shape, layout.num_bytes) == (values.dtype, values.shape, len(content))
    for read in (array_values, values_in_place):
        result = read(held(content, values))
        np.testing.assert_array_equal(result, np.load(io.BytesIO(content), allow_pickle=False), strict=True)
        assert result.flags.f_contiguous == values.flags.f_contiguous


def test_values_are_the_callers_own_and_those_in_place_cannot_be_written():
    array = Array(np.zeros(3, np.float32))
    array_values(array)[:] = 1
    assert not array_values(array).any()
    with pytest.raises(ValueError, match="read-only"):
        values_in_place(array)[:] = 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        npy(np.zeros(3))[:100],
        npy(np.zeros(3)).replace(b"'<f8'", b"'|O' "),
        npy(np.zeros(3)).replace(b"'<f8'", b"'<x9'"),
        npy(np.zeros(3)).replace(b"(3,)", b"f(),"),
        npy(np.zeros(3)).replace(b"\x93NUMPY\x01", b"\x93NUMPY\x02"),
    ],
    ids=["none", "magic alone", "cut", "objects", "unknown type", "a call", "another version"],
)
def test_what_is_no_head_is_refused(content):
    with pytest.raises(ValueError, match=r"header of (a|the) \.npy file"):
        npy_layout(content)


@pytest.mark.parametrize("content", [npy(np.zeros(3))[:-1], npy(np.zeros(3)) + b"x"], ids=["short", "long"])
def test_a_file_of_another_length_is_refused(content):
    with pytest.raises(ValueError, match=r"expected a \.npy file of 152 bytes"):
        array_values(held(content, np.zeros(3)))
