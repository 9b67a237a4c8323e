/* What the C kernels share: registers of floats, bfloat16 in and out, and work shared by torch's threads. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"

#define LOG2E 1.44269504088896f
#define INLINE static inline __attribute__((always_inline))

INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE int larger(int a, int b) { return a > b ? a : b; }

#include "registers.h" /* of the instructions that are compiled for */

/* A line into the second cache: the first one has too little room for a block. */
INLINE void ask_for(const void *at) { __builtin_prefetch(at, 0, 2); }

/* Rows that each thread takes a share of. */
struct rows {
    void (*run)(const void *of, int first, int end);
    const void *of;
    int count, share;
    atomic_int next;
};

static void run_shares(void *data)
{
    struct rows *rows = data;
    for (int first; (first = atomic_fetch_add(&rows->next, rows->share)) < rows->count;)
        rows->run(rows->of, first, smaller(first + rows->share, rows->count));
}

/* Calls `run` on all rows; where they are few it is not worth waking a thread. */
static inline void share_rows(void (*run)(const void *, int, int), const void *of, int count, size_t bytes_per_row,
                              parallel_t parallel, int num_threads)
{
    int num_shares = 4 * num_threads;
    struct rows rows = {.run = run, .of = of, .count = count, .share = larger(1, (count + num_shares - 1) / num_shares)};
    if (num_threads > 1 && count > 1 && count * bytes_per_row > 65536)
        parallel(run_shares, &rows, num_threads, 0);
    else
        run(of, 0, count);
}

/* Neighbouring outputs of one row, up to a register of them. */
INLINE void write_values(const struct product *p, floats values, int row, int output, int count)
{
    size_t at = (size_t)row * p->stride + output;
    if (p->bias)
        values = v_add(values, load_floats(p->bias + output, count));
    if (p->adds)
        values = v_add(values, p->wide ? load_wide(p->wide + at, count) : load_floats(p->out + at, count));
    if (p->wide)
        store_wide(p->wide + at, values, count);
    else
        store_floats(p->out + at, values, count);
}
