# shellcheck shell=bash
# Functions of the batch scripts in this directory, which source this file in the repository and call `train`.

scheduler=pbs
job=${PBS_JOBID:-}
. scripts/common.sh || return 1

[ -n "$job" ] || { log "this is a batch script: start it with qsub"; exit 1; }

# qsub passes no arguments to a script, so the overrides are in GPT4D_ARGS, quoted as in a shell. `bash SCRIPT OVERRIDE...`
# in an interactive job has arguments.
# shellcheck disable=SC2034
mapfile -d '' -t overrides < <(xargs -r printf '%s\0' <<< "${GPT4D_ARGS:-}")

# train SCRIPT RANKS_PER_NODE [MPIEXEC OPTION]... -- [OVERRIDE]...: run train.py on all nodes, and exit.
train() {
    local script=$1 per_node=$2 nodes options=() code
    shift 2
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    check_python
    mapfile -t nodes < <(awk '!seen[$0]++' "$PBS_NODEFILE")
    # With PMIx, mpiexec does not tell the number of all ranks. Other nodes may not have PBS_NODEFILE.
    export WORLD_SIZE=$((${#nodes[@]} * per_node))
    default MASTER_ADDR "${nodes[0]}"
    warn_before_limit
    log "start on ${nodes[*]}"
    run_step mpiexec --envall -n "$WORLD_SIZE" --ppn "$per_node" --hostfile "$PBS_NODEFILE" "${options[@]}" \
        "${python[@]}" train.py "$@"
    code=$?
    # Users cannot requeue a job. After a failed node or a preemption, PBS reruns it by itself (qsub -r y).
    finish "$code" "GPT4D_ARGS=$(printf '%q' "${*@Q}") qsub -v GPT4D_ARGS -l select=${#nodes[@]} $script"
}

# warn_before_limit: PBS sends TERM at the time limit, and KILL a few seconds later, which is too late for a save.
warn_before_limit() {
    local limit hours minutes seconds
    limit=$(qstat -f "$job" | sed -n 's/^ *Resource_List.walltime = //p')
    IFS=: read -r hours minutes seconds <<< "$limit"
    if [ -z "${seconds:-}" ]; then
        log "qstat does not show the time limit: the run is not warned"
        return
    fi
    warn_after $((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds - SECONDS - ${GPT4D_WARNING_S:-300}))
}
