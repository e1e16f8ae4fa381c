# Does what the host orders, one order at a time. An order is a line: a name, and arguments. Its answer is any number of
# lines `value KEY TEXT`, and then `finished NAME`. Settings:
#   SIDECORE_SLOT   the PCI slot of the disk that all orders are about

value() {
    say "value $*"
}

# Nothing may be answered from this guest's memory.
forget_cached() {
    must sync
    must blockdev --flushbufs "/dev/$dev"
    echo 3 >/proc/sys/vm/drop_caches
}

# Lines of one secret, as many bytes of them.
secret() {
    yes "$1" | head -c "$2"
}

# mkfs MIB: a file system on the first so many MiB of the disk.
order_mkfs() {
    must mkfs.ext4 -q -F "/dev/$dev" "${1}M"
    must mount -t ext4 "/dev/$dev" /mnt
}

# keep: known files into the file system, and all of it to the disk.
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

# Writes all of a part of the disk in pieces of several sizes, at random, and reads it back; again and again.
load_blocks() {
    rounds=0
    while [ ! -e /tmp/load.stop ]; do
        fio --name=load --filename="/dev/$dev" --direct=1 --ioengine=io_uring --thread --rw=randwrite --offset="${1}m" \
            --size="${2}m" --bssplit=512/20:4k/60:16k/20 --iodepth=8 --randseed=$rounds --verify=crc32c --verify_fatal=1 \
            --do_verify=1 --allow_mounted_write=1 >/tmp/load.out 2>&1 || {
            tail -n 4 /tmp/load.out >/tmp/load.failed
            return
        }
        rounds=$((rounds + 1))
        echo $rounds >/tmp/load.rounds.new
        mv /tmp/load.rounds.new /tmp/load.rounds
    done
}

# Writes small files and has each on the disk before the next, so that the journal is never idle.
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

# load OFFSET SIZE: begins to write to the disk (in MiB, past the file system) and to the file system.
order_load() {
    rm -f /tmp/load.*
    echo 0 >/tmp/load.rounds
    load_blocks "$1" "$2" &
    load_blocks=$!
    load_files &
    load_files=$!
}

# rounds: whether the load goes on, and how many times fio has verified its part of the disk.
order_rounds() {
    [ ! -e /tmp/load.failed ] || fail "the load found: $(cat /tmp/load.failed)"
    kill -0 $load_blocks && kill -0 $load_files || fail "the load ended by itself"
    value rounds "$(cat /tmp/load.rounds)"
}

# endload: lets the round end, with its verification.
order_endload() {
    touch /tmp/load.stop
    wait $load_blocks $load_files
    [ ! -e /tmp/load.failed ] || fail "the load found: $(cat /tmp/load.failed)"
    value rounds "$(cat /tmp/load.rounds)"
}

# change: overwrites some of the known files, deletes some, and adds one.
order_change() {
    changed=0
    for file in $(cd /tmp/tree && find . -type f | sort | head -n 40); do
        if [ $((changed % 2)) = 0 ]; then
            for tree in /tmp/tree /mnt/known; do echo changed | dd of="$tree/$file" conv=notrunc 2>/dev/null; done
        else
            must rm "/tmp/tree/$file" "/mnt/known/$file"
        fi
        changed=$((changed + 1))
    done
    echo "written after the snapshot" >/mnt/after-snapshot
    sum_tree
    must cp /tmp/sums /mnt/sums
    must sync
    value files $((changed + 1))
    value digest "$(sha256sum </tmp/sums | cut -d ' ' -f 1)"
}

# secret NAME TEXT OFFSET: the text into a file, into a file that is deleted, and to the disk past the file system.
order_secret() {
    secret "$2" 1048576 >"/mnt/$1-secret" || fail "no room for a secret"
    cp "/mnt/$1-secret" "/mnt/$1-deleted" || fail "no room for another"
    must sync
    must rm "/mnt/$1-deleted"
    secret "$2" 1048576 >/tmp/secret
    must dd if=/tmp/secret of="/dev/$dev" bs=1M seek="$3" oflag=direct
    rm /tmp/secret
    must sync
}

# search TEXT TEXT: how many times each of the two is on the disk, anywhere.
order_search() {
    forget_cached
    # Zeros end records, so that a hole of gigabytes is no line of gigabytes.
    dd if="/dev/$dev" bs=1M iflag=direct 2>/tmp/dd.out | grep-gnu -o -a -z -F -e "$1" -e "$2" | tr '\0' '\n' >/tmp/hits
    value one "$(grep-gnu -c -F -e "$1" /tmp/hits)"
    value other "$(grep-gnu -c -F -e "$2" /tmp/hits)"
    # All of the disk, or it proves nothing.
    value mib "$(sed -n 's/^\([0-9]*\)+0 records in$/\1/p' /tmp/dd.out)"
    rm /tmp/hits
}

# scatter OFFSET SIZE: writes every other sector of a part of the disk.
order_scatter() {
    job scatter "/dev/$dev" --rw=write:512 --bs=512 --offset="${1}m" --size="${2}m" --io_size="$(($2 / 2))m" \
        --iodepth=32 --allow_mounted_write=1 || fail "fio: $(fio_words)"
}

# fsck: what e2fsck finds, without changing anything.
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

# check DIGEST: whether the known files are as the list says whose checksum is given.
order_check() {
    if [ "$(sha256sum </mnt/sums | cut -d ' ' -f 1)" = "$1" ]; then
        compare_tree /mnt/known /mnt/sums
    else
        verdict="false the list of checksums itself"
    fi
    value verdict "$verdict"
    value files "$(wc -l </mnt/sums)"
}

# list: what there is at the top of the file system.
order_list() {
    value files "$(ls /mnt | tr '\n' ' ')"
}

# trim: deletes the known files and gives back what the file system does not use.
order_trim() {
    must rm -r /mnt/known
    must sync
    must fstrim -v /mnt
    value words "$(tail -n 1 /tmp/out)"
    must sync
}

# discard OFFSET SIZE: gives back a part of the disk, in MiB.
order_discard() {
    # blkdiscard would want the disk for itself, but its file system is mounted.
    must fio --name=discard --filename="/dev/$dev" --ioengine=psync --rw=trim --bs=1m --offset="${1}m" --size="${2}m" \
        --allow_mounted_write=1
    must sync
}

find_disk "$SIDECORE_SLOT"
value mib $(($(cat "/sys/block/$dev/size") / 2048))
say "finished boot"
while read -r line <&3; do
    # The order's words are meant to be split.
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
