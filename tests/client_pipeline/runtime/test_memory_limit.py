"""A device whose memory is a hard limit: what it says when it needs more, and what is refused before."""

import subprocess
import sys
from dataclasses import replace

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.round_order import RoundOrder
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.ray.arrangement import arrange
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.transport.faults import FailedRound
from client_pipeline.system.costs import model_costs
from client_pipeline.system.scenario import load_scenario
from flower_app.training.memory_limit import check_memory_limit
from helpers.federated_rounds import PLANS, control_units
from helpers.recovery_cases import ADAMW
from helpers.repository import ROOT
from helpers.tiny_models import tiny_batch, tiny_spec

MB = 1e6
LIMITED = RuntimeConfig(memory_limit="scenario")

SCRIPT = """
import os
import sys
import torch
from client_pipeline.runtime.stage.memory import is_out_of_memory, limit_private_memory

for limit in sys.argv[1:]:
    # Each limit is another process's, which has torch already.
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        continue
    if not limit_private_memory(float(limit)):
        print("none", flush=True)
        os._exit(0)
    kept = []
    try:
        for _ in range(64):
            kept.append(torch.zeros(1 << 22))  # 16 MiB
    except RuntimeError as error:
        assert is_out_of_memory(error), error
    print(len(kept), flush=True)
    os._exit(0)
"""


def tensors_of_16_mib(*limits):
    """Return how many of them a process holds under each limit."""
    command = [sys.executable, "-c", SCRIPT, *map(str, limits)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    if "none" in out:
        pytest.skip("the system keeps no limit")
    return [int(count) for count in out]


@pytest.mark.slow
def test_a_process_gets_its_memory_and_what_stacks_may_take_and_no_more():
    large, small = tensors_of_16_mib(20 * (1 << 24), 2 * (1 << 24))
    # 320 MiB are 20 of them, 64 MiB of stacks 4; what the process had before does not count.
    assert 18 <= large <= 25
    assert small <= 7


@pytest.mark.slow
def test_thirty_threads_more_take_no_more_than_what_is_allowed_for_their_stacks():
    script = """
import threading
from client_pipeline.runtime.stage.memory import STACKS_BYTES, limit_private_memory, private_bytes
if not limit_private_memory(1e9):
    print("none")
    raise SystemExit
before, end = private_bytes(), threading.Event()
threads = [threading.Thread(target=end.wait) for _ in range(30)]
for thread in threads:
    thread.start()
print(private_bytes() - before, STACKS_BYTES)
end.set()
"""
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    if "none" in out.stdout:
        pytest.skip("the system keeps no limit")
    taken, allowed = map(int, out.stdout.split())
    # Eight megabytes each by default.
    assert taken <= allowed


@pytest.mark.slow
def test_a_device_that_needs_more_than_its_limit_is_named_with_what_it_holds(local_ray):
    spec = tiny_spec("bert", "token-classification", dropout=0.0)
    wide = replace(spec, config=spec.config | {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4})
    batch = tiny_batch(wide, size=256, length=30)
    # The second device of the plan, 0, holds three TEBs and 256 sentences; the first has room enough.
    placement = Placement(device_memory=(40 * MB, 4000 * MB, 4000 * MB))
    weights = build_parts(wide, seed=1).weights()
    (unit,) = control_units([batch], ADAMW, "limited", spec=wide, placement=placement)
    try:
        with pytest.raises(FailedRound, match=r"device 0: .*more than its 40 MB of memory \(runtime.memory-limit\)"):
            unit.train_round(RoundOrder(round=1, weights=weights, plan=PLANS[0]))
    finally:
        unit.close()


def test_a_limit_gives_every_device_a_process_of_its_own_or_is_refused():
    arrangement, why = arrange(LIMITED, FaultConfig(), paced=False, num_devices=[4, 4], cores=2)
    assert not arrangement.device_actors and "each has a limit of its memory" in why
    with pytest.raises(ValueError, match="runtime.devices-per-actor = 2: runtime.memory-limit = scenario"):
        arrange(replace(LIMITED, devices_per_actor=2), FaultConfig(), paced=False, num_devices=[4], cores=2)
    with pytest.raises(ValueError, match="runtime.memory-limit: expected one of none, scenario, found 'cgroup'"):
        RuntimeConfig(memory_limit="cgroup")


def test_what_does_not_fit_is_refused_with_the_numbers():
    spec = replace(tiny_spec("llama"), lora=LoraConfig(rank=2))
    scenario = load_scenario("two-clusters")
    settings = replace(scenario.planner, num_blocks=5, batch_size=8)
    costs = model_costs(spec, sequence_length=16, batch_size=8)
    network = replace(scenario, planner=settings, costs=costs)
    check_memory_limit("scenario", "model", network)
    least = costs.block_memory + costs.device_memory
    poor = tuple(tuple(replace(d, memory=least if i < 4 else 0.0) for i, d in enumerate(c)) for c in network.clusters)
    with pytest.raises(ValueError, match=r"cluster 0: its devices of .* MB hold 4 of the model's 5 TEBs: a TEB needs"):
        check_memory_limit("scenario", "model", replace(network, clusters=poor))
    check_memory_limit("none", "scenario", replace(network, clusters=poor))
    with pytest.raises(ValueError, match='runtime.memory-limit: scenario .* expected costs = "model", found'):
        check_memory_limit("scenario", "measured", network)
    # Before the model is there nobody knows what it needs.
    check_memory_limit("scenario", "model", scenario)


def test_devices_that_recompute_or_have_another_schedule_need_room_for_one_micro_batch():
    spec = replace(tiny_spec("llama"), lora=LoraConfig(rank=2))
    scenario = load_scenario("two-clusters")
    costs = {again: model_costs(spec, sequence_length=16, batch_size=8, recompute=again) for again in (False, True)}
    memory = costs[True].memory
    settings = replace(scenario.planner, num_blocks=5, batch_size=8, max_micro_batches=4)
    # One TEB a device, with the activations of two of eight examples.
    room = memory.block_memory(2) + memory.least_device_memory(8, 2)

    def network(again, room):
        clusters = tuple(tuple(replace(d, memory=room) for d in devices[:5]) for devices in scenario.clusters)
        return replace(scenario, planner=settings, costs=costs[again], clusters=clusters)

    check_memory_limit("scenario", "model", network(True, room))
    check_memory_limit("scenario", "model", network(False, room), "1f1b")
    with pytest.raises(ValueError, match=r"activations of 8 examples: as GPipe keeps them.* set runtime.recompute"):
        check_memory_limit("scenario", "model", network(False, room))
    with pytest.raises(ValueError, match="activations of 2 examples: one micro-batch of 4, computed again"):
        check_memory_limit("scenario", "model", network(True, room - 1))
