# Orders about a disk, $dev, for the parts that take orders.

value() {
    say "value $*"
}

# Executes orders, one after the other. An order is a line: a name, and arguments. Its answer is any
# number of lines `value KEY TEXT`, and then `finished NAME`.
take_orders() {
    say "finished boot"
    while read -r line <&3; do
        # The words of the order must be split.
        set -- $line
        order=$1
        shift
        [ "$order" != off ] || break
        case $(type "order_$order" 2>&1) in
            *"not found"*) fail "no such order: $order" ;;
        esac
        "order_$order" "$@"
        say "finished $order"
    done
    say done
}

# Waits until a command succeeds, for so many tenths of a second at most.
until_so() {
    tenths=$1
    shift
    while ! "$@"; do
        [ $tenths -gt 0 ] || return 1
        tenths=$((tenths - 1))
        sleep 0.1
    done
}

mib() {
    echo $(($(cat "/sys/block/$dev/size") / 2048))
}

has_size() {
    [ "$(mib)" = "$1" ]
}

# grown MIB: waits until the disk has this size.
order_grown() {
    until_so 300 has_size "$1"
    value mib "$(mib)"
}

# Reads must not be answered from this guest's page cache.
forget_cached() {
    must sync
    must blockdev --flushbufs "/dev/$dev"
    echo 3 >/proc/sys/vm/drop_caches
}

# mkfs MIB: makes a file system on the first so many MiB of the disk.
order_mkfs() {
    must mkfs.ext4 -q -F "/dev/$dev" "${1}M"
    must mount -t ext4 "/dev/$dev" /mnt
}

# keep: writes known files into the file system, and all of it to the disk.
order_keep() {
    make_tree
    mkdir /mnt/known /mnt/churn
    must cp -a /tmp/tree/. /mnt/known/
    must cp /tmp/sums /mnt/sums
    must sync
    value files "$(wc -l </tmp/sums)"
    value kib "$(du -s -k /tmp/tree | cut -f 1)"
    value digest "$(sha256sum </tmp/sums | cut -d ' ' -f 1)"
}

# Writes a part of the disk in pieces of several sizes, in random order, and reads it back;
# repeatedly.
load_blocks() {
    rounds=0
    while [ ! -e /tmp/load.stop ]; do
        fio --name=load --filename="/dev/$dev" --direct=1 --ioengine=io_uring --hipri="$SIDECORE_POLLED" --thread \
            --rw=randwrite --offset="${1}m" --size="${2}m" --bssplit=512/20:4k/60:16k/20 --iodepth=8 --randseed=$rounds \
            --verify=crc32c --verify_fatal=1 --do_verify=1 --allow_mounted_write=1 >/tmp/load.out 2>&1 || {
            tail -n 4 /tmp/load.out >/tmp/load.failed
            return
        }
        rounds=$((rounds + 1))
        echo $rounds >/tmp/load.rounds.new
        mv /tmp/load.rounds.new /tmp/load.rounds
    done
}

# Writes small files, each to the disk before the next one, so that the journal is never idle.
load_files() {
    count=0
    while [ ! -e /tmp/load.stop ]; do
        dd if=/dev/urandom of="/mnt/churn/$((count % 100))" bs=3000 count=1 conv=fsync 2>/dev/null || {
            echo "a file could not be written" >/tmp/load.failed
            return
        }
        count=$((count + 1))
    done
}

# load OFFSET SIZE: starts writes to the disk (in MiB, behind the file system) and to the file
# system.
order_load() {
    rm -f /tmp/load.*
    echo 0 >/tmp/load.rounds
    load_blocks "$1" "$2" &
    load_blocks=$!
    load_files &
    load_files=$!
}

# rounds: whether the load still runs, and how many times fio has verified its part of the disk.
order_rounds() {
    [ ! -e /tmp/load.failed ] || fail "the load found: $(cat /tmp/load.failed)"
    kill -0 $load_blocks && kill -0 $load_files || fail "the load ended by itself"
    value rounds "$(cat /tmp/load.rounds)"
}

