# The guest is a host: its own sidecored serves a volume to its own kernel, by ublk. Executes the
# orders of the run, one at a time (see orders in disk.sh). The daemon's files are on tmpfs.

. /parts/disk.sh

CONTROL=/run/sidecore/control.sock

configure() {
    mkdir -p /run/sidecore
    truncate -s 512M /run/pool.img
    cat >/run/disks.toml <<EOF
control_socket = "$CONTROL"
key_directory = "/run/sidecore/keys"

[[sidecore]]
name = "sc0"

[[store]]
name = "pool-file"
type = "file"
path = "/run/pool.img"

[[controller]]
name = "pool"
store = "pool-file"
format = "blank"

[[store]]
name = "volume"
type = "volume"
controller = "pool"
volume = "container"
size = "256MiB"

[[device]]
name = "container"
front_end = "ublk"
number = 0
store = "volume"
queues = 2
EOF
}

# Starts a daemon with the configuration of this name.
start_one() {
    : >"/run/$1.ready"
    sidecored --config "/run/$1.toml" >"/run/$1.ready" 2>>"/run/$1.log" &
}

start() {
    start_one disks
    daemon=$!
}

is_ready() {
    grep -q "^ready" /run/disks.ready
}

# The device is shown as running, so the kernel has it back.
is_running() {
    sidecore --socket "$CONTROL" list 2>/dev/null | grep -q "^container *running"
}

log_words() {
    tail -n 4 /run/disks.log | tr '\n' ' '
}

# Whether a process has ended, with all of its threads.
has_exited() {
    [ "$(ls "/proc/$1/task" 2>/dev/null | wc -l)" -le 1 ] && ! grep -q "^State:[[:space:]]*[RSD]" "/proc/$1/status" 2>/dev/null
}

