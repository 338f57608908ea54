# Matrices that OpenBLAS multiplies in four threads, beside two threads of Python's own.
import hashlib, os, threading
import numpy

def matrix(seed, size=600):
    random = numpy.random.Generator(numpy.random.PCG64(seed))
    # Whole numbers: their sums do not depend on who adds them in which order.
    return random.integers(-50, 50, (size, size)).astype(numpy.float64)

done = [0, 0]
def beside(number):
    while True:
        numpy.sort(matrix(number, 200).ravel())
        done[number] += 1
for number in range(2):
    threading.Thread(target=beside, args=(number,), daemon=True).start()

keep = [matrix(1000 + number) for number in range(8)]
step = 0
while True:
    step += 1
    product = matrix(step) @ keep[step % 8] @ keep[(step + 3) % 8]
    hashed = hashlib.sha256(product.tobytes()).hexdigest()
    with open("steps", "a") as steps:
        steps.write(f"{step} {hashed} {product.trace():.0f}\n")
    if os.path.exists("stop"):
        os._exit(0 if min(done) > 0 else 5)
