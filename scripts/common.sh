# shellcheck shell=bash
# Functions of the batch scripts of all schedulers. The file common.sh of a scheduler sets `scheduler` and `job`, and sources
# this file. It never prints the environment and is never traced (set -x), because the environment contains keys and tokens.

readonly EXIT_UNFINISHED=75  # train.py's exit code for "saved; the same command resumes"

# shellcheck disable=SC2154
log() { echo "$scheduler: job ${job:-none}: $*" >&2; }

# The traps are set before modules are loaded, which takes seconds.
stop_signal='' signals=0 step=''
on_signal() {
    signals=$((signals + 1))
    [ -z "$stop_signal" ] || return 0  # a second one would end the run unsaved; schedulers also send TERM to the tasks
    stop_signal=$1
    [ -z "$step" ] || forward_signal
}
forward_signal() { kill -USR1 "$step" 2> /dev/null; }  # always USR1, because launchers turn TERM into KILL
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM

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

check_python() {
    command -v "${python[0]}" > /dev/null && return
    log "there is no ${python[0]}; set GPT4D_VENV or GPT4D_CONTAINER (see scripts/slurm/README.md)"
    exit 1
}

# run_step COMMAND...: start the tasks, unless a signal has arrived before, and return their exit code.
run_step() {
    [ -z "$stop_signal" ] || return "$EXIT_UNFINISHED"
    wait_for "$@"
}

# wait_for COMMAND...: run COMMAND and return its exit code. A signal to this script asks the tasks to save and to exit.
wait_for() {
    local signals_before code
    # In the background, because bash runs no trap while it waits for a foreground command.
    "$@" &
    step=$!
    [ -z "$stop_signal" ] || forward_signal
    while signals_before=$signals; wait "$step"; code=$?; [ "$signals_before" != "$signals" ]; do
        :  # a trap interrupts `wait`, not the step; `wait` still returns the exit code of a finished step
    done
    step=''
    return "$code"
}

# is_unfinished CODE: the tasks have saved, or the stop signal ended them before train.py could handle it.
is_unfinished() {
    [ "$1" = "$EXIT_UNFINISHED" ] || { [ -n "$stop_signal" ] && [ "$1" -gt 128 ]; }
}

# warn_after SECONDS: send USR1 to this script after SECONDS, for schedulers that do not warn it before the time limit.
warn_after() {
    if [ "$1" -le 0 ]; then
        log "less than ${GPT4D_WARNING_S:-300} s until the time limit: the run is not warned"
        return
    fi
    { timeout "$1" tail --pid=$$ -f /dev/null || kill -USR1 $$; } > /dev/null 2>&1 &  # tail ends with this script
}

# finish CODE COMMAND: exit with CODE; if the run is unfinished, show the command that resumes it, and exit with 75.
finish() {
    is_unfinished "$1" || exit "$1"
    log "${stop_signal:+$stop_signal: }unfinished; resume with: $2"
    exit "$EXIT_UNFINISHED"
}
