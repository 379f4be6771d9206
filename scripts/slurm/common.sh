# shellcheck shell=bash
# What the batch scripts beside this file share: they source it in the repository, then call `train`.
# It prints no environment and is never traced (set -x): keys and tokens are in there.

readonly GO_ON=75         # train.py's exit code for "saved; the same command goes on"
readonly IDLE_REQUEUES=3  # in a row, from one checkpoint: a run that comes no further would go round for ever

say() { echo "slurm: job ${SLURM_JOB_ID:-none}: $*" >&2; }

[ -n "${SLURM_JOB_ID:-}" ] || { say "this is a batch script: start it with sbatch"; exit 1; }

# Slurm warns of the time limit with USR1, to the batch shell alone (--signal=B:USR1@300), and ends or preempts with
# TERM. The traps stand before modules are loaded, which takes seconds.
asked='' signals=0 step=''
hear() {
    signals=$((signals + 1))
    [ -z "$asked" ] || return 0  # a second signal would end the run without a save; Slurm sends the tasks TERM itself
    asked=$1
    [ -z "$step" ] || hand_on
}
hand_on() { kill -USR1 "$step" 2> /dev/null; }  # USR1 whatever was heard: of TERM srun makes KILL
trap 'hear USR1' USR1
trap 'hear TERM' TERM

# With sbatch --export=NONE, srun would hide from the tasks what is exported here.
unset SLURM_EXPORT_ENV

# default NAME VALUE: exports NAME, with the value it has already, if any.
default() { export "$1=${!1-$2}"; }

# load MODULE...: environment modules, where there are any. A container or a virtual environment may need none.
load() {
    if ! type module > /dev/null 2>&1; then
        say "there is no 'module' command; going on without $*"
    elif ! module load "$@"; then
        say "module load $* failed; going on without"
    fi
}

# Kernels of one hardware queue start in the order they were given: a collective starts before the computation that is
# to run beside it, instead of finding all multiprocessors taken.
default CUDA_DEVICE_MAX_CONNECTIONS 1

python=("${GPT4D_VENV:-$PWD/.venv}/bin/python")

# in_container COMMAND...: if GPT4D_CONTAINER names an image, COMMAND runs what follows it inside.
in_container() {
    [ -z "${GPT4D_CONTAINER:-}" ] || python=("$@" python3)
}

# train [OPTION OF SRUN]... -- [WORD OF TRAIN.PY]...: ends this script.
train() {
    local options=() heard code
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    if ! command -v "${python[0]}" > /dev/null; then
        say "there is no ${python[0]}: GPT4D_VENV and GPT4D_CONTAINER say what to run in (scripts/slurm/README.md)"
        exit 1
    fi
    # Since Slurm 22.05 srun does not take this from sbatch by itself.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # Ranks that have saved leave one after the other, so the first to leave must not end the rest (kill-on-bad-exit).
    # If one fails, the others end themselves and say why; one that cannot is ended after two minutes.
    options+=(--kill-on-bad-exit=0 --wait=120)

    if [ -n "$asked" ]; then
        code=$GO_ON  # heard before anything was started
    else
        say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on ${SLURM_JOB_NODELIST:-}"
        # In the background: bash runs no trap while it waits for a command in front.
        srun "${options[@]}" "${python[@]}" train.py "$@" &
        step=$!
        [ -z "$asked" ] || hand_on
        while heard=$signals; wait "$step"; code=$?; [ "$heard" != "$signals" ]; do
            :  # a trap ends `wait`, not the step; of a step that has ended, `wait` still knows the code
        done
        step=''
    fi

    if [ "$code" != "$GO_ON" ] && { [ -z "$asked" ] || [ "$code" -le 128 ]; }; then
        exit "$code"  # done, or failed
    fi
    # Asked to stop and ended by a signal: it came before train.py listened.
    go_on "$@"
    exit "$GO_ON"
}

# go_on [WORD OF TRAIN.PY]...: puts this job back into the queue. Not one that is no longer RUNNING while this script
# still is: scancel, the end of its time or Slurm's own requeue have decided already, and a requeue would undo scancel.
go_on() {
    local state
    state=$(patiently scontrol show job "$SLURM_JOB_ID" --oneliner | grep -om1 'JobState=[A-Z_]*')
    case $state in
        JobState=RUNNING | JobState=SIGNALING) ;;
        *) say "ended from outside ($state); if Slurm has not requeued it, the same sbatch command goes on"; return ;;
    esac
    note_progress "$@" || return
    if patiently scontrol requeue "$SLURM_JOB_ID"; then
        say "${asked:+$asked: }saved, and back in the queue"
    else
        say "cannot be requeued here; the same sbatch command goes on"
    fi
}

# patiently COMMAND...: until it succeeds, for a minute: the controller of a large machine is out of reach at times.
patiently() {
    local seconds
    for seconds in 5 15 40; do
        "$@" && return
        sleep "$seconds"
    done
    "$@"
}

# note_progress [WORD OF TRAIN.PY]...: notes in run.dir from which checkpoint this job goes on; fails if it has gone on
# from this one too often.
note_progress() {
    local run_dir newest job before count
    if ! run_dir=$("${python[@]}" train.py "$@" --cfg job --package run.dir --resolve) || ! mkdir -p "$run_dir"; then
        say "no run.dir; not requeued"
        return 1
    fi
    newest=$(find "$run_dir/checkpoints" -maxdepth 1 -name 'step_*[0-9]' 2> /dev/null | sort | tail -n 1)
    newest=${newest##*/}
    read -r job before count 2> /dev/null < "$run_dir/requeues"
    [ "${job:-} ${before:-}" = "$SLURM_JOB_ID ${newest:=none}" ] || count=0
    count=$((count + 1))
    if [ "$count" -gt "$IDLE_REQUEUES" ]; then
        say "not requeued: $((count - 1)) times in a row without a new checkpoint in $run_dir (newest: $newest)"
        return 1
    fi
    echo "$SLURM_JOB_ID $newest $count" > "$run_dir/requeues"
}