# Where the threads of a process wait in the kernel.
waits_of() {
    for thread in /proc/"$1"/task/*; do
        echo "$(cat "$thread/comm" 2>/dev/null) $(cat "$thread/wchan" 2>/dev/null)"
    done | tr '\n' ','
}

await_daemon() {
    until_so 300 is_ready || fail "the daemon is not ready: $(log_words)"
    until_so 300 is_running || fail "the device is not served: $(log_words)"
}

# missing: the daemon's words without the kernel's module.
order_missing() {
    sidecored --config /run/disks.toml >/run/missing 2>&1
    value code $?
    value words "$(tail -n 1 /run/missing)"
}

# Starts the daemon and kills it so many seconds later, for each argument.
killed_after() {
    for seconds in "$@"; do
        start
        sleep "$seconds"
        kill -9 "$daemon"
        wait "$daemon" 2>/dev/null
    done
}

# serve SECONDS...: loads the module, starts daemons that are killed so many seconds later, and one
# that stays, and waits for the block device.
order_serve() {
    must insmod /modules/ublk_drv.ko
    killed_after "$@"
    start
    await_daemon
    value mib "$(mib)"
    value cache "$(cat /sys/block/ublkb0/queue/write_cache)"
    value fua "$(cat /sys/block/ublkb0/queue/fua)"
    value queues "$(ls /sys/block/ublkb0/mq | wc -l)"
    value words "$(sidecore --socket "$CONTROL" list | tr -s ' \n' ' ')"
}

# format: makes a file system, and puts a tree into it.
order_format() {
    must mkfs.ext4 -q /dev/ublkb0
    must mount -t ext4 /dev/ublkb0 /mnt
    make_tree
    must cp -a /tmp/tree /mnt/known
    must sync
    value files "$(wc -l </tmp/sums)"
}

# A job that writes at random and compares all that it has written.
checked() {
    fio --name="$1" --directory=/mnt --size="$2" --rw=randwrite --bs=4k --direct=1 --ioengine=io_uring \
        --iodepth=16 --thread --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 --fsync=64 \
        >"/tmp/$1.out" 2>&1
}

# Checked jobs one after the other, until they are told to end.
checked_jobs() {
    until [ -e /tmp/load.end ]; do
        checked load 8m || {
            echo "$?" >/tmp/load.code
            return
        }
    done
    echo 0 >/tmp/load.code
}

# load: begins checked jobs behind the orders, and waits until they write.
order_load() {
    rm -f /tmp/load.code /tmp/load.end
    wrote=$(field 7)
    checked_jobs &
    until_so 300 writes_more 200 || fail "the load does not begin"
}

# A counter of the block device.
field() {
    awk "{ print \$$1 }" /sys/block/ublkb0/stat
}

# Whether so many sectors were written since `wrote` was noted.
writes_more() {
    [ $(($(field 7) - wrote)) -ge "$1" ]
}

# kill SECONDS...: kills the daemon, which then is killed again so many seconds after each further
# start, and stays alive after the last one.
order_kill() {
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null
    killed_after "$@"
    start
    await_daemon
    wrote=$(field 7)
    until_so 300 writes_more 8 || fail "no write after the recovery: $(load_words)"
    value times $(($# + 1))
}

load_words() {
    grep -v "^ " /tmp/load.out | tail -n 5 | tr '\n' ' '
}

has_ended() {
    [ -e /tmp/load.code ]
}

# wait: ends the load.
order_wait() {
    : >/tmp/load.end
    until_so 1200 has_ended || fail "the load does not end: $(load_words)"
    if [ "$(cat /tmp/load.code)" = 0 ]; then value load true; else value load "false $(load_words)"; fi
}

# restart: ends the daemon in order while its device is mounted, writes meanwhile, and starts the
# next daemon. The file system is just committing, and a write may need a block of the commit, so
# that it ends only when the next daemon serves the device.
order_restart() {
    kill "$daemon"
    until_so 300 has_exited "$daemon" || fail "the daemon does not end: $(waits_of "$daemon"), $(log_words)"
    wait "$daemon"
    value code $?
    begin_commit &
    committing=$!
    until_so 300 waits_for_a_disk "$committing" || fail "no commit begins: $(waits_of "$committing")"
    write_meanwhile &
    writing=$!
    start
    await_daemon
    until_so 1200 has_exited "$writing" || fail "the write does not end: $(waits_of "$writing")"
    wait "$committing" "$writing"
    value synced $?
}

waits_for_a_disk() {
    grep -q "^State:[[:space:]]*D" "/proc/$1/status"
}

# It waits for the daemon in either call: one of them may find a commit of the kernel's own.
begin_commit() {
    : >/mnt/commit && exec sync
}

write_meanwhile() {
    dd if=/dev/urandom of=/mnt/meanwhile bs=1M count=2 2>/dev/null && sync
}

# known: compares the tree, after the page cache was dropped.
order_known() {
    must sync
    echo 3 >/proc/sys/vm/drop_caches
    compare_tree /mnt/known /tmp/sums
    value known "$verdict"
    must fstrim /mnt
}

# grow MIB: gives the volume another size, and waits until the list shows that the device has it, or
# warns that it has not.
order_grow() {
    must sidecore --socket "$CONTROL" volume resize container "${1}MiB"
    until_so 300 is_grown "$1" || fail "neither the size nor a warning: $(sidecore --socket "$CONTROL" list)"
    value mib "$(mib)"
}

is_grown() {
    has_size "$1" || sidecore --socket "$CONTROL" list | grep -q "its store has grown"
}

# total: the daemon's counters of the device.
order_total() {
    sidecore --socket "$CONTROL" stats >/tmp/stats
    for key in requests reads writes flushes discards errors rejected enters; do
        value $key "$(awk -v key=$key '$1 == key && NF == 2 { print $2; exit }' /tmp/stats)"
    done
}

# check: unmounts, checks the file system, removes the device.
order_check() {
    must umount /mnt
    must e2fsck -f -n /dev/ublkb0
    value fsck true
    must sidecore --socket "$CONTROL" device remove container
    if [ -e /dev/ublkb0 ]; then value gone false; else value gone true; fi
    kill "$daemon"
    wait "$daemon"
}

# An IOhost, and a VMhost whose block device is the IOhost's.
configure_remote() {
    truncate -s 64M /run/remote.img
    for name in io vm; do
        mkdir -p "/run/$name"
        cat >"/run/$name.toml" <<EOF
control_socket = "/run/$name/control.sock"
key_directory = "/run/$name/keys"

[[sidecore]]
name = "sc0"

[[link]]
name = "wire"
type = "memory"
socket = "/run/wire.sock"
EOF
    done
    cat >>/run/io.toml <<EOF

[[client]]
name = "vmhost"
links = ["wire"]

[[store]]
name = "file"
type = "file"
path = "/run/remote.img"
direct = false

[[device]]
name = "exported"
front_end = "vrio"
client = "vmhost"
store = "file"
EOF
    cat >>/run/vm.toml <<EOF

[[iohost]]
name = "iohost"
link = "wire"
client = "vmhost"

[[store]]
name = "remote"
type = "remote"
iohost = "iohost"
device = "exported"

[[device]]
name = "far"
front_end = "ublk"
number = 1
store = "remote"
EOF
}

is_far_running() {
    sidecore --socket /run/vm/control.sock list 2>/dev/null | grep -q "^far *running"
}

await_far() {
    until_so 600 is_far_running || fail "the remote device is not served: $(tail -n 4 /run/vm.log | tr '\n' ' ')"
}

# Writes to the remote device at random, and compares all that it has written.
far_job() {
    fio --name=far --filename=/dev/ublkb1 --size=16m --rw=randwrite --bs=4k --direct=1 --ioengine=io_uring \
        --iodepth=16 --thread --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 --fsync=64 \
        >/tmp/far.out 2>&1
}

# The sectors that were written to the remote device.
far_wrote() {
    awk '{ print $7 }' /sys/block/ublkb1/stat
}

far_writes_more() {
    [ $(($(far_wrote) - far_before)) -ge "$1" ]
}

await_far_writes() {
    far_before=$(far_wrote)
    until_so 600 far_writes_more 64 || fail "no write to the remote device: $(tail -n 4 /run/vm.log | tr '\n' ' ')"
}

# remote: a block device whose store is an IOhost's. Both daemons are killed under load.
order_remote() {
    configure_remote
    start_one io
    io=$!
    start_one vm
    vm=$!
    await_far
    far_job &
    far=$!
    await_far_writes
    kill -9 "$vm"
    wait "$vm" 2>/dev/null
    start_one vm
    vm=$!
    await_far
    await_far_writes
    kill -9 "$io"
    wait "$io" 2>/dev/null
    start_one io
    io=$!
    wait $far
    code=$?
    value code "$code"
    value words "$(grep -v '^ ' /tmp/far.out | tail -n 3 | tr '\n' ' ')"
    must sidecore --socket /run/vm/control.sock device remove far
    for daemon in "$vm" "$io"; do
        kill "$daemon"
        wait "$daemon"
    done
}

# A device whose store holds each request back for so many microseconds.
configure_slow() {
    mkdir -p /run/slow
    truncate -s 64M /run/slow.img
    cat >/run/slow.toml <<EOF
control_socket = "/run/slow/control.sock"
key_directory = "/run/slow/keys"

[[sidecore]]
name = "sc0"

[[store]]
name = "file"
type = "file"
path = "/run/slow.img"
direct = false

[[store.stage]]
type = "delay"
delay_us = $1

[[device]]
name = "slow"
front_end = "ublk"
number = 2
store = "file"
EOF
}

is_slow_running() {
    sidecore --socket /run/slow/control.sock list 2>/dev/null | grep -q "^slow *running"
}

# slow: kills a daemon that has shown a device, whose store answers no read for a minute.
order_slow() {
    configure_slow 60000000
    start_one slow
    slow=$!
    until_so 300 test -e /sys/block/ublkb2 || fail "no device: $(tail -n 4 /run/slow.log | tr '\n' ' ')"
    kill -9 "$slow"
    until_so 100 has_exited "$slow" || fail "the killed daemon does not end: $(waits_of "$slow")"
    wait "$slow" 2>/dev/null
    value state ended
    configure_slow 0
    start_one slow
    slow=$!
    until_so 300 is_slow_running || fail "the device is not recovered: $(tail -n 4 /run/slow.log | tr '\n' ' ')"
    must dd if=/dev/ublkb2 of=/dev/null bs=1M count=4
    must sidecore --socket /run/slow/control.sock device remove slow
    kill "$slow"
    wait "$slow"
}

mkdir -p /run
mount -t tmpfs -o size=500m tmpfs /run
configure
dev=ublkb0
take_orders
