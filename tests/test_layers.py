"""The house: which rooms of the core may import which, imports hidden inside functions included."""

import ast
import re
from collections.abc import Container
from pathlib import Path

CORE = Path(__file__).parents[1] / "ring_plugins" / "core"
#: From the ground up. A room imports rooms of lower floors only, and none of its own floor but itself.
FLOORS = [
    {"base", "trace"},
    {"linux"},
    {"arrays"},
    {"net"},
    {"control"},
    {"rendezvous", "collectives"},
    {"gradients", "gpu", "observe"},
    {"world", "functions", "exit_hooks"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FACES = ("torch", "lightning", "keras", "horovod", "tensorflow", "jax")


def imports(file: Path) -> list[str]:
    """Modules of this package that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.split(".")[0] == "ring_plugins"]


def room(module: str) -> str | None:
    """The room of the core that a module lies in."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["ring_plugins", "core"] and len(parts) > 2 else None


def test_every_import_in_the_core_leads_down():
    wrong = []
    for file in sorted(CORE.rglob("*.py")):
        own = file.relative_to(CORE).parts[0].removesuffix(".py")
        for module in imports(file):
            other = room(module)
            if module.split(".")[1:2] not in ([], ["core"]):
                wrong.append(f"{file.relative_to(CORE)} imports {module}, which is above the core")
            elif other is not None and other in FLOOR and own in FLOOR and other != own:
                top = max(FLOOR.values())
                if FLOOR[other] > FLOOR[own] or (FLOOR[other] == FLOOR[own] and FLOOR[own] not in (0, top)):
                    wrong.append(f"{file.relative_to(CORE)} imports {module} of a higher floor")
    assert not wrong, "\n".join(wrong)


def _file(imported: str, names: Container[str]) -> str | None:
    """The module that an import loads: the name itself, or the module that holds the name."""
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in names), None)


def test_there_is_no_circle_of_files():
    package = CORE.parent
    names = {
        "ring_plugins." + ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): file
        for file in package.rglob("*.py")
        if file != package / "__init__.py"
    }
    edges = {
        name: {one for other in imports(file) if (one := _file(other, names))} - {name} for name, file in names.items()
    }
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        state[name] = 1
        for other in sorted(edges[name]):
            assert state.get(other) != 1, " -> ".join((*path[path.index(other) :], other))
            if other not in state:
                visit(other, (*path, other))
        state[name] = 2

    for name in sorted(names):
        if name not in state:
            visit(name, (name,))


def test_the_core_names_no_face():
    wrong = []
    for file in sorted(CORE.rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if re.search(rf"ring_plugins\.({'|'.join(FACES)})\b|^\s*(import|from) ({'|'.join(FACES)})\b", line):
                wrong.append(f"{file.relative_to(CORE)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_one_module_reads_the_variables():
    package = CORE.parent
    wrong = []
    for file in sorted(package.rglob("*.py")):
        if file == CORE / "base" / "config.py":
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if re.search(r"environ(\.get\(|\[|\.setdefault\(|\.pop\()\s*\(?[\"']RING_|getenv\([\"']RING_", line):
                wrong.append(f"{file.relative_to(package)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)
