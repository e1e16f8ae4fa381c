#!/bin/busybox sh
# Called by udhcpc with the lease of the DHCP server.

case $1 in
    deconfig) ip addr flush dev "$interface" ;;
    bound | renew) ip addr add "$ip/$mask" dev "$interface" ;;
esac
