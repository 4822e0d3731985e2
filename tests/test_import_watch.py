"""A function is called once a package has been imported, and only then."""

import importlib
import importlib.util
import sys

import pytest

from ring_plugins.import_watch import ImportWatch, has_finished


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that is not imported yet, and reads `seen` while it is."""
    name = f"watched_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def watch(monkeypatch, name, function):
    monkeypatch.setattr(sys, "meta_path", [ImportWatch([name], function), *sys.meta_path])


def test_the_function_is_called_once_when_the_module_has_been_executed(package, monkeypatch):
    values = []
    watch(monkeypatch, package, lambda name: values.append(getattr(sys.modules[name], "value", None)))
    for _ in range(2):
        assert importlib.import_module(package).value == 1
        assert values == [1]
        del sys.modules[package]


def test_to_ask_for_a_package_is_not_to_import_it(package, monkeypatch):
    called = []
    watch(monkeypatch, package, called.append)
    assert importlib.util.find_spec(package) is not None
    assert called == []
    importlib.import_module(package)
    assert called == [package]


def test_other_packages_and_those_that_were_imported_before_are_not_watched(package, monkeypatch):
    called = []
    importlib.import_module(package)
    watch(monkeypatch, package, called.append)
    del sys.modules[package]
    importlib.import_module(package)
    watch(monkeypatch, "another", called.append)
    importlib.reload(sys.modules[package])
    assert called == []


def test_a_package_under_way_has_not_finished(package, monkeypatch):
    seen = []
    assert not has_finished(package)
    watch(monkeypatch, package, lambda name: seen.append(has_finished(name)))
    importlib.import_module(package)
    assert seen == [False]
    assert has_finished(package)
