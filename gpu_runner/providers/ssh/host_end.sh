# How the end of a machine is finished: by its supervisor, or by what a request starts that finds a dead one's machine.
# `finish` is called in the machine's folder, with its settings, while descriptor 8 holds its lock. POSIX sh.

seconds_up() { # $now: whole seconds; $part: hundredths after them
    read -r now _ </proc/uptime
    part=${now#*.} now=${now%%.*}
}

marked() { grep -lzxF "GPU_RUNNER_MACHINE=$1" /proc/[0-9]*/environ 2>/dev/null; }

begun() { # programs that have just begun: the kernel shows no environment of theirs yet (env_end, field 51, is 0; proc(5))
    grep -Lz "" /proc/[0-9]*/environ 2>/dev/null | while read -r file; do
        folder=${file%/environ}
        if [ -e "$folder/exe" ] && read -r line <"$folder/stat"; then # no zombie, no thread of the kernel
            set -- ${line##*) }
            if [ "${49}" = 0 ]; then echo "${folder#/proc/}"; fi
        fi 2>/dev/null
    done
}

bound_log() { # vLLM writes a few lines a minute; whatever writes more keeps its last part
    size=$(wc -c <"$name.log")
    if [ "$size" -gt 67108864 ]; then
        tail -c 1048576 "$name.log" >"$name.1.log"
        : >"$name.log"
    fi
}

run_end_command() ( # true when it says that nothing is left of what the engine started elsewhere
    exec 8>&-
    export name port gpus
    timeout -k 5 60 sh ./end_command </dev/null >>"$name.log" 2>&1
)

end_elsewhere() { # until then the GPUs are taken: `failed_ends` says how often it was tried in vain
    tries=0 rest=1
    while [ -s end_command ]; do
        run_end_command && break
        status=$? # before a substitution: in bash it sets $? within the same word
        echo "$(date -u +%FT%TZ) end command failed with status $status; GPUs $gpus stay taken; again in $rest s" >>"$name.log"
        tries=$((tries + 1))
        echo "$tries" >failed_ends
        sleep "$rest" 8>&-
        rest=$((rest < 32 ? rest * 2 : rest))
        bound_log
    done
    rm -f failed_ends
}

finish() { # once its processes are gone
    trap '' TERM INT HUP
    end_elsewhere
    rm -f environment
    for lock in "$root"/gpus/*; do
        if [ "$(readlink "$lock")" = "$name" ]; then rm -f "$lock"; fi
    done
    : >gone
}
