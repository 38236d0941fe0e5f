/* Declarations shared by the parts of the small guest; see scripts/test-guest. */
#ifndef GUEST_H
#define GUEST_H

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>

enum { BLOCK_BYTES = 4096 };

/* The mount point of the file system, if the kernel's command line contains `mount=vdb`. */
#define MOUNT_POINT "/mnt"

void wait_ms(long ms);
/* Microseconds since the guest started; this clock stops while the machine is paused. */
uint64_t now_us(void);
/* Waits for the virtio-serial port with this name, and opens it in non-blocking mode. */
int open_port(const char *name);
/* Writes all bytes to a port, and waits for as long as the other side needs. */
void write_port(int port, const void *bytes, size_t length);
/* Waits until a port has input; reads up to `size` bytes. */
size_t read_port(int port, void *bytes, size_t size);

/* Answers the requests of clients of the guest agent until the guest stops (a thread; agent.c). */
void *answer_agent(void *nothing);
/* Executes the commands from the port holdfast.measure, and reports measurements (measure.c). Never returns. */
void measure(void);

#endif
