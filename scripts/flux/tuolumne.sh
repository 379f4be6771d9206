#!/usr/bin/env bash
# Tuolumne (LLNL): 4 MI300A of 128 GB per node, four Slingshot NICs. In the repository, run:
#   flux batch --nodes=2 scripts/flux/tuolumne.sh model=gpt_1b3 parallel.gx=4
# Arguments after the script are train.py's overrides. The options below are defaults: options of flux batch override them.
# flux: --job-name=gpt4d
# flux: --nodes=1
# flux: --exclusive
# flux: --time-limit=1h
# flux: --output=flux-{{id}}.out

# flux batch runs a copy of this file in the directory in which it was called, or the repository is GPT4D_HOME.
cd "${GPT4D_HOME:-.}" || exit 1
scheduler=flux
job=$(flux getattr jobid 2> /dev/null)
if ! . scripts/common.sh; then
    echo "$PWD is not the gpt4d repository; call flux batch there, or set GPT4D_HOME" >&2
    exit 1
fi
[ -n "$job" ] || { log "this is a batch script: start it with flux batch"; exit 1; }
check_python

# RCCL reaches Slingshot through libfabric with its OFI plugin. Without it RCCL uses TCP sockets, at a tenth of the speed.
if [ -n "${GPT4D_OFI_PLUGIN:-}" ]; then
    export LD_LIBRARY_PATH=$GPT4D_OFI_PLUGIN${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
    log "GPT4D_OFI_PLUGIN is not set: RCCL uses slow TCP between nodes; set it to the lib directory of an OFI plugin"
fi
default NCCL_SOCKET_IFNAME hsn   # RCCL's bootstrap and sockets: the Slingshot interfaces
default GLOO_SOCKET_IFNAME hsn0  # messages between hosts by gloo, which needs the full name of one interface
default NCCL_CROSS_NIC 1         # a ring may use different NICs on different nodes: all are on one network
default FI_MR_CACHE_MONITOR userfaultfd  # detects freed memory; the default malloc hooks can deadlock
default FI_CXI_DEFAULT_CQ_SIZE 131072    # completion queue; the default overflows in large jobs

default MASTER_ADDR "$(flux hostlist --expand --nth=0 local)"  # no variable of Flux contains it
nodes=$(flux hostlist --count local)

# `flux run` does not pass signals on, so the tasks are a job of their own, to which this script is attached.
forward_signal() { flux job kill --signal=USR1 "$tasks" || flux cancel "$tasks"; }  # it may not have started yet

# Consecutive tasks share a node. Each task sees all GPUs of the node, and uses the GPU with the number of its local rank.
# The time limit ends the job without a warning. A task waits for the remaining tasks, which exit one after the other.
warn_after $(($(flux job timeleft) - ${GPT4D_WARNING_S:-300}))
log "start on $(flux hostlist local)"
tasks=$(flux submit --nodes="$nodes" --tasks-per-node=4 --exclusive -o mpibind=off -o gpu-affinity=off \
    -o cpu-affinity=per-task -o exit-timeout=none "${python[@]}" train.py "$@") || exit 1
wait_for flux job attach "$tasks"
code=$?
# Flux has no requeue.
finish "$code" "flux batch --nodes=$nodes scripts/flux/tuolumne.sh ${*@Q}"
