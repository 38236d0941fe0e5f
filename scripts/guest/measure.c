/*
 * Measures pauses and delays in the guest: the cost of a backup.
 *
 * A paused machine does not notice the pause, because its clock stops too. So the guest sends a tick, `t`, to the port
 * holdfast.measure every millisecond, and the host's clock shows when ticks are missing. The guest itself measures the
 * time of writes, each from its scheduled time: a delayed write also delays the following ones, and their delays count
 * too.
 *
 *   write DISK PER_SECOND SPAN    writes blocks of 4 KiB at random offsets in the first SPAN bytes (O_DIRECT), and sometimes
 *                                 reads back a block; wrong content is an error
 *   file PER_SECOND               writes a block to the mounted file system, durably
 *   report                        {"disk": {...}, "file": {...}} of all writes since the last report
 *   stop                          ends the writers
 *   dirty DISK COUNT BYTES SPAN   writes COUNT pieces of BYTES random bytes, evenly spread over the first SPAN bytes
 *
 * The answer to every command is one line: ok, a report, or `error` and the reason.
 */
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS_PER_OCTAVE = 8, BUCKET_COUNT = 27 * BUCKETS_PER_OCTAVE, READ_BACK_EVERY = 8, DIRTY_BYTES_MAX = 1 << 20 };

/* Histogram of write times. The upper end of a bucket is at most an eighth above its lower end. */
struct latencies {
    uint64_t count, errors, wrong, max_us;
    uint32_t buckets[BUCKET_COUNT];
};

struct writer {
    pthread_t thread;
    int is_running, must_stop, file;
    uint64_t period_us, block_count;
    uint32_t *generations; /* Writes to each block so far; NULL if blocks are not read back. */
    struct latencies latencies;
};

static int port;
static pthread_mutex_t saying = PTHREAD_MUTEX_INITIALIZER, recording = PTHREAD_MUTEX_INITIALIZER;
static struct writer disk_writer, file_writer;
static uint64_t random_state;

static uint64_t mixed(uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

static uint64_t random_number(void) {
    return mixed(random_state += 0x9e3779b97f4a7c15);
}

static void say(const char *line) {
    pthread_mutex_lock(&saying);
    write_port(port, line, strlen(line));
    pthread_mutex_unlock(&saying);
}

static void *tick(void *nothing) {
    struct timespec next;
    for (clock_gettime(CLOCK_MONOTONIC, &next);;) {
        next.tv_nsec += 1000000;
        if (next.tv_nsec >= 1000000000) next.tv_sec++, next.tv_nsec -= 1000000000;
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec > next.tv_sec || (now.tv_sec == next.tv_sec && now.tv_nsec - next.tv_nsec > 2000000)) next = now;
        /* A tick without a reader is dropped: the port is non-blocking. */
        pthread_mutex_lock(&saying);
        ssize_t written = write(port, "t\n", 2);
        pthread_mutex_unlock(&saying);
        if (written < 0) clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){ 0, 1000000 }, NULL);
    }
    return nothing;
}

static int bucket_of(uint64_t us) {
    int octave = 0;
    while (us >> octave >= 2 * BUCKETS_PER_OCTAVE) octave++;
    int bucket = us < BUCKETS_PER_OCTAVE ? (int)us : octave * BUCKETS_PER_OCTAVE + (int)(us >> octave);
    return bucket < BUCKET_COUNT ? bucket : BUCKET_COUNT - 1;
}

/* The upper end of a bucket, in microseconds. */
static uint64_t end_of(int bucket) {
    if (bucket < 2 * BUCKETS_PER_OCTAVE) return (uint64_t)bucket;
    int octave = bucket / BUCKETS_PER_OCTAVE - 1;
    return ((uint64_t)(bucket % BUCKETS_PER_OCTAVE + BUCKETS_PER_OCTAVE + 1) << octave) - 1;
}

