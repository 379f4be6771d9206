#!/usr/bin/env bash
# Perlmutter (NERSC): 4 A100 per node, one Slingshot NIC per GPU. In the repository, run:
#   sbatch --account=m0000_g --nodes=16 scripts/slurm/perlmutter.sh model=gpt_5b parallel.gx=4 parallel.gz=4
# Arguments after the script are train.py's overrides. The options below are defaults: sbatch options override them.
#SBATCH --job-name=gpt4d
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --nodes=1
# One task per GPU, with a quarter of the node's 64 cores (128 hardware threads).
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=06:00:00
# Consecutive ranks share a node, so that x, the axis that communicates most, goes over NVLink.
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

# NCCL reaches Slingshot through libfabric with the aws-ofi-nccl plugin, which this module contains. Without it
# NCCL uses TCP sockets, at a tenth of the speed. Shifter has its own module for it, see below.
[ -n "${GPT4D_CONTAINER:-}" ] || load_modules "${GPT4D_NCCL_MODULE:-nccl}"

default NCCL_SOCKET_IFNAME hsn   # NCCL's bootstrap and sockets: the Slingshot interfaces, not the management network
default GLOO_SOCKET_IFNAME hsn0  # messages between hosts by gloo, which needs the full name of one interface
default NCCL_CROSS_NIC 1         # a ring may use different NICs on different nodes: all are on one network
default NCCL_NET_GDR_LEVEL PHB   # NICs read the memory of GPUs below the same host bridge directly
default FI_CXI_DISABLE_HOST_REGISTER 1   # with NCCL, libfabric's registration of host memory with CUDA can deadlock
default FI_MR_CACHE_MONITOR userfaultfd  # detects freed memory; the default malloc hooks can deadlock
default FI_CXI_DEFAULT_CQ_SIZE 131072    # completion queue; the default overflows in large jobs
default FI_CXI_RX_MATCH_MODE hybrid      # matches in software when the NIC's list is full, instead of failing
default FI_CXI_RDZV_PROTO alt_read       # the receiver's NIC reads large messages,
default FI_CXI_RDZV_THRESHOLD 0          # and small ones too, so that none passes through host memory
default FI_CXI_RDZV_GET_MIN 0
default FI_CXI_RDZV_EAGER_SIZE 0

# Shifter unpacks an image once, into a file that each node mounts, so nothing has to be staged.
in_container shifter --image="${GPT4D_CONTAINER:-}" --module=gpu,nccl-plugin

# The task with local rank i uses GPU i, which is closest to NUMA domain 3-i. Each task sees all GPUs of the node, as
# NCCL needs for NVLink. map_ldom requires whole nodes; on a part of a node set GPT4D_CPU_BIND=cores.
train --gpu-bind=none --cpu-bind="${GPT4D_CPU_BIND:-map_ldom:3,2,1,0}" -- cluster=perlmutter "$@"
