import itertools

from ring_plugins.core.collectives.fingerprint import fingerprint, fingerprint_of_several, mismatch


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
