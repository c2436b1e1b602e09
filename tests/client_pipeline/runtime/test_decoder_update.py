"""The decoder's trainer: what it collects of each cluster, and the step that it takes with all of it."""

import pytest
import torch
from torch import nn

from client_pipeline.partition.micro_batches import StepId
from client_pipeline.runtime.decoder_update import Contribution, HeadTrainer, check_tied
from client_pipeline.runtime.optimizer_config import OptimizerConfig

SGD = OptimizerConfig(name="sgd", lr=0.5)
MASK_BT = torch.ones(2, 3, dtype=torch.bool)


class Linear(nn.Module):
    """A head whose loss is the sum of x w + c, so that each gradient can be written down."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.c = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x_BTD, mask_BT, targets):
        return (x_BTD * self.w).sum() + self.c * mask_BT.sum()


def step(cluster=0, number=1):
    return StepId(seed=0, round=1, step=number, cluster=cluster)


def trainer():
    return HeadTrainer(Linear(), SGD, unit=4)


def collect(made, cluster, value, total_weight=4.0, micro_batch=0):
    x_BTD = torch.full((2, 3, 2), value)
    return made.gradient(step(cluster), micro_batch, x_BTD, MASK_BT, {}, total_weight)


def test_the_gradient_is_of_the_sum_over_the_whole_steps_weight():
    gradient, loss_sum = collect(trainer(), 0, 2.0)
    assert loss_sum == 6 * (2.0 - 4.0) + 0.5 * 6
    assert torch.equal(gradient, torch.tensor([1.0, -2.0]).expand(2, 3, 2) / 4.0)


def test_micro_batches_of_a_cluster_add_up_and_clusters_are_apart():
    made = trainer()
    for micro_batch, value in enumerate((1.0, 2.0)):
        collect(made, 0, value, micro_batch=micro_batch)
    collect(made, 7, 10.0)
    found = made.gradients(0)
    assert torch.equal(found["w"], torch.tensor([18.0, 18.0]) / 4.0) and float(found["c"]) == 12 / 4.0
    assert torch.equal(found["unused"], torch.zeros(2))
    assert torch.equal(made.gradients(7)["w"], torch.tensor([60.0, 60.0]) / 4.0)
    # They are copies.
    found["w"].zero_()
    assert float(made.gradients(0)["w"].sum()) == 9.0


def test_the_norm_is_that_of_all_that_was_collected_of_a_cluster():
    made = trainer()
    assert made.gradient_norm_sq(0) == 0.0
    collect(made, 0, 2.0)
    assert made.gradient_norm_sq(0) == pytest.approx(3.0**2 + 3.0**2 + 1.5**2)
    assert made.gradient_norm_sq(1) == 0.0


def test_a_step_weighs_clusters_and_clips_each_by_its_own_factor():
    made = trainer()
    collect(made, 0, 2.0)
    collect(made, 1, 4.0)
    before = {name: p.detach().clone() for name, p in made.parameters.items()}
    made.apply([Contribution(cluster=1, weight=1.0, scale=0.5), Contribution(cluster=0, weight=3.0)], 1)
    # Eq. (7): (3 * 3 + 1 * 0.5 * 6) / 4 of each entry of w, (3 * 1.5 + 1 * 0.5 * 1.5) / 4 of c.
    assert torch.allclose(made.parameters["w"], before["w"] - 0.5 * (9.0 + 3.0) / 4)
    assert torch.allclose(made.parameters["c"], before["c"] - 0.5 * (4.5 + 0.75) / 4)
    # What was collected is used once, and no gradient stays.
    assert made.gradient_norm_sq(0) == 0.0 and made.optimizer.gradient_norm_sq() == 0.0


def test_a_cluster_that_sent_nothing_counts_with_its_weight():
    made = trainer()
    collect(made, 0, 2.0)
    made.apply([Contribution(cluster=0, weight=1.0), Contribution(cluster=5, weight=1.0)], 1)
    assert torch.allclose(made.parameters["w"].detach(), torch.tensor([1.0, -2.0]) - 0.5 * 3.0 / 2)


@pytest.mark.parametrize("contributions", [[], [Contribution(cluster=0, weight=0.0)]])
def test_a_step_that_nobody_contributes_to_is_refused_and_changes_nothing(contributions):
    made = trainer()
    collect(made, 0, 2.0)
    with pytest.raises(ValueError, match="at least one contribution with a positive weight"):
        made.apply(contributions, 1)
    assert torch.equal(made.parameters["w"], torch.tensor([1.0, -2.0]))
    assert made.gradient_norm_sq(0) > 0


def test_a_step_that_is_dropped_is_forgotten_for_its_cluster_alone():
    made = trainer()
    collect(made, 0, 2.0)
    collect(made, 1, 2.0)
    made.discard(0)
    made.discard(3)
    assert made.gradient_norm_sq(0) == 0.0 and made.gradient_norm_sq(1) > 0


def test_a_copy_goes_its_own_way():
    made = trainer()
    other = made.copy()
    collect(other, 0, 2.0)
    other.apply([Contribution(cluster=0, weight=1.0)], 1)
    assert torch.equal(made.parameters["w"], torch.tensor([1.0, -2.0]))
    assert not torch.equal(other.parameters["w"], made.parameters["w"])


def test_tied_matrices_are_those_that_the_head_reads():
    expected = {"out": torch.Size([3, 2]), "more": torch.Size([1])}
    good = {"out": torch.zeros(3, 2), "more": torch.zeros(1)}
    check_tied(expected, good)
    check_tied({}, {})
    with pytest.raises(ValueError, match="tied matrix more: missing; expected .*'more', 'out'.*found .'out'"):
        check_tied(expected, {"out": good["out"]})
    with pytest.raises(ValueError, match="tied matrix other: not one of this head's"):
        check_tied(expected, good | {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"tied matrix out: expected shape \[3, 2\], found \[2, 3\]"):
        check_tied(expected, good | {"out": torch.zeros(2, 3)})


def test_micro_batches_and_the_step_make_no_second_gradient_of_the_head():
    made = trainer()
    collect(made, 0, 1.0)
    places = [gradient.data_ptr() for gradient in made._collected[0]]
    collect(made, 0, 2.0, micro_batch=1)
    assert [gradient.data_ptr() for gradient in made._collected[0]] == places
    assert all(parameter.grad is None for parameter in made.parameters.values())
    applied = []
    made.optimizer.apply = lambda number: applied.extend(p.grad.data_ptr() for p in made.parameters.values())
    made.apply([Contribution(cluster=0, weight=3.0)], 1)
    assert applied == places


def test_a_backward_pass_that_fails_leaves_no_gradient_behind():
    made = trainer()
    collect(made, 0, 1.0)
    made.parameters["w"].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collect(made, 0, 2.0, micro_batch=1)
    assert all(parameter.grad is None for parameter in made.parameters.values())
    assert made.gradient_norm_sq(0) == 0.0
