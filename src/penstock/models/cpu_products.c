/* Products of few rows and a matrix: the matrix is read once, in the order in which it lies in memory. */
#include "cpu_vectors.h"

#define GROUP 4    /* rows that share one pass over a part of the matrix */
#define SHARE 64   /* outputs that a thread takes at a time */

struct product {
    const bf16 *rows;       /* [rows, inputs] */
    const bf16 *weight;     /* [outputs, inputs] */
    const bf16 *bias;       /* [outputs], or NULL */
    bf16 *out;              /* [rows, outputs] */
    parallel_t parallel;
    int32_t num_rows, num_inputs, num_outputs, adds, num_threads; /* adds: to what is in `out` */
};

/* 16 sums: `num_outputs` outputs of `num_rows` rows, both constants where this is inlined. */
INLINE void write_sums(const struct product *p, const float *sums, int row, int output, const int num_rows,
                       const int num_outputs)
{
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++) {
        bf16 *to = p->out + (size_t)(row + r) * p->num_outputs + output;
        int count = smaller(num_outputs, p->num_outputs - output);
        __m512i order = _mm512_mullo_epi32(LANE_NUMBERS, _mm512_set1_epi32(num_rows));
        __m512 values = _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(r)), _mm512_loadu_ps(sums));
        if (p->bias)
            values = _mm512_add_ps(values, load_floats(p->bias + output, count));
        if (p->adds)
            values = _mm512_add_ps(values, load_floats(to, count));
        store_floats(to, values, count);
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
