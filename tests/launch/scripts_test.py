"""The starting points for clusters: they parse, and their dry runs print what would be run."""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.tiny_run import program_environment
from ttt_jax import config_files, sharding
from ttt_jax.compile_check import topology

_LAUNCH = pathlib.Path(__file__).parent.parent.parent / "launch"
_SCRIPTS = sorted(_LAUNCH.glob("*.sh"))
_FLAGS = ["--config=configs/lact_llm.py:760m", "--workdir=/mnt/runs/a b", "--config.mesh.fsdp=16"]


def run(script: str, *arguments: str, code: int = 0, **variables: str) -> str:
    environment = os.environ | {"HOME": "/home/x"} | variables
    command = [str(_LAUNCH / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.name)
def test_the_shell_can_parse_it(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_tpu_vm_makes_the_slice_copies_the_code_and_trains_on_every_host():
    options = dict(SPOT="1", PROJECT="p", MOUNT="gcsfuse b /mnt/runs", CACHE="gs://b/cache")
    printed = run("tpu_vm.sh", "--dry-run", "tpu", "zone", "v5litepod-16", "--", *_FLAGS, **options)
    create, archive, copy, unpack, train = map(shlex.split, printed.splitlines())
    assert create[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "tpu"]
    assert {"--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"} <= set(create)
    assert {"--zone=zone", "--project=p", "--spot"} <= set(create)
    assert archive[0] == "git" and "--output=ttt-jax.tar" in archive
    for command in (copy, unpack, train):
        assert "--worker=all" in command and "--project=p" in command
    remote = train[-1].removeprefix("--command=")
    assert remote.startswith("gcsfuse b /mnt/runs && cd ttt-jax && ")
    assert "export JAX_COMPILATION_CACHE_DIR=gs://b/cache" in remote
    last = shlex.split(remote.rpartition(" && ")[2])
    assert last == ["exec", ".venv/bin/python", "launch/train.py", "--distributed", *_FLAGS]


def test_tpu_vm_refuses_what_it_does_not_know():
    message = run("tpu_vm.sh", "--dry-run", "tpu", "zone", "h100-8", "--", "--config=x", code=2)
    assert "ACCELERATOR=h100-8: write v5litepod-16" in message
    assert "launch/tpu_vm.sh [--dry-run] NAME ZONE" in run("tpu_vm.sh", "tpu", code=2)


def test_slurm_runs_a_process_a_gpu_and_keeps_what_is_set():
    options = dict(PYTHON="/env/bin/python", XLA_FLAGS="--xla_a=1", SLURM_SUBMIT_DIR="/tree")
    *exports, command = run("slurm.sh", "--dry-run", *_FLAGS, **options).splitlines()
    values = dict(shlex.split(line)[1].split("=", 1) for line in exports)
    assert values["JAX_COMPILATION_CACHE_DIR"] == "/home/x/.cache/jax"
    assert values["XLA_FLAGS"].split()[-1] == "--xla_a=1"
    words = shlex.split(command)
    assert words[0] == "srun"
    program = ["/env/bin/python", "/tree/launch/train.py", "--distributed"]
    assert words[-len(program + _FLAGS) :] == program + _FLAGS
    assert "sbatch launch/slurm.sh" in run("slurm.sh", code=2)


def test_slurm_goes_back_into_the_queue_after_a_saved_state_alone(tmp_path):
    """With stand-ins for srun, which ends as the trainer does, and for scontrol."""
    for name, body in {"srun": "exit $CODE", "scontrol": f'echo "$@" >> {tmp_path}/calls'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for code in (0, 1, 3, 143):
        run("slurm.sh", *_FLAGS, code=code, CODE=str(code), PATH=path, SLURM_JOB_ID="7")
    assert (tmp_path / "calls").read_text() == "requeue 7\n"


def test_directives_of_slurm_start_a_process_for_each_gpu():
    text = (_LAUNCH / "slurm.sh").read_text()
    values = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert values["gpus-per-node"] == values["ntasks-per-node"]
    assert values["signal"].startswith("TERM@")


def test_gke_runs_one_process_a_host_on_a_mesh_of_all_chips():
    service, job = yaml.safe_load_all((_LAUNCH / "gke.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    hosts = spec["completions"]
    assert spec["parallelism"] == hosts and hosts * chips == int(rows) * int(columns)
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    words = container["command"]
    assert words[:3] == ["python", "launch/train.py", "--distributed"]
    flags = dict(word.removeprefix("--").split("=") for word in words[3:])
    mesh = {axis: int(flags.get(f"config.mesh.{axis}", 1)) for axis in sharding.MESH_AXES}
    assert mesh["data"] * mesh["fsdp"] * mesh["model"] == hosts * chips
    config = config_files.load(flags["config"])
    assert config.data.batch_size % (mesh["data"] * mesh["fsdp"]) == 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 3]


def test_libtpu_knows_the_flags_of_both():
    """An unknown flag ends the process as soon as libtpu is loaded."""
    flags = re.findall(r"--xla_tpu\w+=\w+", (_LAUNCH / "gke.yaml").read_text())
    assert flags and flags == re.findall(r"--xla_tpu\w+=\w+", (_LAUNCH / "tpu_vm.sh").read_text())
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('libtpu is missing: pip install "jax[tpu]"')
    code = "from ttt_jax.compile_check import topology; topology.parse('v5e:2x2').devices()"
    variables = topology.parse("v5e:2x2").environment()
    for words, fails in ((flags, False), ([*flags, "--xla_tpu_no_such_flag=true"], True)):
        environment = program_environment(LIBTPU_INIT_ARGS=" ".join(words), **variables)
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert bool(done.returncode) == fails, done.stderr
