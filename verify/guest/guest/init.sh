#!/bin/busybox sh
# The guest's first process: it sets the system up and then runs one of the scripts in /parts, which
# the host chooses. The functions here are for all of them.
#
# ttyS0 carries the dialogue with the host, line by line, each beginning with SIDECORE; ttyS1 is the
# kernel's console, so that its messages never interrupt a line. The settings are on the kernel's
# command line, from which the kernel puts them into this environment:
#   SIDECORE_PART     which script: measure, orders or nvme
#   SIDECORE_POLLED   1 to give the disks queues that are polled, else 0
# and the settings of the script.

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
    # The kernel may need a moment to power off; process 1 must not return.
    while :; do sleep 60; done
}

# Runs a command without output; its last lines become the failure's message.
must() {
    "$@" >/tmp/out 2>&1 || fail "$* ended with $?: $(tail -n 4 /tmp/out)"
}

# Makes a tree to compare: this system's own smaller files, and random data in files of several
# lengths. The checksums are in /tmp/sums.
make_tree() {
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
    sum_tree
}

sum_tree() {
    cd /tmp/tree || fail "no tree"
    find . -type f | sort | xargs sha256sum >/tmp/sums
    cd /
}

# Compares the files in a directory with a list of checksums: the verdict is `true`, or `false` and
# the differences.
compare_tree() {
    cd "$1" || fail "no $1"
    if sha256sum -c "$2" >/tmp/compare 2>&1; then
        verdict=true
    else
        verdict="false $(grep -v ': OK$' /tmp/compare | head -n 3 | tr '\n' ' ')"
    fi
    cd /
}

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

# Runs fio with the options of all runs. The arguments are the job's name, the target, and more
# options.
job() {
    name=$1
    target=$2
    shift 2
    fio --name="$name" --filename="$target" --direct=1 --ioengine=io_uring --hipri="$SIDECORE_POLLED" --bs=4k --thread \
        --output-format=json --output=/tmp/fio.json "$@" >/tmp/fio.out 2>&1
}

fio_words() {
    cat /tmp/fio.out /tmp/fio.json 2>/dev/null | head -c 600 | tr '\n' ' '
}

# Options of measured jobs: one request at a time.
LATENCIES="--iodepth=1 --lat_percentiles=1 --clat_percentiles=0 --percentile_list=50:99"

# Prints all lines of /proc/interrupts and of the disk's own counters that may matter.
count() {
    cat /proc/interrupts >"/tmp/interrupts.$1"
    cat "/sys/block/$dev/stat" >"/tmp/stat.$1"
}

say "booted $(uname -r)"
for module in $(cat /modules/order); do
    case $module in
        virtio_blk.ko | nvme.ko) must insmod "/modules/$module" "poll_queues=$SIDECORE_POLLED" ;;
        *) must insmod "/modules/$module" ;;
    esac
done
. "/parts/$SIDECORE_PART.sh"

poweroff -f
while :; do sleep 60; done
