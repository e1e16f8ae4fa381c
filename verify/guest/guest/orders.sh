# Executes the host's orders, one at a time (see disk.sh). Settings:
#   SIDECORE_SLOT   the PCI slot of the disk that all orders are about

. /parts/disk.sh

# Lines of one secret, as many bytes of them.
secret() {
    yes "$1" | head -c "$2"
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

# secret NAME TEXT OFFSET: writes the text into a file, into a file that is deleted, and to the disk
# behind the file system.
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

# search TEXT TEXT: the number of occurrences of each text on the whole disk.
order_search() {
    forget_cached
    # Zeros end records, so that a hole of gigabytes is not one line.
    dd if="/dev/$dev" bs=1M iflag=direct 2>/tmp/dd.out | grep-gnu -o -a -z -F -e "$1" -e "$2" | tr '\0' '\n' >/tmp/hits
    value one "$(grep-gnu -c -F -e "$1" /tmp/hits)"
    value other "$(grep-gnu -c -F -e "$2" /tmp/hits)"
    # A search of a part of the disk would prove nothing.
    value mib "$(sed -n 's/^\([0-9]*\)+0 records in$/\1/p' /tmp/dd.out)"
    rm /tmp/hits
}

# scatter OFFSET SIZE: writes every other sector of a part of the disk.
order_scatter() {
    job scatter "/dev/$dev" --rw=write:512 --bs=512 --offset="${1}m" --size="${2}m" --io_size="$(($2 / 2))m" \
        --iodepth=32 --allow_mounted_write=1 || fail "fio: $(fio_words)"
}

# list: the names at the top of the file system.
order_list() {
    value files "$(ls /mnt | tr '\n' ' ')"
}

# trim: deletes the known files and trims the free space of the file system.
order_trim() {
    must rm -r /mnt/known
    must sync
    must fstrim -v /mnt
    value words "$(tail -n 1 /tmp/out)"
    must sync
}

# discard OFFSET SIZE: discards a part of the disk, in MiB.
order_discard() {
    # blkdiscard wants exclusive access to the disk, but its file system is mounted.
    must fio --name=discard --filename="/dev/$dev" --ioengine=psync --rw=trim --bs=1m --offset="${1}m" --size="${2}m" \
        --allow_mounted_write=1
    must sync
}

# count SECONDS: the cost of reads, one at a time.
order_count() {
    measure_reads 0 "$1"
    value virtio "$virtio"
    measured "$virtio-"
}

# forbidden SLOT: tries to write to the read-only disk in a slot, as root.
order_forbidden() {
    ours=$dev
    find_disk "$1"
    value flag "$(cat "/sys/block/$dev/ro")"
    blockdev --setrw "/dev/$dev" 2>/tmp/forbidden.err
    dd if=/dev/urandom of="/dev/$dev" bs=4096 count=4 oflag=direct conv=notrunc 2>>/tmp/forbidden.err
    value code $?
    value words "$(grep -v records /tmp/forbidden.err | tr '\n' ' ')"
    dev=$ours
}

# carried FROM TO OFFSET: writes random data to one device, at an offset in MiB; whether another one
# returns them. They stay in /tmp/written.
carried() {
    head -c 8388608 /dev/urandom >/tmp/written
    must dd if=/tmp/written of="$1" bs=1M seek="$3" oflag=direct
    must dd if="$2" of=/tmp/returned bs=1M skip="$3" count=8 iflag=direct
    if cmp /tmp/written /tmp/returned >/dev/null 2>&1; then echo true; else echo false; fi
}

# dm_crypt SLOT SLOT KEY: opens the disk in a slot by dm-crypt, with the header on the disk in
# another one, and compares it with this order's disk.
order_dm_crypt() {
    ours=$dev
    find_disk "$1"
    ciphertext=/dev/$dev
    find_disk "$2"
    header=/dev/$dev
    dev=$ours
    printf %s "$3" >/tmp/key
    mkdir -p /run/cryptsetup
    # There is no udev to wait for.
    export DM_DISABLE_UDEV=1
    must cryptsetup open --header "$header" --key-file /tmp/key "$ciphertext" plain
    value cipher "$(cryptsetup status plain | sed -n 's/^ *cipher: *//p')"
    value reads "$(carried "/dev/$dev" /dev/mapper/plain 0)"
    must dd if="$ciphertext" of=/tmp/returned bs=1M count=8 iflag=direct
    if cmp /tmp/written /tmp/returned >/dev/null 2>&1; then value hidden false; else value hidden true; fi
    value writes "$(carried /dev/mapper/plain "/dev/$dev" 100)"
    must cryptsetup close plain
}

find_disk "$SIDECORE_SLOT"
value mib $(($(cat "/sys/block/$dev/size") / 2048))
take_orders
