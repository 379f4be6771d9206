#!/usr/bin/env bash
# Aurora (ALCF): two processors with 52 cores each, six Intel GPUs and eight Slingshot NICs per node. gpt4d has no support
# for Intel GPUs: the ranks compute on the cores. In the repository, run:
#   GPT4D_ARGS='model=gpt_125m parallel.gx=4' qsub -A PROJECT -l select=2 -v GPT4D_ARGS scripts/pbs/aurora.sh
# GPT4D_ARGS has train.py's overrides. The options below are defaults: qsub options override them.
#PBS -N gpt4d
#PBS -l select=1
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:flare
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

default GLOO_SOCKET_IFNAME hsn0  # messages between hosts by gloo, which needs the full name of one interface

in_container apptainer exec --bind "$PWD" "${GPT4D_CONTAINER:-}"

# Twelve ranks with eight cores each. The first core of each processor remains for the system.
cores=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100
train scripts/pbs/aurora.sh 12 --cpu-bind "${GPT4D_CPU_BIND:-$cores}" -- "${overrides[@]}" "$@"
