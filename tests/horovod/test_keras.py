"""A training script for Horovod's Keras, on all ranks."""

import pytest

from tests.launch import run_ranks

FIT = """
import keras
import numpy as np
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
import ring_plugins.horovod.MODULE as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 4)).astype("float32"), rng.normal(size=(32, 2)).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
rate = 0.05 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), compression=hvd.Compression.none)
model.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
rates = []

class Rates(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        rates.append(round(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)), 6))

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=rate, multiplier=lambda epoch: 0.1, start_epoch=3),
    Rates(),
]
history = model.fit(x[mine], y[mine], batch_size=8, epochs=4, callbacks=callbacks, verbose=1 if hvd.rank() == 0 else 0)
report("rates", rates)
report("loss", history.history["loss"][-1])
report("bits", [hash(value.tobytes()) for value in model.get_weights()])
report("functions", [
    float(hvd.allreduce(np.float32(hvd.rank()), name="x")), hvd.allreduce(hvd.rank(), average=False).tolist(),
    hvd.allgather(np.ones(1 + hvd.rank(), np.float32)).shape[0], hvd.broadcast(np.array([hvd.rank()]), 1).tolist(),
])
beside = []
for name in (None, "x"):
    if hvd.rank():
        try:
            hvd.allreduce(np.ones(2), name=name)
        except ring.MismatchError as error:
            beside.append(str(error))
    hvd.join()  # a barrier here
report("beside join", beside)
rejected = []
for call in (
    lambda: hvd.DistributedOptimizer(optimizer, backward_passes_per_step=4),
    lambda: hvd.callbacks.LearningRateScheduleCallback(rate, 0.1, start_epoch=30),
):
    try:
        call()
    except ring.ArgumentError as error:
        rejected.append(str(error))
report("rejected", rejected)
path = f"{TMP!r}/model{hvd.rank()}.keras"
model.save(path)
loaded = hvd.load_model(path)
loaded.fit(x[mine], y[mine], batch_size=8, epochs=1, verbose=0)
report("loaded", [hash(value.tobytes()) for value in loaded.get_weights()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "backend"),
    [
        ("tensorflow.keras", "tensorflow"),
        pytest.param("keras", "torch", marks=pytest.mark.slow),
        pytest.param("keras", "jax", marks=pytest.mark.slow),
    ],
)
def test_a_script_for_horovod_with_keras(tmp_path, module, backend):
    script = FIT.replace("MODULE", module).replace("{TMP!r}", str(tmp_path))
    result = run_ranks(script, 2, env={"KERAS_BACKEND": backend, "PYTHONHASHSEED": "0"})
    warmed = [0.0625, 0.075, 0.0875, 0.1, 0.1, 0.1, 0.01, 0.01]
    assert result.values("rates") == [pytest.approx(warmed)] * 2
    assert result.values("functions") == [[0.5, 1, 3, [1]]] * 2
    beside = result.values("beside join")[1]
    assert len(beside) == 2 and all("rank 0 calls hvd.join()" in text for text in beside), beside
    for key in ("loss", "bits", "loaded"):
        assert result.values(key)[0] == result.values(key)[1], key
    for texts in result.values("rejected"):
        assert len(texts) == 2, texts
        assert "gradient_accumulation_steps=4" in texts[0] and "lambda epoch: 0.1 ** (epoch - 30)" in texts[1]
    assert "learning rate: 0.05 for one process, 0.1 for 2 ranks after warm-up" in " ".join(result.output.split())
    assert "multiplied twice" not in result.output
