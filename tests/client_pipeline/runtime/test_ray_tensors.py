"""Tensors cross Ray as arrays: the same numbers in memory of their own, whatever kind of tensor it is."""

import pytest
import ray
import torch
from ray import cloudpickle
from torch.nn import Parameter

from client_pipeline.runtime.ray.ray_tensors import send_tensors_as_arrays
from client_pipeline.runtime.stage.moved_block import MovedBlock

KINDS = {
    "float32": torch.randn(3, 4),
    "no dimension": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).T,
    "a part of a larger one": torch.randn(6, 6)[1:3, ::2],
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "bool": torch.tensor([True, False]),
    "int8": torch.tensor([-3, 4], dtype=torch.int8),
    "with a gradient": torch.randn(2, 2).requires_grad_(),
    "sparse": torch.eye(3).to_sparse(),
    "a parameter": Parameter(torch.randn(2)),
}


@pytest.fixture(autouse=True)
def registered(local_ray):
    send_tensors_as_arrays()
    yield
    ray.util.deregister_serializer(torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_the_same_behind_ray_and_can_be_written_to(kind):
    sent = KINDS[kind]
    (came,) = ray.get(ray.put([sent]))
    assert type(came) is type(sent) and came.dtype == sent.dtype and came.requires_grad == sent.requires_grad
    assert torch.equal(came.to_dense(), sent.to_dense())
    if sent.layout is torch.strided and sent.is_contiguous() and sent.numel():
        assert came.stride() == sent.stride()
    with torch.no_grad():
        came.zero_()
    assert torch.count_nonzero(came.to_dense()) == 0


def test_what_is_in_a_tuple_of_ours_is_sent_so_too():
    moved = MovedBlock(weights={"w": torch.ones(2)})
    pickled = cloudpickle.dumps(moved)
    assert b"_from_wire" in pickled
    assert torch.equal(cloudpickle.loads(pickled).weights["w"], torch.ones(2))
