# A page without a display; what it writes to its console becomes the steps.
chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$PWD/profile" \
    --no-first-run --enable-logging=stderr "file://$PWD/page.html" 2>&1 < /dev/null |
    sed -un 's/.*"step \([0-9]* [0-9-]*\)".*/\1/p' >> steps
