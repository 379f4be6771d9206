# shellcheck shell=bash
# Functions of the batch scripts in this directory, which source this file in the repository and call `train`.

readonly MAX_IDLE_REQUEUES=3  # in a row from one checkpoint: a run without progress would be requeued forever

# For a task of a job array, scontrol needs this form: one of the tasks has the number of the array, which names all tasks.
scheduler=slurm
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-${SLURM_JOB_ID:-}}

# Slurm sends USR1 before the time limit, to the batch shell only (--signal=B:USR1@300), and TERM to end or preempt the
# job.
. scripts/common.sh || return 1

[ -n "$job" ] || { log "this is a batch script: start it with sbatch"; exit 1; }

# With sbatch --export=NONE, srun would not pass on to the tasks what this script exports.
unset SLURM_EXPORT_ENV

# train [SRUN OPTION]... -- [OVERRIDE]...: run train.py on all tasks, requeue the job if it is unfinished, and exit.
train() {
    local options=() code
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    check_python
    # Since Slurm 22.05 srun does not inherit this from sbatch.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # Ranks that have saved exit one after the other, so the first exit must not end the rest (kill-on-bad-exit). If a
    # rank fails, the others exit by themselves and report why; one that cannot is ended after two minutes.
    options+=(--kill-on-bad-exit=0 --wait=120)

    log "start $((${SLURM_RESTART_COUNT:-0} + 1)) on ${SLURM_JOB_NODELIST:-}"
    run_step srun "${options[@]}" "${python[@]}" train.py "$@"
    code=$?
    is_unfinished "$code" || exit "$code"
    requeue "$@"
    exit "$EXIT_UNFINISHED"
}

# requeue [OVERRIDE]...: requeue this job unless it is no longer RUNNING although this script is. Then scancel, the time
# limit or Slurm's own requeue has decided already, and a requeue here would undo scancel.
requeue() {
    local state
    state=$(retry scontrol show job "$job" --oneliner | grep -om1 'JobState=[A-Z_]*')
    case $state in
        JobState=RUNNING | JobState=SIGNALING) ;;
        *) log "ended from outside ($state); unless Slurm requeues it, resume with the same sbatch command"; return ;;
    esac
    record_progress "$@" || return
    if retry scontrol requeue "$job"; then
        log "${stop_signal:+$stop_signal: saved and }requeued"
    else
        log "cannot be requeued here; resume with the same sbatch command"
    fi
}

# retry COMMAND...: repeat COMMAND until it succeeds, for a minute, because a busy controller does not always answer.
retry() {
    local seconds
    for seconds in 5 15 40; do
        "$@" && return
        sleep "$seconds"
    done
    "$@"
}

# record_progress [OVERRIDE]...: record in run.dir which checkpoint this job resumes from; fail if it has resumed from
# this one too often.
record_progress() {
    local run_dir newest recorded before count record
    if ! run_dir=$("${python[@]}" train.py "$@" --cfg job --package run.dir --resolve) || ! mkdir -p "$run_dir"; then
        log "cannot determine or create run.dir; not requeued"
        return 1
    fi
    record=$run_dir/requeues${SLURM_ARRAY_TASK_ID:+.$SLURM_ARRAY_TASK_ID}  # tasks of an array share run_dir
    # The runs of a sweep are one level below.
    newest=$(find "$run_dir" -mindepth 2 -maxdepth 3 -path '*/checkpoints/step_*[0-9]' -printf '%C@ %P\n' 2> /dev/null \
        | sort -n | tail -n 1)
    newest=${newest#* }
    read -r recorded before count 2> /dev/null < "$record"
    [ "${recorded:-} ${before:-}" = "$job ${newest:=none}" ] || count=0
    count=$((count + 1))
    if [ "$count" -gt "$MAX_IDLE_REQUEUES" ]; then
        log "not requeued: $((count - 1)) times in a row without a new checkpoint in $run_dir (newest: $newest)"
        return 1
    fi
    echo "$job $newest $count" > "$record"
}
