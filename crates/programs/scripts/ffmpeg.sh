# Encodes a picture that moves and a tone, in several threads, and hashes what comes out.
ffmpeg -nostdin -v error -f lavfi -i testsrc2=duration=2:size=480x270:rate=25 \
    -f lavfi -i sine=frequency=440:duration=2 \
    -c:v libx264 -preset medium -threads 4 -c:a aac -flags +bitexact -f md5 -