static void record(struct latencies *latencies, uint64_t us, int has_failed, int is_wrong) {
    pthread_mutex_lock(&recording);
    latencies->count++;
    latencies->errors += has_failed != 0;
    latencies->wrong += is_wrong != 0;
    if (us > latencies->max_us) latencies->max_us = us;
    latencies->buckets[bucket_of(us)]++;
    pthread_mutex_unlock(&recording);
}

/* The content of a block after this many writes to it. It cannot be compressed. */
static void fill(uint64_t *block, uint64_t number, uint32_t generation, uint64_t boot) {
    uint64_t seed = mixed(boot ^ number << 32 ^ generation);
    for (int word = 0; word < BLOCK_BYTES / 8; word++) block[word] = mixed(seed += 0x9e3779b97f4a7c15);
}

static int holds_another(struct writer *writer, uint64_t number, uint64_t *block, uint64_t *back, uint64_t boot) {
    fill(block, number, writer->generations[number], boot);
    return pread(writer->file, back, BLOCK_BYTES, (off_t)(number * BLOCK_BYTES)) != BLOCK_BYTES || memcmp(back, block, BLOCK_BYTES) != 0;
}

static void *keep_writing(void *of) {
    struct writer *writer = of;
    uint64_t *block = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES), *back = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES);
    uint64_t boot = random_number(), earlier = UINT64_MAX, due_us = now_us();
    for (uint64_t count = 0; !__atomic_load_n(&writer->must_stop, __ATOMIC_RELAXED); count++, due_us += writer->period_us) {
        uint64_t now = now_us(), number = random_number() % writer->block_count;
        uint32_t generation = writer->generations ? writer->generations[number] + 1 : (uint32_t)count;
        fill(block, number, generation, boot);
        if (now < due_us) {
            uint64_t rest = due_us - now;
            nanosleep(&(struct timespec){ (time_t)(rest / 1000000), (long)(rest % 1000000 * 1000) }, NULL);
        }
        /* The time that a busy host adds to the sleep must not count as time of the disk. */
        uint64_t woken = now_us(), start_us = now < due_us ? woken : due_us;
        int has_failed = pwrite(writer->file, block, BLOCK_BYTES, (off_t)(number * BLOCK_BYTES)) != BLOCK_BYTES;
        uint64_t took_us = now_us() - start_us;
        if (now < due_us && woken > due_us + writer->period_us) due_us = woken;
        int is_wrong = 0;
        if (writer->generations) {
            if (!has_failed) writer->generations[number] = generation;
            if (count % READ_BACK_EVERY == 0 && earlier != UINT64_MAX) is_wrong = holds_another(writer, earlier, block, back, boot);
            if (random_number() % READ_BACK_EVERY == 0) earlier = number;
        }
        record(&writer->latencies, took_us, has_failed, is_wrong);
    }
    free(block);
    free(back);
    return NULL;
}

static const char *begin(struct writer *writer, const char *path, int flags, uint64_t per_second, uint64_t span, int reads_back) {
    if (writer->is_running) return "it writes already";
    if (per_second == 0 || span < BLOCK_BYTES) return "nothing would be written";
    writer->file = open(path, flags | O_RDWR | O_CLOEXEC, 0600);
    if (writer->file < 0) return strerror(errno);
    writer->period_us = 1000000 / per_second;
    writer->block_count = span / BLOCK_BYTES;
    writer->generations = reads_back ? calloc(writer->block_count, sizeof *writer->generations) : NULL;
    memset(&writer->latencies, 0, sizeof writer->latencies);
    writer->must_stop = 0;
    writer->is_running = 1;
    pthread_create(&writer->thread, NULL, keep_writing, writer);
    return NULL;
}

static void end(struct writer *writer) {
    if (!writer->is_running) return;
    __atomic_store_n(&writer->must_stop, 1, __ATOMIC_RELAXED);
    pthread_join(writer->thread, NULL);
    close(writer->file);
    free(writer->generations);
    writer->is_running = 0;
}

