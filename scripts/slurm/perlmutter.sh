#!/usr/bin/env bash
# Perlmutter (NERSC): 4 A100 a node, one Slingshot NIC a GPU. From the repository:
#   sbatch --account=m0000_g --nodes=16 scripts/slurm/perlmutter.sh model=gpt_5b parallel.gx=4 parallel.gz=4
# Words after the script are train.py's. What follows are defaults: options before the script override each of them.
#SBATCH --job-name=gpt4d
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --nodes=1
# One task a GPU, with a quarter of the node's 64 cores (128 hardware threads).
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=06:00:00
# Consecutive ranks share a node, so that x, the axis that communicates most, goes over NVLink.
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

# NCCL reaches Slingshot through libfabric by the aws-ofi-nccl plugin, which this module brings. Without it NCCL takes
# TCP sockets, at a tenth of the speed. Shifter has a module of its own for it, below.
[ -n "${GPT4D_CONTAINER:-}" ] || load "${GPT4D_NCCL_MODULE:-nccl}"

default NCCL_SOCKET_IFNAME hsn   # NCCL's first messages, and sockets: the Slingshot interfaces, not the management net
default GLOO_SOCKET_IFNAME hsn0  # the host's own messages, by gloo, which wants one interface's whole name
default NCCL_CROSS_NIC 1         # a ring may leave by one NIC and enter by another: Slingshot's NICs share one network
default NCCL_NET_GDR_LEVEL PHB   # NIC and GPU below one host bridge: the NIC reads the GPU's memory itself
default FI_CXI_DISABLE_HOST_REGISTER 1   # registering host memory with CUDA inside libfabric can deadlock with NCCL
default FI_MR_CACHE_MONITOR userfaultfd  # sees memory that is given back; the default hooks into malloc can deadlock
default FI_CXI_DEFAULT_CQ_SIZE 131072    # completions of many peers at once: the default overflows in large jobs
default FI_CXI_RX_MATCH_MODE hybrid      # matching goes on in software when the NIC's list is full, instead of failing
default FI_CXI_RDZV_PROTO alt_read       # large messages are read by the receiver's NIC,
default FI_CXI_RDZV_THRESHOLD 0          # and so are small ones: none lies in host memory on its way to a GPU
default FI_CXI_RDZV_GET_MIN 0
default FI_CXI_RDZV_EAGER_SIZE 0

# Shifter unpacks an image once, into one file that each node mounts: nothing is left to stage.
in_container shifter --image="${GPT4D_CONTAINER:-}" --module=gpu,nccl-plugin

# GPU i is closest to NUMA domain 3-i, and the task with local rank i takes GPU i. Each task sees all GPUs of the node:
# NCCL needs that for NVLink. map_ldom wants whole nodes: in a part of one, GPT4D_CPU_BIND=cores.
train --gpu-bind=none --cpu-bind="${GPT4D_CPU_BIND:-map_ldom:3,2,1,0}" -- "$@"
