"""docs/security.md lists all that listens and all that unpickles."""

import re

from tests.launch import REPOSITORY

PACKAGE = REPOSITORY / "ring_plugins"
PAGE = (REPOSITORY / "docs" / "security.md").read_text()
LISTENS = re.compile(r"create_server\(|\.listen\(|AF_UNIX, socket\.SOCK_DGRAM|TCPStore\(|HTTPServer\(")
UNPICKLES = re.compile(r"pickle\.loads?\(|Unpickler|\.recv\(\)|torch\.load\(|np\.load\(|marshal\.|_comm\.allgather\(")
RUNS_TEXT = re.compile(r"(?<![\w.])(?:eval|exec)\(")


def files(pattern):
    return {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if pattern.search(file.read_text())}


def test_the_page_lists_everything_that_listens():
    assert {name for name in files(LISTENS) if f"`{name}`" not in PAGE} == set()


def test_the_page_lists_everything_that_unpickles_and_nothing_evaluates_text():
    table = PAGE.partition("## Where pickles are read")[2]
    assert set(re.findall(r"^\| `(\S+\.py)`", table, re.MULTILINE)) == files(UNPICKLES)
    assert files(RUNS_TEXT) == set()


def test_files_of_the_page_exist():
    for name in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert (PACKAGE / name).exists() or (REPOSITORY / name).exists(), name
