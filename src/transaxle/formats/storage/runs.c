/* Strided reads: runs of one file, equally long, each read by one `pread` into its place.

   A column cut of a matrix is a run of a few kB in each row. Asked for one by one from Python, every run costs several
   times its copy; here it costs the system call. Plain C11 and POSIX; no state, no allocation, no dependency. */

#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include <stdint.h>
#include <unistd.h>

/* `loops`: count, step in the file and step in memory of each loop, in bytes, the outermost first; memory has room for
   all runs. Reads the runs from number `first` on and returns the number of the one that could not be read whole at
   once, or how many there are. Who calls reads that one in the ordinary way, and so learns what is wrong. */
int64_t transaxle_runs(int fd, int64_t offset, uint8_t *out, int64_t width, int depth, const int64_t *loops,
                       int64_t first) {
    int64_t total = 1;
    for (int level = 0; level < depth; level++) total *= loops[3 * level];
    while (first < total) {
        int64_t from = offset, at = 0, rest = first;
        for (int level = depth - 1; level >= 0; level--) {
            int64_t index = rest % loops[3 * level];
            rest /= loops[3 * level];
            from += index * loops[3 * level + 1];
            at += index * loops[3 * level + 2];
        }
        /* The innermost loop, from where it stands to its end. */
        int64_t inner = depth ? loops[3 * depth - 3] : 1;
        int64_t end = first + inner - first % inner;
        int64_t step = depth ? loops[3 * depth - 2] : 0, into = depth ? loops[3 * depth - 1] : 0;
        for (; first < end; first++, from += step, at += into)
            if (pread(fd, out + at, (size_t)width, (off_t)from) != width) return first;
    }
    return total;
}

/* Which source this was built from: strided.py loads no other. */
uint32_t transaxle_stamp(void) { return STAMP; }
