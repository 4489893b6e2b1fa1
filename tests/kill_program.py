"""Run by kill_test.py: trains `tiny_config`, and writes down every batch that it was given.

    python -m tests.kill_program TEXT WORKDIR FIELDS MESH [LARGEST_FILE]

FIELDS (of the training, and "rows" of a batch) and MESH are JSON. Each line of WORKDIR/batches.txt
is a batch's number and hash. With LARGEST_FILE no file may grow past so many bytes from the fifth
step of the process on.
"""

import json
import pathlib
import resource
import sys

from tests.data.corpora import digest
from tests.tiny_run import tiny_config
from ttt_jax import train
from ttt_jax.config import MeshConfig
from ttt_jax.data.pipeline import BatchIterator


def main(text: str, workdir: str, fields: str, mesh: str, largest_file: str = "") -> int:
    """Trains and returns the trainer's exit code."""
    changes = json.loads(fields)
    rows = changes.pop("rows", 4)
    config = tiny_config(pathlib.Path(text), **changes)
    config.data.batch_size = rows
    config.mesh = MeshConfig(**json.loads(mesh))
    pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
    take, taken = BatchIterator.__next__, 0

    def take_and_note(self):
        nonlocal taken
        batch = take(self)
        state = self.get_state()
        if state["split"] == "train":
            with (pathlib.Path(workdir) / "batches.txt").open("a") as file:
                file.write(f"{state['step']} {digest(batch)}\n")
            taken += 1
            if largest_file and taken == 5:
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest_file), limits[1]))
        return batch

    BatchIterator.__next__ = take_and_note
    return train.main(config, workdir)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
