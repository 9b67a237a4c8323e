/* Products of rows and a matrix that stays as it lies in memory.
 *
 * Few rows: the matrix is read once, in its order. More rows: they are turned so that a lane is a row, and the
 * matrix is read in pairs of inputs that are shared by all lanes; it need not be packed for that.
 */
#include <string.h>

#include "cpu_vectors.h"

#define GROUP 4    /* rows that share one pass over a part of the matrix */
#define SHARE 64   /* outputs that a thread takes at a time */
#define TALL 32    /* rows that are turned together */
#define TILES 2    /* of such rows, in a work item */
#define WIDE 12    /* outputs whose sums are held at once */

/* 16 sums: `num_outputs` outputs of `num_rows` rows, both constants where this is inlined. */
INLINE void write_sums(const struct product *p, const float *sums, int row, int output, const int num_rows,
                       const int num_outputs)
{
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++) {
        int count = smaller(num_outputs, p->num_outputs - output);
        __m512i order = _mm512_mullo_epi32(LANE_NUMBERS, _mm512_set1_epi32(num_rows));
        __m512i places = _mm512_add_epi32(order, _mm512_set1_epi32(r));
        write_values(p, _mm512_permutexvar_ps(places, _mm512_loadu_ps(sums)), row + r, output, count);
    }
}

INLINE void multiply(const struct product *p, int row, int first, int end, const int num_rows, const int num_outputs)
{
    int size = p->num_inputs;
    const bf16 *rows[GROUP], *last = p->weight + (size_t)(p->num_outputs - 1) * size;
    for (int r = 0; r < num_rows; r++)
        rows[r] = p->rows + (size_t)smaller(row + r, p->num_rows - 1) * size;
    for (int output = first; output < end; output += num_outputs) {
        __m512 sums[LANES];
        const bf16 *weights[LANES];
        for (int o = 0; o < num_outputs; o++) {
            const bf16 *at = p->weight + (size_t)(output + o) * size;
            weights[o] = at < last ? at : last;
        }
        for (int i = 0; i < LANES; i++)
            sums[i] = _mm512_setzero_ps();
        for (int i = 0; i < size; i += 32) {
            __m512i x[GROUP];
            for (int r = 0; r < num_rows; r++)
                x[r] = load_32(rows[r] + i, size - i);
            for (int o = 0; o < num_outputs; o++) {
                __m512i weight = load_32(weights[o] + i, size - i);
                _mm_prefetch((const char *)(weights[o] + (size_t)num_outputs * size + i), _MM_HINT_T0);
                for (int r = 0; r < num_rows; r++)
                    sums[o * num_rows + r] = dot(sums[o * num_rows + r], weight, x[r]);
            }
        }
        float totals[LANES];
        _mm512_storeu_ps(totals, sum_each(sums));
        write_sums(p, totals, row, output, num_rows, num_outputs);
    }
}

static void multiply_share(const void *of, int first, int end)
{
    const struct product *p = of;
    for (int output = first * SHARE; output < end * SHARE; output += SHARE)
        for (int row = 0; row < p->num_rows; row += GROUP) {
            int last = smaller(output + SHARE, p->num_outputs);
            switch (smaller(GROUP, p->num_rows - row)) {
            case 1: multiply(p, row, output, last, 1, 16); break;
            case 2: multiply(p, row, output, last, 2, 8); break;
            default: multiply(p, row, output, last, 4, 4);
            }
        }
}

void penstock_multiply(const struct product *p)
{
    int num_shares = (p->num_outputs + SHARE - 1) / SHARE;
    share_rows(multiply_share, p, num_shares, sizeof(bf16) * SHARE * p->num_inputs, p->parallel, p->num_threads);
}

struct turned {
    uint32_t pairs[TILES][MOST_INPUTS / 2 * TALL]; /* of inputs, a row per lane */
};

struct many_rows {
    const struct product *of;
    atomic_int next_item, next_thread;
    int num_items, num_parts; /* parts: of the outputs */
};

int64_t penstock_product_bytes(void) { return sizeof(struct turned); }

