%% A ring of processes on two schedulers, a table, ports, timers.
-module(steps).
-export([main/0]).

ring(0, Last) -> ring_node(Last);
ring(Left, Last) -> ring_node(spawn(fun() -> ring(Left - 1, Last) end)).

ring_node(Next) ->
    receive {Number, Path} -> Next ! {Number * 31 rem 1000003 + 1, Path + 1}, ring_node(Next) end.

main() ->
    Self = self(),
    ets:new(words, [named_table, public, ordered_set]),
    Ticker = spawn(fun() -> tick(0) end),
    First = spawn(fun() -> ring(500, Self) end),
    Port = open_port({spawn, "cat"}, [stream, binary]),
    step(1, First, Port, Ticker).

tick(Ticks) ->
    receive {ask, From} -> From ! {ticks, Ticks}, tick(Ticks)
    after 5 -> tick(Ticks + 1)
    end.

step(Step, First, Port, Ticker) ->
    [First ! {Step * Number, 0} || Number <- lists:seq(1, 50)],
    Back = lists:sort([receive {Value, 501} -> Value end || _ <- lists:seq(1, 50)]),
    [ets:insert(words, {V rem 1000, V}) || V <- Back],
    Hash = binary:encode_hex(crypto_hash({Step, Back, erlang:phash2(ets:tab2list(words))})),
    port_command(Port, Hash),
    Hash = collect(Port, byte_size(Hash), <<>>),
    ok = file:write_file("steps", io_lib:format("~b ~s~n", [Step, Hash]), [append]),
    case filelib:is_file("stop") of
        true ->
            Ticker ! {ask, self()},
            receive {ticks, Ticks} when Ticks > 0 -> halt(0) after 1000 -> halt(5) end;
        false -> step(Step + 1, First, Port, Ticker)
    end.

crypto_hash(Term) -> erlang:md5(term_to_binary(Term)).

collect(_, Left, Got) when byte_size(Got) >= Left -> Got;
collect(Port, Left, Got) ->
    receive {Port, {data, Data}} -> collect(Port, Left, <<Got/binary, Data/binary>>) end.
