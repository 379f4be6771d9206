#!/usr/bin/env bash
# Frontier (OLCF): 4 MI250X per node, each two GPUs (GCDs) of 64 GB, and four Slingshot NICs. In the repository, run:
#   sbatch --account=abc123 --nodes=16 scripts/slurm/frontier.sh model=gpt_10b parallel.gx=8 parallel.gz=4
# Arguments after the script are train.py's overrides. The options below are defaults: sbatch options override them.
#SBATCH --job-name=gpt4d
#SBATCH --partition=batch
#SBATCH --nodes=1
# One task per GCD, with the seven cores of a chiplet that are available to jobs.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=02:00:00
# Consecutive ranks share a node, so that x, the axis that communicates most, goes over Infinity Fabric.
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

# PyTorch's ROCm wheels contain ROCm; your own build needs the module that it was built with.
[ -z "${GPT4D_MODULES:-}" ] || read -ra modules <<< "$GPT4D_MODULES"
[ -z "${modules[*]:-}" ] || load_modules "${modules[@]}"

# RCCL reaches Slingshot through libfabric with its OFI plugin (librccl-net.so or libnccl-net.so), which users build for
# their ROCm version. Without it RCCL uses TCP sockets, at a tenth of the speed.
if [ -n "${GPT4D_OFI_PLUGIN:-}" ]; then
    export LD_LIBRARY_PATH=$GPT4D_OFI_PLUGIN${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
elif [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    log "GPT4D_OFI_PLUGIN is not set: RCCL uses slow TCP between nodes; set it to the lib directory of an OFI plugin"
fi

default NCCL_SOCKET_IFNAME hsn   # RCCL's bootstrap and sockets: the Slingshot interfaces
default GLOO_SOCKET_IFNAME hsn0  # messages between hosts by gloo, which needs the full name of one interface
default NCCL_CROSS_NIC 1         # a ring may use different NICs on different nodes: all are on one network
default NCCL_NET_GDR_LEVEL PHB   # NICs read the memory of GPUs below the same host bridge directly
default FI_MR_CACHE_MONITOR userfaultfd  # detects freed memory; the default malloc hooks can deadlock
default FI_CXI_DEFAULT_CQ_SIZE 131072    # completion queue; the default overflows in large jobs
default FI_CXI_RX_MATCH_MODE hybrid      # matches in software when the NIC's list is full, instead of failing

in_container apptainer exec --rocm --bind "$PWD" "${GPT4D_CONTAINER:-}"

# The task with local rank i uses GCD i and the cores closest to it: GCDs 0 to 7 belong to chiplets 6 7 2 3 0 1 4 5,
# whose first core is reserved for the system. (--gpu-bind=closest would hide the other tasks' GPUs, which RCCL needs.)
chiplets=(0xfe000000000000 0xfe00000000000000 0xfe0000 0xfe000000 0xfe 0xfe00 0xfe00000000 0xfe0000000000)
default GPT4D_CPU_BIND "mask_cpu:$(IFS=,; echo "${chiplets[*]}")"
train --gpu-bind=none --cpu-bind="$GPT4D_CPU_BIND" -- cluster=frontier "$@"
