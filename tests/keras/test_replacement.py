"""Ranks are killed in a `fit` and other processes take their places: the end is that of a replay."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.launch import run_ranks, slowness

CHECKS = Path(__file__).with_name("checks_replacement.py")
BACKENDS = ("tensorflow", "torch", "jax")
EPOCHS, BATCHES = 3, 4


def gradient(step, slot):
    """Of every weight: its average over any of up to four ranks is exact."""
    return 12.0 * ((7 * step + 3 * slot) % 5 - 2)


def fit(backend, deaths, ranks=3, pending=True, environment=None, **options):
    env = {
        "TEST_DEATHS": json.dumps(deaths), "KERAS_BACKEND": backend,
        **({"TEST_PENDING": str(60 * slowness())} if pending else {}), **(environment or {}),
    }  # fmt: skip
    return run_ranks(CHECKS, ranks, env=env, timeout=150, **options)


def replayed(averaged_over, counts):
    """The weight and the velocity after SGD with momentum 0.5 and rate 0.5 has taken the averages over these slots."""
    weight = velocity = np.float32(0)
    for step, slots in enumerate(averaged_over):
        came = [gradient(step % BATCHES, slot) for slot in slots if step % BATCHES < counts.get(slot, BATCHES)]
        average = np.float32(sum(came) / len(came))
        velocity = np.float32(0.5) * velocity - np.float32(0.5) * average
        weight = weight + velocity
    return float(weight), float(velocity)


def check(result, slots=range(3), has_warmup=False, counts={}):  # noqa: B006 - nobody changes it
    """That all ranks of the end have the same, and what a replay gives; returns it, and their numbers."""
    found = [result.reports[slot]["found"] for slot in slots]
    assert all(one == found[0] for one in found), str(result)
    first = found[0]
    assert len(first["history"]) == EPOCHS * BATCHES
    assert first["fitted"][0] == list(range(EPOCHS))
    assert all(len(values) == EPOCHS for values in first["fitted"][1].values())
    assert first["ranks"] == [[rank, len(found), slot] for rank, slot in enumerate(slots)]
    *_, (kernel,), (bias,) = first["weights"]
    assert kernel == bias
    if not has_warmup:
        assert first["rates"] == [0.5] * EPOCHS * BATCHES
        # A rank that was lost in a step took part in its averages, or did not; the same holds for all that are left.
        possible = [
            [before, after] if len(after) < len(before) else [after]
            for before, after in itertools.pairwise([list(range(max(3, len(found)))), *first["history"]])
        ]
        (velocity,) = first["optimizer"][-1]
        assert (kernel, velocity) in {replayed(choice, counts) for choice in itertools.product(*possible)}
    return first, [result.reports[slot]["number"] for slot in slots]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["now", "barrier 3 in"])
def test_another_process_takes_a_place_at_the_end_of_the_epoch(backend, victim, point):
    result = fit(backend, [[victim, 1, point]])
    found, numbers = check(result)
    assert numbers[victim] == 3
    assert result.values("min_delta") == [-0.25] * 3  # EarlyStopping changes the sign once in each process
    assert found["history"][BATCHES:] == [[0, 1, 2]] * (EPOCHS - 1) * BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("death", [[2, 2, "now"], [1, 2, "now"], [0, 2, "barrier 3 in"]])
def test_so_it_does_where_another_rank_has_run_out(backend, death):
    counts = {1: 2, 2: 3}
    if death[0] == 0:
        counts = {1: 2, 0: 3}
    result = fit(backend, [death], environment={"TEST_COUNTS": json.dumps(counts)})
    found, numbers = check(result, counts=counts)
    assert numbers[death[0]] == 3
    assert found["history"][BATCHES:] == [[0, 1, 2]] * (EPOCHS - 1) * BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("death", [[0, 1, "now"], [0, 1, "while saving"], [0, 1, "in validation"]])
def test_files_go_on_in_the_new_rank_0(backend, death, tmp_path):
    result = fit(backend, [death], environment={"TEST_FILES": str(tmp_path)})
    found, _ = check(result)
    assert result.reports[0]["saved"] == [True, "1.keras", "2.keras", "3.keras", "backup", "best.keras", "log.csv"]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch", "0", "1", "2"]
    assert found["best"] == max(found["fitted"][1]["val_mae"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "deaths",
    [
        [[0, 1, "now"], [1, 1, "now"]],
        [[0, 1, "barrier 3 in"], [0, 6, "joiner now"], [2, 9, "now"]],
        [[1, 2, "SIGTERM"]],
        [[0, 1, "now"], [0, 6, "joiner SIGTERM"]],
    ],
)
def test_several_may_be_replaced_at_once_or_in_a_row(backend, deaths):
    check(fit(backend, deaths))


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"joiner round {n} {when}" for n in (1, 2, 3) for when in ("before", "in")])
def test_a_joiner_may_die_while_it_joins_and_the_next_one_joins(point):
    _, numbers = check(fit("torch", [[1, 2, "now"], [1, 0, point]]))
    assert numbers[1] == 4


@pytest.mark.slow
def test_a_joiner_that_cannot_load_the_state_ends_alone_and_the_next_one_joins():
    result = fit("torch", [[1, 1, "now"], [1, 0, "joiner load raises"]])
    _, numbers = check(result)
    assert numbers[1] == 4
    assert "KeyError: 'a callback that cannot load'" in result.output
    assert "It ends, and the other ranks go on without it:" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", [f"round {n} {when}" for n in (1, 3) for when in ("before", "in")])
def test_so_may_a_member_while_another_process_joins(backend, victim, point):
    _, numbers = check(fit(backend, [[1, 1, "now"], [victim, 3, point]]))
    assert sorted(numbers) == sorted([3, 4, 2 - victim])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("epochs", [0.5, 2])
def test_the_rate_follows_the_ranks(backend, epochs):
    found, _ = check(fit(backend, [[0, 1, "now"]], environment={"TEST_WARMUP": str(epochs)}), has_warmup=True)
    sizes = [len(slots) for slots in found["history"]]
    # A step in which a rank was lost had the rate for all.
    sizes = [
        before if step < BATCHES else after for step, (before, after) in enumerate(itertools.pairwise([3, *sizes]))
    ]
    warm = [min(1, step / (epochs * BATCHES)) for step in range(EPOCHS * BATCHES)]
    expected = [0.5 + 0.5 * (size - 1) * share for size, share in zip(sizes, warm, strict=True)]
    assert found["rates"] == pytest.approx(expected)


#: A rank dies in the fit or step that TEST_DEATH names; the other waits for whoever takes its place.
SCRIPT = """
    import os, signal, time
    import keras, numpy as np
    import ring_plugins as ring
    from ring_plugins.core.rendezvous.spawn import slots
    from ring_plugins.core.world import current
    from ring_plugins.keras import BroadcastCallback, DistributedOptimizer, TrainingState, broadcast_variables
    from tests.worker import report

    ring.init(ranks=2, on_failure="replace")
    is_new = current().is_joining
    dies = ring.rank() == int(os.environ.get("TEST_VICTIM", "1")) and not is_new
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")

    def die_or_wait(number):
        if dies and number == int(os.environ["TEST_DEATH"]):
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + float(os.environ["TEST_PATIENCE"])
        while len(current().world_ranks) == 1 and not slots().has_waiting() and time.monotonic() < end:
            time.sleep(0.01)

    def fit(number):
        steps = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs=None: die_or_wait(number))
        return model.fit(*data, batch_size=4, verbose=0, callbacks=[steps, BroadcastCallback()]).epoch

    data = np.ones((16, 2), np.float32), np.ones((16, 1), np.float32)
    way, first = os.environ["TEST_WAY"], 0
    if way == "by hand":
        DistributedOptimizer(model.optimizer)
        broadcast_variables(model)
        for step in range(8):
            die_or_wait(step)
            model.train_on_batch(*data)
    elif way == "several fits":
        epochs = [fit(number) for number in range(3)]
        if "TEST_VICTIM" in os.environ:
            report("epochs", epochs, ring.rank())
    else:
        state = TrainingState(model, number=0)
        first = state.number
        for state.number in range(state.number, 4):
            state.commit()
            fit(state.number)
    weights = [float(np.sum(weight)) for weight in model.get_weights()]
    report("left", [ring.size(), is_new, first], ring.rank())
    report("equal", all(one == weights for one in ring.all_gather_object(weights)), ring.rank())
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("by hand", "averages gradients before it has joined the others"),
        ("several fits", "its script has come to another place"),
    ],
)
def test_a_script_that_cannot_be_joined_is_told_why_and_disturbs_nobody(backend, way, text):
    env = {"KERAS_BACKEND": backend, "TEST_WAY": way, "TEST_PATIENCE": str(4 * slowness()), "TEST_DEATH": "1"}
    result = run_ranks(SCRIPT, 2, env=env, timeout=150)
    assert result.reports == {0: {"left": [1, False, 0], "equal": True}}
    assert text in result.output


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_joins_between_two_fits(backend):
    env = {"KERAS_BACKEND": backend, "TEST_WAY": "state", "TEST_PATIENCE": str(60 * slowness()), "TEST_DEATH": "1"}
    result = run_ranks(SCRIPT, 2, env=env, timeout=150)
    assert result.reports == {0: {"left": [2, False, 0], "equal": True}, 1: {"left": [2, True, 2], "equal": True}}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fits_after_that_in_which_rank_0_was_replaced_have_all_their_epochs(backend):
    env = {"KERAS_BACKEND": backend, "TEST_WAY": "several fits", "TEST_PATIENCE": str(60 * slowness())}
    result = run_ranks(SCRIPT, 2, env={**env, "TEST_VICTIM": "0", "TEST_DEATH": "0"}, timeout=150)
    assert result.values("left") == [[2, True, 0], [2, False, 0]]
    assert result.values("epochs") == [[[0], [0], [0]]] * 2
    assert result.values("equal") == [True, True]


