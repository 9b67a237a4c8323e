/* Products of rows and a bfloat16 matrix.
 *
 * Few rows: the matrix is read once, in its order. More rows: they are turned so that a lane is a row, and pairs of inputs
 * of a panel of the matrix are shared by all lanes.
 */
#include <string.h>

#include "vectors.h"

#define GROUP 4    /* rows that share one pass over a part of the matrix */
#define SHARE 64   /* outputs that a thread takes at a time */
#define TALL 32    /* rows that are turned together: a tile */
#define SLAB 16    /* tiles that share a panel */
#define WIDE 12    /* outputs whose sums are held at once: a panel */
#define DEEP 768   /* inputs of a pass */
#define MAX_PANELS 4

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
                _mm_prefetch((const char *)(weights[o] + (size_t)num_outputs * size + i), _MM_HINT_T1);
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

static void multiply_few(const struct product *p)
{
    int num_shares = (p->num_outputs + SHARE - 1) / SHARE;
    share_rows(multiply_share, p, num_shares, sizeof(bf16) * SHARE * p->num_inputs, p->parallel, p->num_threads);
}

/* Many rows: tiles of 32 of them, turned, and panels of 12 outputs. A work item is some panels for all tiles of a slab;
 * long rows are multiplied in passes, between which sums are kept as they are. */
struct part { /* of one thread */
    bf16 panel[WIDE][DEEP + 32]; /* a copy: its rows never fall on the same lines of the cache, and it is near */
    float sums[MAX_PANELS][SLAB][2 * WIDE][LANES];
};

struct many_rows {
    const struct product *of;
    uint32_t *turned; /* [tiles, pairs of inputs, 32 rows] */
    int first_row, num_tiles, num_panels, panels_of_item, num_items;
    atomic_int next_item, next_thread;
};

static size_t parts_bytes(int num_threads) { return (num_threads * sizeof(struct part) + 63) / 64 * 64; }

int64_t penstock_product_bytes(int num_rows, int num_inputs, int num_threads)
{
    int num_tiles = smaller(SLAB, (num_rows + TALL - 1) / TALL);
    int64_t plain = parts_bytes(num_threads) + sizeof(bf16) * num_tiles * TALL * num_inputs;
    int64_t packed = penstock_panels_bytes(num_inputs, num_threads);
    return plain > packed ? plain : packed;
}

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

INLINE uint32_t *tile_of(const struct many_rows *job, int tile)
{
    return job->turned + (size_t)tile * TALL * (job->of->num_inputs / 2);
}

static void turn_tiles(const void *of, int first, int end)
{
    const struct many_rows *job = of;
    for (int tile = first; tile < end; tile++)
        turn_rows(job->of, job->first_row + tile * TALL, tile_of(job, tile));
}

static void copy_panel(const struct product *p, int output, int input, int count, struct part *part)
{
    for (int o = 0; o < WIDE; o++) {
        const bf16 *from = p->weight + (size_t)smaller(output + o, p->num_outputs - 1) * p->num_inputs + input;
        for (int i = 0; i < count; i += 32)
            _mm512_storeu_si512(part->panel[o] + i, load_32(from + i, count - i));
    }
}

static void write_columns(const struct product *p, const __m512 *sums, int first, int output)
{
    int count = smaller(WIDE, p->num_outputs - output);
    __m512 columns[LANES];
    for (int o = 0; o < LANES; o++)
        columns[o] = o < WIDE ? sums[o] : _mm512_setzero_ps();
    transpose(columns);
    for (int i = 0; i < smaller(LANES, p->num_rows - first); i++)
        write_values(p, columns[i], first + i, output, count);
}

