"""Sets what the kernel lets a process set, each to a value that is not the default, and tells on each
line of the FIFO `commands` what it reads back, in the file that the line names."""
import ctypes, fcntl, json, mmap, os, resource, signal, socket, struct, sys, time

folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
shown = {}    # what to read back, by name
unset = {}    # what could not be set, and why


def call(name, *args):
    result = getattr(libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def setting(name, set_it, show=None):
    try:
        made = set_it()
    except (OSError, ValueError) as error:
        unset[name] = str(error)
        return
    if show:
        shown[name] = (lambda: show(made))


def written(number, kind=ctypes.c_int):
    place = kind()
    call("prctl", number, ctypes.byref(place), 0, 0, 0)
    return place.value


def fdinfo(fd, but=("ino:", "it_value:", "eventfd-id:", "mnt_id:", "pos:")):
    lines = open(f"/proc/self/fdinfo/{fd}").read().splitlines()
    lines = [line.split(" ino:")[0] if line.startswith("tfd:") else line for line in lines]
    return sorted(line for line in lines if not line.startswith(but))


# Descriptors, before privileges change.
NONBLOCK, APPEND, DIRECT, ASYNC = os.O_NONBLOCK, os.O_APPEND, os.O_DIRECT, 0o20000
for name, flags in [("plain", 0), ("nonblock", NONBLOCK), ("packets", DIRECT), ("append", APPEND),
                    ("all", NONBLOCK | DIRECT | APPEND)]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags)
    for end in reader, writer:
        shown[f"pipe {name} {end}"] = lambda end=end: fdinfo(end)
    setting(f"pipe {name} size", lambda: fcntl.fcntl(writer, 1031, 1 << 17),
            lambda _, writer=writer: fcntl.fcntl(writer, 1032))
for name, kind in [("thread", 0), ("process", 1), ("group", 2)]:
    reader, writer = os.pipe()
    ends = (reader, writer)
    owner = struct.pack("ii", kind, os.getpid())
    setting(f"owner {name}", lambda: fcntl.fcntl(reader, 15, owner))
    setting(f"signal {name}", lambda: fcntl.fcntl(reader, 10, 23 + kind))
    shown[f"owner {name}"] = lambda reader=reader: (
        struct.unpack("ii", fcntl.fcntl(reader, 16, bytes(8))), fcntl.fcntl(reader, 11))
for name, flags in [("append", os.O_WRONLY | APPEND), ("sync", os.O_RDWR | os.O_SYNC),
                    ("dsync", os.O_WRONLY | os.O_DSYNC), ("noatime", os.O_RDONLY | os.O_NOATIME),
                    ("nofollow", os.O_RDONLY | os.O_NOFOLLOW), ("path", os.O_PATH),
                    ("path nofollow", os.O_PATH | os.O_NOFOLLOW), ("nonblock", os.O_RDONLY | NONBLOCK),
                    ("none", os.O_WRONLY | os.O_RDWR)]:
    open(f"{folder}/file", "a").close()
    setting(f"file {name}", lambda: os.open(f"{folder}/file", flags), lambda fd: fdinfo(fd))
