"""When weights are compared after the ranks of a job have changed."""

from types import SimpleNamespace

import pytest
from torch import nn

from ring_plugins.core.base.errors import DriftError
from ring_plugins.torch import recovery


def test_weights_are_compared_in_the_pass_after_a_change_and_behind_the_first_update(monkeypatch):
    elastic, compared, told = SimpleNamespace(view=0, tell_changes=lambda: told.append(1)), [], []
    monkeypatch.setattr(recovery, "current", lambda: SimpleNamespace(elastic=elastic))
    monkeypatch.setattr(recovery, "differing_weights", lambda *_: compared.append(elastic.view) or outcome)
    check, outcome = recovery.RecoveryCheck(None, None), ""
    named = list(nn.Linear(1, 1).named_parameters())

    def passes(number):
        compared.clear()
        for _ in range(number):
            check.after_pass(named)
        return list(compared)

    assert passes(2) == []
    elastic.view = 1
    assert passes(4) == [1, 1]
    elastic.view = 2
    assert passes(1) == [2]
    elastic.view = 3  # before the second comparison, which is put off
    assert passes(4) == [3, 3] and told
    elastic.view, outcome = 4, "they differ."
    with pytest.raises(DriftError, match=r"they differ\. Continue from a checkpoint"):
        passes(1)
