// Parallel streams, a scheduled executor, and garbage for the collector's threads.
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.*;

public class Steps {
    static String work(long step) throws Exception {
        Map<Long, Long> counts = LongStream.range(0, 60000).parallel()
            .map(i -> (i * 6364136223846793005L + step * 1442695040888963407L) >>> 40)
            .boxed()
            .collect(Collectors.groupingByConcurrent(v -> v % 977, Collectors.summingLong(v -> v)));
        StringBuilder text = new StringBuilder();
        new TreeMap<>(counts).forEach((key, value) -> text.append(key).append(value));
        byte[] hash = MessageDigest.getInstance("SHA-256")
            .digest(text.toString().getBytes(StandardCharsets.UTF_8));
        return HexFormat.of().formatHex(hash);
    }

    public static void main(String[] arguments) throws Exception {
        AtomicLong ticks = new AtomicLong();
        ScheduledExecutorService timers = Executors.newScheduledThreadPool(2);
        timers.scheduleAtFixedRate(ticks::incrementAndGet, 1, 5, TimeUnit.MILLISECONDS);
        ExecutorService pool = Executors.newFixedThreadPool(4);
        for (long step = 1;; step++) {
            List<Future<String>> parts = new ArrayList<>();
            for (int part = 0; part < 4; part++) {
                long seed = step * 4 + part;
                parts.add(pool.submit(() -> work(seed)));
            }
            StringBuilder line = new StringBuilder().append(step).append(' ');
            for (Future<String> part : parts) line.append(part.get());
            Files.writeString(Path.of("steps"), line.append('\n'),
                StandardOpenOption.CREATE, StandardOpenOption.APPEND);
            if (Files.exists(Path.of("stop"))) System.exit(ticks.get() > 0 ? 0 : 5);
        }
    }
}
