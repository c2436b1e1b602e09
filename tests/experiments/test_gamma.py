"""Effect of Gamma: the injected error, the training in one process, and the comparison of ranks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from client_pipeline.system.scenario import load_scenario
from experiments import gamma
from experiments.bags_of_words import BagsOfWords, upload_error
from experiments.base.finished_runs import finished_rows
from experiments.base.results import read_rows
from experiments.curves import load_curves
from experiments.rank_correlation import rank_correlation
from experiments.reproduce import ReproduceOptions, reproduce
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def quiet(_):
    pass


@pytest.fixture(scope="module")
def planned():
    scenario = load_scenario("table2-contended")
    return next(plan_rounds(scenario, make_policy("dssda", seed=0), 1))


# What is injected.


def test_an_uploads_error_is_that_of_eq_25(planned):
    result = gamma.noise_ratios(planned.instance, planned.answer, 3.0, phi=2.0)
    assert len(result) == 4
    for n, ratio in result.items():
        part, network = planned.answer.clusters[n], planned.network
        signal = part.power_w * network.gain[n, part.channel]
        epsilon = 0.2 / (signal + network.interference_w[n, part.channel])
        assert ratio == pytest.approx(3.0 * epsilon / 4.0)


def test_the_error_that_is_added_has_the_variance_of_the_formula():
    gradient = torch.full((300, 4), 0.01, dtype=torch.float64)
    for mean_square in (0.35, 2.86):
        errors = torch.stack(
            [upload_error(gradient, mean_square, np.random.default_rng([seed, 1, 2])) for seed in range(400)]
        )
        assert float(errors.square().sum(dim=(1, 2)).mean()) == pytest.approx(mean_square, rel=0.01)
        # Every number alike, and no shift.
        assert float(errors[:, :150].square().sum(dim=(1, 2)).mean()) == pytest.approx(mean_square / 2, rel=0.02)
        assert abs(float(errors.mean())) < 4 * (mean_square / 1200 / errors.numel()) ** 0.5
    assert not upload_error(gradient, 0.0, np.random.default_rng(0)).any()


def test_the_parts_of_gamma_are_all_of_it(planned):
    settings = load_scenario("table2-contended").planner
    segments, uploads, waiting = gamma.gamma_parts(planned, settings.g0, settings.phi)
    assert segments + uploads + waiting + settings.g0 * settings.phi**2 == pytest.approx(float(planned.gamma.mean()))
    sizes = [part.choice.num_segments for part in planned.answer.clusters if part.selected]
    assert segments == pytest.approx(sum(size**2 / 12 for size in sizes) / 8)
    assert uploads == pytest.approx(sum(gamma.noise_ratios(planned.instance, planned.answer, 1.0, 1.0).values()) / 8)


# What is trained.


@pytest.fixture(scope="module")
def problem():
    [curve] = load_curves("gamma", smoke=True, only="1-v")
    return BagsOfWords(curve.config, 8, 0.0, 1e-3)


def test_the_samples_of_a_cluster_are_its_gradient_on_average_with_the_error_that_is_counted(problem):
    w = torch.randn(problem.start().shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors, means = [], []
    for n in range(8):
        drawn = torch.stack([problem.sample(w, n, np.random.default_rng([n, i])) for i in range(400)])
        means.append(drawn.mean(dim=0))
        errors.append(float((drawn - means[-1]).square().sum(dim=(1, 2)).mean()))
    assert problem.sampling_error(w) == pytest.approx(np.mean(errors), rel=0.05)
    # The mean of the clusters' gradients is that of the objective.
    probe = 1e-4 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope = problem.objective(w + probe) - problem.objective(w - probe)
    mean = torch.stack(means).mean(dim=0)
    assert slope == pytest.approx(2 * float((mean * probe).sum()), abs=0.05 * float(mean.norm() * probe.norm()))


def test_the_smoothness_bounds_the_change_of_the_gradient(problem):
    start = problem.start()
    for seed in range(3):
        probe = 0.1 * torch.randn(start.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        change = problem.objective(probe) + problem.objective(-probe) - 2 * problem.objective(start)
        assert 0 < change <= problem.smoothness * float(probe.square().sum())


def test_training_learns_and_a_cluster_too_small_is_named(problem):
    rows = list(gamma._train(problem, [dict.fromkeys(range(8), 0.0)] * 60, 1.0, 20, 0))
    assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
    assert rows[-1]["loss"] < problem.objective(problem.start()) - 0.1
    assert rows[-1]["worst_accuracy"] <= rows[-1]["accuracy"]
    [curve] = load_curves("gamma", smoke=True, only="1-v", sets=["batch-size=300"])
    with pytest.raises(ValueError, match="cluster 0 has 200 examples to train on, fewer than batch-size = 300"):
        BagsOfWords(curve.config, 8, 0.0, 1e-3)


# What is kept.


def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    [curve] = load_curves("gamma", smoke=True, only="1-v")

    def make():
        yield {"round": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finished_rows(tmp_path / "a.json", curve, curve.config, make, quiet)
    assert not (tmp_path / "a.json").exists()


# How ranks are compared.


def test_the_rank_correlation_is_spearmans_and_its_chance_that_of_all_orders():
    rng = np.random.default_rng(0)
    groups = [(rng.normal(size=4), rng.normal(size=4)) for _ in range(2)]
    groups[1][1][0] = groups[1][1][1]
    result, p = rank_correlation(groups)
    assert result == pytest.approx(np.mean([spearmanr(x, y).statistic for x, y in groups]))
    orders = [
        np.mean([spearmanr(x, np.array(y)[list(order)]).statistic for (x, y), order in zip(groups, both, strict=True)])
        for both in itertools.product(itertools.permutations(range(4)), repeat=2)
    ]
    assert p == pytest.approx(np.mean(np.abs(orders) >= abs(result) - 1e-6))


@pytest.mark.slow
def test_gamma_is_told_again_from_its_rows(tmp_path):
    options = ReproduceOptions(out=tmp_path, smoke=True, only="1-v", sets=["num-rounds=4"])
    result = reproduce("gamma", options, quiet)["gamma"]
    folder = tmp_path / "gamma"
    rows = read_rows(folder)
    assert [(row["round"], row["seed"]) for row in rows] == [(4, 0)] * 6
    (folder / "figure.png").unlink()
    # The run is kept: nothing is trained again.
    kept = (folder / "runs" / "1-v0.01-seed0.json").stat().st_mtime_ns
    assert reproduce("gamma", options, quiet)["gamma"] == result
    assert (folder / "runs" / "1-v0.01-seed0.json").stat().st_mtime_ns == kept
    assert reproduce("gamma", replace(options, plot_only=True), quiet)["gamma"] == result
