"""Attributes of one instance are replaced and come back."""

import pytest

from ring_plugins.keras.patches import Patch, replaced


class Owner:
    kind = "of the class"

    def method(self):
        return "original"

    def __setattr__(self, name, value):
        raise AssertionError("tracked")


def test_a_patch_replaces_on_the_instance_only_and_knows_what_was_there():
    owner, other = Owner(), Owner()
    patch = Patch(owner, method=lambda: "replaced", new=1)
    assert (owner.method(), owner.new, other.method()) == ("replaced", 1, "original")
    assert patch.before["method"]() == "original" and patch.before["new"] is None
    patch.restore()
    assert owner.method() == "original" and vars(owner) == {}


def test_what_the_instance_had_itself_comes_back_also_after_an_exception():
    owner = Owner()
    vars(owner)["kind"] = "its own"

    def fail():
        with replaced(owner, kind="inner") as before:
            assert (owner.kind, before) == ("inner", {"kind": "its own"})
            with replaced(owner, kind="innermost"):
                assert owner.kind == "innermost"
            assert owner.kind == "inner"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert vars(owner) == {"kind": "its own"}
