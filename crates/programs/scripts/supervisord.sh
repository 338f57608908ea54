# Asks its own supervisor over and over to start another program again.
step=0
while [ ! -e stop ]; do
    step=$((step + 1))
    said=$(supervisorctl -c supervisord.conf restart sleeper)
    echo "$step" $said >> steps
done
exec supervisorctl -c supervisord.conf shutdown