static void turn_rows(const struct product *p, int first, uint32_t *pairs)
{
    for (int half = 0; half < TALL; half += LANES)
        for (int input = 0; input < p->num_inputs; input += 32) {
            __m512 r[LANES];
            for (int i = 0; i < LANES; i++) {
                int row = first + half + i;
                const bf16 *from = p->rows + (size_t)row * p->num_inputs + input;
                r[i] = row < p->num_rows ? (__m512)load_32(from, p->num_inputs - input) : _mm512_setzero_ps();
            }
            transpose(r);
            for (int i = 0; i < smaller(LANES, (p->num_inputs - input) / 2); i++)
                _mm512_storeu_ps(pairs + (size_t)(input / 2 + i) * TALL + half, r[i]);
        }
}

static void write_columns(const struct product *p, __m512 *columns, int first, int output)
{
    int count = smaller(WIDE, p->num_outputs - output);
    transpose(columns);
    for (int i = 0; i < smaller(LANES, p->num_rows - first); i++)
        write_values(p, columns[i], first + i, output, count);
}

/* 12 outputs of 32 rows. */
static void multiply_turned(const struct product *p, const uint32_t *pairs, int first, int output)
{
    __m512 sums[2 * LANES];
    const bf16 *weights[WIDE];
    for (int o = 0; o < WIDE; o++) {
        weights[o] = p->weight + (size_t)smaller(output + o, p->num_outputs - 1) * p->num_inputs;
        sums[o] = sums[LANES + o] = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < p->num_inputs / 2; pair++) {
        __m512i one = _mm512_loadu_si512(pairs + (size_t)pair * TALL);
        __m512i two = _mm512_loadu_si512(pairs + (size_t)pair * TALL + LANES);
        _mm_prefetch((const char *)(weights[0] + (size_t)WIDE * p->num_inputs + 2 * WIDE * pair), _MM_HINT_T0); /* the next 12 */
        for (int o = 0; o < WIDE; o++) {
            int32_t both;
            memcpy(&both, weights[o] + 2 * pair, sizeof both);
            __m512i shared = _mm512_set1_epi32(both);
            sums[o] = dot(sums[o], one, shared);
            sums[LANES + o] = dot(sums[LANES + o], two, shared);
        }
    }
    for (int half = 0; half < 2; half++) {
        __m512 columns[LANES];
        for (int o = 0; o < LANES; o++)
            columns[o] = o < WIDE ? sums[half * LANES + o] : _mm512_setzero_ps();
        write_columns(p, columns, first + half * LANES, output);
    }
}

static void run_many_rows(void *data)
{
    struct many_rows *job = data;
    const struct product *p = job->of;
    int num_blocks = (p->num_outputs + WIDE - 1) / WIDE;
    struct turned *turned = (struct turned *)p->workspace + atomic_fetch_add(&job->next_thread, 1);
    for (int item; (item = atomic_fetch_add(&job->next_item, 1)) < job->num_items;) {
        int first = item / job->num_parts * TALL * TILES, part = item % job->num_parts;
        int num_tiles = smaller(TILES, (p->num_rows - first + TALL - 1) / TALL);
        for (int tile = 0; tile < num_tiles; tile++)
            turn_rows(p, first + tile * TALL, turned->pairs[tile]);
        int end = num_blocks * (part + 1) / job->num_parts;
        for (int block = num_blocks * part / job->num_parts; block < end; block++)
            for (int tile = 0; tile < num_tiles; tile++)
                multiply_turned(p, turned->pairs[tile], first + tile * TALL, block * WIDE);
    }
}

void penstock_multiply_many(const struct product *p)
{
    int num_tiles = (p->num_rows + TALL * TILES - 1) / (TALL * TILES);
    int wanted = (4 * p->num_threads + num_tiles - 1) / num_tiles, most = larger(1, p->num_outputs / (16 * WIDE));
    struct many_rows job = {.of = p, .num_parts = smaller(wanted, most)};
    job.num_items = num_tiles * job.num_parts;
    if (p->num_threads > 1)
        p->parallel(run_many_rows, &job, p->num_threads, 0);
    else
        run_many_rows(&job);
}
