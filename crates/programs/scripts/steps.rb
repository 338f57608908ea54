# Threads, fibers, a child process' pipes and garbage.
require 'digest'
pipe = IO.popen(['cat'], 'r+')
ticks = 0
Thread.new { loop { sleep 0.005; ticks += 1 } }
(1..).each do |step|
  parts = 3.times.map do |part|
    Thread.new do
      words = Fiber.new { 5000.times { |i| Fiber.yield(((i * 7919 + step * part) % 10007).to_s(36)) }; nil }
      list = []
      while (word = words.resume) do list << word end
      Digest::SHA256.hexdigest(list.sort.tally.sort.inspect)
    end
  end
  pipe.puts(Digest::SHA256.hexdigest(parts.map(&:value).join))
  File.write('steps', "#{step} #{pipe.gets}", mode: 'a')
  exit!(ticks > 0 ? 0 : 5) if File.exist?('stop')
end