static int print_latencies(char *line, size_t size, const char *name, struct writer *writer) {
    pthread_mutex_lock(&recording);
    struct latencies taken = writer->latencies;
    memset(&writer->latencies, 0, sizeof writer->latencies);
    pthread_mutex_unlock(&recording);
    int length = snprintf(line, size, "\"%s\": {\"count\": %llu, \"errors\": %llu, \"wrong\": %llu, \"max_us\": %llu, \"buckets\": [", name,
                          (unsigned long long)taken.count, (unsigned long long)taken.errors, (unsigned long long)taken.wrong,
                          (unsigned long long)taken.max_us);
    const char *comma = "";
    for (int bucket = 0; bucket < BUCKET_COUNT; bucket++) {
        if (taken.buckets[bucket] == 0) continue;
        length += snprintf(line + length, size - (size_t)length, "%s[%llu, %u]", comma, (unsigned long long)end_of(bucket), taken.buckets[bucket]);
        comma = ", ";
    }
    return length + snprintf(line + length, size - (size_t)length, "]}");
}

static void report(void) {
    static char line[32768];
    int length = snprintf(line, sizeof line, "{");
    length += print_latencies(line + length, sizeof line - (size_t)length, "disk", &disk_writer);
    length += snprintf(line + length, sizeof line - (size_t)length, ", ");
    length += print_latencies(line + length, sizeof line - (size_t)length, "file", &file_writer);
    snprintf(line + length, sizeof line - (size_t)length, "}\n");
    say(line);
}

static const char *make_dirty(const char *path, uint64_t count, uint64_t bytes, uint64_t span) {
    if (count == 0 || bytes == 0 || bytes > DIRTY_BYTES_MAX || bytes % BLOCK_BYTES != 0 || span / count < bytes) return "no such pieces";
    int disk = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (disk < 0) return strerror(errno);
    uint64_t *piece = aligned_alloc(BLOCK_BYTES, bytes);
    const char *problem = NULL;
    for (uint64_t number = 0; number < count && !problem; number++) {
        for (uint64_t word = 0; word < bytes / 8; word++) piece[word] = random_number();
        uint64_t place = number * (span / count / bytes) + random_number() % (span / count / bytes);
        if (pwrite(disk, piece, bytes, (off_t)(place * bytes)) != (ssize_t)bytes) problem = strerror(errno);
    }
    if (fsync(disk) != 0 && !problem) problem = strerror(errno);
    free(piece);
    close(disk);
    return problem;
}

static const char *obey(const char *line) {
    char disk[16], path[32];
    unsigned long long first = 0, second = 0, third = 0;
    if (sscanf(line, "write %15s %llu %llu", disk, &first, &second) == 3) {
        snprintf(path, sizeof path, "/dev/%s", disk);
        return begin(&disk_writer, path, O_DIRECT, first, second, 1);
    }
    if (sscanf(line, "file %llu", &first) == 1)
        return begin(&file_writer, MOUNT_POINT "/written", O_CREAT | O_DSYNC, first, BLOCK_BYTES, 0);
    if (sscanf(line, "dirty %15s %llu %llu %llu", disk, &first, &second, &third) == 4) {
        snprintf(path, sizeof path, "/dev/%s", disk);
        return make_dirty(path, first, second, third);
    }
    if (strcmp(line, "stop") != 0) return "no such command";
    end(&disk_writer);
    end(&file_writer);
    return NULL;
}

void measure(void) {
    getrandom(&random_state, sizeof random_state, 0);
    port = open_port("holdfast.measure");
    pthread_t ticker;
    pthread_create(&ticker, NULL, tick, NULL);
    char line[256], bytes[256];
    for (size_t length = 0;;) {
        size_t count = read_port(port, bytes, sizeof bytes);
        for (size_t number = 0; number < count; number++) {
            if (bytes[number] != '\n' && length < sizeof line - 1) {
                line[length++] = bytes[number];
                continue;
            }
            line[length] = 0;
            length = 0;
            if (strcmp(line, "report") == 0) {
                report();
                continue;
            }
            const char *problem = obey(line);
            char answer[128];
            snprintf(answer, sizeof answer, problem ? "error %s\n" : "ok\n", problem);
            say(answer);
        }
    }
}
