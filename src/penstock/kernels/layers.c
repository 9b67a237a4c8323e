/* Norms and gated activations in bfloat16, each in one pass over memory. */
#include "vectors.h"

/* Up to 16 values from `at` on. */
INLINE __m512 load_values(const void *from, size_t at, int count, const int is_wide)
{
    if (is_wide)
        return _mm512_maskz_loadu_ps(lanes_of(count), (const float *)from + at);
    return load_floats((const bf16 *)from + at, count);
}

INLINE void norm_row(const struct norm *n, size_t first, bf16 *to, const int is_wide)
{
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < n->width; i += LANES) {
        __m512 x = load_values(n->rows, first + i, n->width - i, is_wide);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / n->width + n->eps;
    __m512 scale = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(_mm512_set1_ps(mean)));
    for (int i = 0; i < n->width; i += LANES) {
        int count = n->width - i;
        __m512 weight = _mm512_maskz_loadu_ps(lanes_of(count), n->weight + i);
        __m512 x = load_values(n->rows, first + i, count, is_wide);
        store_floats(to + i, _mm512_mul_ps(_mm512_mul_ps(x, scale), weight), count);
    }
}

static void norm_rows(const void *of, int first, int end)
{
    const struct norm *n = of;
    for (int row = first; row < end; row++)
        for (int inner = 0; inner < n->num_inner; inner++) {
            size_t at = row * n->outer_stride + inner * n->inner_stride;
            bf16 *to = n->out + ((size_t)row * n->num_inner + inner) * n->width;
            if (n->is_wide)
                norm_row(n, at, to, 1);
            else
                norm_row(n, at, to, 0);
        }
}

void penstock_rms_norm(const struct norm *n)
{
    size_t row_bytes = sizeof(bf16) * n->num_inner * n->width;
    share_rows(norm_rows, n, n->num_outer, row_bytes, n->parallel, n->num_threads);
}

/* x times the sigmoid of x; for gelu, of its polynomial in place of the tanh. */
INLINE __m512 activated(__m512 x, int is_gelu)
{
    __m512 at = x;
    if (is_gelu) {
        __m512 cube = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1));
        at = _mm512_mul_ps(_mm512_mul_ps(x, cube), _mm512_set1_ps(2 * 0.7978845608f));
    }
    __m512 decay = exp2_ps(_mm512_mul_ps(at, _mm512_set1_ps(-LOG2E)));
    return _mm512_div_ps(x, _mm512_add_ps(decay, _mm512_set1_ps(1)));
}

static void gate_rows(const void *of, int first, int end)
{
    const struct gate *g = of;
    for (int row = first; row < end; row++) {
        const bf16 *gate = g->gate_up + (size_t)row * 2 * g->width, *up = gate + g->width;
        bf16 *to = g->out + (size_t)row * g->width;
        for (int i = 0; i < g->width; i += LANES) {
            int count = g->width - i;
            __m512 product = _mm512_mul_ps(activated(load_floats(gate + i, count), g->is_gelu), load_floats(up + i, count));
            store_floats(to + i, product, count);
        }
    }
}

void penstock_gated_activation(const struct gate *g)
{
    share_rows(gate_rows, g, g->num_rows, sizeof(bf16) * 3 * g->width, g->parallel, g->num_threads);
}
