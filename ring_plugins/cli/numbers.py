"""Whole numbers as arguments of commands, with errors that show what was given and what to give."""

from __future__ import annotations

import typer


def whole_number(text: str | int) -> int:
    """The number that a text is; typer's own error would not show the text.

    Raises:
        typer.BadParameter: it is none. typer adds the argument's name and its variable's.
    """
    try:
        return int(text)  # a number already: the default
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number. Give one, such as 2.") from None
