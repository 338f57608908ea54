# A program that answers the faults of its own memory, by a thread, a child that inherited the
# descriptor, or one that alone has it. Arguments: what it does, and a folder. Commands come as
# lines of FOLDER/commands, a pipe: "show", "read PAGE", "write PAGE"; answers and events go to FOLDER/told.
import array, ctypes, fcntl, os, select, socket, struct, sys, threading

what, folder = sys.argv[1:]
told = open(folder + "/told", "a", buffering=1)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
USERFAULTFD, NONBLOCK, SHARED, ANONYMOUS, NORESERVE = 323, 0o4000, 1, 0x22, 0x4000
API, REGISTER, COPY, ZEROS = 0xC018AA3F, 0xC020AA00, 0xC028AA03, 0xC020AA04
PROTECT, CONTINUE, POISON = 0xC018AA06, 0xC020AA07, 0xC020AA08
MISSING, PROTECTION, MINOR = 1, 2, 4
page, pages = 4096, 64


def call(number, *words):
    argument = array.array("Q", words)
    try:
        fcntl.ioctl(uffd, number, argument, True)
    except OSError as error:
        return error.errno
    return 0


def begin(features, modes):
    global uffd
    uffd = libc.syscall(USERFAULTFD, NONBLOCK)
    if uffd < 0 or call(API, 0xAA, features, 0) or call(REGISTER, area, pages * page, modes, 0):
        sys.exit("not registered")


# Calls of the library leave the interpreter to other threads.
def read(at):
    byte = ctypes.create_string_buffer(1)
    libc.memcpy(byte, area + at * page, 1)
    return byte.raw[0]


def write(at, value):
    libc.memset(area + at * page, value, 1)


def mapped(flags, fd=-1):
    at = libc.mmap(None, pages * page, 3, flags, fd, 0)
    if at == 2**64 - 1:
        sys.exit("no memory")
    return at


if what == "protected":
    area = mapped(ANONYMOUS)
    for at in range(10):
        write(at, at)
    begin(1 | 1 << 13, PROTECTION)
    call(PROTECT, area + 4 * page, 20 * page, 1)
elif what == "minor":
    fd = os.memfd_create("minor")
    os.truncate(fd, pages * page)
    for at in range(0, pages, 2):
        os.pwrite(fd, bytes([at % 4 and at]) * page, at * page)
    area = mapped(SHARED, fd)
    begin(1 << 10 | 1 << 5, MISSING | MINOR)
    for at in (2, 4, 6):
        call(CONTINUE, area + at * page, page, 0, 0)
elif what == "huge":
    page, pages = 2 << 20, 6
    fd = libc.memfd_create(b"huge", 4)
    os.truncate(fd, pages * page)
    area = mapped(SHARED | NORESERVE, fd)
    write(0, 1)
    write(2, 0)
    read(3)
    begin(1 << 4, MISSING)
else:
    area = mapped(ANONYMOUS)
    write(5, 55)
    begin(1 << 14, MISSING)
    call(ZEROS, area + 7 * page, 2 * page, 0, 0)
    if what == "missing":
        call(POISON, area + 20 * page, page, 0, 0)
source = libc.mmap(None, page, 3, ANONYMOUS, -1, 0)


def answer():
    poll = select.poll()
    poll.register(uffd, select.POLLIN)
    while True:
        poll.poll()
        try:
            message = os.read(uffd, 32)
        except BlockingIOError:
            continue
        flags, address = struct.unpack("QQ", message[8:24])
        address &= -page
        at = (address - area) // page
        told.write(f"event {message[0]:#x} {flags} {at}\n")
        if flags & 2:
            call(PROTECT, address, page, 0)
        elif flags & 4:
            call(CONTINUE, address, page, 0, 0)
        else:
            libc.memset(source, 100 + at, 1)
            call(COPY, address, source, page, 0, 0)


def show():
    with open("/proc/self/pagemap", "rb") as file:
        kinds = ""
        for at in range(pages):
            file.seek((area + at * page) // 4096 * 8)
            (entry,) = struct.unpack("Q", file.read(8))
            present, swapped, protected = (entry >> bit & 1 for bit in (63, 62, 57))
            kinds += ["." if not swapped else "m", "P"][present] if not protected else "wp"[present]
        return kinds


if what == "inherited" and os.fork() == 0:
    answer()
elif what in ("passed", "outside"):
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        # Who answers has left the tree where its parent has ended.
        if what == "outside" and os.fork():
            os._exit(0)
        os.close(uffd)
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        uffd = fds[0]
        theirs.send(b"x")
        answer()
    socket.send_fds(ours, [b"x"], [uffd])
    ours.recv(1)
    os.close(uffd)
    if what == "outside":
        os.wait()
        ours.close()
        theirs.close()
else:
    threading.Thread(target=answer, daemon=True).start()
os.mkdir(folder + "/ready")
commands = os.open(folder + "/commands", os.O_RDWR)
for line in os.fdopen(commands):
    word, at = (line.split() + ["0"])[:2]
    if word == "show":
        told.write(f"pages {show()}\n")
    elif word == "read":
        told.write(f"read {at}: {read(int(at))}\n")
    else:
        write(int(at), 9)
        told.write(f"wrote {at}\n")
