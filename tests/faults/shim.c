/* Stands between a process and its system: counts the calls that touch files under one folder, and fails one of them,
   fails it and all that follow, ends the process before it, or writes all of them down. Also turns the clock.

   Preloaded, and quiet until `faults_arm` is called in the process whose calls are meant; forks of it are left alone.
   Built by shim.py. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, FSYNC = 8, RENAME = 16, UNLINK = 32, MKDIR = 64, TRUNCATE = 128 };
enum { COUNT, FAIL, FAIL_FOR_GOOD, KILL, RECORD };
#define FILES 65536

static struct {
    char folder[PATH_MAX];
    size_t length;
    int classes, action, number, log;
    long at, calls;
    pid_t process;
} plan;
static char *names[FILES];
static int64_t shift;
static pthread_mutex_t one = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

/* A child that is forked while another thread holds the lock would wait for it for ever. */
static void hold(void) { pthread_mutex_lock(&one); }
static void let_go(void) { pthread_mutex_unlock(&one); }
static void begin_anew(void) { one = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; }
__attribute__((constructor)) static void at_fork(void) { pthread_atfork(hold, let_go, begin_anew); }

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

void faults_arm(const char *folder, int classes, int action, long at, int number, int log) {
    snprintf(plan.folder, sizeof plan.folder, "%s", folder);
    plan.length = strlen(folder);
    plan.classes = classes, plan.action = action, plan.at = at, plan.number = number, plan.log = log;
    plan.calls = 0;
    plan.process = getpid();
}
void faults_disarm(void) { plan.process = 0; }
long faults_calls(void) { return plan.calls; }
void faults_shift_clock(int64_t nanoseconds) { shift = nanoseconds; }

static int armed(void) { return plan.process && plan.process == getpid(); }

/* The absolute path of a name as openat(2) reads it, or NULL where it is not under the folder. */
static const char *inside(int folder, const char *name, char *space) {
    if (!armed() || !name) return NULL;
    if (name[0] == '/') snprintf(space, PATH_MAX, "%s", name);
    else {
        char link[64], base[PATH_MAX];
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return NULL; }
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t size = readlink(link, base, sizeof base - 1);
            if (size < 0) return NULL;
            base[size] = 0;
        }
        if ((size_t)snprintf(space, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return NULL;
    }
    if (strncmp(space, plan.folder, plan.length)) return NULL;
    return space[plan.length] == '/' || space[plan.length] == 0 ? space : NULL;
}

static void note(int op, const char *path, const char *other, int64_t offset, const void *data, int64_t size) {
    if (plan.action != RECORD) return;
    int64_t head[5] = {op, (int64_t)strlen(path), other ? (int64_t)strlen(other) : 0, offset, size};
    struct iovec parts[4] = {{head, sizeof head}, {(void *)path, (size_t)head[1]}, {(void *)other, (size_t)head[2]},
                             {(void *)data, data ? (size_t)size : 0}};
    REAL(writev)(plan.log, parts, 4);
}

/* Counts a call; returns whether it is to fail, with errno set, or ends the process. */
static int struck(int class, const char *path) {
    if (!path || !(plan.classes & class)) return 0;
    long call = ++plan.calls;
    if (plan.action == KILL && call == plan.at) kill(getpid(), SIGKILL), pause();
    if ((plan.action == FAIL && call == plan.at) || (plan.action == FAIL_FOR_GOOD && call >= plan.at)) {
        errno = plan.number;
        return 1;
    }
    return 0;
}

static const char *named(int file) { return armed() && file >= 0 && file < FILES ? names[file] : NULL; }
static void name_file(int file, const char *path) {
    if (file < 0 || file >= FILES) return;
    free(names[file]);
    names[file] = path ? strdup(path) : NULL;
}

static int do_open(int folder, const char *name, int flags, mode_t mode) {
    if (!armed()) return REAL(openat)(folder, name, flags, mode);
    char space[PATH_MAX];
    pthread_mutex_lock(&one);
    const char *path = inside(folder, name, space);
    int result = -1;
    if (!struck(OPEN, path)) {
        int fresh = path && (flags & O_CREAT) && access(path, F_OK);
        result = REAL(openat)(folder, name, flags, mode);
        if (armed()) name_file(result, path);
        if (path && result >= 0 && fresh) note(OPEN, path, NULL, 1, NULL, 0);
        if (path && result >= 0 && (flags & O_TRUNC) && !fresh) note(TRUNCATE, path, NULL, 0, NULL, 0);
    }
    pthread_mutex_unlock(&one);
    return result;
}
#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); \
    mode = (mode_t)va_arg(rest, int); va_end(rest); }
