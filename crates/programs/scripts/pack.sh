# xz and zstd pack in two threads, and unpack again.
if [ ! -e data ]; then
    awk 'BEGIN { for (i = 1; i < 100000; i++) { x = (x * 16807 + i) % 2147483647; print i, x, x % 97 } }' > data
fi
xz -T2 -3 --block-size=512KiB -c data > data.xz
zstd -q -T2 -6 -c data > data.zst
echo "$(xz -dc data.xz | sha256sum) $(zstd -qdc data.zst | sha256sum) $(cat data.xz data.zst | sha256sum)"