LOOP = Path(__file__).with_name("checks_loop.py")


def loop(backend, deaths, fault="", **options):
    env = {"TEST_DEATHS": json.dumps(deaths), "KERAS_BACKEND": backend, "TEST_PENDING": str(60 * slowness())}
    return run_ranks(LOOP, 3, env={**env, "TEST_FAULT": fault}, timeout=150, **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("victim", "fault", "number", "text"),
    [
        (0, "", 3, ""),
        (1, "other model", 4, "its script has come to another place"),
        (2, "cannot load", 4, "KeyError: 'a value that cannot be loaded'"),
    ],
)
def test_a_process_joins_a_loop_without_fit_where_an_epoch_begins(backend, victim, fault, number, text):
    result = loop(backend, [[victim, 1, "now"]], fault)
    found = result.values("found")
    assert found == [found[0]] * 3, str(result)
    assert text in result.output
    left = [slot for slot in range(3) if slot != victim]
    epochs = found[0]["history"].index([0, 1, 2], 1) // BATCHES
    assert (
        found[0]["history"] == [[0, 1, 2]] + [left] * (epochs * BATCHES - 1) + [[0, 1, 2]] * (EPOCHS - epochs) * BATCHES
    )
    assert found[0]["numbers"][victim] == number
    assert result.values("began") == [epochs * BATCHES if slot == victim else 0 for slot in range(3)]
    weight, velocity = replayed(found[0]["history"])
    assert (found[0]["weights"], found[0]["velocity"]) == ([weight], [velocity])
    assert found[0]["iterations"] == EPOCHS * BATCHES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "fault", "text"),
    [
        ("torch", "not built", "this SGD must be built"),
        ("tensorflow", "left out", "a SGD averages gradients and is not part of the state"),
        ("jax", "not assigned", "steps have averaged gradients, but the variables still have the values from before"),
    ],
)
def test_a_loop_whose_state_would_lack_something_is_rejected_before_anybody_joins(backend, fault, text):
    result = loop(backend, [], fault, check=False)
    assert result.returncode == 1 and not result.values("found")
    assert text in result.output


