# shellcheck shell=bash
# Shared functions of the batch scripts in this directory, which source this file in the repository and call `train`.
# It never prints the environment and is never traced (set -x), because the environment contains keys and tokens.

readonly EXIT_UNFINISHED=75   # train.py's exit code for "saved; the same command resumes"
readonly MAX_IDLE_REQUEUES=3  # in a row from one checkpoint: a run without progress would be requeued forever

log() { echo "slurm: job ${job:-none}: $*" >&2; }

# For a task of a job array, scontrol needs this form: one of the tasks has the number of the array, which names all tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-${SLURM_JOB_ID:-}}

[ -n "$job" ] || { log "this is a batch script: start it with sbatch"; exit 1; }

# Slurm sends USR1 before the time limit, to the batch shell only (--signal=B:USR1@300), and TERM to end or preempt the
# job. The traps are set before modules are loaded, which takes seconds.
stop_signal='' signals=0 step=''
on_signal() {
    signals=$((signals + 1))
    [ -z "$stop_signal" ] || return 0  # a second one would end the run unsaved; Slurm itself sends TERM to the tasks
    stop_signal=$1
    [ -z "$step" ] || forward_signal
}
forward_signal() { kill -USR1 "$step" 2> /dev/null; }  # always USR1, because srun turns TERM into KILL
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM

# With sbatch --export=NONE, srun would not pass on to the tasks what this script exports.
unset SLURM_EXPORT_ENV

# default NAME VALUE: export NAME, with its present value if it is set.
default() { export "$1=${!1-$2}"; }

# load_modules MODULE...: load environment modules. Without them, as in a container, the job continues.
load_modules() {
    if ! type module > /dev/null 2>&1; then
        log "no 'module' command; continuing without $*"
    elif ! module load "$@"; then
        log "module load $* failed; continuing without"
    fi
}

python=("${GPT4D_VENV:-$PWD/.venv}/bin/python")

# in_container COMMAND...: if GPT4D_CONTAINER names an image, run python inside it; COMMAND runs its arguments there.
in_container() {
    [ -z "${GPT4D_CONTAINER:-}" ] || python=("$@" python3)
}

# train [SRUN OPTION]... -- [OVERRIDE]...: run train.py on all tasks, requeue the job if it is unfinished, and exit.
train() {
    local options=() signals_before code
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    if ! command -v "${python[0]}" > /dev/null; then
        log "there is no ${python[0]}; set GPT4D_VENV or GPT4D_CONTAINER (see scripts/slurm/README.md)"
        exit 1
    fi
    # Since Slurm 22.05 srun does not inherit this from sbatch.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # Ranks that have saved exit one after the other, so the first exit must not end the rest (kill-on-bad-exit). If a
    # rank fails, the others exit by themselves and report why; one that cannot is ended after two minutes.
    options+=(--kill-on-bad-exit=0 --wait=120)

    if [ -n "$stop_signal" ]; then
        code=$EXIT_UNFINISHED  # the signal arrived before anything was started
    else
        log "start $((${SLURM_RESTART_COUNT:-0} + 1)) on ${SLURM_JOB_NODELIST:-}"
        # In the background, because bash runs no trap while it waits for a foreground command.
        srun "${options[@]}" "${python[@]}" train.py "$@" &
        step=$!
        [ -z "$stop_signal" ] || forward_signal
        while signals_before=$signals; wait "$step"; code=$?; [ "$signals_before" != "$signals" ]; do
            :  # a trap interrupts `wait`, not the step; `wait` still returns the exit code of a finished step
        done
        step=''
    fi

    if [ "$code" != "$EXIT_UNFINISHED" ] && { [ -z "$stop_signal" ] || [ "$code" -le 128 ]; }; then
        exit "$code"  # finished or failed
    fi
    # Unfinished, or ended by the stop signal before train.py could handle it.
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
