/* A layer between a process and the files of one folder, loaded by LD_PRELOAD. It writes a journal of all changes, lets calls fail, slows
 * them down, or ends the process before one. It is told by variables:
 *
 *   SHIM_FOLDER    the folder
 *   SHIM_JOURNAL   where the journal is appended
 *   SHIM_ERROR     how calls fail: an errno as a number; "short" cuts a write in half
 *   SHIM_FROM      the first call that fails, counted from 0 among those that can fail so
 *   SHIM_COUNT     how many calls fail, 1 without it
 *   SHIM_MATCH     only calls count whose path has this text
 *   SHIM_KILL      the process is killed before this call
 *   SHIM_DELAY_US  how long a write or a sync takes longer
 *   SHIM_READS     reads fail, and nothing else
 *   SHIM_NO_LOCKS  how many locks are refused, as by a server that has none
 *
 * A record of the journal is a header of 40 bytes (`struct header`) and then the first path, the second path and the data. Changes through
 * mappings are not recorded: in a run only the file of optimizer states on disk is mapped, which no later process reads.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, TRUNCATE, WRITE, MKDIR, RENAME, LINK, REMOVE, SYNC, READ };

struct header {
    uint32_t kind, first, second, data;
    uint64_t inode, at, unused;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *folder, *match;
static int journal = -1, error, cut_short;
static long from = -1, count = 1, kill_at = -1, delay_us, calls, failing;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHIM_JOURNAL"), *how = getenv("SHIM_ERROR");
    if (path)
        journal = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    cut_short = how && !strcmp(how, "short");
    error = how ? atoi(how) : 0;
    from = number("SHIM_FROM", -1);
    count = number("SHIM_COUNT", 1);
    kill_at = number("SHIM_KILL", -1);
    delay_us = number("SHIM_DELAY_US", 0);
    match = getenv("SHIM_MATCH");
    folder = getenv("SHIM_FOLDER");
}

/* The absolute path of a name below an open folder, in `to`; NULL if it lies outside of the watched folder. */
static const char *of_name(int at, const char *name, char to[PATH_MAX]) {
    char link[64], base[PATH_MAX];
    if (!folder || !name)
        return NULL;
    if (name[0] == '/') {
        snprintf(to, PATH_MAX, "%s", name);
    } else {
        if (at == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0)
            return NULL;
        base[length] = 0;
        if ((size_t)snprintf(to, PATH_MAX, "%s/%s", base, name) >= PATH_MAX)
            return NULL;
    }
    return strncmp(to, folder, strlen(folder)) ? NULL : to;
}

/* The path of an open file, in `to`; NULL if it lies outside of the watched folder. */
static const char *of_file(int file, char to[PATH_MAX]) {
    char link[64];
    if (!folder)
        return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, to, PATH_MAX - 1);
    if (length < 0)
        return NULL;
    to[length] = 0;
    return strncmp(to, folder, strlen(folder)) ? NULL : to;
}

/* Whether calls of this kind can have the error. */
static int can_fail(enum kind kind) {
    if (cut_short)
        return kind == WRITE;
    switch (error) {
    case ENOSPC:
    case EDQUOT:
        return kind == CREATE || kind == WRITE || kind == MKDIR;
    case EINTR:
        return kind == CREATE || kind == WRITE || kind == SYNC;
    case EROFS:
        return kind != READ && kind != SYNC;
    default:
        return (kind == READ) == (getenv("SHIM_READS") != NULL);
    }
}

/* Counts a call; -1 with errno if it is to fail. The lock is held. */
static int refused(enum kind kind, const char *path) {
    if (kind != READ && kill_at >= 0 && calls++ == kill_at)
        raise(SIGKILL);
    if (delay_us && (kind == WRITE || kind == SYNC))
        usleep(delay_us);
    if (from < 0 || !can_fail(kind) || (match && !strstr(path, match)))
        return 0;
    long n = failing++;
    if (n < from || n >= from + count)
        return 0;
    if (cut_short)
        return 1;
    errno = error;
    return -1;
}

