# The broker with its plugin for STOMP, and nothing of the machine's own configuration.
echo '[rabbitmq_stomp].' > plugins
export RABBITMQ_NODENAME="programs$1@localhost" RABBITMQ_ENABLED_PLUGINS_FILE="$PWD/plugins"
export RABBITMQ_MNESIA_BASE="$PWD/mnesia" RABBITMQ_LOG_BASE="$PWD/logs" RABBITMQ_LOGS=-
export RABBITMQ_CONFIG_FILE="$PWD/rabbitmq.conf" RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='+S 2:2'
export RABBITMQ_DIST_PORT=$(($1 < 40000 ? $1 + 20001 : $1 - 20001)) ERL_EPMD_PORT=$(($1 < 40000 ? $1 + 10001 : $1 - 10001))
exec /usr/lib/rabbitmq/bin/rabbitmq-server
