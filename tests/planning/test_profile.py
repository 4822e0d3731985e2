import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ring_plugins.core.base.errors import ArgumentError  # noqa: E402
from ring_plugins.planning import Profile, measure, reference  # noqa: E402


def test_a_torch_model_is_measured_and_left_as_it_was(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10), nn.Linear(10, 10))
    model[3].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(16, 64), torch.randint(0, 10, (16,))
    found = measure(model, batch, optimizer=optimizer, steps=3, file=tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    assert found.batch == 16
    assert found.nbytes == 4 * (64 * 64 + 64 + 2 * 64 + 64 * 10 + 10)
    readies = {gradient.name: gradient.ready for gradient in found.gradients}
    assert 0 < readies["2.weight"] < readies["0.weight"] <= found.backward
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == {}
    assert all(p.grad is None for p in model.parameters())


def test_arguments_of_a_torch_model():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def training_step(self, batch, _):
            return {"loss": (self.weight * batch["x"]).sum()}

    assert measure(Loss(), {"x": torch.ones(4, 3)}, steps=1).batch == 4
    linear = nn.Linear(3, 1)
    assert measure(linear, torch.ones(5, 3), steps=1).batch == 5
    assert measure(linear, (torch.ones(5, 3), torch.ones(5, 1)), steps=1).batch == 5
    assert measure(linear, 7, loss=lambda model, count: model(torch.ones(count, 3)).sum(), steps=1).batch == 1
    for model, batch, said in (
        (linear, 7, "pass loss"),
        ("a string", 7, "neither a torch module"),
        (nn.ReLU(), 7, "no"),
    ):
        with pytest.raises(ArgumentError, match=said):
            measure(model, batch)
    with pytest.raises(ArgumentError, match="steps=0"):
        measure(linear, torch.ones(5, 3), steps=0)


@pytest.mark.slow
def test_a_keras_model_is_measured_and_left_as_it_was():
    keras = pytest.importorskip("keras")
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    with pytest.raises(ArgumentError, match="not compiled"):
        measure(model, (np.zeros((6, 8, 8, 1)), np.zeros((6, 10))))
    model.compile("adam", "mse")
    before = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    found = measure(model, (np.random.rand(6, 8, 8, 1), np.zeros((6, 10))), steps=2)
    after = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert found.batch == 6
    assert found.nbytes == 4 * (9 * 4 + 4 + 144 * 10 + 10)
    kernel, _, dense, _ = found.gradients
    # 36 weights at 36 places, and 1440 at one: 0.47 to 0.53 of the arithmetic.
    assert dense.ready / kernel.ready == pytest.approx(1440 / (1440 + 36 * 36), rel=0.01)


def test_a_saved_profile_is_read_as_it_was(tmp_path):
    reference("resnet-50").save(tmp_path / "mine.json")
    assert Profile.load(tmp_path / "mine.json") == reference("resnet-50")


def test_another_file_is_an_error_that_says_how_to_make_one(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        with pytest.raises(ArgumentError, match="planning.measure"):
            Profile.load(tmp_path / name)


def test_a_step_takes_a_positive_time():
    with pytest.raises(ArgumentError, match="positive"):
        reference("resnet-50").at_step(0)