static void note(enum kind kind, uint64_t inode, uint64_t at, const char *first, const char *second, const struct iovec *data,
                 int parts, size_t bytes) {
    if (journal < 0)
        return;
    int kept = errno;
    struct header h = {kind, first ? strlen(first) : 0, second ? strlen(second) : 0, bytes, inode, at, 0};
    char *record = malloc(sizeof h + h.first + h.second + bytes), *end = record;
    end = mempcpy(end, &h, sizeof h);
    end = mempcpy(end, first ? first : "", h.first);
    end = mempcpy(end, second ? second : "", h.second);
    for (int i = 0; i < parts && bytes; i++) {
        size_t part = data[i].iov_len < bytes ? data[i].iov_len : bytes;
        end = mempcpy(end, data[i].iov_base, part);
        bytes -= part;
    }
    if (syscall(SYS_write, journal, record, end - record) != end - record)
        abort();
    free(record);
    errno = kept;
}

static int open_at(int at, const char *name, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = (flags & (O_CREAT | O_TRUNC)) && (flags & O_TMPFILE) != O_TMPFILE ? of_name(at, name, buffer) : NULL;
    if (!path)
        return syscall(SYS_openat, at, name, flags, mode);
    struct stat status;
    pthread_mutex_lock(&lock);
    int there = !lstat(path, &status), file = refused(CREATE, path);
    if (file == 0)
        file = syscall(SYS_openat, at, name, flags, mode);
    if (file >= 0 && !fstat(file, &status)) {
        if (!there)
            note(CREATE, status.st_ino, 0, path, NULL, NULL, 0, 0);
        else if (flags & O_TRUNC)
            note(TRUNCATE, status.st_ino, 0, NULL, NULL, NULL, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return file;
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name)                                       \
    int name(const char *path, int flags, ...) {         \
        va_list rest;                                    \
        va_start(rest, flags);                           \
        mode_t mode = mode_of(flags, rest);              \
        va_end(rest);                                    \
        return open_at(AT_FDCWD, path, flags, mode);     \
    }
#define OPENAT(name)                                     \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest;                                    \
        va_start(rest, flags);                           \
        mode_t mode = mode_of(flags, rest);              \
        va_end(rest);                                    \
        return open_at(at, path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Writes at the file's position, or at `at` if that is not negative. */
static ssize_t write_at(int file, const struct iovec *data, int parts, off_t at) {
    char buffer[PATH_MAX];
    const char *path = of_file(file, buffer);
    if (!path)
        return at < 0 ? syscall(SYS_writev, file, data, parts) : syscall(SYS_pwritev, file, data, parts, at, 0);
    struct stat status;
    struct iovec first = data[0];
    pthread_mutex_lock(&lock);
    int outcome = refused(WRITE, path);
    if (outcome > 0) {
        first.iov_len = (first.iov_len + 1) / 2;
        data = &first;
        parts = 1;
    }
    ssize_t written = -1;
    if (outcome >= 0) {
        off_t start = at < 0 ? lseek(file, 0, SEEK_CUR) : at;
        if (!fstat(file, &status) && fcntl(file, F_GETFL) & O_APPEND)
            start = status.st_size;
        written = at < 0 ? syscall(SYS_writev, file, data, parts) : syscall(SYS_pwritev, file, data, parts, at, 0);
        if (written > 0)
            note(WRITE, status.st_ino, start, NULL, NULL, data, parts, written);
    }
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t write(int file, const void *data, size_t bytes) {
    struct iovec part = {(void *)data, bytes};
    return write_at(file, &part, 1, -1);
}

ssize_t writev(int file, const struct iovec *data, int parts) { return write_at(file, data, parts, -1); }

ssize_t pwrite(int file, const void *data, size_t bytes, off_t at) {
    struct iovec part = {(void *)data, bytes};
    return write_at(file, &part, 1, at);
}

ssize_t pwrite64(int file, const void *data, size_t bytes, off_t at) { return pwrite(file, data, bytes, at); }

int ftruncate(int file, off_t length) {
    char buffer[PATH_MAX];
    const char *path = of_file(file, buffer);
    if (!path)
        return syscall(SYS_ftruncate, file, length);
    struct stat status;
    pthread_mutex_lock(&lock);
    int done = refused(TRUNCATE, path);
    if (done == 0)
        done = syscall(SYS_ftruncate, file, length);
    if (!done && !fstat(file, &status))
        note(TRUNCATE, status.st_ino, length, NULL, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}

int ftruncate64(int file, off_t length) { return ftruncate(file, length); }

static int sync_by(long call, int file) {
    char buffer[PATH_MAX];
    const char *path = of_file(file, buffer);
    if (!path)
        return syscall(call, file);
    struct stat status;
    pthread_mutex_lock(&lock);
    int done = refused(SYNC, path);
    if (done == 0)
        done = syscall(call, file);
    if (!done && !fstat(file, &status))
        note(SYNC, status.st_ino, 0, NULL, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}

int fsync(int file) { return sync_by(SYS_fsync, file); }
int fdatasync(int file) { return sync_by(SYS_fdatasync, file); }

int mkdirat(int at, const char *name, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = of_name(at, name, buffer);
    struct stat status;
    if (!path)
        return syscall(SYS_mkdirat, at, name, mode);
    pthread_mutex_lock(&lock);
    int done = refused(MKDIR, path);
    if (done == 0)
        done = syscall(SYS_mkdirat, at, name, mode);
    if (!done && !lstat(path, &status))
        note(MKDIR, status.st_ino, 0, path, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* A rename, or a second name. */
static int moved(enum kind kind, int from_at, const char *name, int to_at, const char *other) {
    char a[PATH_MAX], b[PATH_MAX];
    const char *first = of_name(from_at, name, a), *second = of_name(to_at, other, b);
    long call = kind == RENAME ? SYS_renameat2 : SYS_linkat;
    if (!first || !second)
        return syscall(call, from_at, name, to_at, other, 0);
    pthread_mutex_lock(&lock);
    int done = refused(kind, first);
    if (done == 0)
        done = syscall(call, from_at, name, to_at, other, 0);
    if (!done)
        note(kind, 0, 0, first, second, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}

int rename(const char *name, const char *other) { return moved(RENAME, AT_FDCWD, name, AT_FDCWD, other); }
int renameat(int at, const char *name, int to, const char *other) { return moved(RENAME, at, name, to, other); }
int link(const char *name, const char *other) { return moved(LINK, AT_FDCWD, name, AT_FDCWD, other); }
int linkat(int at, const char *name, int to, const char *other, int flags) {
    (void)flags;
    return moved(LINK, at, name, to, other);
}

int unlinkat(int at, const char *name, int flags) {
    char buffer[PATH_MAX];
    const char *path = of_name(at, name, buffer);
    if (!path)
        return syscall(SYS_unlinkat, at, name, flags);
    pthread_mutex_lock(&lock);
    int done = refused(REMOVE, path);
    if (done == 0)
        done = syscall(SYS_unlinkat, at, name, flags);
    if (!done)
        note(REMOVE, 0, 0, path, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int flock(int file, int how) {
    static long refusals;
    pthread_mutex_lock(&lock);
    int refuses = refusals++ < number("SHIM_NO_LOCKS", 0);
    pthread_mutex_unlock(&lock);
    if (refuses) {
        errno = ENOLCK;
        return -1;
    }
    return syscall(SYS_flock, file, how);
}

ssize_t read(int file, void *to, size_t bytes) {
    char buffer[PATH_MAX];
    const char *path = from < 0 ? NULL : of_file(file, buffer);
    if (path) {
        pthread_mutex_lock(&lock);
        int outcome = refused(READ, path);
        pthread_mutex_unlock(&lock);
        if (outcome < 0)
            return outcome;
    }
    return syscall(SYS_read, file, to, bytes);
}