GROWS = """
    import keras, numpy as np, os
    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.keras import BroadcastCallback, LearningRateWarmupCallback, TrainingState, shard
    from tests.torch.checks_replacement import begin_step, own_deaths, slots_taken
    from tests.worker import report

    class Follows(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            begin_step(state.step, own_deaths(current().shard[0], 2), 2, current().shard[0])

        def on_train_batch_end(self, batch, logs=None):
            state.step += 1
            state.history = [*state.history, slots_taken()]

    ring.init(ranks=2, on_failure="replace", max_ranks=4)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.5), loss=lambda wanted, found: keras.ops.sum(wanted * found, axis=-1))
    inputs, targets = np.ones((24, 1), np.float32), 8.0 * (np.arange(24, dtype=np.float32)[:, None] % 7 - 2)
    callbacks = [Follows(), BroadcastCallback()]
    if "TEST_ONE_FIT" in os.environ:
        state = type("State", (), {"step": 0, "history": []})()
        model.fit(shard((inputs, targets), batch_size=1), epochs=40, shuffle=False, verbose=0, callbacks=callbacks)
        report("found", [slots_taken()])
        raise SystemExit
    state = TrainingState(model, epoch=0, step=0, history=[])
    for state.epoch in range(state.epoch, 3):
        state.commit()
        data = shard((inputs, targets), batch_size=1, seed=state.epoch, shuffle=False)
        warmup = LearningRateWarmupCallback(0, initial_learning_rate=0.5)
        model.fit(data, shuffle=False, verbose=0, callbacks=[*callbacks, warmup])
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    report("found", [model.get_weights()[0].item(), state.history, rate])
"""


