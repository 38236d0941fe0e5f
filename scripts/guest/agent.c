/*
 * The part of the QEMU guest agent that backups need (source: QEMU's qga/qapi-schema.json): it answers synchronization
 * requests, freezes and thaws the mounted file system with the real ioctls, and sets the clock.
 *
 * Requests are one line each. They are only searched for a key and its value: clients of this guest are not hostile.
 */
#include "guest.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_BYTES_MAX = 4096, RESTART = 0xff };

static const char *const COMMANDS[] = {
    "guest-sync", "guest-sync-delimited", "guest-ping", "guest-info", "guest-get-time", "guest-set-time",
    "guest-fsfreeze-status", "guest-fsfreeze-freeze", "guest-fsfreeze-freeze-list", "guest-fsfreeze-thaw",
};
enum { COMMAND_COUNT = sizeof COMMANDS / sizeof *COMMANDS };

static int is_frozen;

/* The text after "key": in a request; NULL if the key is missing. */
static const char *value_of(const char *request, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    const char *found = strstr(request, quoted);
    if (!found) return NULL;
    for (found += strlen(quoted); isspace((unsigned char)*found) || *found == ':'; found++) {}
    return found;
}

static int asks_for(const char *request, const char *command) {
    const char *said = value_of(request, "execute");
    size_t length = strlen(command);
    return said && *said == '"' && strncmp(said + 1, command, length) == 0 && said[length + 1] == '"';
}

/* Freezes or thaws the mounted file system. Returns the number of file systems, or -1 if it failed. */
static int switch_file_system(unsigned long request) {
    int folder = open(MOUNT_POINT, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return 0;
    int result = ioctl(folder, request, 0), error = errno;
    close(folder);
    if (result == 0) return 1;
    /* It was already thawed, or no file system is mounted: the file system of the folder cannot be frozen. */
    return error == EINVAL || error == EOPNOTSUPP ? 0 : -1;
}

static void answer_freeze(char *answer, size_t size) {
    int count = is_frozen ? -1 : switch_file_system(FIFREEZE);
    if (count < 0) {
        snprintf(answer, size, "{\"error\": {\"class\": \"GenericError\", \"desc\": \"the file systems are frozen already\"}}");
        return;
    }
    is_frozen = 1;
    snprintf(answer, size, "{\"return\": %d}", count);
}

static void answer_info(char *answer, size_t size) {
    int length = snprintf(answer, size, "{\"return\": {\"version\": \"7.2.0\", \"supported_commands\": [");
    for (int number = 0; number < COMMAND_COUNT; number++)
        length += snprintf(answer + length, size - (size_t)length,
                           "%s{\"enabled\": true, \"name\": \"%s\", \"success-response\": true}", number ? ", " : "", COMMANDS[number]);
    snprintf(answer + length, size - (size_t)length, "]}}");
}

static void answer_time(const char *request, char *answer, size_t size) {
    struct timespec time;
    if (asks_for(request, "guest-set-time")) {
        const char *said = value_of(request, "time");
        /* Without a time, use that of the machine's clock, which this guest follows anyway. */
        long long nanoseconds = said ? atoll(said) : 0;
        time = (struct timespec){ nanoseconds / 1000000000, nanoseconds % 1000000000 };
        int failed = said && clock_settime(CLOCK_REALTIME, &time) != 0;
        snprintf(answer, size, failed ? "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such time\"}}" : "{\"return\": {}}");
        return;
    }
    clock_gettime(CLOCK_REALTIME, &time);
    snprintf(answer, size, "{\"return\": %lld}", time.tv_sec * 1000000000LL + time.tv_nsec);
}

static void answer_request(const char *request, char *answer, size_t size) {
    if (asks_for(request, "guest-sync") || asks_for(request, "guest-sync-delimited")) {
        const char *id = value_of(request, "id");
        const char *mark = asks_for(request, "guest-sync") ? "" : "\xff";
        snprintf(answer, size, "%s{\"return\": %lld}", mark, id ? atoll(id) : 0);
    } else if (asks_for(request, "guest-ping")) {
        snprintf(answer, size, "{\"return\": {}}");
    } else if (asks_for(request, "guest-info")) {
        answer_info(answer, size);
    } else if (asks_for(request, "guest-get-time") || asks_for(request, "guest-set-time")) {
        answer_time(request, answer, size);
    } else if (asks_for(request, "guest-fsfreeze-status")) {
        snprintf(answer, size, "{\"return\": \"%s\"}", is_frozen ? "frozen" : "thawed");
    } else if (asks_for(request, "guest-fsfreeze-freeze") || asks_for(request, "guest-fsfreeze-freeze-list")) {
        answer_freeze(answer, size);
    } else if (asks_for(request, "guest-fsfreeze-thaw")) {
        is_frozen = 0;
        snprintf(answer, size, "{\"return\": %d}", switch_file_system(FITHAW) > 0);
    } else {
        snprintf(answer, size, "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"this guest does not know that\"}}");
    }
}

void *answer_agent(void *nothing) {
    int port = open_port("org.qemu.guest_agent.0");
    char request[REQUEST_BYTES_MAX], answer[REQUEST_BYTES_MAX], bytes[512];
    size_t length = 0;
    for (;;) {
        size_t count = read_port(port, bytes, sizeof bytes);
        for (size_t number = 0; number < count; number++) {
            if ((unsigned char)bytes[number] == RESTART || length == sizeof request - 1) length = 0;
            if ((unsigned char)bytes[number] == RESTART) continue;
            request[length++] = bytes[number];
            if (bytes[number] != '\n') continue;
            request[length] = 0;
            length = 0;
            if (request[strspn(request, " \r\n")] == 0) continue;
            answer_request(request, answer, sizeof answer - 1);
            strcat(answer, "\n");
            write_port(port, answer, strlen(answer));
        }
    }
    return nothing;
}
