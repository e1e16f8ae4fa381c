# Executes the host's orders, one at a time (see disk.sh), with NVMe functions that come and go.
# Most orders are about the function that was found last.

. /parts/disk.sh

# Finds the live controller behind the port in a PCI slot, and the disk of its namespace:
# $controller and $dev.
look() {
    controller=
    dev=
    for path in /sys/class/nvme/nvme*; do
        case $(readlink -f "$path/device") in
            */"0000:00:$1.0"/*) ;;
            *) continue ;;
        esac
        controller=${path##*/}
        [ "$(cat "$path/state" 2>/dev/null)" = live ] || return 1
        for disk in "$path"/nvme*n*; do
            # If a subsystem may have several controllers, this is a path to a disk: nvme1c1n1 to
            # nvme1n1.
            dev=$(echo "${disk##*/}" | sed 's/c[0-9]*n/n/')
            [ -b "/dev/$dev" ] && return
        done
    done
    return 1
}

is_gone() {
    look "$1"
    [ -z "$controller" ]
}

# find SLOT: the function behind a port, once it is ready.
order_find() {
    until_so 300 look "$1" || fail "no NVMe disk behind the port in slot $1; controller: $controller, disk: $dev"
    value controller "$controller"
    value dev "$dev"
    value mib "$(mib)"
    value polls "$(cat "/sys/block/$dev/queue/io_poll")"
    value queues "$(ls "/sys/block/$dev/mq" 2>/dev/null | wc -l)"
}

# gone SLOT: waits until no function is behind a port.
order_gone() {
    if until_so 300 is_gone "$1"; then value gone true; else value gone "false $controller"; fi
}

# remove SLOT: releases the function behind a port, as on a request to eject. order_gone waits for
# the end.
order_remove() {
    for function in "/sys/bus/pci/devices/0000:00:$1.0"/0000:??:??.?; do
        echo 1 >"$function/remove" || fail "the kernel does not let go of $function"
    done
}

# nvme ARGUMENTS: runs nvme-cli, with its output as the answer.
order_nvme() {
    nvme "$@" >/tmp/nvme.out 2>/tmp/nvme.err
    value code $?
    value out "$(tr '\n' ' ' </tmp/nvme.out | tr -s ' ')"
    value err "$(tr '\n' ' ' </tmp/nvme.err | head -c 300)"
}

# stamp BLOCK COUNT: writes random data to so many blocks of 4 KiB, and to /tmp/stamp. /tmp/other
# differs from it in one byte.
order_stamp() {
    dd if=/dev/urandom of=/tmp/stamp bs=4096 count="$2" 2>/dev/null
    must dd if=/tmp/stamp of="/dev/$dev" bs=4096 seek="$1" oflag=direct
    cp /tmp/stamp /tmp/other
    last=$(tail -c 1 /tmp/stamp | od -A n -t u1 | tr -d ' ')
    printf "\\$(printf %o $((255 - last)))" |
        dd of=/tmp/other bs=1 seek=$((4096 * $2 - 1)) conv=notrunc 2>/dev/null
}

# nonzero BLOCK COUNT: the number of bytes in so many blocks of 4 KiB that are not zero.
order_nonzero() {
    dd if="/dev/$dev" bs=4096 skip="$1" count="$2" iflag=direct 2>/dev/null >/tmp/blocks
    value bytes "$(wc -c </tmp/blocks)"
    value nonzero "$(tr -d '\0' </tmp/blocks | wc -c)"
}

# fio OFFSET SIZE: writes a part of the disk, in MiB, and verifies it; polled.
order_fio() {
    for how in write read; do
        if job $how "/dev/$dev" --rw=rand$how --offset="${1}m" --size="${2}m" --iodepth=8 --verify=crc32c \
            --verify_fatal=1 --do_verify=1 --allow_mounted_write=1; then
            value $how true
        else
            value $how "false $(fio_words)"
        fi
    done
}

# measure POLLED OFFSET SECONDS: the cost of reads of the 16 MiB there, with polled queues or with
# the others.
order_measure() {
    # Only for this order.
    usual=$SIDECORE_POLLED
    SIDECORE_POLLED=$1
    measure_reads "$2" "$3"
    SIDECORE_POLLED=$usual
    measured "${controller}q"
}

has_ended() {
    ! kill -0 "$1" 2>/dev/null
}

# Whether the disk has completed so many reads since it appeared.
has_read() {
    [ "$(sed 's/^ *//' "/sys/block/$dev/stat" | cut -d ' ' -f 1)" -ge "$1" ]
}

# press OFFSET SIZE: starts reads and writes of a part of the disk, in MiB, until the disk is gone.
order_press() {
    enough=$(($(sed 's/^ *//' "/sys/block/$dev/stat" | cut -d ' ' -f 1) + 200))
    fio --name=press --filename="/dev/$dev" --direct=1 --ioengine=io_uring --hipri="$SIDECORE_POLLED" --thread \
        --rw=randrw --offset="${1}m" --size="${2}m" --bs=4k --iodepth=8 --time_based --runtime=120 \
        --allow_mounted_write=1 >/tmp/press.out 2>&1 &
    press=$!
    until_so 300 has_read "$enough" || fail "fio does not read: $(tail -n 4 /tmp/press.out)"
    ! has_ended "$press" || fail "fio ended by itself: $(tail -n 4 /tmp/press.out)"
}

# pressed: the result of these reads and writes, after the disk's removal.
order_pressed() {
    until_so 600 has_ended "$press" || fail "fio goes on, or hangs, without its disk"
    wait "$press"
    value code $?
    value words "$(sed -n 's/.*\(error=[^)]*\).*/\1/p' /tmp/press.out | head -n 1)"
}

take_orders
