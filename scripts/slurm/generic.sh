#!/usr/bin/env bash
# Any cluster, with GPUs or without. From the repository:
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 scripts/slurm/generic.sh model=gpt_1b3 parallel.gx=4
# Words after the script are train.py's. What follows are defaults: options before the script override each of them.
#SBATCH --job-name=gpt4d
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
# Consecutive ranks share a node, so that x, the axis that communicates most, is innermost.
#SBATCH --distribution=block:block
# The run hears of its time limit 300 s before: time for a step and a save.
#SBATCH --signal=B:USR1@300
# Back into the queue after a node failure, a preemption, or the time limit; one log for all starts.
#SBATCH --requeue
#SBATCH --open-mode=append

# sbatch runs a copy of this file; the repository is where sbatch was called, or GPT4D_HOME.
cd "${GPT4D_HOME:-${SLURM_SUBMIT_DIR:-.}}" || exit 1
if ! . scripts/slurm/common.sh; then
    echo "$PWD is not gpt4d: call sbatch in the repository, or set GPT4D_HOME" >&2
    exit 1
fi

# --nv and --rocm bring the host's GPU driver into the container, where there is one; the working directory is bound
# anyway, other directories with APPTAINER_BIND.
gpu=()
[ ! -e /dev/nvidiactl ] || gpu=(--nv)
[ ! -e /dev/kfd ] || gpu=(--rocm)
in_container apptainer exec "${gpu[@]}" --bind "$PWD" "${GPT4D_CONTAINER:-}"

train -- "$@"