# endload: ends the load after its round, with the verification.
order_endload() {
    touch /tmp/load.stop
    wait $load_blocks $load_files
    [ ! -e /tmp/load.failed ] || fail "the load found: $(cat /tmp/load.failed)"
    value rounds "$(cat /tmp/load.rounds)"
}

# fsck: e2fsck's result, without changes to the disk.
order_fsck() {
    e2fsck -f -n "/dev/$dev" >/tmp/fsck.out 2>&1
    value code $?
    value words "$(tail -n 1 /tmp/fsck.out | tr '\n' ' ')"
}

order_mount() {
    must mount -t ext4 "/dev/$dev" /mnt
    value recovered "$(dmesg | grep -c "($dev): recovery complete")"
}

order_unmount() {
    must umount /mnt
    forget_cached
}

# check DIGEST: compares the known files with the list whose checksum is given.
order_check() {
    if [ "$(sha256sum </mnt/sums | cut -d ' ' -f 1)" = "$1" ]; then
        compare_tree /mnt/known /mnt/sums
    else
        verdict="false the list of checksums itself"
    fi
    value verdict "$verdict"
    value files "$(wc -l </mnt/sums)"
}

# fresh MIB COUNT: writes so many blocks of 4 KiB to the disk, behind the file system. Each write is
# answered, and no flush follows.
order_fresh() {
    must dd if=/dev/urandom of=/tmp/fresh bs=4096 count="$2"
    must dd if=/tmp/fresh of="/dev/$dev" bs=4096 seek=$(($1 * 256)) oflag=direct
}

# answered MIB COUNT: checks these blocks.
order_answered() {
    must dd if="/dev/$dev" of=/tmp/answered bs=4096 skip=$(($1 * 256)) count="$2" iflag=direct
    if cmp -s /tmp/fresh /tmp/answered; then value same true; else value same false; fi
}

# log: the kernel's new messages of interest: warnings and more severe ones, and all about NVMe.
order_log() {
    dmesg -c -r >/tmp/log
    value lines "$(grep-gnu -E '^<[0-4]>|nvme|I/O error' /tmp/log | tr '\n' '|')"
}

# kernel: the errors in the kernel's log. A stall of an emulated CPU is the host's fault.
order_kernel() {
    dmesg | grep -i -e "i/o error" -e "ext4-fs error" -e "oops:" -e "warning: cpu" -e "blocked for more than" >/tmp/kernel
    found=$(head -n 3 /tmp/kernel | tr '\n' '|')
    value kernel "${found:-none}"
}

# digest OFFSET SIZE: checksums of all files, and of a part of the disk behind the file system, in
# MiB. The host computes the same from the store.
order_digest() {
    cd /mnt || fail "no file system"
    value count "$(find . -type f | wc -l)"
    value files "$(find . -type f | sort | xargs sha256sum | sha256sum | cut -d ' ' -f 1)"
    cd /
    value blocks "$(dd if="/dev/$dev" bs=1M skip="$1" count="$2" iflag=direct 2>/dev/null | sha256sum | cut -d ' ' -f 1)"
}

# Reads the 16 MiB at an offset in MiB for so many seconds, one at a time, and counts before and
# after.
measure_reads() {
    must sync
    count begin
    job measure "/dev/$dev" --rw=randread --offset="${1}m" --size=16m --time_based $LATENCIES --runtime="$2" \
        --allow_mounted_write=1 || fail "fio: $(fio_words)"
    count end
}

# The counts of a measurement: the lines of /proc/interrupts with a text, the disk's own counters,
# and fio's result.
measured() {
    for edge in begin end; do
        value "interrupts-$edge" "$(grep "$1" "/tmp/interrupts.$edge" | tr '\n' '|')"
        value "stat-$edge" "$(cat "/tmp/stat.$edge")"
    done
    value fio "$(tr -d '\n' </tmp/fio.json | tr -s ' ')"
}

# flood SECONDS: reads as many blocks at once as the disk takes.
order_flood() {
    job flood "/dev/$dev" --rw=randread --size=64m --time_based $LATENCIES --iodepth=32 --runtime="$1" \
        --allow_mounted_write=1 || fail "fio: $(fio_words)"
    value fio "$(tr -d '\n' </tmp/fio.json | tr -s ' ')"
}
