"""A second device: its tensors lie apart from the host's, and the processor computes them all the same.

torch keeps a place for a device of somebody's own. A tensor there wraps one of the host, and an operation over tensors
of both is refused, as a GPU's is. So what passes on it has moved each tensor that a GPU would need moved.
"""

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from client_pipeline.runtime.stage import accelerator

NAME = "apart"
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_MATH_ATTENTION = 0
"""torch's number for attention that is computed by plain products: a processor's own kernel is not another device's."""


def _mapped(convert, value):
    """Convert what is in tuples and lists, as operations have them; torch's own way for any tree takes longer."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(convert, each) for each in value)
    return convert(value)


class ApartTensor(torch.Tensor):
    """A tensor of the second device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner):
        self.inner = inner

    def untyped_storage(self):
        """Return the storage of the numbers."""
        return self.inner.untyped_storage()

    def __repr__(self):
        return f"ApartTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._fused_sdp_choice.default:
            return _MATH_ATTENTION

        def inner(value):
            if isinstance(value, ApartTensor):
                return value.inner
            if isinstance(value, torch.Tensor) and value.dim() and func not in _COPIES:
                raise RuntimeError(
                    f"{func}: expected all tensors on {NAME}, found one of {list(value.shape)} on the host"
                )
            return torch.device("cpu") if isinstance(value, torch.device) else value

        result = func(*_mapped(inner, args), **{name: _mapped(inner, value) for name, value in kwargs.items()})
        goes_to_host = torch.device(kwargs.get("device") or NAME).type == "cpu"
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], ApartTensor):
            return args[0]
        if func is torch.ops.aten._to_copy.default and goes_to_host:
            return result
        wrapped = _mapped(lambda value: ApartTensor(value) if isinstance(value, torch.Tensor) else value, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return ApartTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return ApartTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _registered():
    """Tell torch of the device, once for each process."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


_LIBRARY = _registered()
"""Registration of the device; it ends with this object."""


@pytest.fixture
def apart_device(monkeypatch):
    """Have ``runtime.accelerator = "cuda"`` mean the second device, of 100 free bytes; gives that device."""
    device = torch.device(NAME, 0)
    kind = accelerator.AcceleratorKind(lambda: [device], lambda _: 100.0, "it is always there")
    monkeypatch.setitem(accelerator.ACCELERATOR_KINDS, "cuda", kind)
    # Parameters keep their identity when their module moves, as they do on their way to a GPU.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield device
    torch.__future__.set_swap_module_params_on_conversion(before)
