/*
 * The first process of the guest of scripts/kernel-guest, in its initrd. It loads the modules that the kernel needs to
 * access its disk (`/modules/00.ko` and so on, in this order), mounts /dev/vda as the root, and runs its
 * /sbin/kernel-init as init.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ATTEMPTS = 500 };

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

int main(void) {
    mount("dev", "/dev", "devtmpfs", 0, "");
    int console = open("/dev/ttyS0", O_RDWR | O_NOCTTY);
    for (int number = 0; number < 3; number++) dup2(console, number);
    load_modules();
    int attempt = 0;
    while (mount("/dev/vda", "/root", "ext4", 0, "") != 0 && ++attempt < ATTEMPTS)
        nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
    if (attempt == ATTEMPTS) {
        printf("kernel-guest: no root on /dev/vda: %m\n");
        return 1;
    }
    mount("/dev", "/root/dev", NULL, MS_MOVE, NULL);
    if (chdir("/root") != 0 || mount(".", "/", NULL, MS_MOVE, NULL) != 0 || chroot(".") != 0 || chdir("/") != 0)
        printf("kernel-guest: the root cannot be changed: %m\n");
    execl("/sbin/kernel-init", "kernel-init", NULL);
    printf("kernel-guest: /sbin/kernel-init does not start: %m\n");
    return 1;
}
