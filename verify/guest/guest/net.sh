# A guest on a network: executes orders about its NICs, one at a time (see orders in disk.sh).

. /parts/disk.sh

# Waits until the kernel has a NIC.
has_nic() {
    [ -e "/sys/class/net/$1" ]
}

# up NIC ADDRESS/BITS: gives a NIC an address.
order_up() {
    until_so 100 has_nic "$1" || fail "there is no NIC $1"
    must ip link set "$1" up
    must ip addr add "$2" dev "$1"
}

# Counts the answers to five pings.
pinged() {
    value received "$(sed -n 's/.* \([0-9]*\) packets received.*/\1/p' /tmp/ping)"
}

# lease NIC: asks the DHCP server for an address.
order_lease() {
    until_so 100 has_nic "$1" || fail "there is no NIC $1"
    must ip link set "$1" up
    must udhcpc -i "$1" -n -q -t 20 -T 1 -s /parts/lease.sh
    value address "$(ip -4 -o addr show dev "$1" | sed -n 's/.* inet \([^ ]*\) .*/\1/p')"
}

# fetch URL
order_fetch() {
    must wget -q -O /tmp/fetched "$1"
    value digest "$(sha256sum </tmp/fetched | cut -d ' ' -f 1)"
    rm /tmp/fetched
}

# ping ADDRESS
order_ping() {
    ping -c 5 -W 2 "$1" >/tmp/ping 2>&1
    pinged
}

# The interrupts of all virtio devices so far. A guest without MSI-X has a line for each device.
nic_interrupts() {
    awk '/virtio/ { sum += $2 } END { print sum + 0 }' /proc/interrupts
}

# pings ADDRESS COUNT: pings again as soon as an answer is there, and counts the interrupts meanwhile.
order_pings() {
    before=$(nic_interrupts)
    ping -A -q -c "$2" -W 5 "$1" >/tmp/ping 2>&1
    value interrupts $(($(nic_interrupts) - before))
    pinged
}

# tune ARGUMENTS: runs the program that sets this guest up to poll.
order_tune() {
    sidecore-guest-tune "$@" >/tmp/tune 2>&1
    value code $?
    value words "$(tr '\n' ' ' </tmp/tune)"
}

# reload: loads the driver of NICs again, with the options that modprobe would give it at a boot.
order_reload() {
    must rmmod virtio_net
    must insmod /modules/virtio_net.ko $(sed -n 's/^options virtio_net //p' /etc/modprobe.d/*.conf)
}

# setting PATH: a setting, as the kernel shows it.
order_setting() {
    value setting "$(cat "$1" 2>&1)"
}

# threads NIC: the kernel's threads that poll a NIC.
order_threads() {
    value threads "$(ps | grep -c "[n]api/$1-")"
}

# ping6 ADDRESS NIC: the address is link-local.
order_ping6() {
    ping6 -c 5 -W 2 -I "$2" "$1" >/tmp/ping 2>&1
    pinged
}

# listen: takes a file, by TCP. An end of its input would end the connection: it has one without.
order_listen() {
    [ -p /tmp/open ] || must mkfifo /tmp/open
    nc -l -p 9000 <>/tmp/open >/tmp/got &
    listener=$!
    # The port is there once the kernel lists it: 9000 is 2328 in hexadecimal.
    until_so 100 grep -q ':2328 .* 0A ' /proc/net/tcp /proc/net/tcp6 || fail "nc does not listen"
}

# send ADDRESS MIB: sends random data, by TCP.
order_send() {
    head -c $(($2 * 1048576)) /dev/urandom >/tmp/sent || fail "no random data"
    must sh -c "nc $1 9000 </tmp/sent"
    value digest "$(sha256sum </tmp/sent | cut -d ' ' -f 1)"
    rm /tmp/sent
}

# connect ADDRESS PORT: tries to begin a connection, by TCP, for two seconds.
order_connect() {
    nc -w 2 "$1" "$2" </dev/null >/tmp/connected 2>&1
    value code $?
}

# got: waits for the end of the file.
order_got() {
    wait $listener
    value mib "$(($(wc -c </tmp/got) / 1048576))"
    value digest "$(sha256sum </tmp/got | cut -d ' ' -f 1)"
    rm /tmp/got
}

# claim NIC MAC: changes the address of a NIC, which keeps its other addresses.
order_claim() {
    must ip link set "$1" down
    must ip link set "$1" address "$2"
    must ip link set "$1" up
}

# kernel: the errors in the kernel's log.
order_kernel() {
    dmesg | grep -i -e "virtio_net.*err" -e "oops:" -e "warning: cpu" -e "bad gso" -e "csum fail" -e "hw csum" >/tmp/kernel
    found=$(head -n 3 /tmp/kernel | tr '\n' '|')
    value kernel "${found:-none}"
}

take_orders
