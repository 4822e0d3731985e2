"""Write the reference into docs/api and docs/cli.md, so that these pages are whole wherever they are read.

    python docs/_site/reference.py           # needs ring_plugins[docs]; tests/test_site.py checks that both agree

Each text stands between `<!-- reference: PATH options -->` and `<!-- end -->`, where PATH names a function, class or
module of the source. Options: `level=3` of the heading, `as=NAME` to show, `members=A,B` of a module or class; of a
class all that are public by default, and none with `members=`. `<!-- reference: command line -->` is `ring`'s.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
PAGES = [*sorted((REPOSITORY / "docs" / "api").glob("*.md")), REPOSITORY / "docs" / "cli.md"]
BLOCK = re.compile(r"(<!-- reference: ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGE = re.compile(r"(?<![\w/\[])docs/([\w/]+\.md)\b")
SECTIONS = {
    "parameters": "Arguments",
    "attributes": "Attributes",
    "returns": "Returns",
    "yields": "Yields",
    "raises": "Raises",
}
WIDTH = 100


def filled(text: str) -> str:
    """A page with its reference as the source has it now."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{block(match[2])}\n\n{match[3]}", text)


def block(what: str) -> str:
    """The text of one comment."""
    if what == "command line":
        return command_line()
    path, *words = what.split()
    options = dict(word.split("=", 1) for word in words)
    level, found = int(options.get("level", 2)), source(path)
    members = [name for name in options["members"].split(",") if name] if "members" in options else None
    if found.is_module:
        return "\n\n".join(entry(resolved(found[name]), level, name) for name in members or public(found))
    return entry(found, level, options.get("as", path.rpartition(".")[2]), members)


def source(path: str) -> Any:
    """What griffe has read at a path."""
    import griffe

    if not _PACKAGES:
        _PACKAGES.append(griffe.load("ring_plugins", search_paths=[str(REPOSITORY)]))
    return resolved(_PACKAGES[0][path.removeprefix("ring_plugins").removeprefix(".")] if "." in path else _PACKAGES[0])


_PACKAGES: list[Any] = []


def resolved(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def public(found: Any) -> list[str]:
    """Names of members that have docstrings and are neither private nor hooks of a framework."""
    return [
        name
        for name, member in found.members.items()
        if not name.startswith(("_", "on_")) and not member.is_alias and member.docstring
    ]


def entry(found: Any, level: int, name: str, members: list[str] | None = None) -> str:
    """Heading, signature, docstring, and the members of a class."""
    parts = [f"{'#' * level} {name}"]
    if found.is_function:
        parts.append(fence(signature(name, found.parameters, found.returns)))
    elif found.is_class:
        start = found.members.get("__init__") or found.all_members.get("__init__")
        is_made = start is not None and not start.is_alias
        parts.append(fence(signature(name, resolved(start).parameters if is_made else fields(found), None)))
    elif found.annotation is not None:
        parts.append(fence(f"{name}: {found.annotation}"))
    if found.docstring:
        parts += told(found.docstring)
    if found.is_class:
        for member in public(found) if members is None else members:
            parts.append(entry(resolved(found.all_members[member]), level + 1, f"{name}.{member}"))
    return "\n\n".join(parts)


def fields(found: Any) -> list[Any]:
    """The arguments of a dataclass's constructor."""
    return [one for one in getattr(found, "parameters", []) if one.name != "self"]


def fence(text: str) -> str:
    return f"```text\n{text}\n```"


def signature(name: str, parameters: Any, returns: Any) -> str:
    """A call, on one line or with one argument on each."""
    words, is_keyword = list[str](), False
    for one in parameters:
        if one.name in ("self", "cls"):
            continue
        kind = str(getattr(one.kind, "value", one.kind))
        if kind == "keyword-only" and not is_keyword:
            words.append("*")
        is_keyword = is_keyword or kind in ("keyword-only", "variadic positional")
        text = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "") + one.name
        text += f": {one.annotation}" if one.annotation is not None else ""
        default = one.default if not kind.startswith("variadic") else None
        if default is not None:
            text += f" = {default}" if one.annotation is not None else f"={default}"
        words.append(text)
    end = f" -> {returns}" if returns is not None else ""
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def told(docstring: Any) -> Iterator[str]:
    """The parts of a docstring as Markdown."""
    for section in docstring.parse("google", warn_unknown_params=False, warn_missing_types=False, warnings=False):
        kind = section.kind.value
        if kind == "text":
            yield linked(section.value)
        elif kind in SECTIONS:
            yield f"**{SECTIONS[kind]}**\n\n" + "\n".join(item(one, kind) for one in section.value)
        elif kind == "admonition":
            yield linked(f"**{section.title}**: {section.value.contents}")
        elif kind == "examples":
            yield "**Example**\n\n" + "\n\n".join(linked(text) for _, text in section.value)
        else:
            raise ValueError(f"{docstring.parent.path} has a section of the kind {kind}.")


def item(one: Any, kind: str) -> str:
    """One argument, attribute, result or error."""
    text = linked(" ".join(one.description.split()))
    if kind in ("parameters", "attributes"):
        return f"- `{one.name}`: {text}"
    return f"- `{one.annotation}`: {text}" if one.annotation else f"- {text}"


def linked(text: str) -> str:
    """With links to the pages that it names, from docs/api."""
    return PAGE.sub(r"[\g<0>](../\1)", text)


def command_line() -> str:
    """Every subcommand with its arguments and options, from the functions that typer calls."""
    from ring_plugins.cli.main import app

    sections = []
    for command in app.registered_commands:
        function: Any = command.callback
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
        told = [(one, typing.get_args(hints[one.name])) for one in parameters]
        rows = [row(one.name, one.default, *kind) for one, kind in told if not getattr(kind[1], "hidden", False)]
        text = inspect.cleandoc(function.__doc__ or "").replace("**Examples**", "Examples:")
        sections.append(
            f"## ring {command.name}\n\n{text}\n\n| argument or option | meaning |\n|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(sections)


def row(name: str, default: Any, kind: Any, information: Any, *_: Any) -> str:
    """One argument or option: how it is typed, and what it means."""
    # typer takes the first spelling of an option for its default where that is given in the signature.
    first = (information.default,) if isinstance(information.default, str) else ()
    declared = (*first, *(getattr(information, "param_decls", None) or ()))
    is_option = type(information).__name__ == "OptionInfo"
    names = ", ".join(f"`{one}`" for one in declared) or (
        f"`--{name.replace('_', '-')}`" if is_option else f"`{name.upper()}`"
    )
    if is_option and default is True and not declared:  # typer adds the second spelling by itself
        names += f", `--no-{name.replace('_', '-')}`"
    kinds = [one for one in typing.get_args(kind) if one is not type(None)] or [kind]
    choices = (
        " \\| ".join(f"`{one.value}`" for one in kinds[0])
        if isinstance(kinds[0], type) and issubclass(kinds[0], Enum)
        else ""
    )
    unit = {int: "number", float: "number"}.get(kinds[0], choices)
    text = " ".join((information.help or "").split()).replace("|", "\\|")
    shown = default.value if isinstance(default, Enum) else default
    is_worth_saying = shown not in (None, False, "", ()) and default is not inspect.Parameter.empty
    if is_worth_saying and "efault" not in text:
        text += " On by default." if default is True else f" Default: `{shown}`."
    if getattr(information, "envvar", None):
        names = [information.envvar] if isinstance(information.envvar, str) else information.envvar
        text += f" Variable: {', '.join(f'`{name}`' for name in names)}."
    return f"| {names} {unit} | {text} |"


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"wrote {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
