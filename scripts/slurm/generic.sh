#!/usr/bin/env bash
# Any cluster, with or without GPUs. In the repository, run:
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 scripts/slurm/generic.sh model=gpt_1b3 parallel.gx=4
# Arguments after the script are train.py's overrides. The options below are defaults: sbatch options override them.
#SBATCH --job-name=gpt4d
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
# Consecutive ranks share a node, so that x, the axis that communicates most, has consecutive ranks.
#SBATCH --distribution=block:block
# Slurm signals the run 300 s before its time limit, which leaves time for a step and a save.
#SBATCH --signal=B:USR1@300
# Requeue after a node failure, a preemption or the time limit; all starts write to one log.
#SBATCH --requeue
#SBATCH --open-mode=append

# sbatch runs a copy of this file, so the repository is GPT4D_HOME or the directory in which sbatch was called.
cd "${GPT4D_HOME:-${SLURM_SUBMIT_DIR:-.}}" || exit 1
if ! . scripts/slurm/common.sh; then
    echo "$PWD is not the gpt4d repository; call sbatch there, or set GPT4D_HOME" >&2
    exit 1
fi

# --nv and --rocm make the host's GPU driver, if any, available in the container. Bind directories other than the
# working directory with APPTAINER_BIND.
gpu=()
[ ! -e /dev/nvidiactl ] || gpu=(--nv)
[ ! -e /dev/kfd ] || gpu=(--rocm)
in_container apptainer exec "${gpu[@]}" --bind "$PWD" "${GPT4D_CONTAINER:-}"

train -- "$@"
