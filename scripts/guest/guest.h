/* What the parts of the small guest share; see scripts/test-guest. */
#ifndef GUEST_H
#define GUEST_H

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>

enum { BLOCK_BYTES = 4096 };

/* Where a file system is mounted, if the kernel's command line says `mount=vdb`. */
#define MOUNT_POINT "/mnt"

void wait_ms(long ms);
/* Microseconds since the guest began to run; they stop while the machine is paused. */
uint64_t now_us(void);
/* Opens the virtio-serial port of this name, as soon as it is there; it never blocks. */
int open_port(const char *name);
/* Writes all of it to a port, however long the other side takes. */
void write_port(int port, const void *bytes, size_t length);
/* Waits until a port has something to read; up to `size` bytes of it. */
size_t read_port(int port, void *bytes, size_t size);

/* Answers the questions of the QEMU guest agent, as long as the guest runs (a thread; agent.c). */
void *answer_agent(void *nothing);
/* Executes the commands from the port holdfast.measure, and reports what the guest measures (measure.c). Never returns. */
void measure(void);

#endif
