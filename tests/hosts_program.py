"""Run by hosts_test.py, one process a host: what the devices get of the data and of a checkpoint.

    python -m tests.hosts_program stream CONFIG.py STEPS          digests of the batches, whole
    python -m tests.hosts_program state CONFIG.py WORKDIR         digest of the newest state

The last line of standard output is JSON.
"""

import argparse
import dataclasses
import hashlib
import json
import runpy

import jax
import numpy as np
from jax.experimental import multihost_utils

from ttt_jax import checkpoint, processes, sharding
from ttt_jax.tasks import make_task
from ttt_jax.train_step import make_trainee


def digest(tree) -> str:
    """A hash of the names and whole values of arrays that lie on several processes."""
    out = hashlib.sha256()
    whole = multihost_utils.process_allgather(tree, tiled=True)
    for path, value in jax.tree_util.tree_leaves_with_path(whole):
        out.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape}".encode())
        out.update(np.ascontiguousarray(value).tobytes())
    return out.hexdigest()


def main() -> None:
    """Joins the other processes and prints what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["stream", "state"])
    parser.add_argument("config")
    parser.add_argument("argument")
    parser.add_argument("--coordinator_address")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    options = parser.parse_args()
    if options.num_processes is not None:
        processes.start(options.coordinator_address, options.num_processes, options.process_id)
    config = runpy.run_path(options.config)["get_config"]()
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    batches = make_task(config).batches("train", mesh)
    rows = sharding.batch_sharding(mesh, config.data.batch_size)
    if options.what == "stream":
        found = [digest(sharding.place_batch(next(batches), rows))
                 for _ in range(int(options.argument))]  # fmt: skip
    else:
        trainee = make_trainee(config.model, config.optimizer, config.train.steps, mesh)
        checkpoints = checkpoint.Checkpoints(options.argument)
        state = checkpoints.restore(trainee.abstract, batches)
        checkpoints.close()
        found = [digest(state), batches.get_state()["step"], sharding.row_block(mesh)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
