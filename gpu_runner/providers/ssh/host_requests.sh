# What a host is asked, over the standard input of sh. Before this text stand assignments (requests.py), after it the
# call of `main`, so that a part of it does nothing. Every request holds the host's lock (descriptor 9): one at a time.
#
# Files below $root = FOLDER/HOST: lock; gpus/DEVICE, a symbolic link to the name of the machine that has the GPU;
# machines/NAME with settings, command, end_command, environment (0600; the supervisor removes it), supervisor.sh, and
# lock (held by the supervisor), alive (changed by every sweep), ready, engine, exit, end (reason, uptime, boot, and
# hundredths of a second after the uptime), failed_ends (how often the end command has failed), gone, NAME.log. A machine
# is made beside and moved to its place whole; it is there from then on, also when it has ended.

export LC_ALL=C
umask 077
eval "$end_text" # host_end.sh

refuse() { # the reply ends: nothing was done
    printf 'end %s %s\n' "$nonce" "$1"
    exit 0
}

open_root() {
    mkdir -p "$root/machines" "$root/gpus" 2>/dev/null && ( : >>"$root/lock") 2>/dev/null || refuse no-folder
    command -v flock >/dev/null && command -v setsid >/dev/null || refuse no-tools
    exec 9>>"$root/lock"
    flock -w 8 9 || refuse busy
    read -r boot </proc/sys/kernel/random/boot_id
    seconds_up
}

write_end() { # write_end FOLDER REASON; false when the disk is full
    printf '%s %s %s %s\n' "$2" "$now" "$boot" "$part" >"$1/end.$$" && { ln "$1/end.$$" "$1/end" 2>/dev/null || [ -e "$1/end" ]; }
    written=$?
    rm -f "$1/end.$$"
    return $written
}

renew_end_command() { # that of a container as an earlier version wrote it: it fails, in some versions, for one that is gone
    if [ "$(cat end_command)" = 'docker rm -f "${name}"' ]; then
        printf '%s' "$docker_end_text" >end_command.new && mv -f end_command.new end_command
    fi
} 2>/dev/null

settle() ( # end what a dead supervisor left of the machine in FOLDER, and free its GPUs
    this_boot=$boot this_root=$root
    . "$1/settings"
    exec 8>>"$1/lock"
    flock -n 8 || return 0 # its supervisor lives, or the last step of an earlier look goes on
    reason=interrupted
    if [ "$boot" != "$this_boot" ]; then reason=host-restarted now=0 part=00; fi
    boot=$this_boot root=$this_root
    write_end "$1" "$reason" 2>/dev/null
    tries=0
    while
        new=$(begun) left=$(marked "$machine_id") # fails, too, where a process is somebody else's
        [ -n "$new$left" ]
    do
        for file in $left; do
            pid=${file#/proc/}
            kill -s KILL "${pid%/environ}" 2>/dev/null
        done
        tries=$((tries + 1))
        [ "$tries" -lt 20 ] || return 0
        sleep 0.1
    done
    cd "$1" || return 0
    renew_end_command
    if [ ! -s end_command ]; then
        finish
    else # it may take long: no request waits for it
        setsid sh -c "$end_text
. ./settings && finish" </dev/null >/dev/null 2>&1 9>&- &
    fi
)

settle_all() {
    for each in "$root"/machines/*/; do
        each=${each%/}
        if [ -e "$each/settings" ] && [ ! -e "$each/gone" ]; then settle "$each"; fi
    done 2>/dev/null
    for lock in "$root"/gpus/*; do # of a create that was cut short
        owner=$(readlink "$lock") || continue
        if [ ! -e "$root/machines/$owner/settings" ] || [ -e "$root/machines/$owner/gone" ]; then rm -f "$lock"; fi
    done
}

as_seconds() { # as_seconds HUNDREDTHS; negative where the one moment was read after the other
    if [ "$1" -ge 0 ]; then printf '%d.%02d' $(($1 / 100)) $(($1 % 100)); else echo 0.00; fi
}

describe() ( # machine NAME ID STATE PORT SLOTS SECONDS REASON BILLED
    this_boot=$boot state=booting seconds=- reason=- billed=- made_at=
    . "$1/settings"
    until=$now until_part=$part
    if [ -e "$1/end" ]; then
        state=ended
        read -r reason ended_at end_boot end_part <"$1/end"
        if [ "$end_boot" != "$this_boot" ]; then ended_at=0 end_part=00; fi
        until=$ended_at until_part=${end_part:-00}
        # A one before the hundredths, so that 08 is no octal number.
        seconds=$(as_seconds $(((now - until) * 100 + 1$part - 1$until_part)))
    elif [ -e "$1/gone" ]; then # its end could not be written
        state=ended seconds=0.00 reason=interrupted made_at=
    elif [ -e "$1/ready" ]; then state=running
    fi
    if [ -n "$made_at" ] && [ "$boot" = "$this_boot" ]; then
        billed=$(as_seconds $(((until - ${made_at%.*}) * 100 + 1$until_part - 1${made_at#*.})))
    fi
    printf 'machine %s %s %s %s %s %s %s %s\n' \
        "$name" "$machine_id" "$state" "$port" "$slots" "$seconds" "$reason" "$billed"
    list_failed_end "$1" "$name"
)

list_failed_end() { # of the machine NAME in FOLDER
    if [ ! -e "$1/gone" ] && read -r tries <"$1/failed_ends"; then echo "failed-end $2 $tries"; fi
} 2>/dev/null

list_gpus() {
    for lock in "$root"/gpus/*; do
        owner=$(readlink "$lock") || continue # no GPU is taken, or a supervisor has just freed this one
        printf 'gpu %s %s\n' "${lock##*/}" "$owner"
    done
}

