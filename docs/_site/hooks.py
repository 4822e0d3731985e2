"""What mkdocs makes of files outside docs/ and of the command line.

Pages link to files of the repository as GitHub shows them (`../examples/torch_loop.py`). On the site, each example is a
page of its own, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md are pages, and links to anything else become plain text.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "README.md": "index.md",
    "examples": "examples.md",
    "examples/deploy": "examples.md",
}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".ipynb": "json", "": "dockerfile"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")
OPTION = re.compile(r"(?<![\w\-])-{1,2}[A-Za-z][\w\-]*")
PAGE = re.compile(r"\bdocs/([\w/]+)\.md\b")
MARKER = re.compile(r"^<!-- (?:tested by|run by|not run|collected by|results:|end)[^\n]*-->\n", re.MULTILINE)


def examples() -> dict[str, str]:
    """Paths of the examples in the repository and on the site."""
    files = (path for path in sorted((REPOSITORY / "examples").rglob("*")) if path.suffix in LANGUAGES)
    names = [str(path.relative_to(REPOSITORY)) for path in files if path.is_file() and "__pycache__" not in path.parts]
    return {name: f"{name.replace('.', '_')}.md" for name in names}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose sources are outside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for source, page in PAGES.items():
        if source.endswith(".md"):
            files.append(File.generated(config, page, content=(REPOSITORY / source).read_text()))
    for source, page in examples().items():
        file = File.generated(config, page, content=page_of(REPOSITORY / source))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def page_of(file: Path) -> str:
    """An example as a page: its story, then its text."""
    if file.suffix == ".ipynb":
        return notebook(file)
    text, title = file.read_text(), file.relative_to(REPOSITORY)
    return f"# {title}\n\n```{LANGUAGES[file.suffix]}\n{text}\n```\n"


def notebook(file: Path) -> str:
    """A notebook as a page, with the outputs that it keeps."""
    title, *parts = [part for cell in json.loads(file.read_text())["cells"] for part in parts_of(cell)]
    return "\n\n".join([title, f"`{file.relative_to(REPOSITORY)}`", *parts]) + "\n"


def parts_of(cell: dict[str, Any]) -> Iterator[str]:
    """The text of a cell, then its outputs."""
    text = "".join(cell["source"])
    yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
    outputs = cell.get("outputs", ())
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    if printed:
        yield f"```log\n{printed}```"
    for output in outputs:
        picture = output.get("data", {}).get("image/png")
        if picture:
            yield f"![Output of this cell](data:image/png;base64,{''.join(picture.split())})"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Resolve links out of docs/, drop the comments that the tests read, and insert the command line."""
    source = page.file.src_uri
    origin = {page: name for name, page in PAGES.items() if name.endswith(".md")}.get(source)
    known = PAGES | examples()

    def resolve(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        folder = posixpath.dirname(origin if origin else f"docs/{source}")
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            there = path.removeprefix("docs/")
        elif path in known:
            there = known[path]
        else:
            return text
        return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(source) or '.')}{anchor})"

    fences = re.split(r"(^```.*?^```$)", MARKER.sub("\n", markdown), flags=re.MULTILINE | re.DOTALL)
    text = "".join(part if part.startswith("```") else LINK.sub(resolve, part) for part in fences)
    # Messages are single long lines, which site.css wraps; pygments knows no language "log".
    text = re.sub(r"^( *```)log$", r"\1{.text .log}", text, flags=re.MULTILINE)
    return text.replace("<!-- generated: cli -->", command_line()) if source == "cli.md" else text


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Names of strategies, options that browsers do not break after their hyphens, and links from docstrings to pages.

    Strategies exist once per package, so their signatures are those of the classes that hold their logic. Docstrings
    name pages as files of the repository, which is what a reader of the source can open.
    """
    if page.file.src_uri.startswith("api/"):
        parts = re.split(r"(<(pre|code|a)\b.*?</\2>)", html, flags=re.DOTALL)
        del parts[2::3]  # the names of the elements
        link = rf'<a href="{"../" * page.url.count("/")}\1/">\g<0></a>'
        html = "".join(part if part.startswith(("<pre", "<code", "<a")) else PAGE.sub(link, part) for part in parts)
    html = re.sub(r"<code>[^<\n]+</code>", lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
    return re.sub(r"(>Ring)(?:Trainer|Fabric)Logic(</span>)", lambda m: f"{m[1]}{NAMES[m[0]]}{m[2]}", html)


NAMES = {">RingTrainerLogic</span>": "Strategy", ">RingFabricLogic</span>": "FabricStrategy"}


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
        text += f" Variable: `{information.envvar}`."
    return f"| {names} {unit} | {text} |"
