"""A task with memory to order: evaluates one expression a line and prints the result."""
import ctypes
import os
import signal
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
PAGE = 4096


def call(name, *arguments):
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = getattr(libc, name)(*arguments)
    if result in (-1, 2**64 - 1):
        return -ctypes.get_errno()
    return result


def mmap(pages, protection=3, flags=0x22, fd=-1):
    """Maps pages, aligned like a huge page."""
    whole = call("mmap", 0, pages * PAGE + (2 << 20), protection, flags, fd, 0)
    start = whole + (2 << 20) - 1 & -(2 << 20)
    return call("mmap", start, pages * PAGE, protection, flags | 0x10, fd, 0)


def put(address, page, byte, pages=1):
    """Fills pages with a byte, and their first eight bytes with their numbers."""
    ctypes.memset(address + page * PAGE, byte, pages * PAGE)
    for number in range(page, page + pages) if byte else ():
        ctypes.memmove(address + number * PAGE, (number + 1).to_bytes(8, "little"), 8)
    return 0


def fork(address, *pages):
    """Makes a child that writes to some pages and then waits."""
    done, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        call("prctl", 1, int(signal.SIGKILL))
        for page in pages:
            put(address, page, 99)
        os.write(tell, b"x")
        while True:
            signal.pause()
    os.read(done, 1)
    return pid


def memfd(pages):
    fd = call("memfd_create", ctypes.c_char_p(b"test"), 1)
    os.ftruncate(fd, pages * PAGE)
    return fd


def file(path, pages):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for number in range(pages):
        os.write(fd, bytes([number + 1]) * PAGE)
    return fd


for line in sys.stdin:
    print(eval(line), flush=True)
