"""What private names of Keras are taken for: a version of Keras that changes one fails here, not in somebody's fit."""

import ast

import pytest

from tests.keras.launches import BACKENDS, environment
from tests.launch import run_ranks

SCRIPT = """
import tempfile
import keras
import numpy as np
from tests.worker import report

x = np.ones((8, 3), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
model.compile(optimizer, "mse", metrics=[keras.metrics.MeanMetricWrapper(lambda y, p: y - p)])
seen = {"initial epoch at first": model._initial_epoch}
read, calls = model._get_metrics_result_or_logs, []
vars(model)["_get_metrics_result_or_logs"] = lambda logs: calls.append(1) or read(logs)
epochs = []
note = keras.callbacks.LambdaCallback(
    on_train_begin=lambda logs: epochs.append(model._initial_epoch),
    on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
)
options = {"batch_size": 2, "initial_epoch": 2, "epochs": 3, "verbose": 0, "validation_data": (x, x[:, :1])}
model.fit(x, x[:, :1], callbacks=[note], **options)
# Only BackupAndRestore sets it: the first epoch is what on_epoch_begin gets.
seen["initial epoch in fit"] = epochs
seen["metrics are read"] = len(calls)  # at the end of the epoch and of the validation
seen["batches and updates"] = [int(optimizer._iterations), int(optimizer.iterations)]
trained, sums = model.trainable_variables, optimizer._accumulated_gradients
seen["trained"] = [one is other for one, other in zip(optimizer._trainable_variables, trained, strict=True)]
seen["places"] = [optimizer._trainable_variables_indices[optimizer._var_key(one)] for one in trained]
seen["sums"] = [tuple(one.shape) == tuple(other.shape) for one, other in zip(sums, trained, strict=True)]
seen["rate"] = isinstance(optimizer._learning_rate, keras.Variable)
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
seen["schedule"] = keras.optimizers.SGD(schedule)._learning_rate is schedule
given = keras.tree.flatten([model._compile_metrics._user_metrics, model._compile_metrics._user_weighted_metrics])
seen["metrics given"] = [type(one).__name__ for one in given if one is not None]
seen["layers"] = sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())
seen["moments"] = callable(model.layers[1]._moments)
callbacks = keras.callbacks.CallbackList([keras.callbacks.Callback()], model=model)
seen["calls in a thread"] = isinstance(callbacks._async_train, bool)
seen["layers begin with the model"] = next(iter(model._flatten_layers())) is model
seen["places of variables"] = [optimizer._get_variable_index(one) for one in trained]
decaying = keras.optimizers.AdamW(0.1)
decaying.exclude_from_weight_decay(var_names=["bias"])
decaying.build(trained)
seen["decays"] = [decaying._use_weight_decay(one) for one in trained[:2]]
keys = [decaying._var_key(variable) for variable in trained[:2]]
seen["decisions are kept by"] = [*decaying._exclude_from_weight_decay_cache] == keys
seen["rate of a step"] = float(optimizer._get_current_learning_rate()) == float(optimizer.learning_rate)
names = {
    keras.callbacks.ModelCheckpoint: ["_save_model"], keras.callbacks.BackupAndRestore: ["_load_model", "_save_model"],
    keras.callbacks.TensorBoard: ["_close_writers"], keras.callbacks.ProgbarLogger: ["_maybe_init_progbar"],
}
saving = keras.callbacks.BackupAndRestore(tempfile.mkdtemp(), save_freq=3)
kept = ["_weights_path", "_prev_weights_path", "_training_metadata_path", "_prev_training_metadata_path"]
seen["a backup"] = [hasattr(saving, name) for name in kept] + [saving._current_epoch, saving._last_batch_seen]
masks = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
seen["seeds"] = [tuple(one.state.shape) for layer in masks._flatten_layers() for one in layer._seed_generators]
seen["methods of callbacks"] = all(callable(getattr(kind, name)) for kind in names for name in names[kind])
# The methods that a sharded optimizer and the rate replace on an instance are what an update calls, in this order.
called, replaced = [], keras.optimizers.AdamW(0.1)
replaced.build(trained)
hooks = ["_backend_apply_gradients", "_apply_weight_decay", "_backend_update_step"]
for name in hooks:
    def hook(*args, name=name, own=getattr(replaced, name)):
        called.append((name, len(args)))
        return own(*args)
    vars(replaced)[name] = hook
replaced.apply([keras.ops.zeros(one.shape, one.dtype) for one in trained])
seen["an update calls"] = called
had = len(replaced.variables)
replaced._untrack_variable(replaced.variables[-1])
seen["untracked"] = had - len(replaced.variables)
rate = keras.optimizers.SGD(0.5)
noted, assign = [], rate._learning_rate.assign
vars(rate._learning_rate)["assign"] = lambda value: noted.append(float(value)) or assign(value)
rate.learning_rate = 0.25
seen["a rate is set by"] = noted
vars(rate)["_get_current_learning_rate"] = lambda: 0.75
seen["and read by"] = rate.learning_rate
logger = keras.callbacks.CSVLogger(tempfile.mkdtemp() + "/log.csv")
logger.set_model(model)
logger.on_train_begin()
seen["logger at first"] = [logger.keys, logger.csv_file.closed]
logger.on_epoch_end(0, {"loss": 1.0})
seen["logger"] = [list(logger.keys), logger.sep, logger.append]
logger.on_train_end()
backend = keras.backend.backend()
if backend == "tensorflow":
    made = model._make_function(model.train_step)
    import tensorflow as tf
    step = tf.function(lambda: trained[0].value + 1)
    cached = [not [*step._function_cache.values()]]
    step()
    cached += [any(v is trained[0].value for v in graph.variables) for graph in step._function_cache.values()]
    inside = []
    for compiles in (True, False):
        @tf.function(jit_compile=compiles)
        def traced():
            graph, contexts = tf.compat.v1.get_default_graph(), []
            while graph is not None:
                contexts.append(graph._get_control_flow_context())
                graph = getattr(graph, "outer_graph", None)
            inside.append(any(context is not None and context.IsXLAContext() for context in contexts))
        tf.function(lambda: traced())()  # as Keras calls its compiled step
    shuffled = tf.data.Dataset.range(4).shuffle(4, seed=3)
    mapped = shuffled.map(lambda v: v)
    own = cached == [True, True] and inside == [True, False] and mapped._inputs() == [shuffled]
    own = own and type(shuffled).__name__ == "_ShuffleDataset" and int(shuffled._seed2) == 3
    own = own and callable(made) and model._distribute_strategy is None and isinstance(model._jit_compile, bool)
elif backend == "jax":
    value = trained[0]._value
    own = value.block_until_ready() is value and value.shape == trained[0].shape
    trained[0]._value, trained[0]._initializer = None, keras.initializers.Zeros()
    own = own and tuple(trained[0].shape) == (3, 1)  # whose value may go, as in fit
    trained[0]._value = value
else:
    own = True  # see tests/torch/test_private_names.py
seen["of the backend"] = bool(own)
report("seen", {name: repr(value) for name, value in seen.items()})
"""


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[] if name == "torch" else [pytest.mark.slow]) for name in BACKENDS]
)
def test_private_names_of_keras_are_what_they_are_taken_for(backend):
    (found,) = run_ranks(SCRIPT, 1, env=environment(backend), timeout=300).values("seen")
    assert {name: ast.literal_eval(value) for name, value in found.items()} == {
        "initial epoch at first": None,
        "initial epoch in fit": [None, 2],
        "metrics are read": 2,
        "batches and updates": [4, 2],
        "trained": [True] * 4,
        "places": [0, 1, 2, 3],
        "sums": [True] * 4,
        "rate": True,
        "schedule": True,
        "metrics given": ["MeanMetricWrapper"],
        "layers": 1,
        "moments": True,
        "calls in a thread": True,
        "layers begin with the model": True,
        "places of variables": [0, 1, 2, 3],
        "decays": [True, False],
        "decisions are kept by": True,
        "rate of a step": True,
        "a backup": [True] * 4 + [0, 0],
        "seeds": [(2,)],
        "methods of callbacks": True,
        "an update calls": [
            ("_backend_apply_gradients", 2),
            ("_apply_weight_decay", 1),
            ("_backend_update_step", 3),
        ],
        "untracked": 1,
        "a rate is set by": [0.25],
        "and read by": 0.75,
        "logger at first": [None, False],
        "logger": [["loss", "val_loss"], ",", False],
        "of the backend": True,
    }
