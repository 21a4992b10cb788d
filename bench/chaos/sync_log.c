/* Notes every successful fsync and fdatasync of a server: the file's size when the call began, and its path.
 * What a file had then is on disk; what came later may be lost with the power. Loaded by LD_PRELOAD.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int noted(int fd, const char *name) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    struct stat before;
    int has_size = fstat(fd, &before) == 0;
    int code = real(fd);
    const char *log_path = getenv("CHAOS_SYNC_LOG");
    if (code != 0 || !has_size || log_path == NULL) return code;
    char link[64], path[3072], line[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return code;
    path[length] = 0;
    int log_fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0) abort(); /* a proof without its log would prove nothing */
    int count = snprintf(line, sizeof line, "%lld %s\n", (long long)before.st_size, path);
    if (write(log_fd, line, count) != count) abort();
    close(log_fd);
    return code;
}

int fsync(int fd) { return noted(fd, "fsync"); }
int fdatasync(int fd) { return noted(fd, "fdatasync"); }
