"""A submodule of Horovod that is no file here is another module's second name, or an ImportError with the remedy."""

import importlib
from pathlib import Path

import pytest

import ring_plugins.horovod
from ring_plugins.horovod import submodules


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mxnet", "MXNet is not supported"),
        ("mxnet.mpi_ops", "MXNet is not supported"),
        ("spark.keras", r"horovod.spark.keras does not exist in ring_plugins; instead: .*spark.run\(fn, num_proc=4\)"),
        ("spark.common.store", "there are no estimators"),
        ("data.data_loader_base", "num_workers=2"),
        ("runner.launch", "ring run"),
        ("_keras.callbacks", "ring_plugins.horovod.keras"),
    ],
)
def test_what_does_not_exist_says_what_to_write(name, said):
    with pytest.raises(ImportError, match=said):
        importlib.import_module(f"ring_plugins.horovod.{name}")


def test_a_name_that_horovod_lacks_too_is_missing_as_usual():
    with pytest.raises(ModuleNotFoundError, match="No module named 'ring_plugins.horovod.torhc'"):
        importlib.import_module("ring_plugins.horovod.torhc")


def test_an_alias_is_the_same_module_and_does_not_change_it(monkeypatch):
    monkeypatch.setitem(submodules.ALIASES, "other", "basics")
    alias = importlib.import_module("ring_plugins.horovod.other")
    original = importlib.import_module("ring_plugins.horovod.basics")
    assert alias is original and original.__spec__.name == original.__name__ == "ring_plugins.horovod.basics"
    assert importlib.reload(original) is original


def test_every_alias_leads_to_a_module_and_none_is_refused():
    for name, module in submodules.ALIASES.items():
        assert importlib.util.find_spec(f"ring_plugins.horovod.{module}"), name


def test_only_one_finder_is_installed():
    submodules.install()
    finders = [one for one in ring_plugins.horovod.submodules.sys.meta_path if isinstance(one, submodules._Finder)]
    assert len(finders) == 1


def _public_names():
    """The names of each module; those of modules that import TensorFlow are slow."""
    by_module = {}
    for line in Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").splitlines():
        module, _, names = line.partition(":")
        if names:
            by_module.setdefault(module.removeprefix("horovod"), []).extend(names.split())
    frameworks = (".keras", ".tensorflow")
    return [
        pytest.param(
            *(module, names), id=f"horovod{module}", marks=[pytest.mark.slow] if module.startswith(frameworks) else []
        )
        for module, names in by_module.items()
    ]


@pytest.mark.parametrize(("module", "names"), _public_names())
def test_every_public_name_of_horovod_is_there_or_says_what_to_write(module, names):
    if ".tensorflow" in module:
        pytest.importorskip("tensorflow")
    try:
        found = importlib.import_module(f"ring_plugins.horovod{module}")
    except ImportError as error:
        assert "; instead: " in str(error)
        return
    silent = []
    for name in names:
        try:
            getattr(found, name)
        except AttributeError as error:
            if str(error) == f"module {found.__name__!r} has no attribute {name!r}":
                silent.append(name)
    assert silent == []
