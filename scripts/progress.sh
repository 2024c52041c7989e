# Steps of setup.sh: what is done is remembered, a long one shows that it lives, a failed one says what failed.
# Sourced; reads STAMPS and LOG (paths), VENV, STEPS (how many there are), and counts STEP.
# shellcheck shell=bash

say() { printf '%s\n' "$*"; }

fail() {
    printf '\nsetup: %s\n' "$*" >&2
    exit 1
}

digest() { sha256sum | cut -c1-16; }

# step NAME KEY FUNCTION TITLE: runs the function unless it succeeded before with the same key.
step() {
    local name=$1 key=$2 function=$3 title=$4 started=$SECONDS
    STEP=$((STEP + 1))
    if [ -f "$STAMPS/$name" ] && [ "$(cat "$STAMPS/$name")" = "$key" ]; then
        say "[$STEP/$STEPS] $title: up to date"
        return
    fi
    rm -f "$STAMPS/$name"
    say "[$STEP/$STEPS] $title ..."
    "$function"
    printf '%s\n' "$key" > "$STAMPS/$name"
    say "[$STEP/$STEPS] $title: done in $((SECONDS - started)) s"
}

# A line every 15 s, so that a long download does not look like a hang.
sign_of_life() {
    local started=$SECONDS
    while sleep 15 > /dev/null 2>&1; do
        say "        $((SECONDS - started)) s: $(tail -n 1 "$LOG" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
    done
}

# logged WHAT COMMAND...: output goes to the log; on failure the end of it is shown, with what failed.
logged() {
    local what=$1 before pid life status=0
    shift
    [ -d "$VENV" ] || LOG=$(mktemp)
    printf '\n==== %s: %s\n' "$what" "$*" >> "$LOG"
    before=$(wc -l < "$LOG")
    set -m                            # a process group of its own, so that Ctrl-C ends it whole
    "$@" < /dev/null >> "$LOG" 2>&1 9<&- &
    pid=$!
    set +m
    sign_of_life 9<&- &               # without the lock: its sleep outlives it
    life=$!
    trap 'kill -- "-$pid" "$life" 2> /dev/null; exit 130' INT TERM
    wait "$pid" || status=$?
    kill "$life"
    wait "$life" 2> /dev/null || true
    trap - INT TERM
    [ "$status" -ne 0 ] || return 0
    tail -n +"$((before + 1))" "$LOG" | tail -n 15 | sed 's/^/        | /' >&2
    fail "step $STEP of $STEPS failed: $what (exit code $status; the whole log is $LOG)." \
        "Run the same command again to continue from this step."
}
