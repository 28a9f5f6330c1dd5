/* Preloaded into processes: adds seconds to their wall clock, and counts how often they read it since.
 *
 * SHIFTED_CLOCKS names a folder, in which each process makes the file PID of two 64-bit numbers: the seconds, and the
 * count. surroundings.py compiles this and writes the seconds. The monotonic clock is left as it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t *shift;
static int (*read_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_file(void) {
  const char *folder = getenv("SHIFTED_CLOCKS");
  char path[4096];
  if (folder == NULL || snprintf(path, sizeof path, "%s/%d", folder, (int)getpid()) >= (int)sizeof path) return;
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (ftruncate(file, 2 * sizeof *shift) == 0) {
    void *found = mmap(NULL, 2 * sizeof *shift, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) shift = found;
  }
  close(file);
}

int clock_gettime(clockid_t which, struct timespec *now) {
  /* Other libraries may read it before ours is initialized. */
  if (read_clock == NULL) read_clock = dlsym(RTLD_NEXT, "clock_gettime");
  int code = read_clock(which, now);
  if (code == 0 && which == CLOCK_REALTIME && shift != NULL) {
    now->tv_sec += __atomic_load_n(&shift[0], __ATOMIC_RELAXED);
    __atomic_add_fetch(&shift[1], 1, __ATOMIC_RELAXED);
  }
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  int code = clock_gettime(CLOCK_REALTIME, &found);
  (void)zone;
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return code;
}

time_t time(time_t *result) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (result != NULL) *result = found.tv_sec;
  return found.tv_sec;
}