int open(const char *name, int flags, ...) { MODE return do_open(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return do_open(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE return do_open(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE return do_open(folder, name, flags | O_LARGEFILE, mode); }

DIR *opendir(const char *name) {
    if (!armed()) return REAL(opendir)(name);
    char space[PATH_MAX];
    pthread_mutex_lock(&one);
    int strikes = struck(OPEN, inside(AT_FDCWD, name, space));
    pthread_mutex_unlock(&one);
    return strikes ? NULL : REAL(opendir)(name);
}

/* A renaming that goes past the C library (safetensors asks the system itself) shows when the file is closed. */
int close(int file) {
    const char *path = named(file);
    if (path) {
        char link[64], now[PATH_MAX];
        pthread_mutex_lock(&one);
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t size = plan.action == RECORD ? readlink(link, now, sizeof now - 1) : -1;
        if (size > 0) {
            now[size] = 0;
            if (strcmp(now, path) && !strstr(now, " (deleted)") && !access(now, F_OK) && access(path, F_OK))
                note(RENAME, path, now, 0, NULL, 0);
        }
        name_file(file, NULL);
        pthread_mutex_unlock(&one);
    }
    return REAL(close)(file);
}

/* Other files go their own way: a read of a pipe may wait for long, and nobody else may wait for that. */
#define ON_FILE(class, call, ...) \
    if (!named(file)) return call; \
    pthread_mutex_lock(&one); \
    const char *path = named(file); \
    __typeof__(call) result = -1; \
    if (!struck(class, path)) { result = call; if (path && result >= 0) { __VA_ARGS__; } } \
    pthread_mutex_unlock(&one); \
    return result

static int64_t before(int file, ssize_t wrote) {
    if (plan.action != RECORD) return 0;
    return (fcntl(file, F_GETFL) & O_APPEND ? lseek(file, 0, SEEK_END) : lseek(file, 0, SEEK_CUR)) - wrote;
}
ssize_t write(int file, const void *data, size_t size) {
    ON_FILE(WRITE, REAL(write)(file, data, size), note(WRITE, path, NULL, before(file, result), data, result));
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    ON_FILE(WRITE, REAL(writev)(file, parts, count), {
        int64_t place = before(file, result), left = result;
        for (int k = 0; k < count && left > 0; k++) {
            int64_t size = (int64_t)parts[k].iov_len < left ? (int64_t)parts[k].iov_len : left;
            note(WRITE, path, NULL, place, parts[k].iov_base, size);
            place += size, left -= size;
        }
    });
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t place) {
    ON_FILE(WRITE, REAL(pwrite64)(file, data, size, place), note(WRITE, path, NULL, place, data, result));
}
ssize_t read(int file, void *data, size_t size) { ON_FILE(READ, REAL(read)(file, data, size), ); }
ssize_t pread64(int file, void *data, size_t size, off64_t place) {
    ON_FILE(READ, REAL(pread64)(file, data, size, place), );
}
int fsync(int file) { ON_FILE(FSYNC, REAL(fsync)(file), note(FSYNC, path, NULL, 0, NULL, 0)); }
int fdatasync(int file) { ON_FILE(FSYNC, REAL(fdatasync)(file), note(FSYNC, path, NULL, 0, NULL, 0)); }
int ftruncate64(int file, off64_t size) {
    ON_FILE(TRUNCATE, REAL(ftruncate64)(file, size), note(TRUNCATE, path, NULL, size, NULL, 0));
}
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }
void *mmap64(void *where, size_t size, int protection, int flags, int file, off64_t place) {
    if (!named(file)) return REAL(mmap64)(where, size, protection, flags, file, place);
    pthread_mutex_lock(&one);
    int strikes = struck(READ, named(file));
    pthread_mutex_unlock(&one);
    return strikes ? MAP_FAILED : REAL(mmap64)(where, size, protection, flags, file, place);
}
void *mmap(void *where, size_t size, int protection, int flags, int file, off_t place) {
    return mmap64(where, size, protection, flags, file, place);
}

#define ON_NAME(class, folder, name, call, ...) \
    if (!armed()) return call; \
    char space[PATH_MAX]; \
    pthread_mutex_lock(&one); \
    const char *path = inside(folder, name, space); \
    int result = -1; \
    if (!struck(class, path)) { result = call; if (path && !result) { __VA_ARGS__; } } \
    pthread_mutex_unlock(&one); \
    return result
static int do_rename(int from, const char *old, int to, const char *new) {
    char target[PATH_MAX];
    ON_NAME(RENAME, from, old, REAL(renameat)(from, old, to, new), {
        const char *other = inside(to, new, target);
        note(RENAME, path, other ? other : "", 0, NULL, 0);
    });
}
int rename(const char *old, const char *new) { return do_rename(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return do_rename(from, old, to, new); }
int unlink(const char *name) {
    ON_NAME(UNLINK, AT_FDCWD, name, REAL(unlink)(name), note(UNLINK, path, NULL, 0, NULL, 0));
}
int unlinkat(int folder, const char *name, int flags) {
    ON_NAME(UNLINK, folder, name, REAL(unlinkat)(folder, name, flags), note(UNLINK, path, NULL, 0, NULL, 0));
}
int rmdir(const char *name) {
    ON_NAME(UNLINK, AT_FDCWD, name, REAL(rmdir)(name), note(UNLINK, path, NULL, 0, NULL, 0));
}
int mkdir(const char *name, mode_t mode) {
    ON_NAME(MKDIR, AT_FDCWD, name, REAL(mkdir)(name, mode), note(MKDIR, path, NULL, 0, NULL, 0));
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = REAL(clock_gettime)(clock, time);
    if (!result && shift && clock == CLOCK_REALTIME) {
        int64_t now = time->tv_sec * 1000000000LL + time->tv_nsec + shift;
        time->tv_sec = now / 1000000000LL, time->tv_nsec = now % 1000000000LL;
    }
    return result;
}
int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    int result = REAL(gettimeofday)(time, zone);
    if (!result) time->tv_sec += shift / 1000000000LL;
    return result;
}
time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
