#!/bin/busybox sh
# The guest's first and only process. It does the demo's work on each disk and reports every step to the host.
#
# ttyS0 carries the dialogue with the host, one line at a time, each beginning with SIDECORE; ttyS1 is the kernel's
# console, so that its messages never fall into the middle of a line. The host hands the settings over on the kernel's
# command line, from where the kernel puts them into this environment:
#   SIDECORE_MODE     polled or interrupt
#   SIDECORE_DISKS    name:PCI slot, separated by commas
#   SIDECORE_SECONDS  how long the measured window lasts

/bin/busybox mkdir -p /proc /sys /dev /tmp /mnt /bin /sbin
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys

exec 3<>/dev/ttyS0
stty raw -echo <&3

say() {
    echo "SIDECORE $*" >&3
}

fail() {
    say "failed $(echo "$*" | tr '\n' ' ')"
    poweroff -f
    # Powering off may take the kernel a moment; process 1 must not return.
    while :; do sleep 60; done
}

# Runs a command quietly; its last words become the failure's message.
must() {
    "$@" >/tmp/out 2>&1 || fail "$* ended with $?: $(tail -n 4 /tmp/out)"
}

# Says where we are, and goes on only after the host has looked at the daemon's counters.
meet_host() {
    say "$*"
    read -r answer <&3
    [ "$answer" = go ] || fail "the host answered '$answer' to '$*'"
}

# Everything that may show in /proc/interrupts and in the disk's own counters, as the kernel prints it.
snapshot() {
    cat /proc/interrupts >"/tmp/interrupts.$1"
    cat "/sys/block/$dev/stat" >"/tmp/stat.$1"
}

say "booted $(uname -r)"

polled=0
[ "$SIDECORE_MODE" = polled ] && polled=1
for module in $(cat /modules/order); do
    case $module in
        virtio_blk.ko) must insmod "/modules/$module" "poll_queues=$polled" ;;
        *) must insmod "/modules/$module" ;;
    esac
done

# A tree worth comparing: this system's own smaller files, and random data cut into files of several lengths.
mkdir -p /tmp/tree/random /tmp/tree/system
head -c 3000000 /dev/urandom >/tmp/random
for length in 4096 20011 70001; do
    mkdir "/tmp/tree/random/$length"
    count=$((1000000 / length))
    while [ $count -gt 0 ]; do
        dd bs=$length count=1 of="/tmp/tree/random/$length/$count" 2>/dev/null
        count=$((count - 1))
    done
done </tmp/random
rm /tmp/random
must tar -c -f /tmp/system.tar $(find /lib /usr /sbin /modules -type f -size -300k)
must tar -x -C /tmp/tree/system -f /tmp/system.tar
rm /tmp/system.tar
cd /tmp/tree || fail "no tree"
find . -type f | sort | xargs sha256sum >/tmp/sums
say "tree $(wc -l </tmp/sums) $(du -s -k . | cut -f 1)"
cd /

find_disk() {
    for path in /sys/block/vd*; do
        case $(readlink -f "$path/device") in
            */0000:00:$1.0/virtio*)
                dev=${path##*/}
                virtio=$(basename "$(readlink -f "$path/device")")
                return
                ;;
        esac
    done
    fail "no disk in PCI slot $1"
}

# fio with what all its runs share; the rest, and the job's name first, are this function's arguments.
job() {
    name=$1
    shift
    fio --name="$name" --filename="/dev/$dev" --direct=1 --ioengine=io_uring --hipri=$polled --bs=4k --thread \
        --output-format=json --output=/tmp/fio.json "$@" >/tmp/fio.out 2>&1
}

fio_words() {
    cat /tmp/fio.out /tmp/fio.json 2>/dev/null | head -c 600 | tr '\n' ' '
}

check_filesystem() {
    say "step $disk mkfs.ext4"
    must mkfs.ext4 -q -F "/dev/$dev"
    must mount -t ext4 "/dev/$dev" /mnt
    say "step $disk copy"
    must cp -a /tmp/tree/. /mnt/
    must sync
    must umount /mnt
    # Nothing of what was written may be answered from this guest's memory.
    must blockdev --flushbufs "/dev/$dev"
    echo 3 >/proc/sys/vm/drop_caches
    must mount -t ext4 "/dev/$dev" /mnt
    say "step $disk compare"
    cd /mnt || fail "no /mnt"
    if sha256sum -c /tmp/sums >/tmp/compare 2>&1; then
        verdict=true
    else
        verdict="false $(grep -v ': OK$' /tmp/compare | head -n 3 | tr '\n' ' ')"
    fi
    cd /
    must umount /mnt
    say "verified $disk tree $verdict"
}

check_blocks() {
    say "step $disk write"
    if job write --rw=randwrite --size=16m --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1; then
        say "verified $disk write true"
    else
        say "verified $disk write false $(fio_words)"
    fi
    say "step $disk read"
    if job read --rw=randread --size=16m --iodepth=8 --verify=crc32c --verify_fatal=1; then
        say "verified $disk read true"
    else
        say "verified $disk read false $(fio_words)"
    fi
}

measure() {
    set -- --rw=randread --iodepth=1 --time_based --lat_percentiles=1 --clat_percentiles=0 --percentile_list=50:99
    say "step $disk warm-up"
    job warm-up "$@" --runtime=1 || fail "fio: $(fio_words)"
    # Only the measured job touches the disk between the two meetings.
    must sync
    meet_host "window $disk begin"
    snapshot begin
    job measure "$@" --runtime="$SIDECORE_SECONDS" || fail "fio: $(fio_words)"
    snapshot end
    meet_host "window $disk end"
    for edge in begin end; do
        grep "$virtio-" "/tmp/interrupts.$edge" | while read -r line; do say "interrupts $disk $edge $line"; done
        say "stat $disk $edge $(cat /tmp/stat.$edge)"
    done
    say "fio $disk $(tr -d '\n' </tmp/fio.json | tr -s ' ')"
}

for pair in $(echo "$SIDECORE_DISKS" | tr ',' ' '); do
    disk=${pair%%:*}
    find_disk "${pair##*:}"
    say "disk $disk $dev $virtio $(cat "/sys/block/$dev/queue/io_poll")"
    [ "$(cat "/sys/block/$dev/queue/io_poll")" = "$polled" ] || fail "/dev/$dev has no queue to poll: $(dmesg | grep "$virtio" | tail -n 3)"
    # Feature bits are a string of digits, the lowest first: bit 34 is VIRTIO_F_RING_PACKED.
    packed=$(cut -c 35 "/sys/block/$dev/device/features")
    case $disk in "$SIDECORE_PACKED") expected=1 ;; *) expected=0 ;; esac
    [ "$packed" = "$expected" ] || fail "/dev/$dev has the wrong ring format: packed is $packed, not $expected"
    check_filesystem
    check_blocks
    measure
done

say done
poweroff -f
while :; do sleep 60; done