setting("directory", lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY), lambda fd: fdinfo(fd))
setting("directory path", lambda: os.open(folder, os.O_PATH | os.O_DIRECTORY), lambda fd: fdinfo(fd))
for seals in [1, 2, 4, 6, 8, 16, 14, 30, 31]:
    def sealed(seals=seals):
        fd = os.memfd_create("m", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.write(fd, b"sealed")
        fcntl.fcntl(fd, 1033, seals)
        return fd
    setting(f"memfd seals {seals}", sealed, lambda fd: fcntl.fcntl(fd, 1034))
for flags in [8, 16]:    # MFD_NOEXEC_SEAL, MFD_EXEC
    setting(f"memfd {flags}", lambda: os.memfd_create("x", flags | 2),
            lambda fd: (fcntl.fcntl(fd, 1034), oct(os.fstat(fd).st_mode)))
setting("memfd seal exec", lambda: fcntl.fcntl(os.memfd_create("e", 2), 1033, 0x20))
for clock in [0, 1, 7, 8, 9]:
    for how in [0, 1, 3]:
        def timer(clock=clock, how=how):
            fd = call("timerfd_create", clock, NONBLOCK)
            now = {0: time.CLOCK_REALTIME, 8: time.CLOCK_REALTIME, 1: time.CLOCK_MONOTONIC,
                   7: time.CLOCK_BOOTTIME, 9: time.CLOCK_BOOTTIME}[clock]
            due = 5000 + (int(time.clock_gettime(now)) if how & 1 else 0)
            call("timerfd_settime", fd, how, struct.pack("4q", 70, 7, due, 0), None)
            return fd
        setting(f"timerfd {clock} {how}", timer, lambda fd: fdinfo(fd))
def expired():
    fd = call("timerfd_create", 1, NONBLOCK)
    call("timerfd_settime", fd, 0, struct.pack("4q", 0, 0, 0, 1), None)
    while "ticks: 1" not in open(f"/proc/self/fdinfo/{fd}").read():
        time.sleep(0.001)
    return fd
setting("timerfd expired", expired, lambda fd: fdinfo(fd))
for name, count, flags in [("eventfd full", 2**64 - 2, NONBLOCK), ("eventfd semaphore", 3, 1)]:
    def counter(count=count, flags=flags):
        fd = call("eventfd", 0, flags)
        os.write(fd, struct.pack("Q", count))
        return fd
    setting(name, counter, lambda fd: fdinfo(fd))
mask = ctypes.create_string_buffer(struct.pack("Q", 0x7fffffff00000e00))
setting("signalfd", lambda: call("signalfd", -1, mask, NONBLOCK), lambda fd: fdinfo(fd))
import select
epoll = select.epoll()
for bit in [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 13, 28, 29, 30, 31]:
    def watched(bit=bit):
        fd = call("eventfd", 0, 0)
        events = 1 << bit | (1 if bit in (28, 29, 30, 31) else 0)
        call("epoll_ctl", epoll.fileno(), 1, fd, struct.pack("=IQ", events, 0x1234567800000000 | bit))
    setting(f"epoll bit {bit}", watched)
setting("epoll polling", lambda: fcntl.ioctl(epoll, 0x40088a01, struct.pack("IHBB", 40, 8, 1, 0)))
shown["epoll"] = lambda: fdinfo(epoll.fileno())
def polling():
    try:
        return fcntl.ioctl(epoll, 0x80088a02, bytes(8)).hex()
    except OSError as error:
        return str(error)
shown["epoll polling"] = polling
watches = call("inotify_init1", NONBLOCK)
for at, bits in enumerate([0xfff, 2 | 1 << 26, 2 | 1 << 31, 8 | 1 << 28, 0x100 | 1 << 24]):
    os.makedirs(f"{folder}/watched{at}")
    setting(f"inotify {bits:x}", lambda: call("inotify_add_watch", watches,
                                              f"{folder}/watched{at}".encode(), bits))
shown["inotify"] = lambda: [line.split(" ino:")[0] + line[line.index(" mask:"):].split(" ignored")[0]
                            for line in fdinfo(watches) if line.startswith("inotify")]
for name, flags, events in [("plain", 0, 2), ("names", 0xe00, 0x100), ("unlimited", 0x30, 8)]:
    def group(flags=flags, events=events):
        fd = call("fanotify_init", flags | 2, 0)
        call("fanotify_mark", fd, 1, ctypes.c_uint64(events), -100, f"{folder}/watched0".encode())
        return fd
    setting(f"fanotify {name}", group,
            lambda fd: [line.split(" ino:")[0] for line in fdinfo(fd) if line.startswith("fanotify")])
for number, name in [(1024, "lease")]:
    leased = os.open(f"{folder}/leased", os.O_RDONLY | os.O_CREAT)
    setting(name, lambda: fcntl.fcntl(leased, number, fcntl.F_RDLCK), lambda _: fcntl.fcntl(leased, 1025))
locked = os.open(f"{folder}/locked", os.O_RDWR | os.O_CREAT)
setting("flock", lambda: fcntl.flock(locked, fcntl.LOCK_SH))
setting("lock of the description", lambda: fcntl.fcntl(
    locked, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 10, 10, 0)))
setting("lock of the process", lambda: fcntl.lockf(locked, fcntl.LOCK_EX, 5, 100))
shown["locks"] = lambda: [line.split()[1:5] + line.split()[-2:] for line in fdinfo(locked)
                          if line.startswith("lock:")]
