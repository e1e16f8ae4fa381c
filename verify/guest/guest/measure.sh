# Checks the data of each disk, and counts the events of its requests. Settings:
#   SIDECORE_DISKS    name:PCI slot, separated by commas
#   SIDECORE_PACKED   the disk that has packed rings
#   SIDECORE_WRITES   the disk on which writes with and without a file system are compared
#   SIDECORE_SECONDS  the length of a measurement

# Tells the host the state, and continues after the host has read the daemon's counters.
meet_host() {
    say "$*"
    read -r answer <&3
    [ "$answer" = go ] || fail "the host answered '$answer' to '$*'"
}

# Prints the number of requests that the disk has completed, of each kind.
completed() {
    awk '{ print $1, $5, $12, $16 }' "/sys/block/$dev/stat"
}

# Has each CPU take the interrupts that are pending for it. The host may not have let one run since,
# and so a request that the daemon has counted may not be completed here yet.
take_interrupts() {
    cpu=$(nproc)
    while [ "$cpu" -gt 0 ]; do
        cpu=$((cpu - 1))
        must taskset -c "$cpu" true
    done
}

# Lets guest and host count the same requests at one end of a window: once more when a request was
# completed in between, as those of a journal that commits by its own clock.
meet_at_rest() {
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        before=$(completed)
        count "$1"
        meet_host "window $disk $what $1"
        take_interrupts
        [ "$(completed)" != "$before" ] || return 0
    done
    fail "$disk does not come to rest at the $1 of $what"
}

# Runs a job of fio, with no other requests on the disk, between two exchanges with the host. The
# differences of the counters are the job's.
window() {
    what=$1
    shift
    must sync
    meet_at_rest begin
    "$@" || fail "fio: $(fio_words)"
    # The job's data that the file system has not written yet belongs to the job.
    must sync
    meet_at_rest end
    for edge in begin end; do
        grep "$virtio-" "/tmp/interrupts.$edge" | while read -r line; do say "interrupts $disk $what $edge $line"; done
        say "stat $disk $what $edge $(cat /tmp/stat.$edge)"
    done
    say "fio $disk $what $(tr -d '\n' </tmp/fio.json | tr -s ' ')"
}

check_filesystem() {
    say "step $disk mkfs.ext4"
    must mkfs.ext4 -q -F "/dev/$dev"
    must mount -t ext4 "/dev/$dev" /mnt
    say "step $disk copy"
    must cp -a /tmp/tree/. /mnt/
    must sync
    must umount /mnt
    # Reads must not be answered from this guest's page cache.
    must blockdev --flushbufs "/dev/$dev"
    echo 3 >/proc/sys/vm/drop_caches
    must mount -t ext4 "/dev/$dev" /mnt
    say "step $disk compare"
    compare_tree /mnt /tmp/sums
    must umount /mnt
    say "verified $disk tree $verdict"
}

check_blocks() {
    say "step $disk write"
    if job write "/dev/$dev" --rw=randwrite --size=16m --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1; then
        say "verified $disk write true"
    else
        say "verified $disk write false $(fio_words)"
    fi
    say "step $disk read"
    if job read "/dev/$dev" --rw=randread --size=16m --iodepth=8 --verify=crc32c --verify_fatal=1; then
        say "verified $disk read true"
    else
        say "verified $disk read false $(fio_words)"
    fi
}

measure_reads() {
    reads="--rw=randread --size=16m --time_based $LATENCIES"
    say "step $disk warm-up"
    # The options are words, which must be split.
    job warm-up "/dev/$dev" $reads --runtime=1 || fail "fio: $(fio_words)"
    say "step $disk measure"
    window read job measure "/dev/$dev" $reads --runtime="$SIDECORE_SECONDS"
}

# The cost of a write on the disk itself and in a file: to places that were never written, and to
# the same places again.
measure_writes() {
    writes="--rw=randwrite --size=1m $LATENCIES"
    say "step $disk writes"
    must blkdiscard "/dev/$dev"
    window raw-first job raw-first "/dev/$dev" $writes
    window raw-again job raw-again "/dev/$dev" $writes
    say "step $disk writes to a file on ext4"
    must mkfs.ext4 -q -F "/dev/$dev"
    # Without the thread that initializes the file system later, whose requests would be counted.
    must mount -t ext4 -o noinit_itable "/dev/$dev" /mnt
    # The first writes must allocate the file's space, so fio must not preallocate it.
    window ext4-first job ext4-first /mnt/file $writes --fallocate=none
    window ext4-again job ext4-again /mnt/file $writes --overwrite=1
    must umount /mnt
}

make_tree
say "tree $(wc -l </tmp/sums) $(du -s -k /tmp/tree | cut -f 1)"

for pair in $(echo "$SIDECORE_DISKS" | tr ',' ' '); do
    disk=${pair%%:*}
    find_disk "${pair##*:}"
    polls=$(cat "/sys/block/$dev/queue/io_poll")
    say "disk $disk $dev $virtio $polls"
    [ "$polls" = "$SIDECORE_POLLED" ] || fail "/dev/$dev has no queue to poll: $(dmesg | grep "$virtio" | tail -n 3)"
    # Feature bits are a string of digits, the lowest first: bit 34 is VIRTIO_F_RING_PACKED.
    packed=$(cut -c 35 "/sys/block/$dev/device/features")
    case $disk in "$SIDECORE_PACKED") expected=1 ;; *) expected=0 ;; esac
    [ "$packed" = "$expected" ] || fail "/dev/$dev has the wrong ring format: packed is $packed, not $expected"
    check_filesystem
    check_blocks
    measure_reads
    [ "$disk" != "$SIDECORE_WRITES" ] || measure_writes
done
say done
