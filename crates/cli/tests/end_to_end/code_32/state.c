// A program of 32 bits that checks again and again that all is as it was made at the start: what its
// threads have of the kernel, how long their calls wait, what signals and timers tell. Writes what
// it has done into the file that it is told, and what is wrong into FILE.failed.
#define _GNU_SOURCE
#include <asm/ldt.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *status_path;
static volatile unsigned rounds[6], fired, ticked, handled;
static char alternate[32768] __attribute__((aligned(64)));

static void fail(const char *what, long got) {
	char text[200], path[300];
	snprintf(text, sizeof text, "failed: %s: %ld\n", what, got);
	snprintf(path, sizeof path, "%s.failed", status_path);
	FILE *file = fopen(path, "a");
	fputs(text, file);
	fclose(file);
	_exit(1);
}
#define MUST(condition, got) do { if (!(condition)) fail(#condition, (long)(got)); } while (0)

static int64_t now_ns(void) {
	struct timespec time;
	MUST(clock_gettime(CLOCK_MONOTONIC, &time) == 0, errno);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static long call(long number, long a, long b, long c, long d, long e) {
	long result;
	__asm__ volatile("int $0x80" : "=a"(result)
		: "0"(number), "b"(a), "c"(b), "d"(c), "S"(d), "D"(e) : "memory");
	return result;
}

struct state {
	unsigned segments[6];
	unsigned area[4];
	unsigned robust[2];
	unsigned char stack[12];
	unsigned short control;
	unsigned mxcsr;
};

static void look(struct state *state) {
	memset(state, 0, sizeof *state);
	__asm__("mov %%cs, %0" : "=r"(state->segments[0]));
	__asm__("mov %%ds, %0" : "=r"(state->segments[1]));
	__asm__("mov %%es, %0" : "=r"(state->segments[2]));
	__asm__("mov %%fs, %0" : "=r"(state->segments[3]));
	__asm__("mov %%gs, %0" : "=r"(state->segments[4]));
	__asm__("mov %%ss, %0" : "=r"(state->segments[5]));
	state->area[0] = state->segments[4] >> 3;
	MUST(call(SYS_get_thread_area, (long)state->area, 0, 0, 0, 0) == 0, 0);
	long result = call(SYS_get_robust_list, 0, (long)&state->robust[0], (long)&state->robust[1], 0, 0);
	MUST(result == 0, result);
	MUST(call(SYS_sigaltstack, 0, (long)state->stack, 0, 0, 0) == 0, 0);
	__asm__("fnstcw %0" : "=m"(state->control));
	__asm__("stmxcsr %0" : "=m"(state->mxcsr));
}

enum { WAIT_MS = 150 };

// A stop by a dump that is killed before it has read the registers ends a wait in epoll.
#ifdef NO_EPOLL
enum { KINDS = 5 };
#else
enum { KINDS = 6 };
#endif

static long wait_once(int kind, int epoll) {
	int word = 7;
	int32_t short_time[2] = {0, WAIT_MS * 1000000};
	int64_t long_time[2] = {0, WAIT_MS * 1000000};
	switch (kind) {
	case 0: return call(SYS_nanosleep, (long)short_time, 0, 0, 0, 0);
	case 1: return call(SYS_clock_nanosleep_time64, CLOCK_MONOTONIC, 0, (long)long_time, 0, 0);
	case 2: return call(SYS_futex, (long)&word, 0, 7, (long)short_time, 0) + ETIMEDOUT;
	case 3: return call(SYS_futex_time64, (long)&word, 0, 7, (long)long_time, 0) + ETIMEDOUT;
	case 4: return poll(0, 0, WAIT_MS);
	default: {
		struct epoll_event event;
		return epoll_wait(epoll, &event, 1, WAIT_MS);
	}
	}
}

_Noreturn static void *waiter(void *argument) {
	int kind = (int)(intptr_t)argument;
	static __thread int own;
	int epoll = kind == 5 ? epoll_create1(0) : -1;
	own = kind * 77 + 1;
	struct state first, later;
	look(&first);
	for (;;) {
		int64_t begun = now_ns();
		errno = 0;
		long result = wait_once(kind, epoll);
		MUST(result == 0, kind * 100000 + errno - result);
		int64_t took_ms = (now_ns() - begun) / 1000000;
		MUST(took_ms >= WAIT_MS - 25, kind * 100000 + took_ms);
		MUST(own == kind * 77 + 1, own);
		look(&later);
		MUST(memcmp(&first, &later, sizeof first) == 0, kind);
		rounds[kind]++;
	}
}

static void on_alternate(int signal, siginfo_t *info, void *context) {
	char here;
	(void)signal;
	MUST(&here > alternate && &here < alternate + sizeof alternate, &here);
	unsigned segment;
	__asm__("mov %%cs, %0" : "=r"(segment));
	MUST(segment == 0x23 && context != 0, segment);
	if (info->si_code == SI_TIMER)
		MUST(info->si_value.sival_int == 0x5a5a, info->si_value.sival_int);
	fired++;
}

static void plain(int signal) { handled += signal == SIGUSR2; }
static void tick(int signal) { ticked += signal == SIGALRM; }

static void prepare(void) {
	stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
	MUST(sigaltstack(&stack, 0) == 0, errno);
	struct sigaction action = {.sa_sigaction = on_alternate, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
	MUST(sigaction(SIGUSR1, &action, 0) == 0, errno);
	action = (struct sigaction){.sa_handler = plain, .sa_flags = SA_RESTART};
	MUST(sigaction(SIGUSR2, &action, 0) == 0, errno);
	action = (struct sigaction){.sa_handler = tick, .sa_flags = SA_RESTART};
	MUST(sigaction(SIGALRM, &action, 0) == 0, errno);
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGRTMIN + 1);
	sigaddset(&blocked, SIGUSR1);
	sigaddset(&blocked, SIGUSR2);
	sigaddset(&blocked, SIGALRM);
	MUST(sigprocmask(SIG_BLOCK, &blocked, 0) == 0, errno);
	for (intptr_t kind = 0; kind < KINDS; kind++) {
		pthread_t thread;
		MUST(pthread_create(&thread, 0, waiter, (void *)kind) == 0, kind);
	}
	sigdelset(&blocked, SIGRTMIN + 1);
	MUST(sigprocmask(SIG_UNBLOCK, &blocked, 0) == 0, errno);
	union sigval value = {.sival_int = 0x1234567};
	MUST(sigqueue(getpid(), SIGRTMIN + 1, value) == 0, errno);
	timer_t timer;
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1, .sigev_value.sival_int = 0x5a5a};
	MUST(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0, errno);
	struct itimerspec every = {{0, 20000000}, {0, 20000000}};
	MUST(timer_settime(timer, 0, &every, 0) == 0, errno);
	MUST(ualarm(30000, 30000) == 0, errno);
}

