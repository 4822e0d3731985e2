"""Run `keras_step.py` on every backend, and on TensorFlow with a simulated network too.

python benchmarks/keras_steps.py               # about a quarter of an hour; nothing else should run meanwhile
python benchmarks/keras_steps.py --seconds 15  # about nine minutes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

RUNS = (
    ("tensorflow", ()),
    ("torch", ()),
    ("jax", ()),
    ("tensorflow", ("--models", "convolutions", "--network", "0.5")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="approximate time to spend on each model")
    options = parser.parse_args()
    for backend, arguments in RUNS:
        subprocess.run(
            ["mpirun", "-n", "2", "--bind-to", "none", sys.executable, str(Path(__file__).parent / "keras_step.py"),
             "--seconds", str(options.seconds), *arguments],
            env={**os.environ, "KERAS_BACKEND": backend},
            check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
