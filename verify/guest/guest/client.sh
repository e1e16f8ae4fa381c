# The guest is a client of an IOhost: its own sidecored serves a remote disk to its own kernel, by
# ublk. Executes the orders of the run, one at a time (see orders in disk.sh).

. /parts/disk.sh

CONTROL=/run/guest1-control.sock

# put FILE HEX: writes a file that only root can read.
order_put() {
    (umask 077 && echo "$2" | xxd -r -p >"$1") || fail "no $1"
}

has_nic() {
    [ -e /sys/class/net/eth0 ]
}

# The device is shown as running, and the kernel has its disk.
is_running() {
    sidecore --socket "$CONTROL" list 2>/dev/null | grep -q "^$1 *running" && [ -b "/dev/$dev" ]
}

# serve DEVICE CONFIG: starts the daemon, and waits until the device is a disk of this kernel.
order_serve() {
    until_so 100 has_nic || fail "there is no NIC"
    must ip link set eth0 up
    must insmod /modules/ublk_drv.ko
    sidecored --config "$2" >/run/daemon.out 2>/run/daemon.log &
    daemon=$!
    until_so 600 is_running "$1" || fail "the device is not served: $(tail -n 4 /run/daemon.log | tr '\n' ' ')"
    value mib "$(mib)"
}

# release DEVICE: removes the device, and ends the daemon in order.
order_release() {
    must sidecore --socket "$CONTROL" device remove "$1"
    if [ -e "/dev/$dev" ]; then value gone false; else value gone true; fi
    kill "$daemon"
    wait "$daemon"
    value code $?
}

mkdir -p /run
mount -t tmpfs -o size=64m,mode=755 tmpfs /run
dev=ublkb0
take_orders
