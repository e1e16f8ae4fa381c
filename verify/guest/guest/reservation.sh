# The guest is two hosts: namespaces with names of their own, and a controller each of one NVMe
# subsystem, which is this kernel's own. On each runs `sidecore own`, with an etcd of one member for
# both. Executes the orders of the run, one at a time (see orders in disk.sh).

. /parts/disk.sh

TARGET=/sys/kernel/config/nvmet
ETCD=http://127.0.0.1:2379
PEER=http://127.0.0.1:2380

# subsystem NAME RESERVATIONS: makes an NVMe subsystem with a namespace in memory.
subsystem() {
    must mkdir -p "$TARGET/subsystems/$1/namespaces/1"
    truncate -s 16M "/run/$1.img"
    (
        cd "$TARGET/subsystems/$1" || exit
        echo 1 >attr_allow_any_host
        printf %s "/run/$1.img" >namespaces/1/device_path
        echo 1 >namespaces/1/buffered_io
        echo "$2" >namespaces/1/resv_enable
        echo 1 >namespaces/1/enable
    )
    must ln -s "$TARGET/subsystems/$1" "$TARGET/ports/1/subsystems/$1"
}

# connect HOST SUBSYSTEM: gives a host a controller.
connect() {
    id=00000000-0000-0000-0000-00000000000$1
    host="hostnqn=nqn.2014-08.org.nvmexpress:uuid:$id,hostid=$id"
    # nvme connect takes the second host for the first one.
    echo "transport=loop,nqn=$2,$host" >/dev/nvme-fabrics || fail "host $1 cannot connect"
}

has_disks() {
    [ -b /dev/nvme0n1 ] && [ -b /dev/nvme1n1 ] && [ -b /dev/nvme2n1 ]
}

etcd_answers() {
    wget -q -O - $ETCD/health 2>/dev/null | grep -q true
}

# begin: makes the disks and starts etcd.
order_begin() {
    must mount -t configfs configfs /sys/kernel/config
    mkdir -p /run/sidecore
    must mkdir -p "$TARGET/ports/1"
    echo loop >"$TARGET/ports/1/addr_trtype"
    subsystem shared 1
    subsystem plain 0
    connect 1 shared
    connect 2 shared
    connect 3 plain
    until_so 100 has_disks || fail "no disks: $(ls /dev/nvme*)"
    must ip link set lo up
    # There is no resolver for localhost.
    etcd --data-dir /run/etcd --listen-client-urls "$ETCD" --advertise-client-urls "$ETCD" \
        --listen-peer-urls "$PEER" --initial-advertise-peer-urls "$PEER" \
        --initial-cluster "default=$PEER" >/run/etcd.log 2>&1 &
    until_so 300 etcd_answers || fail "no etcd: $(tail -n 3 /run/etcd.log)"
}

# The disk of a host.
disk_of() {
    case $1 in
        io1) echo /dev/nvme0n1 ;;
        *) echo /dev/nvme1n1 ;;
    esac
}

# own HOST: starts a candidate.
order_own() {
    unshare -u -m sh /parts/candidate.sh shared "$1" "$(disk_of "$1")" >>"/run/$1.log" 2>&1 &
    echo $! >"/run/$1.pid"
}

# refused CLUSTER HOST DISK WORD: the words of a candidate that is refused, with this one in them.
order_refused() {
    unshare -u -m sh /parts/candidate.sh "$1" "$2" "$3" >/run/refused 2>&1 &
    refused=$!
    until_so 200 grep -q "$4" /run/refused
    kill "$refused" 2>/dev/null
    wait "$refused" 2>/dev/null
    value words "$(tail -n 2 /run/refused | tr '\n' ' ')"
}

# newest FILE...: the newest lines, as one.
newest() {
    tail -n 3 "$@" | tr '\n' ' '
}

wrote() {
    [ "$(tail -n 1 "/run/$1.writes" 2>/dev/null | cut -d ' ' -f 2)" = "$2" ] &&
        [ "$(wc -l <"/run/$1.writes")" -gt "$3" ]
}

# wrote HOST RESULT: waits until another write of the host's command had this result.
order_wrote() {
    lines=$(wc -l <"/run/$1.writes" 2>/dev/null || echo 0)
    until_so 300 wrote "$1" "$2" "$lines" ||
        fail "$1 has no new write that is $2: $(newest "/run/$1.writes" "/run/$1.log")"
    value epoch "$(tail -n 1 "/run/$1.writes" | cut -d ' ' -f 1)"
}

# says HOST WORD: waits until the host's candidate has said a word.
order_says() {
    until_so 300 grep -q "$2" "/run/$1.log" || fail "$1 does not say $2: $(newest "/run/$1.log")"
    value words "$(grep "$2" "/run/$1.log" | tail -n 1)"
}

# signal HOST SIGNAL: to the candidate alone; command HOST SIGNAL: to its command.
order_signal() {
    kill "-$2" "$(cat "/run/$1.pid")" || fail "$1 has ended: $(newest "/run/$1.log")"
}

order_command() {
    kill "-$2" "$(cat "/run/$1.writer")" || fail "the command of $1 has ended"
}

# ended HOST: waits until the candidate has ended.
order_ended() {
    until_so 300 has_ended "$1" || fail "$1 does not end: $(newest "/run/$1.log")"
}

has_ended() {
    ! kill -0 "$(cat "/run/$1.pid")" 2>/dev/null
}

# keys: the registrations and the reservation, as another program reads them.
order_keys() {
    must nvme resv-report /dev/nvme0n1 --eds --numd=1024 --output-format=json
    value keys "$(grep -c '"rkey"' /tmp/out)"
    value key "$(printf '0x%x' "$(sed -n 's/.*"rkey" *: *\([0-9]*\).*/\1/p' /tmp/out | head -n 1)")"
    value type "$(sed -n 's/.*"rtype" *: *\([0-9]*\).*/\1/p' /tmp/out | head -n 1)"
    value holds "$(sed -n 's/.*"rcsts" *: *\([0-9]*\).*/\1/p' /tmp/out | head -n 1)"
    value words "$(tr -d ' \n' </tmp/out)"
}

# intrude: another program ends the reservation by the other path.
order_intrude() {
    must nvme resv-register /dev/nvme1n1 --nrkey=99 --rrega=0 --iekey
    must nvme resv-release /dev/nvme1n1 --crkey=99 --rrela=1
}

# foreign: another program writes by a path that is not registered.
order_foreign() {
    dd if=/dev/zero of="$1" bs=4096 count=1 oflag=direct 2>/tmp/out
    value code $?
    value words "$(head -n 1 /tmp/out)"
}

# tool ACTION DISK [OPTION]: what `sidecore reservation` says.
order_tool() {
    sidecore reservation "$@" >/tmp/out 2>&1
    value code $?
    value words "$(tr '\n' ' ' </tmp/out)"
}

take_orders
