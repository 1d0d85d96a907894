import numpy as np

from fedloom.streams import key, stream, streams_of, torch_seed


def test_a_stream_depends_on_its_names_only():
    stream(0, "a", 1).random(100)
    assert np.array_equal(stream(0, "a", 1).random(3), stream(0, "a", 1).random(3))
    names = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", "1"), (0, "a", 1, 0)]
    assert len({key(*n) for n in names}) == len(names)
    assert key(0, np.int64(3)) == key(0, 3)


def test_streams_are_the_same_on_every_machine():
    """Frozen numbers: a change here changes every result ever published with fedloom."""
    assert stream(0, "participants", 1).integers(0, 1000, 4).tolist() == [940, 332, 476, 724]
    assert torch_seed(0, "model") == 2270954609273582428


def test_the_streams_of_a_round_are_its_own_but_for_those_of_round_zero():
    for purpose in (("graph",), ("waypoint", 3)):
        first, second = (streams_of(0, t)(*purpose).random() for t in (1, 2))
        assert first == stream(0, *purpose, 1).random()
        assert first != second
        same = {streams_of(0, t)(*purpose, round=0).random() for t in (1, 2)}
        assert same == {stream(0, *purpose, 0).random()}
