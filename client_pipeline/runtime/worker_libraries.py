"""What the workers of Ray need imported, in a process that they are forks of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from client_pipeline.quick_imports import quick_import

_NEEDED = ("numpy", "torch", "safetensors.torch", "grpc_health.v1.health", "requests", "jsonschema", "yaml")
"""What our actors need, and Ray, which itself no such process may import: what a worker is it reads then."""


@contextlib.contextmanager
def fit_to_fork() -> Iterator[None]:
    """Import within what forks are to have, unless the environment says how."""
    # Neither for numbers that this process computes, nor for threads that a fork would not have; and no fork could use
    # an accelerator that this process had begun to use to see whether it is there.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK")
    added = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def import_libraries(modules: Sequence[str]) -> None:
    """Import the libraries that workers need, and ``modules`` of others that a model needs."""
    with fit_to_fork():
        for module in (*_NEEDED, *modules):
            # What cannot be imported is for the worker to say that needs it.
            with contextlib.suppress(Exception):
                if module.startswith("transformers."):
                    from client_pipeline.partition.hugging_face import import_models_library

                    import_models_library()
                quick_import(module)
