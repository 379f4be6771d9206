#!/usr/bin/env bash
# Polaris (ALCF): 4 A100 of 40 GB per node, two Slingshot NICs. In the repository, run:
#   GPT4D_ARGS='model=gpt_1b3 parallel.gx=4' qsub -A PROJECT -l select=2 -v GPT4D_ARGS scripts/pbs/polaris.sh
# GPT4D_ARGS has train.py's overrides. The options below are defaults: qsub options override them.
#PBS -N gpt4d
#PBS -l select=1
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:eagle
#PBS -q debug
# One log; rerun after a node failure or a preemption.
#PBS -j oe
#PBS -k doe
#PBS -r y

# qsub runs a copy of this file, so the repository is GPT4D_HOME or the directory in which qsub was called.
cd "${GPT4D_HOME:-${PBS_O_WORKDIR:-.}}" || exit 1
if ! . scripts/pbs/common.sh; then
    echo "$PWD is not the gpt4d repository; call qsub there, or set GPT4D_HOME" >&2
    exit 1
fi

# NCCL reaches Slingshot through libfabric with the aws-ofi-nccl plugin. The settings are ALCF's.
plugin=${GPT4D_OFI_PLUGIN:-/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib}
if [ -d "$plugin" ]; then
    export LD_LIBRARY_PATH=$plugin:/soft/libraries/hwloc/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    default NCCL_NET "AWS Libfabric"
else
    log "there is no $plugin: NCCL uses slow TCP between nodes; set GPT4D_OFI_PLUGIN to the plugin's lib directory"
fi
default NCCL_SOCKET_IFNAME hsn   # NCCL's bootstrap: the Slingshot interfaces
default GLOO_SOCKET_IFNAME hsn0  # messages between hosts by gloo, which needs the full name of one interface
default NCCL_NET_GDR_LEVEL PHB
default NCCL_CROSS_NIC 1
default FI_CXI_DISABLE_HOST_REGISTER 1
default FI_MR_CACHE_MONITOR userfaultfd
default FI_CXI_DEFAULT_CQ_SIZE 131072

in_container apptainer exec --nv --bind "$PWD" "${GPT4D_CONTAINER:-}"

# Consecutive ranks share a node. The rank with local rank i uses GPU i, which is closest to NUMA domain 3-i.
cores=list:24-31,56-63:16-23,48-55:8-15,40-47:0-7,32-39
train scripts/pbs/polaris.sh 4 --cpu-bind "${GPT4D_CPU_BIND:-$cores}" -- "${overrides[@]}" "$@"
