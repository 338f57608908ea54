# The server in the foreground, two windows in it; it reads its configuration for its first client.
tmux -D -S socket -f tmux.conf &
until tmux -S socket has-session; do sleep 0.1; done
wait $!
