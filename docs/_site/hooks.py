"""What mkdocs makes of files outside docs/.

Pages link to files of the repository as GitHub shows them (`../examples/torch_loop.py`). On the site, each example is a
page of its own, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md are pages, and links to anything else become plain text.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
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
MARKER = re.compile(r"^<!-- (?:tested by|run by|not run|collected by|results:|reference:|end)[^\n]*-->\n", re.MULTILINE)


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
    """Resolve links out of docs/, and drop the comments that the tests read."""
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
    if source.startswith("api/"):  # where "text" is a signature
        text = re.sub(r"^```text$", "```{.text .signature}", text, flags=re.MULTILINE)
    return text


def on_page_content(html: str, **_: Any) -> str:
    """Options that browsers do not break after their hyphens."""
    return re.sub(r"<code>[^<\n]+</code>", lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