request_list() {
    open_root
    settle_all
    for each in "$root"/machines/*/; do
        each=${each%/}
        case ${each##*/} in
        "$tag"*) [ -e "$each/settings" ] || continue ;;
        *) continue ;;
        esac
        # In place, so that it works on a full disk too.
        if [ "$sign" = 1 ] && [ ! -e "$each/gone" ]; then printf '%12d\n' "$now" 1<>"$each/alive"; fi
        describe "$each"
    done
    list_gpus
    refuse ok
}

take_gpus() { # the first free set of $gpu_sets, all of it
    for gpus in $gpu_sets; do
        taken= free=1
        for device in $(echo "$gpus" | tr , ' '); do
            if ln -sn "$name" "$root/gpus/$device" 2>/dev/null; then taken="$taken $device"; else free=0; fi
        done
        if [ "$free" = 1 ]; then return 0; fi
        for device in $taken; do rm -f "$root/gpus/$device"; done
    done
    return 1
}

take_port() {
    used=' '
    for each in "$root"/machines/*/; do
        if [ -e "$each/settings" ] && [ ! -e "$each/gone" ]; then
            used="$used$(sed -n 's/^port=//p' "$each/settings") "
        fi
    done
    port=$first_port
    while [ "$port" -lt $((first_port + 1000)) ]; do
        hex=$(printf '%04X' "$port")
        case $used in
        *" $port "*) ;;
        *) grep -qs ": [0-9A-F]*:$hex [0-9A-F]*:0000 0A" /proc/net/tcp /proc/net/tcp6 || return 0 ;;
        esac
        port=$((port + 1))
    done
    return 1
}

free_taken() {
    rm -rf "$new"
    for device in $taken; do rm -f "$root/gpus/$device"; done
    refuse "$1"
}

write_machine() { # into the folder $new
    mkdir "$new" && printf '%s\n' "$end_text" "$supervisor_text" >"$new/supervisor.sh" &&
        printf '%s\n' "$command_text" >"$new/command" && printf '%s' "$end_command_text" >"$new/end_command" &&
        printf '%s\n' "$environment_text" >"$new/environment" && printf '%12d\n' "$now" >"$new/alive" &&
        printf "name='%s'\nmachine_id='%s'\nport=%s\ngpus='%s'\nslots='%s'\norphan_seconds=%s\ngrace_seconds=%s\nboot='%s'\n" \
            "$name" "$machine_id" "$port" "$gpus" "$slots" "$orphan_seconds" "$grace_seconds" "$boot" >"$new/settings" &&
        printf 'root=%s\nmade_at=%s\n' "$quoted_root" "$now.$part" >>"$new/settings" && : >>"$new/lock"
}

request_create() {
    open_root
    if [ -e "$root/machines/$name/settings" ]; then
        describe "$root/machines/$name"
        refuse ok
    fi
    settle_all
    rm -rf "$root"/machines/.new-*
    find "$root/machines" -mindepth 1 -maxdepth 1 -type d -mtime +7 2>/dev/null | while read -r old; do
        if [ -e "$old/gone" ] || [ ! -e "$old/settings" ]; then rm -rf "$old"; fi
    done
    new="$root/machines/.new-$name.$$" taken=
    take_gpus || refuse no-capacity
    take_port || free_taken no-port
    quoted_root="'$(printf '%s\n' "$root" | sed "s/'/'\\\\''/g")'"
    write_machine 2>/dev/null || free_taken no-space
    exec 8>>"$new/lock"
    flock -n 8 && mv "$new" "$root/machines/$name" || free_taken no-space
    machine=$root/machines/$name
    setsid sh "$machine/supervisor.sh" "$machine" </dev/null >/dev/null 2>&1 9>&- &
    describe "$machine"
    refuse ok
}

request_show() { # `ready=1`: its engine has answered
    open_root
    machine=$root/machines/$name
    [ -e "$machine/settings" ] || refuse ok
    settle_all
    if [ "$ready" = 1 ] && [ ! -e "$machine/end" ]; then : >"$machine/ready"; fi
    describe "$machine"
    refuse ok
}

end_now() ( # its supervisor looks twice a second; the engine need not wait for that
    . "$1/settings"
    for file in $(marked "$machine_id"); do
        pid=${file#/proc/}
        kill -s TERM "${pid%/environ}" 2>/dev/null
    done
)

request_terminate() {
    open_root
    machine=$root/machines/$name
    [ -e "$machine/settings" ] || refuse ok
    settle_all
    if [ ! -e "$machine/end" ] && [ ! -e "$machine/gone" ]; then
        if write_end "$machine" terminated 2>/dev/null; then
            end_now "$machine"
        else
            read -r pid <"$machine/supervisor" && kill -s TERM "$pid" # it lives: its lock is held
        fi
    fi
    describe "$machine"
    refuse ok
}

request_inspect() {
    for tool in flock setsid grep readlink sed timeout find; do
        if command -v "$tool" >/dev/null; then echo "tool $tool yes"; else echo "tool $tool no"; fi
    done
    if mkdir -p "$root" 2>/dev/null; then
        df -Pk "$root" | { read -r _; read -r _ _ _ free _; echo "disk $free"; }
    fi
    for each in "$root"/machines/*/; do
        each=${each%/}
        list_failed_end "$each" "${each##*/}"
    done
    echo "time $(date +%s)"
    (
        eval "$environment_text"
        if command -v "$program" >/dev/null; then echo "command yes"; else echo "command no"; fi
    )
    if command -v nvidia-smi >/dev/null; then
        echo "driver yes"
        timeout 5 nvidia-smi --query-gpu=index,memory.total,name --format=csv,noheader,nounits | head -n 64 |
            sed 's/^/seen /'
    else
        echo "driver no"
    fi
    refuse ok
}

main() {
    case $folder in
    /*) root=$folder ;;
    *) root=$HOME/$folder ;;
    esac
    root=$root/$(uname -n) # a home on a network drive belongs to several hosts
    printf 'begin %s\n' "$nonce"
    case $request in
    list) request_list ;;
    create) request_create ;;
    show) request_show ;;
    terminate) request_terminate ;;
    inspect) request_inspect ;;
    esac
    refuse unknown-request
}
