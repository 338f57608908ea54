// A program of 32 bits with a thread that runs 64-bit code for ever.
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static void *beyond(void *argument) {
	// A far jump into the segment of 64-bit code, to instructions that are the same there.
	__asm__ volatile("ljmp $0x33, $1f\n1: pause\njmp 1b");
	return argument;
}

int main(void) {
	pthread_t thread;
	pthread_create(&thread, 0, beyond, 0);
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
