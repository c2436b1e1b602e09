"""Devices on machines without the model's files: each gets the frozen weights of its own TEBs, and no others."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices import device_pool
from client_pipeline.runtime.devices.block_moves import BlockPlacement
from client_pipeline.runtime.devices.device import DeviceActor
from client_pipeline.runtime.devices.device_pool import DevicePool
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.weights.base_weights import cut_part
from helpers.thread_ray import run_in_threads
from helpers.tiny_models import tiny_spec

ON_MACHINES = Placement(ray_address="127.0.0.1:1", num_devices=2)


@pytest.fixture
def model(tmp_path):
    """A specification with adapters, and the frozen weights in the files of the control unit's machine."""
    spec = tiny_spec("llama", "causal-lm", dropout=0.0)
    build_parts(spec, seed=3).reference.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    _, weights = load_pretrained_weights(str(tmp_path / "model"), "causal-lm", server_layers=2)
    return replace(spec, lora=LoraConfig(rank=2), base_dtype="int8"), weights.base


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give devices with a cache in the home of their user."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".collapipe" / "weights"


@pytest.fixture
def devices(monkeypatch):
    """Devices by their number, whose machines do not have the control unit's folder."""
    run_in_threads(monkeypatch)
    made = []

    class FarDevice(DeviceActor):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.parts = []
            made.append(self)

        def has_files(self, base):
            return base.source.startswith("~") and super().has_files(base)

        def keep_part(self, content):
            self.parts.append(content)
            super().keep_part(content)

    monkeypatch.setattr(device_pool, "DeviceActor", FarDevice)
    return made


def placement_of(spec, base, placement=ON_MACHINES):
    pool = DevicePool("cut", spec, OptimizerConfig(name="sgd"), RuntimeConfig(timeout=240.0), placement)
    return pool, BlockPlacement(pool, base)


def segments(*blocks):
    order = tuple(device for device, count in enumerate(blocks) if count)
    return ClusterPlan(delta=blocks, order=order, m=1).segments()


def names_in(content, path):
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_a_device_gets_the_files_of_its_own_tebs_and_no_other(model, cache, devices, tmp_path):
    spec, base = model
    pool, placement = placement_of(spec, base)
    try:
        placement.place(segments(2, 3))
        # They start at the same time, in any order.
        devices.sort(key=lambda device: min(device.stage.blocks))
        assert [len(device.parts) for device in devices] == [2, 3]
        contents = [content for device in devices for content in device.parts]
        assert len(set(contents)) == 5 == len(list(cache.iterdir()))
        for index, content in enumerate(contents):
            assert names_in(content, tmp_path / "part") == set(base.part(f"blocks.{index}."))
            # As the file has them, not as they are used.
            assert len(content) < 2.5 * sum(value.numel() for value in base.part(f"blocks.{index}.").values())
        for device in devices:
            for index, block in device.stage.blocks.items():
                expected = base.part(f"blocks.{index}.")
                assert all(
                    torch.equal(p, expected[name.replace(".base_layer", "")]) for name, p in block.frozen.items()
                )
        # After a step, another plan: what a device has not had comes, the rest is there; here both have one home.
        (cache / cut_part(base.part("blocks.2.")).base.files[0].name).unlink()
        answers = {device: pool[device].apply.options(num_returns=2).remote(1, 1.0, True) for device in (0, 1)}
        placement.stepped(1)
        placement.commit(segments(2, 3), {device: copies for device, (_, copies) in answers.items()}, 0)
        placement.place(segments(3, 2))
        assert [len(device.parts) for device in devices] == [3, 3]
        assert [sorted(device.stage.blocks) for device in devices] == [[0, 1, 2], [3, 4]]
        assert devices[0].stage.blocks[2].version == 1
        assert placement.committed == 1
    finally:
        pool.close()


def test_a_device_that_starts_again_has_its_parts(model, cache, devices):
    spec, base = model
    for _ in range(2):
        pool, placement = placement_of(spec, base)
        try:
            placement.place(segments(2, 3))
        finally:
            pool.close()
    # The two of each start at the same time, in any order.
    assert sorted(len(device.parts) for device in devices[:2]) == [2, 3]
    assert [len(device.parts) for device in devices[2:]] == [0, 0]


def test_devices_of_the_control_units_machine_map_its_files(model, cache, devices):
    spec, base = model
    pool, placement = placement_of(spec, base, Placement())
    try:
        placement.place(segments(2, 3))
        assert [len(device.parts) for device in devices] == [0, 0] and not cache.exists()
    finally:
        pool.close()
