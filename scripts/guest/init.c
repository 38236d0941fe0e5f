/*
 * The only process of the small guest (scripts/test-guest).
 *
 * By default it writes block after block to /dev/vda, each with a counter and a random number of this boot, and reads
 * back the previous block. It prints `seq NUMBER boot RANDOM` on ttyS0, or BAD if the content of the disk differs from
 * the copy in memory. Words of the kernel's command line change that:
 *
 *   mount=vdb   mounts the ext4 of this disk, which the guest agent can then freeze; the agent answers in any case
 *   read=64     first reads this many MiB of /dev/vda, spread over the disk, like a system that boots from it
 *   tick        also prints a dot every millisecond: a pause of the machine shows from outside
 *   measure     writes nothing by itself; the guest executes commands and reports measurements: measure.c
 */
#include "guest.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK_COUNT = 1024, SAY_EVERY = 5, READ_BYTES = 64 << 10, PORT_COUNT_MAX = 32 };

void wait_ms(long ms) {
    struct timespec time = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&time, NULL);
}

uint64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

int open_port(const char *wanted) {
    /* The port appears soon, or never. */
    for (long pause_ms = 5;; wait_ms(pause_ms), pause_ms = pause_ms < 500 ? pause_ms * 2 : pause_ms)
        for (int number = 1; number < PORT_COUNT_MAX; number++) {
            char path[64], name[64] = "";
            snprintf(path, sizeof path, "/sys/class/virtio-ports/vport0p%d/name", number);
            int file = open(path, O_RDONLY | O_CLOEXEC);
            if (file < 0) continue;
            ssize_t length = read(file, name, sizeof name - 1);
            close(file);
            if (length <= 0 || strncmp(name, wanted, strlen(wanted)) != 0 || name[strlen(wanted)] != '\n') continue;
            snprintf(path, sizeof path, "/dev/vport0p%d", number);
            int port = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
            if (port >= 0) return port;
        }
}

void write_port(int port, const void *bytes, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t written = write(port, (const char *)bytes + done, length - done);
        if (written > 0) done += (size_t)written;
        else wait_ms(2);
    }
}

size_t read_port(int port, void *bytes, size_t size) {
    for (;;) {
        struct pollfd ready = { .fd = port, .events = POLLIN };
        poll(&ready, 1, -1);
        ssize_t length = read(port, bytes, size);
        if (length > 0) return (size_t)length;
        /* Without a client, poll returns at once. */
        wait_ms(5);
    }
}

static int open_disk(void) {
    int disk;
    while ((disk = open("/dev/vda", O_RDWR | O_DIRECT | O_DSYNC | O_CLOEXEC)) < 0) wait_ms(5);
    return disk;
}

static void load_modules(void) {
    for (int number = 0; number < 100; number++) {
        char path[32];
        snprintf(path, sizeof path, "/modules/%02d.ko", number);
        int module = open(path, O_RDONLY | O_CLOEXEC);
        if (module < 0) break;
        syscall(SYS_finit_module, module, "", 0);
        close(module);
    }
}

static void mount_disk(const char *name) {
    char device[32];
    snprintf(device, sizeof device, "/dev/%.16s", name);
    for (int attempt = 0; attempt < 100 && access(device, F_OK) != 0; attempt++) wait_ms(20);
    if (mount(device, MOUNT_POINT, "ext4", 0, "") != 0) dprintf(1, "BAD mount of %s: %m\n", device);
}

static void read_much(long mebibytes) {
    int disk = open_disk();
    off_t size = lseek(disk, 0, SEEK_END), count = (off_t)mebibytes * (1 << 20) / READ_BYTES;
    void *bytes = aligned_alloc(BLOCK_BYTES, READ_BYTES);
    for (off_t number = 0; number < count; number++)
        if (pread(disk, bytes, READ_BYTES, size / count * number / READ_BYTES * READ_BYTES) != READ_BYTES)
            dprintf(1, "BAD read number %lld: %m\n", (long long)number);
    free(bytes);
    close(disk);
}

static void write_and_check(void) {
    int disk = open_disk();
    uint64_t boot = 0, *block = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES), *back = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES);
    getrandom(&boot, sizeof boot, 0);
    for (uint64_t seq = 1;; seq++) {
        off_t before = (off_t)((seq - 1) % BLOCK_COUNT) * BLOCK_BYTES, here = (off_t)(seq % BLOCK_COUNT) * BLOCK_BYTES;
        if (seq > 1 && (pread(disk, back, BLOCK_BYTES, before) != BLOCK_BYTES || memcmp(back, block, BLOCK_BYTES) != 0))
            dprintf(1, "BAD seq %llu: the disk holds %llu of boot %016llx\n", (unsigned long long)seq - 1,
                    (unsigned long long)back[0], (unsigned long long)back[1]);
        for (int word = 0; word < BLOCK_BYTES / 8; word += 2) block[word] = seq, block[word + 1] = boot;
        if (pwrite(disk, block, BLOCK_BYTES, here) != BLOCK_BYTES) dprintf(1, "BAD seq %llu: cannot write\n", (unsigned long long)seq);
        if (seq % SAY_EVERY == 0) dprintf(1, "seq %llu boot %016llx\n", (unsigned long long)seq, (unsigned long long)boot);
        wait_ms(10);
    }
}

static void *tick(void *nothing) {
    for (;; wait_ms(1))
        if (write(1, ".", 1) < 0) return nothing;
}

int main(void) {
    mount("dev", "/dev", "devtmpfs", 0, "");
    mount("proc", "/proc", "proc", 0, "");
    mount("sys", "/sys", "sysfs", 0, "");
    dup2(open("/dev/ttyS0", O_WRONLY | O_NOCTTY), 1);
    load_modules();

    char line[1024] = "";
    int file = open("/proc/cmdline", O_RDONLY | O_CLOEXEC), is_measuring = 0, is_ticking = 0;
    if (read(file, line, sizeof line - 1) < 0) dprintf(1, "BAD command line: %m\n");
    close(file);
    long mebibytes = 0;
    for (char *rest = line, *word; (word = strsep(&rest, " \n"));) {
        if (strncmp(word, "mount=", 6) == 0) mount_disk(word + 6);
        if (strncmp(word, "read=", 5) == 0) mebibytes = atol(word + 5);
        if (strcmp(word, "tick") == 0) is_ticking = 1;
        if (strcmp(word, "measure") == 0) is_measuring = 1;
    }
    if (mebibytes > 0) read_much(mebibytes);

    pthread_t agent, ticks;
    pthread_create(&agent, NULL, answer_agent, NULL);
    if (is_ticking) pthread_create(&ticks, NULL, tick, NULL);
    if (is_measuring) measure();
    write_and_check();
}