# How a child ended, of two pidfds.
child = os.fork()
if child == 0:
    os._exit(7)
pidfds = [os.pidfd_open(child), os.pidfd_open(child)]
os.waitpid(child, 0)
def ended(fd):
    try:
        info = fcntl.ioctl(fd, 0xc040ff0b, struct.pack("<Q", 8) + bytes(56))
        return struct.unpack_from("<Q", info)[0] & 8 and struct.unpack_from("<i", info, 60)[0]
    except OSError as error:
        return error.strerror
shown["pidfds"] = lambda: ([ended(fd) for fd in pidfds],
                           os.fstat(pidfds[0]).st_ino == os.fstat(pidfds[1]).st_ino)

# Memory.
PAGES = 4 * 4096
places = {}
def mapping(flags, prot=3, fd=-1):
    at = libc.mmap(None, ctypes.c_size_t(PAGES), prot, flags, fd, ctypes.c_long(0))
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    # Kept apart from its neighbours.
    libc.mmap(None, ctypes.c_size_t(PAGES), 0, 0x4022, -1, ctypes.c_long(0))
    return at
def keep(name, make):
    def kept():
        places[name] = make()
    setting(name, kept)
for flags in [0x22, 0x21, 0x28, 0x122, 0x4022, 0x2022, 0x20022, 0x8022, 0x62]:
    keep(f"mmap {flags:#x}", lambda: mapping(flags))
for prot in [0, 1, 2, 3, 4, 5, 7]:
    keep(f"prot {prot}", lambda: mapping(0x22, prot))
for advice in [0, 1, 2, 3, 8, 10, 12, 14, 15, 16, 18, 20, 21, 22, 23, 25]:
    def advised(advice=advice):
        at = mapping(0x22)
        call("madvise", ctypes.c_void_p(at), ctypes.c_size_t(PAGES), advice)
        return at
    keep(f"advice {advice}", advised)
def guarded():
    at = mapping(0x22)
    call("madvise", ctypes.c_void_p(at + 4096), ctypes.c_size_t(4096), 102)
    return at
keep("guard", guarded)
for how in [0, 1]:
    def locked_in(how=how):
        at = mapping(0x22)
        call("mlock2", ctypes.c_void_p(at), ctypes.c_size_t(PAGES), how)
        return at
    keep(f"mlock2 {how}", locked_in)
def named():
    at = mapping(0x22)
    call("prctl", 0x53564d41, 0, ctypes.c_void_p(at), ctypes.c_size_t(PAGES), b"ledger")
    return at
keep("named", named)
def maps():
    told, at = {}, None
    by_start = {at: name for name, at in places.items()}
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and first[0] in "0123456789abcdef":
            start, end = (int(word, 16) for word in first.split("-"))
            names = [name for begin, name in by_start.items() if start <= begin < end]
            at = names[0] if names else None
            if at:
                told[at] = [line.split()[1], line.split(None, 5)[5:]]
        elif at and line.startswith("VmFlags"):
            told[at].append(sorted(set(line.split()[1:]) - {"sd"}))
    return told
shown["mappings"] = maps

# What a process has.
STATUS = ("Umask", "Groups", "Uid", "Gid", "SigBlk", "SigIgn", "SigCgt", "Cap", "NoNewPrivs", "Seccomp",
          "Speculation", "Cpus_allowed:", "THP_enabled", "Threads", "Name")
shown["status"] = lambda: [line.strip() for line in open("/proc/self/status") if line.startswith(STATUS)]
shown["limits"] = lambda: open("/proc/self/limits").read()
for number in range(16):
    def limited(number=number):
        soft, hard = resource.prlimit(0, number)
        if hard == resource.RLIM_INFINITY:
            resource.prlimit(0, number, (1 << 40 if number in (0, 9, 15) else soft, 1 << 41))
        elif soft > 1:
            resource.prlimit(0, number, (soft - 1, hard))
    setting(f"limit {number}", limited)
for file, value in [("oom_score_adj", "123"), ("coredump_filter", "0x5f"), ("autogroup", "3"),
                    ("timerslack_ns", "777")]:
    def put(file=file, value=value):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(value)
    setting(file, put, lambda _, file=file: open(f"/proc/self/{file}").read().split()[-1])