/* In place: an image of a moment in which another file was to take its place would need that. */
static void report(unsigned round) {
	static int file = -1;
	char path[300], text[300];
	snprintf(text, sizeof text, "%10u %10u %10u %10u %10u %10u %10u %10u %10u %10u\n", round, fired, ticked,
		 handled, rounds[0], rounds[1], rounds[2], rounds[3], rounds[4], rounds[KINDS - 1]);
	int bytes = strlen(text);
	if (file >= 0) {
		MUST(pwrite(file, text, bytes, 0) == bytes, errno);
		return;
	}
	snprintf(path, sizeof path, "%s.new", status_path);
	file = open(path, O_WRONLY | O_CREAT, 0600);
	MUST(file >= 0, errno);
	MUST(write(file, text, bytes) == bytes, errno);
	MUST(rename(path, status_path) == 0, errno);
}

int main(int count, char **arguments) {
	(void)count;
	status_path = arguments[1];
	prepare();
	struct state first, later;
	look(&first);
	double x87 = 1.0 / 3;
	for (unsigned round = 1;; round++) {
		struct timespec time = {0, 10000000};
		while (nanosleep(&time, &time) != 0)
			MUST(errno == EINTR, errno);
		x87 = x87 * 3 / 3;
		look(&later);
		MUST(memcmp(&first, &later, sizeof first) == 0, 0);
		raise(SIGUSR2);
		MUST(handled == round, handled);
		void *memory = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		MUST(memory != MAP_FAILED, errno);
		memset(memory, 1, 65536);
		munmap(memory, 65536);
		if (round % 16 == 0) {
			sigset_t wanted;
			siginfo_t info;
			struct timespec none = {0, 0};
			sigemptyset(&wanted);
			sigaddset(&wanted, SIGRTMIN + 1);
			int got = sigtimedwait(&wanted, &info, &none);
			MUST(got == SIGRTMIN + 1, errno);
			MUST(info.si_value.sival_int == 0x1234567, info.si_value.sival_int);
			union sigval value = {.sival_int = 0x1234567};
			MUST(sigqueue(getpid(), SIGRTMIN + 1, value) == 0, errno);
			pid_t child = fork();
			if (child == 0)
				_exit(7);
			int status;
			while (waitpid(child, &status, 0) < 0)
				MUST(errno == EINTR, errno);
			MUST(WIFEXITED(status) && WEXITSTATUS(status) == 7, status);
		}
		report(round);
	}
}
