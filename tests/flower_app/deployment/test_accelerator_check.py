"""``collapipe doctor`` names the accelerators of a machine."""

import re

import pytest
import torch

from client_pipeline.runtime.stage import accelerator
from client_pipeline.runtime.stage.accelerator import AcceleratorKind
from flower_app.deployment.machine_checks import check_accelerator


@pytest.mark.parametrize(
    ("free_bytes", "found"),
    [
        ([], "none that torch .* knows: the processor computes"),
        ([2.5e9, 5e9], "meta:0 with 2.5 GB free, meta:1 with 5.0 GB free"),
    ],
)
def test_each_accelerator_is_named_with_its_free_memory_and_none_is_no_failure(free_bytes, found, monkeypatch):
    devices = [torch.device("meta", number) for number in range(len(free_bytes))]
    kind = AcceleratorKind(lambda: devices, lambda device: free_bytes[device.index], "")
    monkeypatch.setattr(accelerator, "ACCELERATOR_KINDS", {"cuda": kind})
    (finding,) = check_accelerator()
    assert (finding.check, finding.status) == ("accelerator", "ok")
    assert re.fullmatch(found, finding.found)
