/*
 * The init process of a guest that measures or checks its first disk, /dev/vda, and powers off. The word of the kernel's
 * command line that begins with `disk=` chooses:
 *
 *   disk=speed seconds=N       latency and throughput, one line for each case
 *   disk=write seconds=N       numbered blocks at changing places for so long, each is read back; then a flush
 *   disk=check                compares the blocks of an earlier `write` with their numbers
 *
 * Linked statically: the guest has no other files than this program and the modules in /modules.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK_BYTES = 4096, LARGE_BYTES = 1 << 20, SAMPLE_COUNT_MAX = 1000000, CHECKED_BLOCK_COUNT = 4096 };

static double samples[SAMPLE_COUNT_MAX];

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static int compare(const void *first, const void *second) {
    double a = *(const double *)first, b = *(const double *)second;
    return (a > b) - (a < b);
}

static void fail(const char *what) {
    printf("FAIL %s: %s\n", what, strerror(errno));
    reboot(RB_POWER_OFF);
}

static void load_modules(void) {
    static const char *const names[] = {"virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev",
                                        "virtio_pci", "virtio_blk"};
    for (size_t index = 0; index < sizeof names / sizeof *names; index++) {
        char path[64];
        snprintf(path, sizeof path, "/modules/%s.ko", names[index]);
        int file = open(path, O_RDONLY);
        if (file < 0 || syscall(SYS_finit_module, file, "", 0) != 0)
            fail(path);
        close(file);
    }
}

/* Random accesses with a queue of one. */
static void measure(int disk, uint64_t size, const char *name, int is_write, size_t length, double seconds, int flushes) {
    char *bytes;
    if (posix_memalign((void **)&bytes, BLOCK_BYTES, length) != 0)
        fail("memory");
    memset(bytes, 7, length);
    uint64_t state = 88172645463325252ull;
    long count = 0;
    double begin = now_s();
    while (now_s() - begin < seconds && count < SAMPLE_COUNT_MAX) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        off_t offset = state % (size / length) * length;
        double start = now_s();
        ssize_t done = is_write ? pwrite(disk, bytes, length, offset) : pread(disk, bytes, length, offset);
        if (done != (ssize_t)length || (flushes && fdatasync(disk) != 0))
            fail(name);
        samples[count++] = now_s() - start;
    }
    double took = now_s() - begin;
    qsort(samples, count, sizeof *samples, compare);
    printf("RESULT %s p50_us=%.1f mib_s=%.1f\n", name, samples[count / 2] * 1e6, count * (double)length / took / 1048576);
    free(bytes);
}

static void fill(uint64_t *block, uint64_t index, uint64_t number) {
    for (size_t word = 0; word < BLOCK_BYTES / 8; word++)
        block[word] = index << 32 ^ number * 0x9e3779b97f4a7c15 ^ word;
    block[0] = number;
    block[1] = index;
}

static void write_blocks(int disk, double seconds) {
    static uint64_t numbers[CHECKED_BLOCK_COUNT];
    uint64_t *block, *found, number = 0;
    if (posix_memalign((void **)&block, BLOCK_BYTES, BLOCK_BYTES) || posix_memalign((void **)&found, BLOCK_BYTES, BLOCK_BYTES))
        fail("memory");
    double begin = now_s(), longest = 0;
    printf("WRITING\n");
    while (now_s() - begin < seconds) {
        uint64_t index = ++number * 2654435761u % CHECKED_BLOCK_COUNT, other = number * 40503u % CHECKED_BLOCK_COUNT;
        double start = now_s();
        fill(block, index, number);
        if (pwrite(disk, block, BLOCK_BYTES, index * BLOCK_BYTES) != BLOCK_BYTES)
            fail("write");
        numbers[index] = number;
        if (numbers[other]) {
            fill(block, other, numbers[other]);
            if (pread(disk, found, BLOCK_BYTES, other * BLOCK_BYTES) != BLOCK_BYTES)
                fail("read");
            if (memcmp(block, found, BLOCK_BYTES) != 0)
                fail("a block has not the content that was written");
        }
        if (number % 64 == 0 && fdatasync(disk) != 0)
            fail("flush");
        double took = now_s() - start;
        longest = took > longest ? took : longest;
    }
    if (fdatasync(disk) != 0)
        fail("flush");
    printf("WROTE %llu longest_ms=%.0f\n", (unsigned long long)number, longest * 1000);
}

static void check_blocks(int disk) {
    uint64_t *block, *found, count = 0;
    if (posix_memalign((void **)&block, BLOCK_BYTES, BLOCK_BYTES) || posix_memalign((void **)&found, BLOCK_BYTES, BLOCK_BYTES))
        fail("memory");
    for (uint64_t index = 0; index < CHECKED_BLOCK_COUNT; index++) {
        if (pread(disk, found, BLOCK_BYTES, index * BLOCK_BYTES) != BLOCK_BYTES)
            fail("read");
        if (found[0] == 0)
            continue;
        fill(block, index, found[0]);
        if (memcmp(block, found, BLOCK_BYTES) != 0)
            fail("a block is not one that was written");
        count++;
    }
    printf("CHECKED %llu\n", (unsigned long long)count);
}

int main(void) {
    static char words[4096];
    setvbuf(stdout, NULL, _IONBF, 0);
    mount("dev", "/dev", "devtmpfs", 0, "");
    mount("proc", "/proc", "proc", 0, "");
    int console = open("/dev/console", O_RDWR);
    dup2(console, 1);
    int file = open("/proc/cmdline", O_RDONLY);
    if (file < 0 || read(file, words, sizeof words - 1) <= 0)
        fail("command line");
    load_modules();
    int disk = -1;
    for (int attempt = 0; attempt < 100 && disk < 0; attempt++) {
        disk = open("/dev/vda", O_RDWR | O_DIRECT);
        if (disk < 0 && (errno == EROFS || errno == EACCES))
            disk = open("/dev/vda", O_RDONLY | O_DIRECT);
        usleep(50000);
    }
    uint64_t size;
    if (disk < 0 || ioctl(disk, BLKGETSIZE64, &size) != 0)
        fail("/dev/vda");
    const char *job = strstr(words, "disk="), *number = strstr(words, "seconds=");
    double seconds = number ? atof(number + 8) : 2;
    if (job && strncmp(job, "disk=write", 10) == 0) {
        write_blocks(disk, seconds);
    } else if (job && strncmp(job, "disk=check", 10) == 0) {
        check_blocks(disk);
    } else {
        measure(disk, size, "read_4k", 0, BLOCK_BYTES, seconds, 0);
        measure(disk, size, "write_4k", 1, BLOCK_BYTES, seconds, 0);
        measure(disk, size, "write_flush_4k", 1, BLOCK_BYTES, seconds, 1);
        measure(disk, size, "read_1m", 0, LARGE_BYTES, seconds, 0);
        measure(disk, size, "write_1m", 1, LARGE_BYTES, seconds, 0);
    }
    printf("END\n");
    reboot(RB_POWER_OFF);
    return 0;
}
