# The command of an owner on host $1: writes to the disk $2 all the time, and notes the epoch and
# the result of each write.
echo $$ >"/run/$1.writer"
trap 'exit 0' TERM
while :; do
    if dd if=/dev/zero of="$2" bs=4096 count=1 oflag=direct 2>"/tmp/$1.dd"; then
        echo "$SIDECORE_EPOCH done"
    else
        echo "$SIDECORE_EPOCH $(sed -n 's/.*: //p' "/tmp/$1.dd" | head -n 1 | tr ' ' '-')"
    fi >>"/run/$1.writes"
    usleep 20000
done
