from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients.arrival import ArrivalOrder

ALONE = SingleCommunicator("alone")


def test_an_order_is_known_once_all_its_positions_were_among_those_learned():
    order = ArrivalOrder()
    assert order.of([0, 1]) is None
    assert order.learn([0, 1, 2], [1, 2, 0], ALONE)
    assert order.of([0, 1, 2]) == [1, 2, 0]
    assert order.of([0, 2]) == [2, 0]
    assert order.of([0, 3]) is None
    assert order.of([]) == []


def test_gradients_that_did_not_come_are_last_and_strangers_do_not_count():
    order = ArrivalOrder()
    assert order.learn([0, 1, 2, 3], [9, 2, 2, 0, 2], ALONE)
    assert order.of([0, 1, 2, 3]) == [2, 0, 3, 1]


def test_a_backward_without_gradients_teaches_nothing():
    order = ArrivalOrder()
    assert not order.learn([0, 1], [], ALONE)
    assert order.of([0, 1]) is None


def test_another_set_is_learned_without_forgetting_the_first():
    order = ArrivalOrder()
    order.learn([0, 1], [0, 1], ALONE)
    order.learn([1, 2], [2, 1], ALONE)
    assert order.of([0, 1, 2]) == [2, 1, 0]


def test_rank_0_decides():
    class SecondRank(SingleCommunicator):
        def broadcast_object(self, item, root=0, purpose=""):
            assert item is None
            return [1, 0]

    order, second = ArrivalOrder(), SecondRank("two")
    second.rank = 1
    assert order.learn([0, 1, 2], [2, 1, 0], second)
    assert order.of([0, 1, 2]) == [1, 0, 2]
