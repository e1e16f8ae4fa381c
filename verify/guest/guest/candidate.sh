# A candidate of the cluster $1 on the host $2, for the disk $3.
hostname "$2"
exec sidecore --socket "/run/sidecore/$2.sock" own disk --name "$2" --cluster "$1" \
    --etcd http://127.0.0.1:2379 --record "/run/$1.owner" --path "$3" --fence-reservation \
    --lease 6 -- sh /parts/writer.sh "$2" "$3"