def grown():
    """What four ranks find of which two have joined for the second of three fits."""
    targets = [8.0 * (i % 7 - 2) for i in range(24)]
    weight = np.float32(0)
    for ranks, epochs in ((2, 1), (4, 2)):
        for _ in range(epochs):
            for step in range(24 // ranks):
                weight -= np.float32(0.5 * ranks) * np.float32(sum(targets[step * ranks : (step + 1) * ranks]) / ranks)
    return [[float(weight), [[0, 1]] * 12 + [[0, 1, 2, 3]] * 12, 2.0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_grows_between_two_fits(backend):
    env = {"TEST_DEATHS": "[]", "TEST_ADDED": "[[1, 2, 2]]", "TEST_MOST": "4", "TEST_PENDING": str(60 * slowness())}
    result = run_ranks(GROWS, 2, env={**env, "KERAS_BACKEND": backend}, timeout=150)
    assert result.values("found") == grown()


@pytest.mark.slow
def test_ranks_that_cannot_be_added_say_why_and_disturb_nobody():
    env = {"TEST_DEATHS": "[]", "TEST_ADDED": "[[1, 2, 1]]", "TEST_MOST": "4", "TEST_PENDING": "6", "TEST_ONE_FIT": "1"}
    result = run_ranks(GROWS, 2, env={**env, "KERAS_BACKEND": "torch"}, timeout=150)
    assert result.values("found") == [[[0, 1]]] * 2
    assert "ranks cannot be added within a fit(), whose data is divided once for all epochs" in result.output


#: Notes what each rank takes of shuffled data in each epoch; rank 0 is replaced in the first one.
NOTED = """
    import os
    import keras, numpy as np
    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.keras import BroadcastCallback, TrainingState, shard
    from tests.torch.checks_replacement import begin_step, own_deaths
    from tests.worker import report

    class Noted:
        # Stands for an array of inputs.
        def __init__(self, count):
            self.shape, self.taken = (count, 1), []

        def __len__(self):
            return self.shape[0]

        def __getitem__(self, indices):
            self.taken += [int(index) for index in indices]
            return np.ones((len(indices), 1), np.float32)

    class Follows(keras.callbacks.Callback):
        step = 0

        def on_epoch_begin(self, epoch, logs=None):
            training.taken.clear()

        def on_train_batch_begin(self, batch, logs=None):
            begin_step(self.step, mine, 2)
            self.step += 1

        def on_test_begin(self, logs=None):
            validation.taken.clear()

        def on_epoch_end(self, epoch, logs=None):
            found[f"fit {number} epoch {epoch}"] = [list(training.taken), list(validation.taken)]

    ring.init(ranks=2, on_failure="replace")
    slot, found = current().shard[0], {}
    mine = own_deaths(slot, 2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    training, validation = Noted(24), Noted(16)
    if "TEST_LOADER" in os.environ:
        import torch

        class Loader(torch.utils.data.DataLoader):
            def __iter__(self):
                return map(self.noted, super().__iter__())

            def noted(self, batch):
                (training if len(self.dataset) == 24 else validation).taken += batch[1].flatten().tolist()
                return batch

        parts = []
        for noted in (training, validation):
            numbers = torch.arange(float(len(noted)))[:, None]
            loader = Loader(torch.utils.data.TensorDataset(numbers, numbers), 2, shuffle=True, num_workers=1)
            parts.append(shard(loader))
    else:
        parts = [shard((noted, np.ones((len(noted), 1), np.float32)), batch_size=2) for noted in (training, validation)]

    def fit(**options):
        return model.fit(
            parts[0], validation_data=parts[1], shuffle=False, verbose=0, callbacks=[Follows(), BroadcastCallback()],
            **options,
        )

    number = 0
    if os.environ["TEST_WAY"] == "state":
        state = TrainingState(model, number=0)
        for number in range(state.number, 3):
            state.number = number
            state.commit()
            fit()
    else:
        fit(initial_epoch=int(os.environ["TEST_WAY"]), epochs=int(os.environ["TEST_WAY"]) + 3)
        number = 1
        fit(epochs=2)
    report("found", found, slot)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["0", "2", "state", "0 in loaders"])
def test_shuffled_data_goes_on_in_the_order_that_the_others_have(backend, way):
    if "loaders" in way and backend != "torch":
        pytest.skip("torch's loaders are for its backend")
    env = {"TEST_WAY": way.split()[0], **({"TEST_LOADER": "1"} if "loaders" in way else {})}
    env |= {"TEST_DEATHS": '[[0, 1, "now"]]', "TEST_PENDING": str(60 * slowness()), "KERAS_BACKEND": backend}
    new, old = run_ranks(NOTED, 2, env=env, timeout=150).values("found")
    assert len(old) == len(new) + 1 == (3 if way == "state" else 5)
    for epoch, (training, validation) in new.items():
        assert sorted(training + old[epoch][0]) == list(range(24)), epoch
        assert sorted(validation + old[epoch][1]) == list(range(16)), epoch


#: Accumulates gradients over more steps than the first epoch has, in which rank 0 is replaced.
ACCUMULATES = """
    import keras, numpy as np
    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.keras import BroadcastCallback, shard
    from tests.torch.checks_replacement import begin_step, own_deaths
    from tests.worker import report

    class Follows(keras.callbacks.Callback):
        step = 0

        def on_train_batch_begin(self, batch, logs=None):
            begin_step(self.step, mine, 2)
            self.step += 1

    ring.init(ranks=2, on_failure="replace")
    slot, mine = current().shard[0], own_deaths(current().shard[0], 2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.125, gradient_accumulation_steps=3), "mse")
    data = np.arange(8, dtype=np.float32)[:, None] / 8
    data = shard((data, 2 * data), batch_size=2)
    model.fit(data, epochs=6, shuffle=False, verbose=0, callbacks=[Follows(), BroadcastCallback()])
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()]).tolist()
    report("found", [weights, int(keras.ops.convert_to_numpy(model.optimizer.iterations))], slot)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_may_join_before_the_first_update(backend):
    env = {"TEST_DEATHS": '[[0, 1, "now"]]', "TEST_PENDING": str(60 * slowness()), "KERAS_BACKEND": backend}
    new, old = run_ranks(ACCUMULATES, 2, env=env, timeout=150).values("found")
    assert new == old
    assert new[0] != [0, 0]
