/* Norms and gated activations in bfloat16, each in one pass over memory. */
#include "vectors.h"

/* Values from `at` on, up to a register of them. */
INLINE floats load_values(const void *from, size_t at, int count, const int is_wide)
{
    if (is_wide)
        return load_wide((const float *)from + at, count);
    return load_floats((const bf16 *)from + at, count);
}

INLINE void norm_row(const struct norm *n, size_t first, bf16 *to, const int is_wide)
{
    floats squares = v_zero();
    for (int i = 0; i < n->width; i += LANES) {
        floats x = load_values(n->rows, first + i, n->width - i, is_wide);
        squares = v_mul_add(x, x, squares);
    }
    float mean = v_sum(squares) / n->width + n->eps;
    floats scale = v_div(v_all(1), v_sqrt(v_all(mean)));
    for (int i = 0; i < n->width; i += LANES) {
        int count = n->width - i;
        floats weight = load_wide(n->weight + i, count);
        floats x = load_values(n->rows, first + i, count, is_wide);
        store_floats(to + i, v_mul(v_mul(x, scale), weight), count);
    }
}

/* The norm of a row, as it was rounded. */
INLINE void add_row(const struct norm *n, size_t row, const bf16 *normed)
{
    for (int i = 0; i < n->width; i += LANES) {
        int count = n->width - i;
        size_t at = row * n->width + i;
        floats sum = v_add(load_values(n->sums, at, count, n->sums_are_wide), load_floats(normed + i, count));
        if (n->sums_are_wide)
            store_wide((float *)n->sums + at, sum, count);
        else
            store_floats((bf16 *)n->sums + at, sum, count);
    }
}

static void norm_rows(const void *of, int first, int end)
{
    const struct norm *n = of;
    for (int row = first; row < end; row++)
        for (int inner = 0; inner < n->num_inner; inner++) {
            size_t at = row * n->outer_stride + inner * n->inner_stride;
            size_t number = (size_t)row * n->num_inner + inner;
            bf16 *to = n->out + number * n->width;
            if (n->is_wide)
                norm_row(n, at, to, 1);
            else
                norm_row(n, at, to, 0);
            if (n->sums)
                add_row(n, number, to);
        }
}

void penstock_rms_norm(const struct norm *n)
{
    size_t row_bytes = sizeof(bf16) * n->num_inner * n->width;
    share_rows(norm_rows, n, n->num_outer, row_bytes, n->parallel, n->num_threads);
}

/* x times the sigmoid of x; for gelu, of its polynomial in place of the tanh. */
INLINE floats activated(floats x, int is_gelu)
{
    floats at = x;
    if (is_gelu) {
        floats cube = v_mul_add(v_mul(x, x), v_all(0.044715f), v_all(1));
        at = v_mul(v_mul(x, cube), v_all(2 * 0.7978845608f));
    }
    floats decay = exp2_ps(v_mul(at, v_all(-LOG2E)));
    return v_div(x, v_add(decay, v_all(1)));
}

/* The two that are not of one register each: value by value. */
INLINE void activate_others(const struct gate *g, const bf16 *gate, const bf16 *up, int count, bf16 *to)
{
    float x[LANES], y[LANES];
    store_wide(x, load_floats(gate, count), count);
    if (g->activation == SQUARED_RELU) {
        for (int i = 0; i < count; i++)
            x[i] = x[i] > 0 ? x[i] * x[i] : 0;
        store_floats(to, load_wide(x, count), count);
        return;
    }
    store_wide(y, load_floats(up, count), count);
    for (int i = 0; i < count; i++) {
        x[i] = x[i] > g->limit ? g->limit : x[i];
        y[i] = (y[i] > g->limit ? g->limit : y[i] < -g->limit ? -g->limit : y[i]) + 1;
    }
    floats wide = load_wide(x, count), decay = exp2_ps(v_mul(wide, v_all(-LOG2E * g->alpha)));
    store_floats(to, v_mul(v_div(wide, v_add(decay, v_all(1))), load_wide(y, count)), count);
}

static void gate_others(const struct gate *g, int first, int end)
{
    int stride = g->activation == SQUARED_RELU ? g->width : 2 * g->width;
    for (int row = first; row < end; row++)
        for (int i = 0; i < g->width; i += LANES) {
            const bf16 *gate = g->gate_up + (size_t)row * stride + i;
            activate_others(g, gate, gate + g->width, smaller(LANES, g->width - i), g->out + (size_t)row * g->width + i);
        }
}

static void gate_rows(const void *of, int first, int end)
{
    const struct gate *g = of;
    if (g->activation >= CLAMPED_SILU) {
        gate_others(g, first, end);
        return;
    }
    for (int row = first; row < end; row++) {
        const bf16 *gate = g->gate_up + (size_t)row * 2 * g->width, *up = gate + g->width;
        bf16 *to = g->out + (size_t)row * g->width;
        for (int i = 0; i < g->width; i += LANES) {
            int count = g->width - i;
            floats product = v_mul(activated(load_floats(gate + i, count), g->activation == GELU_TANH), load_floats(up + i, count));
            store_floats(to + i, product, count);
        }
    }
}

void penstock_gated_activation(const struct gate *g)
{
    share_rows(gate_rows, g, g->num_rows, sizeof(bf16) * 3 * g->width, g->parallel, g->num_threads);
}
