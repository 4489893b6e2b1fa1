#!/usr/bin/env bash
# Trains on a Cloud TPU VM slice: makes it where it is missing, copies the code, runs every host.
#
#   launch/tpu_vm.sh [--dry-run] NAME ZONE ACCELERATOR -- --config=configs/lact_llm.py:760m \
#       --workdir=/mnt/runs/760m --config.mesh.fsdp=16 --config.mesh.data=1
#
# ACCELERATOR is the slice: v5litepod-16, v5p-128, v6e-64, v4-32. --dry-run prints the commands
# and runs none. What is committed is copied. The same command resumes from the newest checkpoint:
# --workdir must be on a disk that all hosts share and that outlives the slice.
#
# Variables: MOUNT (a command that mounts that disk on a host, for example "mkdir -p /mnt/runs &&
# gcsfuse --implicit-dirs BUCKET /mnt/runs"), CACHE (folder or gs:// address for compiled
# programs), SPOT=1 (a slice that can be taken away), PROJECT, RUNTIME (by the accelerator),
# LIBTPU_FLAGS (below).
set -euo pipefail

usage() {
  sed -n '2,/^set -euo/p' "$0" | sed '$d' | sed 's/^# \{0,1\}//' >&2
  exit 2
}

dry_run=
if [[ ${1-} == --dry-run ]]; then
  dry_run=1
  shift
fi
[[ $# -ge 5 && $4 == -- ]] || usage
name=$1 zone=$2 accelerator=$3
shift 4

case $accelerator in
  v4-*) default_runtime='tpu-ubuntu2204-base' ;;
  v5litepod-*) default_runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) default_runtime=v2-alpha-tpuv5 ;;
  v6e-*) default_runtime=v2-alpha-tpuv6e ;;
  *)
    echo "error: ACCELERATOR=$accelerator: write v5litepod-16, v5p-128, v6e-64 or v4-32" >&2
    exit 2
    ;;
esac
runtime=${RUNTIME:-$default_runtime}

# Collectives run beside the products that they do not wait for.
default_flags="--xla_tpu_enable_async_collective_fusion=true"
default_flags+=" --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
default_flags+=" --xla_tpu_overlap_compute_collective_tc=true"
flags=${LIBTPU_FLAGS-$default_flags}
cache=${CACHE:-\$HOME/.cache/jax}

tpu=(gcloud compute tpus tpu-vm)
where=(--zone="$zone")
[[ -z ${PROJECT-} ]] || where+=(--project="$PROJECT")

run() {
  if [[ -n $dry_run ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# The words of the training command, quoted for the shell of the hosts.
printf -v words ' %q' "$@"
remote="${MOUNT:-true} && cd ttt-jax"
# uv brings its own Python: the hosts' is older than 3.11.
remote+=" && python3 -m pip install --quiet --user uv"
remote+=" && python3 -m uv venv --quiet --clear --python 3.12 .venv"
remote+=" && python3 -m uv pip install --quiet --python .venv/bin/python --editable '.[tpu]'"
remote+=" && export JAX_COMPILATION_CACHE_DIR=$cache"
remote+=" && export LIBTPU_INIT_ARGS='$flags'"
remote+=" && exec .venv/bin/python launch/train.py --distributed$words"

if [[ -n $dry_run ]] || ! "${tpu[@]}" describe "$name" "${where[@]}" >/dev/null 2>&1; then
  create=(create "$name" "${where[@]}" --accelerator-type="$accelerator" --version="$runtime")
  [[ -z ${SPOT-} ]] || create+=(--spot)
  run "${tpu[@]}" "${create[@]}"
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
archive=ttt-jax.tar
if [[ -z $dry_run ]]; then
  archive=$(mktemp -t ttt-jax.XXXXXX)
  trap 'rm -f "$archive"' EXIT
fi
run git -C "$root" archive --prefix=ttt-jax/ --output="$archive" --format=tar HEAD
run "${tpu[@]}" scp "$archive" "$name:ttt-jax.tar" "${where[@]}" --worker=all
run "${tpu[@]}" ssh "$name" "${where[@]}" --worker=all --command="tar -xf ttt-jax.tar"
# Every host runs the same command; jax.distributed finds the coordinator in the slice's metadata.
run "${tpu[@]}" ssh "$name" "${where[@]}" --worker=all --command="$remote"