/* Adds the products of 12 outputs and 32 rows to `sums`. What the next panel needs is asked for meanwhile. */
INLINE void multiply_tile(__m512 *sums, const uint32_t *pairs, const struct part *part, int num_pairs, const char *next,
                          size_t next_stride)
{
    for (int pair = 0; pair < num_pairs; pair++) {
        __m512i one = _mm512_loadu_si512(pairs + (size_t)pair * TALL);
        __m512i two = _mm512_loadu_si512(pairs + (size_t)pair * TALL + LANES);
        _mm_prefetch(next + pair % LANES * next_stride + pair / LANES * 64, _MM_HINT_T1);
        for (int o = 0; o < WIDE; o++) {
            int32_t both;
            memcpy(&both, part->panel[o] + 2 * pair, sizeof both);
            __m512i shared = _mm512_set1_epi32(both);
            sums[o] = dot(sums[o], one, shared);
            sums[WIDE + o] = dot(sums[WIDE + o], two, shared);
        }
    }
}

static void multiply_panel(const struct many_rows *job, struct part *part, int panel, int input, int count)
{
    const struct product *p = job->of;
    int output = panel * WIDE, is_last = input + count == p->num_inputs;
    const char *next = (const char *)(p->weight + (size_t)(output + WIDE) * p->num_inputs + input);
    copy_panel(p, output, input, count, part);
    for (int tile = 0; tile < job->num_tiles; tile++) {
        float(*kept)[LANES] = part->sums[panel % job->panels_of_item][tile];
        int first = job->first_row + tile * TALL;
        __m512 sums[2 * WIDE];
        for (int i = 0; i < 2 * WIDE; i++)
            sums[i] = input ? _mm512_loadu_ps(kept[i]) : _mm512_setzero_ps();
        multiply_tile(sums, tile_of(job, tile) + (size_t)input / 2 * TALL, part, count / 2, next,
                      tile ? 0 : sizeof(bf16) * p->num_inputs);
        if (is_last) {
            write_columns(p, sums, first, output);
            write_columns(p, sums + WIDE, first + LANES, output);
        } else
            for (int i = 0; i < 2 * WIDE; i++)
                _mm512_storeu_ps(kept[i], sums[i]);
    }
}

static void run_many_rows(void *data)
{
    struct many_rows *job = data;
    struct part *part = (struct part *)job->of->workspace + atomic_fetch_add(&job->next_thread, 1);
    int num_inputs = job->of->num_inputs, num_passes = (num_inputs + DEEP - 1) / DEEP;
    int deep = ((num_inputs + num_passes - 1) / num_passes + 31) / 32 * 32;
    for (int item; (item = atomic_fetch_add(&job->next_item, 1)) < job->num_items;) {
        int first = item * job->panels_of_item, end = smaller(first + job->panels_of_item, job->num_panels);
        for (int input = 0; input < num_inputs; input += deep)
            for (int panel = first; panel < end; panel++)
                multiply_panel(job, part, panel, input, smaller(deep, num_inputs - input));
    }
}

static void multiply_many(const struct product *p)
{
    int num_panels = (p->num_outputs + WIDE - 1) / WIDE;
    int panels_of_item = smaller(MAX_PANELS, larger(1, num_panels / (8 * p->num_threads)));
    for (int first_row = 0; first_row < p->num_rows; first_row += SLAB * TALL) {
        struct many_rows job = {.of = p, .first_row = first_row, .num_panels = num_panels, .panels_of_item = panels_of_item};
        job.turned = (uint32_t *)((char *)p->workspace + parts_bytes(p->num_threads));
        job.num_tiles = smaller(SLAB, (p->num_rows - first_row + TALL - 1) / TALL);
        job.num_items = (num_panels + panels_of_item - 1) / panels_of_item;
        share_rows(turn_tiles, &job, job.num_tiles, sizeof(bf16) * TALL * p->num_inputs, p->parallel, p->num_threads);
        if (p->num_threads > 1)
            p->parallel(run_many_rows, &job, p->num_threads, 0);
        else
            run_many_rows(&job);
    }
}

/* Many rows are turned in pairs of inputs, so that there must be no odd one. */
void penstock_multiply(const struct product *p)
{
    if (p->type != BF16)
        penstock_multiply_packed(p);
    else if (p->num_rows <= FEW_ROWS || p->num_inputs % 2)
        multiply_few(p);
    else
        multiply_many(p);
}
