"""Required contents of a problem's file, and the messages about a wrong one."""

import json

import numpy as np
import pytest

from helpers.instances import instance_to_dict, random_instance
from strategies.dssda.instance_file import parse_instance, read_instance


def problem():
    return random_instance(np.random.default_rng(40), num_clusters=2, num_channels=2, num_devices=2)


def parsed(path, value):
    """The problem with another value at a place; ``...`` takes the key away."""
    raw = problem()
    place = raw
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return parse_instance(raw, "file")


DEVICE, UP = ("clusters", 1, "devices", 0), ("clusters", 0, "up")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "collapipe-instance/2", "file: format: expected 'collapipe-instance/1', found 'collapipe-ins"),
        (("m_set",), [], "file: m_set: expected a list of integers of at least 1, found \\[\\]"),
        (("m_set",), [1, 0], "file: m_set: "),
        (("m_set",), [True], "file: m_set: "),
        (("m_set",), 3, "file: m_set: "),
        (("clusters",), [], "file: clusters: expected a list of at least one cluster"),
        (("clusters",), {}, "file: clusters: expected a list"),
        (("clusters", 1), 5, r"file: clusters\[1\]: expected an object, found 5"),
        (("clusters", 1, "devices"), [], r"clusters\[1\].devices: expected a list of at least one device"),
        (("clusters", 1, "h"), [1.0], r"clusters\[1\]: h: has 1 values, B has 2; expected one for each channel"),
        (("clusters", 1, "h"), [1.0, 0.0], r"clusters\[1\]: h\[1\]: expected a number above 0, found 0.0"),
        (("clusters", 1, "I"), [-1.0, 0.0], r"clusters\[1\]: I\[0\]: expected a number of at least 0"),
        (("clusters", 1, "B"), [], r"clusters\[1\]: .: "),
        (("L",), 0, "file: L: expected an integer of at least 1, found 0"),
        (("b",), 2.0, "file: b: expected an integer of at least 1, found 2.0"),
        (("S_min",), False, "file: S_min: expected an integer"),
        (("S_max",), 0, "file: S_max: expected an integer of at least 1"),
        (("steps",), 0, "file: steps: expected an integer"),
        (("V",), -1, "file: V: expected a number of at least 0, found -1"),
        (("V",), float("nan"), "file: V: expected a finite number"),
        (("N0",), True, "file: N0: expected a finite number, found True"),
        (("gamma0",), "1", "file: gamma0: expected a finite number, found '1'"),
        (("latency",), "eq16", "file: latency: expected one of eq15, flowshop, found 'eq16'"),
        (("tail",), "all", "file: tail: expected one of none, last, found 'all'"),
        (("energy",), ..., "file: missing key 'energy'"),
        (("work", "o_f"), 0.0, "file: work: o_f: expected a number above 0"),
        (("work", "o_b"), -1.0, "file: work: o_b: expected a number of at least 0"),
        (("act", "zbits"), 1, "file: act: unknown key 'zbits'; did you mean 'z_bits'"),
        (("nothing-alike",), 1, "file: unknown key 'nothing-alike'; expected I?"),
        ((*DEVICE, "phi"), 0, r"clusters\[1\].devices\[0\]: phi: expected a number above 0"),
        ((*DEVICE, "f"), 0, "f: expected a number above 0"),
        ((*DEVICE, "p"), 0, "p: expected a number above 0"),
        ((*DEVICE, "B"), 0, "B: expected a number above 0"),
        ((*DEVICE, "h"), 0, "h: expected a number above 0"),
        ((*DEVICE, "mem"), -1, "mem: expected a number of at least 0"),
        ((*UP, "Pmax"), 0, r"clusters\[0\].up: Pmax: expected a number above 0"),
        ((*UP, "eps_max"), 0, "eps_max: expected a number above 0"),
        ((*UP, "C"), ..., r"clusters\[0\].up: missing key 'C'"),
        (("clusters", 0, "wG"), -1.0, "wG: expected a number of at least 0"),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(path, value, message):
    with pytest.raises(ValueError, match=message):
        parsed(path, value)


def test_clusters_have_the_same_channels():
    raw = problem()
    raw["clusters"][1].update(h=[1.0], I=[0.1], B=[1e6])
    with pytest.raises(ValueError, match=r"clusters\[1\].B: has 1 channels, clusters\[0\] has 2"):
        parse_instance(raw, "file")


def test_what_may_be_left_out_has_its_default():
    raw = problem()
    for key in ("steps", "S_min", "S_max", "tail"):
        del raw[key]
    del raw["work"]["t0"], raw["act"]["lat"], raw["clusters"][0]["up"]["eps_max"]
    for key in ("wS", "wS2", "wP", "wE", "wG", "skip"):
        del raw["clusters"][0][key]
    instance = parse_instance(raw, "file")
    assert (instance.steps, instance.S_min, instance.S_max, instance.tail) == (1, 1, None, "none")
    assert (instance.t0, instance.lat, instance.clusters[0].up.eps_max) == (0.0, 0.0, None)
    cluster = instance.clusters[0]
    assert (cluster.wS, cluster.wS2, cluster.wP, cluster.wE, cluster.wG, cluster.skip) == (0.0,) * 6


def test_what_may_be_zero_or_negative_may():
    for key in ("wS", "wS2", "skip"):
        assert getattr(parsed(("clusters", 0, key), -2.5).clusters[0], key) == -2.5
    for key in ("I", "mem", "Emax", "kappa"):
        assert getattr(parsed((*DEVICE, key), 0).clusters[1].devices[0], key) == 0.0
    for key in ("t_bits", "e_bits", "Emax", "C"):
        assert getattr(parsed((*UP, key), 0).clusters[0].up, key) == 0.0
    for path, value in ((("work", "weight_share"), 1), (("work", "attention_share"), 1), (("kept_keys_share",), 1)):
        assert getattr(parsed(path, value), path[-1]) == 1.0
        with pytest.raises(ValueError, match=f"{path[-1]}: expected a share from 0 to 1, found 1.01"):
            parsed(path, 1.01)
    assert parsed(("m_set",), [4, 2, 4]).m_set == (2, 4)
    assert parsed(("S_max",), 1).S_max == 1 and parsed(("steps",), 3).steps == 3


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.5], r"file: work: teb_shares: expected a list of 3 shares, one for each of the L TEBs, found \[0.5\]"),
        (0.5, "file: work: teb_shares: expected a list of 3 shares"),
        ([0.0, 1, 1], r"file: work: teb_shares\[0\]: expected a number above 0, found 0.0"),
        ([1, 1, "1"], r"file: work: teb_shares\[2\]: expected a finite number, found '1'"),
        ([1.5, 1, 1], "file: work: teb_shares: expected shares of the costliest .* at most 1, found 1.5"),
    ],
)
def test_a_teb_costs_a_part_of_the_costliest(shares, message):
    def parsed_shares(values):
        raw = problem() | {"L": 3}
        raw["work"]["teb_shares"] = values
        return parse_instance(raw, "file").teb_shares

    assert parsed_shares([1, 0.5, 0.25]) == (1.0, 0.5, 0.25)
    assert parsed_shares([1, 1, 1]) == ()
    with pytest.raises(ValueError, match=message):
        parsed_shares(shares)


def test_a_problem_survives_being_written_and_text_that_is_no_json_is_named():
    generator = np.random.default_rng(41)
    for _ in range(10):
        instance = parse_instance(random_instance(generator), "file")
        assert read_instance(json.dumps(instance_to_dict(instance)), "file") == instance
    with pytest.raises(ValueError, match="file: expected JSON, "):
        read_instance("{", "file")
