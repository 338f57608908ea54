-- Traces that the JIT compiles, structures of the FFI, coroutines and strings.
local ffi = require("ffi")
local bit = require("bit")
ffi.cdef("typedef struct { uint32_t key; double value; } pair_t;")
local function work(step)
  local pairs_of = ffi.new("pair_t[?]", 50000)
  local x = step
  for i = 0, 49999 do
    x = (x * 16807) % 2147483647
    pairs_of[i].key = x
    pairs_of[i].value = x / 3
  end
  local sum, mixed = 0, 0
  for round = 1, 20 do
    for i = 0, 49999 do
      sum = (sum + pairs_of[i].value * round) % 1e9
      mixed = bit.bxor(bit.rol(mixed, 5), pairs_of[i].key)
    end
  end
  local words = {}
  local producer = coroutine.wrap(function()
    for i = 0, 2000 do coroutine.yield(string.format("%x", pairs_of[i].key)) end
  end)
  for word in producer do words[#words + 1] = word end
  table.sort(words)
  return string.format("%.3f %s %s", sum, bit.tohex(mixed), words[1000])
end
for step = 1, math.huge do
  local out = assert(io.open("steps", "a"))
  out:write(step, " ", work(step), "\n")
  out:close()
  local stop = io.open("stop")
  if stop then os.exit(0) end
end
