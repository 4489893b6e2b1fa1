"""The notebooks run from top to bottom, in the environment of the tests."""

import os
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

_ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((_ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    """Every cell runs, and what was saved in the repository shows outputs and no error."""
    saved = nbformat.read(path, as_version=4)
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "save the notebook executed"
    folders = [str(_ROOT), str(_ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    client = NotebookClient(saved, timeout=300, kernel_name="python3")
    client.execute()
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2
