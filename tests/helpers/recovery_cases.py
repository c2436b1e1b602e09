"""One cluster with a control unit in this process and real device actors, which a test kills and stops."""

import contextlib
import os
import signal
import threading

import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.link.base import LinkError
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.control_unit import ControlUnit
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig

NUM_BLOCKS = 4
SPEC = transformer.spec(
    vocab_size=30, width=16, num_heads=2, feed_forward=32, encoder_layers=NUM_BLOCKS, decoder_layers=1, dropout=0.1
)
ADAMW = OptimizerConfig(name="adamw", lr=0.01, schedule="linear", warmup_steps=2, total_steps=20)
THREE = ClusterPlan(delta=(1, 2, 1), order=(0, 1, 2), m=4)
LOCAL_STEPS = 3


class Examples:
    """Random sentences; a batch differs with its place in the data order."""

    def __len__(self):
        return 24

    def collate(self, indices, seed=0):
        ids = torch.stack([torch.randint(3, 30, (5,), generator=torch.Generator().manual_seed(i)) for i in indices])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "labels": ids.flip(1)}


def control_unit(run, *, cluster=0, optimizer=ADAMW, spec=SPEC, runtime=None, **more):
    return ControlUnit(
        ClusterSetup(
            run=run,
            cluster=cluster,
            spec=spec,
            optimizer=optimizer,
            runtime=RuntimeConfig(**{"timeout": 120.0, **(runtime or {})}),
            seed=3,
            **{"load_data": Examples, "batch_size": 6, "local_steps": LOCAL_STEPS, **more},
        )
    )


@contextlib.contextmanager
def control_units(run, **settings):
    """Give a function that makes control units with these settings and others; all are closed in the end."""
    made = []

    def make(**more):
        made.append(control_unit(f"{run}-{len(made)}", **settings | more))
        return made[-1]

    try:
        yield make
    finally:
        for unit in made:
            unit.close()


def initial(spec=SPEC):
    return build_parts(spec, seed=1).weights()


def train(unit, weights, rounds=(1, 2), plan=THREE, **more):
    """Rounds of one cluster that trains its decoder itself; returns the weights and the rounds' results."""
    results = []
    for number in rounds:
        results.append(unit.train_round(RoundOrder(round=number, weights=weights, plan=plan, **more)))
        weights = {**weights, **results[-1].weights}
    return weights, results


def faults(results):
    return [(f["kind"], f["device"], f["round"], f["step"]) for result in results for f in result.report["faults"]]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different


def once(unit, *, round_, step, kind, micro_batch, act):
    """Have ``act`` called once, when a micro-batch arrives at the control unit."""
    faults, run_step = unit.faults, unit.pipeline.run_step
    done = []

    def watched(*arguments, progress, **others):
        def watch(event, number):
            here = (faults.round, faults.step, event, number)
            if not done and here == (round_, step, kind, micro_batch):
                done.append(here)
                act()
            progress(event, number)

        return run_step(*arguments, progress=watch, **others)

    unit.pipeline.run_step = watched
    return done


@contextlib.contextmanager
def decoder_refuses(unit):
    """Rounds whose decoder refuses the third micro-batch of a step."""
    opened = unit._open_link

    def failing(order):
        link = opened(order)
        receive = link.receive

        def broken():
            gradient = receive()
            if gradient.micro_batch == 2:
                raise LinkError("the decoder said no")
            return gradient

        link.receive = broken
        return link

    unit._open_link = failing
    try:
        yield
    finally:
        unit._open_link = opened


def kill(unit, device):
    os.kill(unit.pipeline.pool.pids[device][0], signal.SIGKILL)


def stop(unit, device):
    os.kill(unit.pipeline.pool.pids[device][0], signal.SIGSTOP)


def go_on(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def within(seconds, function, *args):
    """Result of a call that must not hang; what it raises is raised here."""
    outcome = []

    def run():
        try:
            outcome.append((function(*args), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the call hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
