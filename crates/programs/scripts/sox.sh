# Sounds that are made, changed and packed, through pipes.
sox -D -R -n -t wav -r 44100 -b 16 - synth 12 pluck 220 synth 12 sine fmod 3 reverb 50 |
    sox -D -R -t wav - -t flac - tempo 1.3 rate -v 32000 | sha256sum
