# Writes to a terminal that a multiplexer holds, asks the multiplexer what stands there, and hashes it.
# The command that writes the screen's contents to the file `screen` stands in the arguments.
step=0
while :; do
    step=$((step + 1))
    printf '\033[2J\033[H'
    row=1
    while [ $row -lt 20 ]; do
        printf '\033[%d;%dH\033[3%dm%d of %d' $row $((row * 3)) $((row % 8)) $((row * step)) $step
        row=$((row + 1))
    done
    printf '\033[0m\033[22;1Hstep %d\n' $step
    tries=0
    # What was written is shown a little later.
    until [ -s screen ] && grep -q "step $step\$" screen; do
        "$@" > asked 2>&1 || { cat asked; exit 3; }
        [ -s screen ] || cp asked screen
        tries=$((tries + 1))
        [ $tries -lt 20000 ] || exit 4
        grep -q "step $step\$" screen || rm -f screen
    done
    echo "$step $(sha256sum < screen)" >> steps
    rm -f screen
    if [ -e stop ]; then exit 0; fi
done
