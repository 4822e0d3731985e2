"""The functions of a C library, declared once: since which version they exist, and what they take."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A C function that returns a status.

    Attributes:
        since: the first version of the library that has it, as the library numbers itself.
        arguments: ctypes types of its arguments.
    """

    since: int
    arguments: tuple[Any, ...]


class Table:
    """Looks up declared functions in a loaded library, each at its first use.

    Args:
        library: a `ctypes.CDLL`, or anything else that has C functions as attributes.
        calls: name -> declaration.
    """

    def __init__(self, library: Any, calls: Mapping[str, Call]) -> None:
        self._library = library
        self._calls = calls
        self._functions: dict[str, Any] = {}

    def since(self, name: str) -> int:
        """The first version of the library that has a function."""
        return self._calls[name].since

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its status.

        Raises:
            AttributeError: the library has no such function, though its version says so.
        """
        function = self._functions.get(name)
        if function is None:
            function = getattr(self._library, name)
            function.argtypes, function.restype = self._calls[name].arguments, ctypes.c_int
            self._functions[name] = function
        status: int = function(*arguments)
        return status

    def text(self, name: str, argument_type: Any, argument: Any) -> str:
        """Call a function of one argument that returns a C string, and return that."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = (argument_type,), ctypes.c_char_p
        found: bytes | None = function(argument)
        return (found or b"").decode(errors="replace").strip()
