#!/usr/bin/env bash
# Frontier (OLCF): 4 MI250X a node, each two GPUs (GCDs) of 64 GB, four Slingshot NICs. From the repository:
#   sbatch --account=abc123 --nodes=16 scripts/slurm/frontier.sh model=gpt_10b parallel.gx=8 parallel.gz=4
# Words after the script are train.py's. What follows are defaults: options before the script override each of them.
#SBATCH --job-name=gpt4d
#SBATCH --partition=batch
#SBATCH --nodes=1
# One task a GCD, with the seven cores of a chiplet that the system leaves to jobs.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=02:00:00
# Consecutive ranks share a node, so that x, the axis that communicates most, goes over Infinity Fabric.
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

# PyTorch's ROCm wheels bring their ROCm along; a build of one's own wants the module it was made with.
[ -z "${GPT4D_MODULES:-}" ] || read -ra modules <<< "$GPT4D_MODULES"
[ -z "${modules[*]:-}" ] || load "${modules[@]}"

# RCCL reaches Slingshot through libfabric by its OFI plugin (librccl-net.so or libnccl-net.so), which users build for
# their ROCm version. Without it RCCL takes TCP sockets, at a tenth of the speed.
if [ -n "${GPT4D_OFI_PLUGIN:-}" ]; then
    export LD_LIBRARY_PATH=$GPT4D_OFI_PLUGIN${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
elif [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    say "GPT4D_OFI_PLUGIN is not set: RCCL speaks TCP between nodes"
fi

default NCCL_SOCKET_IFNAME hsn   # RCCL's first messages, and sockets: the Slingshot interfaces
default GLOO_SOCKET_IFNAME hsn0  # the host's own messages, by gloo, which wants one interface's whole name
default NCCL_CROSS_NIC 1         # a ring may leave by one NIC and enter by another: Slingshot's NICs share one network
default NCCL_NET_GDR_LEVEL PHB   # NIC and GPU below one host bridge: the NIC reads the GPU's memory itself
default FI_MR_CACHE_MONITOR userfaultfd  # sees memory that is given back; the default hooks into malloc can deadlock
default FI_CXI_DEFAULT_CQ_SIZE 131072    # completions of many peers at once: the default overflows in large jobs
default FI_CXI_RX_MATCH_MODE hybrid      # matching goes on in software when the NIC's list is full, instead of failing

# MIOpen keeps what it compiles in an SQLite file, which breaks on a file system that nodes share; /tmp is the node's.
default MIOPEN_USER_DB_PATH "/tmp/gpt4d-miopen-$SLURM_JOB_ID"
default MIOPEN_CUSTOM_CACHE_DIR "$MIOPEN_USER_DB_PATH"

in_container apptainer exec --rocm --bind "$PWD" "${GPT4D_CONTAINER:-}"

# The task with local rank i takes GCD i, on the cores closest to it: GCDs 0 to 7 hang on chiplets 6 7 2 3 0 1 4 5, of
# which the system keeps the first core. (--gpu-bind=closest would hide from each task the GPUs of the others, which
# RCCL wants to see.)
chiplets=(0xfe000000000000 0xfe00000000000000 0xfe0000 0xfe000000 0xfe 0xfe00 0xfe00000000 0xfe0000000000)
default GPT4D_CPU_BIND "mask_cpu:$(IFS=,; echo "${chiplets[*]}")"
train --gpu-bind=none --cpu-bind="$GPT4D_CPU_BIND" -- "$@"
