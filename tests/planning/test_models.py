import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning import reference


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("inception-v3", 23_834_568),
        ("resnet-50", 25_557_032),
        ("resnet-101", 44_549_160),
        ("vgg-16", 138_357_544),
        ("gpt2-small", 124_439_808),
    ],
)
def test_reference_models_have_the_parameters_of_their_papers(name, parameters):
    made = reference(name)
    assert made.nbytes == 4 * parameters
    readies = [gradient.ready for gradient in made.gradients]
    assert readies == sorted(readies, reverse=True)
    assert max(readies) == pytest.approx(made.backward)
    assert made.at_step(2 * made.step).gradients[0].ready == pytest.approx(2 * readies[0])


def test_an_unknown_model_is_an_error_that_names_the_known_ones():
    with pytest.raises(ArgumentError, match="vgg-16"):
        reference("vgg")
