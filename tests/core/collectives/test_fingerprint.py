import itertools

import pytest

from ring_plugins.core.collectives.fingerprint import (
    current_purpose,
    fingerprint,
    fingerprint_of_several,
    for_purpose,
    mismatch,
    purpose,
)


def test_the_text_says_what_the_operation_is():
    assert fingerprint("all_reduce", "float32", 3, "sum").text == "all_reduce(3 x float32, sum)"
    assert fingerprint("broadcast", "int8", (3, 2), "root 0").text == "broadcast(3 x 2 x int8, root 0)"
    assert fingerprint("all_to_all", "int8").text == "all_to_all(int8)"
    assert fingerprint("barrier").text == "barrier()"


def test_different_operations_have_different_codes_of_62_bits():
    all_of_them = [
        fingerprint(kind, dtype, count, detail)
        for kind, dtype, count, detail in itertools.product(
            ("all_reduce", "broadcast"), ("float32", "float64"), (0, 1, 10), ("sum", "average")
        )
    ]
    assert len({found.code for found in all_of_them}) == len(all_of_them)
    assert all(0 <= found.code < 1 << 62 for found in all_of_them)


def test_equal_operations_are_the_same_object():
    assert fingerprint("barrier") is fingerprint("barrier")


def test_what_an_operation_is_needed_for_tells_it_from_the_scripts_own():
    own = fingerprint("all_reduce", "float64", 1, "average")
    needed = for_purpose(own, "average of metrics")
    assert needed.code != own.code
    said = str(mismatch("ring", {0: own.text, 1: needed.text}))
    assert "but rank 1 calls average of metrics: all_reduce(1 x float64, average)." in said
    assert "different numbers of batches" in said
    with purpose("a"):
        with pytest.raises(KeyError), purpose("b"):
            raise KeyError(current_purpose.text)
        assert current_purpose.text == "a"
    assert current_purpose.text == ""


def test_a_mismatch_groups_ranks_by_what_they_call():
    said = str(mismatch("ring", {0: "barrier()", 1: "broadcast()", 2: "barrier()"}))
    assert "ranks disagree in ring: ranks 0, 2 call barrier(), but rank 1 calls broadcast()." in said


def test_several_arrays_are_listed_as_far_as_people_read_and_compared_to_the_last():
    arrays = [("float32", count) for count in range(5)]
    one = fingerprint_of_several("all_reduce", tuple(arrays), "average")
    assert one.text.startswith("all_reduce(0 x float32, 1 x float32, 2 x float32, 2 more (")
    other = fingerprint_of_several("all_reduce", (*arrays[:4], ("float32", 9)), "average")
    assert one.code != other.code
    assert one.text != other.text
    assert fingerprint_of_several("all_reduce", (("float32", 3),), "sum") == fingerprint(
        "all_reduce", "float32", 3, "sum"
    )


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        (("all_reduce(2 x float32, sum)", "all_reduce(3 x float32, sum)"), "Usually a size depends on the rank"),
        (("all_reduce(2 x float32, sum)", "all_reduce(2 x float64, sum)"), "Pass the same dtype on all ranks"),
        (("all_reduce(2 x 3 x float32, sum)", "all_reduce(2 x 3 x float32, max)"), "Pass the same op on all ranks"),
        (("broadcast(2 x int8, root 0)", "broadcast(2 x int8, root 1)"), "Pass the same root on all ranks"),
        (("broadcast_object(root 0)", "broadcast_object(root 1)"), "Pass the same root on all ranks"),
        (("all_reduce(2 x int8, sum)", "all_reduce(3 x int64, sum)"), "Usually the ranks have different numbers of"),
        (
            ("all_reduce(1 x int8, 2 more (0a), sum)", "all_reduce(1 x int8, 2 more (0b), sum)"),
            "Usually a size depends",
        ),
        (("all_reduce(1 x int8, sum)", "all_reduce(1 x int8, 2 x int8, sum)"), "Usually a size depends on the rank"),
    ],
)
def test_a_mismatch_says_what_differs(texts, cause):
    assert f" order. {cause}" in str(mismatch("ring", dict(enumerate(texts))))


def test_a_mismatch_shows_where_the_ranks_places_differ_however_deep():
    def called(*outer):
        return "\n".join(["barrier()", *(f"/a/train.py, line {line}" for line in [*range(10, 20), *outer])])

    said = str(mismatch("ring", {0: called(31, 40, 41, 42, 43), 1: called(32, 40, 41, 42, 43)}))
    assert (
        "rank 0 calls barrier() at /a/train.py, line 10, called from line 11 and line 12 and line 13 and 5 mo" in said
    )
    assert " and line 19 and line 31 and line 40 and 3 more (" in said
    assert " and line 19 and line 32 and line 40 and 3 more (" in said
