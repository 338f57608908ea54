<?php
// Functions that the tracing JIT compiles, in shared memory of the opcode cache; generators, streams.
function sequence(int $seed, int $count): Generator {
    for ($i = 0; $i < $count; $i++) {
        $seed = ($seed * 1103515245 + 12345) % 2147483648;
        yield $seed;
    }
}
function mix(array $numbers): int {
    $mixed = 0;
    for ($round = 0; $round < 5; $round++) {
        foreach ($numbers as $number) $mixed = (($mixed * 31) ^ $number) & 0xffffffff;
    }
    return $mixed;
}
if (!(opcache_get_status()['jit']['on'] ?? false)) exit(4);
[$near, $far] = stream_socket_pair(STREAM_PF_UNIX, STREAM_SOCK_STREAM, 0);
for ($step = 1; ; $step++) {
    $numbers = iterator_to_array(sequence($step, 20000));
    $mixed = mix($numbers);
    sort($numbers);
    fwrite($near, "$mixed\n");
    if (trim(fgets($far)) !== "$mixed") exit(3);
    $hash = hash('sha256', serialize($numbers));
    file_put_contents('steps', "$step $mixed$hash\n", FILE_APPEND);
    if (file_exists('stop')) exit(0);
    clearstatcache();
}
