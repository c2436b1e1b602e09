/* A wall clock that can be stepped, for one program: LD_PRELOAD this, and write seconds into the file STEPPED_CLOCK names.
 *
 * What asks for the time of day gets it with that offset; what waits until a time of day has it taken off again, as the
 * kernel's own clock is not stepped. Monotonic clocks are left alone, as a real step leaves them.
 *
 *     cc -shared -fPIC -O2 -o stepped_clock.so stepped_clock.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long kernel(long number, long a, long b, long c, long d, long e, long f) {
    static long (*libc_syscall)(long, ...);
    if (!libc_syscall) libc_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return libc_syscall(number, a, b, c, d, e, f);
}

static long offset_s(void) {
    static int file = -2;
    char text[32];
    ssize_t size;
    if (file == -2) {
        const char *path = getenv("STEPPED_CLOCK");
        file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    }
    if (file < 0 || (size = pread(file, text, sizeof text - 1, 0)) <= 0) return 0;
    text[size] = 0;
    return atol(text);
}

static int of_day(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)kernel(SYS_clock_gettime, clock, (long)now, 0, 0, 0, 0);
    if (!result && of_day(clock)) now->tv_sec += offset_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (place) *place = found.tv_sec;
    return found.tv_sec;
}

static const struct timespec *true_time(const struct timespec *until, struct timespec *own) {
    if (!until) return until;
    *own = *until;
    own->tv_sec -= offset_s();
    if (own->tv_sec < 0) own->tv_sec = 0;
    return own;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    /* A condition may be on the monotonic clock, whose times are small numbers. */
    static int (*original)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec own;
    if (!original)
        original = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(
            RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    return original(condition, mutex, until->tv_sec > 1000000000 ? true_time(until, &own) : until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*original)(sem_t *, const struct timespec *);
    struct timespec own;
    if (!original) original = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    return original(semaphore, true_time(until, &own));
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left) {
    struct timespec own;
    if (of_day(clock) && flags & TIMER_ABSTIME) wanted = true_time(wanted, &own);
    return kernel(SYS_clock_nanosleep, clock, flags, (long)wanted, (long)left, 0, 0) ? errno : 0;
}

long syscall(long number, ...) {
    struct timespec own;
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_futex && a[1] & FUTEX_CLOCK_REALTIME) a[3] = (long)true_time((const struct timespec *)a[3], &own);
    return kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