for number in range(1, 65):
    if number not in (9, 19, 32, 33):
        setting(f"signal {number}", lambda: signal.signal(number, (signal.SIG_IGN if number % 3 == 0
                                                          and number != 17 else signal.SIG_DFL)))
signal.pthread_sigmask(signal.SIG_SETMASK, {10, 12, 35, 64})
os.kill(os.getpid(), 10)
os.kill(os.getpid(), 35)
os.kill(os.getpid(), 35)
shown["pending"] = lambda: [line for line in open("/proc/self/status") if line[3:6] == "Pnd"]
os.umask(0o27)
setting("interval timers", lambda: [signal.setitimer(which, 4000, 50) for which in (0, 1, 2)],
        lambda _: [signal.getitimer(which)[1] for which in (0, 1, 2)])
class Sigevent(ctypes.Structure):
    _fields_ = [("value", ctypes.c_uint64), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("tid", ctypes.c_int), ("pad", ctypes.c_byte * 44)]
for clock in [0, 1, 2, 7, 8, 9, 11]:
    for notify in [0, 1, 4]:
        def posix(clock=clock, notify=notify):
            event = Sigevent(0x5a5a0000 + clock, 36 + clock, notify, os.getpid())
            timer = ctypes.c_int()
            call("syscall", 222, clock, ctypes.byref(event), ctypes.byref(timer))
            call("syscall", 223, timer.value, 0, struct.pack("4q", 60, 6, 6000, 0), None)
        setting(f"timer {clock} {notify}", posix)
shown["timers"] = lambda: open("/proc/self/timers").read().replace(str(os.getpid()), "SELF")
setting("I/O priority", lambda: call("syscall", 251, 1, 0, 2 << 13 | 5),
        lambda _: call("syscall", 252, 1, 0))
setting("nice", lambda: os.nice(3))
setting("affinity", lambda: os.sched_setaffinity(0, {0}), lambda _: sorted(os.sched_getaffinity(0)))
def scheduling():
    attr = ctypes.create_string_buffer(56)
    call("syscall", 315, 0, attr, 56, 0)
    return attr.raw.hex()
setting("slice", lambda: call("syscall", 314, 0, struct.pack("IIQiIQQQ", 48, 3, 1, 3, 0, 5000000, 0, 0), 0))
shown["scheduling"] = scheduling
for option, args in [(15, (b"ledger",)), (33, (1, 1)), (36, (1,)), (41, (1,)), (57, (1,)),
                     (67, (1,)), (78, (1, 64)), (53, (0, 4)), (24, (22,)), (29, (888,)), (65, (1,)),
                     (8, (1,)), (28, (0x50,)), (38, (1,)), (4, (0,))]:
    full = (*args, *(0,) * (4 - len(args)))
    setting(f"prctl {option}", lambda: call("prctl", option, *full))
setting("personality", lambda: call("personality", 0x0040000))
shown["personality"] = lambda: libc.personality(0xffffffff)
def prctls():
    told = {str(option): libc.prctl(option, *more, *(0,) * (4 - len(more)))
            for option, *more in [(3,), (7,), (21,), (27,), (30,), (34,), (39,), (42,), (52, 0), (52, 1),
                                  (58,), (66,), (68,), (78, 2)]}
    for option in 2, 25, 37:
        told[f"at {option}"] = written(option)
    told["bounds"] = [libc.prctl(23, bit, 0, 0, 0) for bit in range(41)]
    return told
shown["prctl"] = prctls
for command, kind in [(1, "registered")]:
    setting("membarrier", lambda: [call("syscall", 324, 1 << bit, 0, 0) for bit in (2, 4, 6)],
            lambda _: libc.syscall(324, 1 << 9, 0, 0))

os.mkfifo(f"{folder}/commands")
commands = os.open(f"{folder}/commands", os.O_RDWR)


def tell(name):
    told = {name: show() for name, show in shown.items()}
    with open(f"{folder}/new", "w") as out:
        json.dump([told, unset], out, indent=1, sort_keys=True, default=str)
    os.rename(f"{folder}/new", f"{folder}/{name}")


tell("ready")
while True:
    for name in os.read(commands, 4096).decode().split():
        tell(name)
