"""`horovod.tensorflow.util`: what Horovod's scripts and tests use of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - Horovod's name
    """References to variables, by which dictionaries find them; a tuple for each list."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of `vars_to_refs`; a list for each tuple."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()
