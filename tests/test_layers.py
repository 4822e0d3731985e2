"""The architecture: which parts of the package may import which, including imports inside functions."""

import ast
import re
from collections.abc import Container
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ring_plugins"
CORE = PACKAGE / "core"
#: From bottom to top. A room of the core imports rooms of lower layers, and its own files.
LAYERS = [
    {"base", "trace"},
    {"linux"},
    {"arrays"},
    {"net"},
    {"control"},
    {"rendezvous", "collectives"},
    {"gradients", "gpu", "observe"},
    {"members", "exit_hooks"},
    {"communicators"},
    {"job"},
    {"world"},
    {"groups"},
    {"functions", "joining"},
]
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
#: Rooms of the lowest layer may import each other.
OPEN_LAYERS = (0,)
PLUGINS = ("torch", "lightning", "keras", "horovod")
FRAMEWORKS = (*PLUGINS, "tensorflow", "jax")


def imports(file: Path) -> list[str]:
    """The names that a file imports from this package, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.split(".")[0] == "ring_plugins"]


def room_of(name: str) -> str | None:
    """The room of the core that a name is in."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["ring_plugins", "core"] and len(parts) > 2 else None


def test_every_import_in_the_core_leads_down():
    wrong = []
    for file in sorted(CORE.rglob("*.py")):
        own = file.relative_to(CORE).parts[0].removesuffix(".py")
        for name in imports(file):
            other = room_of(name)
            if name.split(".")[1:2] not in ([], ["core"]):
                wrong.append(f"{file.relative_to(CORE)} imports {name}, which is above the core")
            elif other in LAYER_OF and own in LAYER_OF and other != own:
                here, there = LAYER_OF[own], LAYER_OF[other]
                if there > here or (there == here and here not in OPEN_LAYERS):
                    wrong.append(f"{file.relative_to(CORE)} imports {name}, which is not in a lower layer")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle_of_files():
    files = {
        "ring_plugins." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): file
        for file in PACKAGE.rglob("*.py")
        if file != PACKAGE / "__init__.py"
    }
    edges = {
        module: {other for name in imports(file) if (other := _module_of(name, files))} - {module}
        for module, file in files.items()
    }
    is_done: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        is_done[module] = False
        for other in sorted(edges[module]):
            assert is_done.get(other, True), " -> ".join((*path[path.index(other) :], other))
            if other not in is_done:
                visit(other, (*path, other))
        is_done[module] = True

    for module in sorted(files):
        if module not in is_done:
            visit(module, (module,))


def _module_of(name: str, modules: Container[str]) -> str | None:
    """The module that importing a name loads: the name itself, or the module that defines it."""
    return next((module for module in (name, name.rpartition(".")[0]) if module in modules), None)


def test_the_core_names_no_framework():
    names = "|".join(FRAMEWORKS)
    wrong = matching_lines(CORE, rf"ring_plugins\.({names})\b|^\s*(import|from) ({names})\b")
    assert not wrong, "\n".join(wrong)


def test_plugins_import_no_other_plugin_but_torch():
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for plugin in set(PLUGINS) - {"horovod"}  # other names for the plugins below it
        for file in sorted((PACKAGE / plugin).rglob("*.py"))
        for name in imports(file)
        if (other := name.split(".")[1:2]) and other[0] in PLUGINS and other[0] not in (plugin, "torch")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_config_reads_variables_of_this_package():
    pattern = r"environ(\.get\(|\[|\.setdefault\(|\.pop\()\s*\(?[\"']RING_|getenv\([\"']RING_"
    wrong = [line for line in matching_lines(PACKAGE, pattern) if not line.startswith("core/base/config.py:")]
    assert not wrong, "\n".join(wrong)


def matching_lines(directory: Path, pattern: str) -> list[str]:
    """Lines of the Python files below a directory that match, with their places in the package."""
    return [
        f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for file in sorted(directory.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.search(pattern, line)
    ]
