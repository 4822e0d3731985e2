"""Run the notebooks in a kernel, and keep their outputs in them.

    pip install -c constraints.txt ".[docs]" && python docs/_site/execute_notebooks.py

Kept are printed lines, pictures and messages of ring_plugins. Times, paths and notices of the frameworks differ from
machine to machine, and are left out.
"""

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def kept(output: Any) -> Any:
    """An output without what belongs to this machine; None if nothing is left."""
    if output.output_type == "stream" and output.name == "stderr":
        lines = [line for line in output.text.splitlines(keepends=True) if line.startswith("ring_plugins: ")]
        output.text = "".join(lines)
        return output if lines else None
    return output


for file in sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb")):
    notebook = nbformat.read(file, nbformat.NO_CONVERT)
    NotebookClient(notebook, timeout=300).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(kept, cell.outputs) if output]
    nbformat.write(notebook, file)
    print(f"ran {file.name}")
