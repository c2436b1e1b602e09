"""The order of a control unit's examples."""

import pytest

from client_pipeline.runtime.control_unit.data_order import DataOrder


def test_every_epoch_has_each_example_once_in_another_order():
    order = DataOrder(10, 5, seed=0, cluster=0)
    epochs = [order.next_batch() + order.next_batch() for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_goes_on_with_the_next_epoch():
    order = DataOrder(7, 4, seed=0, cluster=0)
    drawn = [i for _ in range(7) for i in order.next_batch()]
    assert sorted(drawn) == sorted(list(range(7)) * 4)


def test_order_depends_on_seed_and_cluster_alone():
    def first(seed, cluster):
        return DataOrder(50, 20, seed, cluster).next_batch()

    assert first(1, 2) == first(1, 2)
    assert first(1, 2) != first(1, 3) != first(2, 2)


def test_going_on_from_the_number_drawn_gives_the_same_batches():
    order, resumed = DataOrder(10, 4, 0, 0), DataOrder(10, 4, 0, 0)
    for _ in range(4):
        order.next_batch()
    resumed.go_to(order.drawn)
    assert order.next_batch() == resumed.next_batch()


def test_fewer_examples_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match="cluster 2 has 3 training examples, fewer than batch-size = 4"):
        DataOrder(3, 4, seed=0, cluster=2)
