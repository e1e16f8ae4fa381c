# A candidate of the cluster $1 on the host $2, for the disk $3, which is the only one of its host.
hostname "$2"
disk=$(readlink -f "/sys/block/${3#/dev/}") || exit
mount -t tmpfs disks /sys/block || exit
ln -s "$disk" "/sys/block/${3#/dev/}"
exec sidecore --socket "/run/sidecore/$2.sock" own disk --name "$2" --cluster "$1" \
    --etcd http://127.0.0.1:2379 --record "/run/$1.owner" --path "$3" --fence-reservation \
    --lease 6 -- sh /parts/writer.sh "$2" "$3"
