# The supervisor of one machine on a host: sh host_supervisor.sh FOLDER. POSIX sh with flock, setsid and grep -z.
#
# It starts the engine in a session of its own, watches it twice a second, and ends it when the file `end` appears, on
# SIGTERM, when the engine ends before it was ready, or when `alive` did not change for $orphan_seconds. Descriptor 8
# holds FOLDER/lock for as long as we live: a machine whose lock is free has lost its supervisor. All processes of the
# engine carry GPU_RUNNER_MACHINE=$machine_id in their environment, by which they are found and ended. Before this text
# stands host_end.sh. Seconds are those of /proc/uptime: setting the clock changes nothing.

umask 077
export LC_ALL=C
cd "$1" || exit 1
. ./settings # name machine_id port gpus orphan_seconds grace_seconds boot root made_at

signal_marked() {
    for file in $(marked "$machine_id"); do
        pid=${file#/proc/}
        kill -s "$1" "${pid%/environ}" 2>/dev/null
    done
}

write_end() { # once only, and whole: a link to a finished file
    seconds_up
    printf '%s %s %s %s\n' "$1" "$now" "$boot" "$part" >"end.$$" && ln "end.$$" end 2>/dev/null
    rm -f "end.$$"
}

start_engine() {
    (
        exec 8>&-
        set -- "$machine_id" "$name" "$port" "$gpus" # whatever the variables of the environment are called
        unset SSH_CLIENT SSH_CONNECTION SSH_TTY
        . ./environment
        rm -f environment
        export GPU_RUNNER_MACHINE="$1" CUDA_VISIBLE_DEVICES="$4" name="$2" port="$3" gpus="$4"
        setsid sh ./command </dev/null >>"$2.log" 2>&1 &
        engine=$!
        echo "$engine" >engine
        wait "$engine"
        code=$?
        echo "$code" >exit.new
        mv -f exit.new exit
    ) &
}

end_engine() {
    trap '' TERM INT HUP
    signal_marked TERM
    steps=$((grace_seconds * 5))
    while [ -n "$(begun)$(marked "$machine_id")" ] && [ "$steps" -gt 0 ]; do
        sleep 0.2 8>&-
        steps=$((steps - 1))
    done
    if read -r engine <engine; then kill -s KILL -- "-$engine" 2>/dev/null; fi
    while [ -n "$(begun)$(marked "$machine_id")" ]; do # until then its GPUs are taken
        signal_marked KILL
        sleep 0.2 8>&-
    done
}

watch() { # until the machine is to end; the reason stands in $reason
    reason=
    trap 'reason=terminated' TERM
    trap 'reason=interrupted' INT HUP
    seconds_up
    heard_at=$now heard= rounds=0
    while [ -z "$reason" ]; do
        sleep 0.5 8>&-
        seconds_up
        if read -r sign <alive && [ -n "$sign" ] && [ "$sign" != "$heard" ]; then heard=$sign heard_at=$now; fi
        rounds=$(((rounds + 1) % 120))
        if [ "$rounds" = 0 ]; then bound_log; fi
        if [ ! -e settings ]; then reason=orphaned # somebody removed the whole folder
        elif [ -e end ]; then reason=terminated
        elif [ -e exit ] && [ ! -e ready ]; then reason=boot-failed
        elif [ $((now - heard_at)) -ge "$orphan_seconds" ]; then reason=orphaned
        fi
    done 2>/dev/null
}

echo $$ >supervisor
: >>"$name.log"
start_engine
watch
write_end "$reason" 2>/dev/null
end_engine
finish
