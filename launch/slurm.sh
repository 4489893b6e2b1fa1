#!/usr/bin/env bash
# Trains on GPU nodes under Slurm, one process a GPU.
#
#   sbatch launch/slurm.sh --config=configs/lact_llm.py:760m --workdir=/shared/runs/760m \
#       --config.mesh.data=1 --config.mesh.fsdp=16
#   launch/slurm.sh --dry-run ...      prints the settings and the command, and runs nothing
#
# Two minutes before its time is over the job is told so (SIGTERM); the trainer saves and ends with
# 143, and the job puts itself back into the queue, where it goes on. --workdir must be on a disk
# that all nodes see.
#
# Variables: PYTHON (the interpreter of an environment with `pip install '.[cuda]'`), CACHE (for
# compiled programs), JAX_COORDINATOR_ADDRESS (host:port; JAX finds it in Slurm's variables if not
# given), XLA_FLAGS.
#SBATCH --job-name=ttt-jax
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

dry_run=
if [[ ${1-} == --dry-run ]]; then
  dry_run=1
  shift
fi
if [[ $# -eq 0 ]]; then
  sed -n '2,/^#SBATCH/p' "$0" | sed '$d' | sed 's/^# \{0,1\}//' >&2
  exit 2
fi

# Slurm runs a copy of this file; the tree is where sbatch was called.
root=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
python=${PYTHON:-$root/.venv/bin/python}

export JAX_COMPILATION_CACHE_DIR=${CACHE:-$HOME/.cache/jax}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Collectives run beside the products that they do not wait for.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS-}"
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

command=(srun --kill-on-bad-exit=1 "$python" "$root/launch/train.py" --distributed "$@")
if [[ -n $dry_run ]]; then
  for name in JAX_COMPILATION_CACHE_DIR XLA_PYTHON_CLIENT_MEM_FRACTION XLA_FLAGS NCCL_DEBUG; do
    printf 'export %s=%q\n' "$name" "${!name}"
  done
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi

code=0
"${command[@]}" || code=$?
if [[ $code -eq 143 && -n ${SLURM_JOB_ID-} ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
