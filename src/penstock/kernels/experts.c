/* Mixtures of experts: which experts a token has, and the sum of what they give.
 *
 * Rows are grouped by expert over the whole step, so that the matrices of an expert are read once. Experts come in waves, whose
 * rows have what lies between the products in the workspace. A wave's matrices are cut into slices of outputs, which threads
 * take one by one. What a token gets from its experts is added in the order of the experts, whatever is computed beside it.
 */
#include <string.h>

#include "blocks.h"

#define SLICE 128    /* outputs; a whole number of what the products take at a time */
#define LEAST_WAVE 64 /* rows that are always in one wave; more where the step has more tokens */
#define COLUMNS 256  /* that a thread adds up at a time */
#define SHARED_BYTES 65536 /* of matrices that pay for waking a thread */

/* --- routing ----------------------------------------------------------------------------------------------------- */

#define TOKENS 4     /* that are scored together */
#define EXPERTS 4
#define MANY_EXPERTS 16 /* that a thread scores for some tokens */

/* A score is added up in one order, whatever is scored beside it. */
INLINE void score_tile(const struct routing *r, int token, int expert)
{
    const bf16 *rows[TOKENS], *router[EXPERTS];
    floats sums[TOKENS][EXPERTS];
    for (int t = 0; t < TOKENS; t++)
        rows[t] = r->rows + (size_t)smaller(token + t, r->num_tokens - 1) * r->num_inputs;
    for (int e = 0; e < EXPERTS; e++)
        router[e] = r->router + (size_t)smaller(expert + e, r->num_experts - 1) * r->num_inputs;
    for (int t = 0; t < TOKENS; t++)
        for (int e = 0; e < EXPERTS; e++)
            sums[t][e] = v_zero();
    for (int i = 0; i < r->num_inputs; i += LANES) {
        int count = smaller(LANES, r->num_inputs - i);
        floats weights[EXPERTS];
        for (int e = 0; e < EXPERTS; e++)
            weights[e] = load_floats(router[e] + i, count);
        for (int t = 0; t < smaller(TOKENS, r->num_tokens - token); t++) {
            floats x = load_floats(rows[t] + i, count);
            for (int e = 0; e < EXPERTS; e++)
                sums[t][e] = v_mul_add(x, weights[e], sums[t][e]);
        }
    }
    for (int t = 0; t < smaller(TOKENS, r->num_tokens - token); t++)
        for (int e = 0; e < smaller(EXPERTS, r->num_experts - expert); e++) {
            uint32_t bits = r->bias ? (uint32_t)r->bias[expert + e] << 16 : 0;
            float bias;
            memcpy(&bias, &bits, sizeof bias);
            r->logits[(size_t)(token + t) * r->num_experts + expert + e] = v_sum(sums[t][e]) + bias;
        }
}

static void score_items(const void *of, int first, int end)
{
    const struct routing *r = of;
    int groups = (r->num_experts + MANY_EXPERTS - 1) / MANY_EXPERTS;
    for (int item = first; item < end; item++) {
        int expert = item % groups * MANY_EXPERTS;
        for (int e = expert; e < smaller(expert + MANY_EXPERTS, r->num_experts); e += EXPERTS)
            score_tile(r, item / groups * TOKENS, e);
    }
}

INLINE float exponential(float x) { return v_first(exp2_ps(v_all(x * LOG2E))); }

static int is_among(const int32_t *found, int count, int expert)
{
    for (int i = 0; i < count; i++)
        if (found[i] == expert)
            return 1;
    return 0;
}

static void route_token(const struct routing *r, int token)
{
    const float *logits = r->logits + (size_t)token * r->num_experts;
    int32_t *experts = r->experts + (size_t)token * r->num_active;
    float *weights = r->weights + (size_t)token * r->num_active, sum = 0;
    for (int i = 0; i < r->num_active; i++) {
        int best = -1;
        for (int expert = 0; expert < r->num_experts; expert++)
            if ((best < 0 || logits[expert] > logits[best]) && !is_among(experts, i, expert))
                best = expert;
        experts[i] = best;
        weights[i] = exponential(logits[best] - logits[experts[0]]);
        sum += weights[i];
    }
    if (r->is_over_all) {
        sum = 0;
        for (int expert = 0; expert < r->num_experts; expert++)
            sum += exponential(logits[expert] - logits[experts[0]]);
    }
    for (int i = 0; i < r->num_active; i++)
        weights[i] /= sum;
}

static void route_tokens(const void *of, int first, int end)
{
    for (int token = first; token < end; token++)
        route_token(of, token);
}

void penstock_route(const struct routing *r)
{
    size_t row_bytes = sizeof(float) * r->num_experts * r->num_active;
    int num_items = (r->num_tokens + TOKENS - 1) / TOKENS * ((r->num_experts + MANY_EXPERTS - 1) / MANY_EXPERTS);
    share_rows(score_items, r, num_items, sizeof(bf16) * MANY_EXPERTS * r->num_inputs, r->parallel, r->num_threads);
    if (r->experts)
        share_rows(route_tokens, r, r->num_tokens, row_bytes, r->parallel, r->num_threads);
}

/* --- experts ----------------------------------------------------------------------------------------------------- */

/* What a wave has in the workspace. */
struct buffers {
    int32_t *starts;  /* [experts + 1]: of each expert's rows */
    int32_t *slots;   /* [rows]: token * active + which of its experts */
    bf16 *rows;       /* [rows of a wave, inputs] */
    bf16 *gate_up;    /* [rows of a wave, what the activation reads] */
    bf16 *inner;      /* [rows of a wave, inner] */
    float *given;     /* [rows of a wave, inputs] */
    char *of_threads; /* [threads, thread_bytes] */
    size_t thread_bytes, sums_bytes, num_bytes;
};

struct wave {
    const struct mixture *m;
    const struct buffers *at;
    int first_expert, end_expert, first_row, num_rows;
    int is_down, slices_of_expert, num_items;
    atomic_int next_item, next_thread;
};

INLINE size_t in_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

INLINE int most_rows(const struct mixture *m) { return larger(m->num_tokens, LEAST_WAVE); }

INLINE int read_width(const struct mixture *m) { return m->up.num_outputs * (m->gate.weight ? 2 : 1); }

static struct buffers buffers_of(const struct mixture *m)
{
    struct buffers at = {0};
    char *next = m->workspace;
    size_t rows = most_rows(m), most_inputs = larger(m->up.num_inputs, m->down.num_inputs);
    size_t in_step = smaller(m->num_tokens, most_rows(m)) * (size_t)m->num_active;
    at.starts = (void *)next, next += in_lines(sizeof(int32_t) * (m->num_experts + 1));
    at.slots = (void *)next, next += in_lines(sizeof(int32_t) * in_step);
    at.rows = (void *)next, next += in_lines(sizeof(bf16) * rows * m->up.num_inputs);
    at.gate_up = (void *)next, next += in_lines(sizeof(bf16) * rows * read_width(m));
    at.inner = (void *)next, next += in_lines(sizeof(bf16) * rows * m->up.num_outputs);
    at.given = (void *)next, next += in_lines(sizeof(float) * rows * m->down.num_outputs);
    at.of_threads = next;
    at.sums_bytes = in_lines(sizeof(float) * m->num_tokens * (most_inputs / BLOCK_OUTPUTS + 1));
    at.thread_bytes = at.sums_bytes + in_lines(penstock_product_bytes(m->num_tokens, most_inputs, 1));
    at.num_bytes = next - (char *)m->workspace + m->num_threads * at.thread_bytes;
    return at;
}

int64_t penstock_mixture_bytes(const struct mixture *m) { return buffers_of(m).num_bytes; }

/* Slots in the order of their experts, and of tokens within one. */
static void sort_slots(const struct mixture *m, const struct buffers *at)
{
    int num_slots = m->num_tokens * m->num_active;
    memset(at->starts, 0, sizeof(int32_t) * (m->num_experts + 1));
    for (int slot = 0; slot < num_slots; slot++)
        at->starts[m->experts[slot] + 1]++;
    for (int expert = 0; expert < m->num_experts; expert++)
        at->starts[expert + 1] += at->starts[expert];
    for (int slot = 0; slot < num_slots; slot++)
        at->slots[at->starts[m->experts[slot]]++] = slot;
    for (int expert = m->num_experts; expert > 0; expert--)
        at->starts[expert] = at->starts[expert - 1];
    at->starts[0] = 0;
}

static void gather_rows(const void *of, int first, int end)
{
    const struct wave *w = of;
    size_t width = w->m->up.num_inputs;
    for (int row = first; row < end; row++) {
        int token = w->at->slots[w->first_row + row] / w->m->num_active;
        memcpy(w->at->rows + row * width, w->m->rows + token * width, sizeof(bf16) * width);
    }
}

INLINE int num_slices(const struct of_experts *with) { return with->weight ? (with->num_outputs + SLICE - 1) / SLICE : 0; }

/* Some outputs of an expert for all of its rows. */
static void multiply_slice(const struct wave *w, const struct of_experts *with, int expert, int slice, int column, char *scratch)
{
    int first = slice * SLICE, row = w->at->starts[expert] - w->first_row;
    struct product p = {
        .num_rows = w->at->starts[expert + 1] - w->at->starts[expert],
        .num_inputs = with->num_inputs,
        .num_outputs = smaller(SLICE, with->num_outputs - first),
        .type = with->type,
        .num_threads = 1,
        .group_sums = (float *)scratch,
        .workspace = scratch + w->at->sums_bytes,
    };
    size_t skipped = with->type == BF16 ? sizeof(bf16) * (size_t)first * with->num_inputs
                                        : first / BLOCK_OUTPUTS * block_bytes(with->type, num_groups_of(&p));
    int64_t place = with->places ? with->places[expert] : expert * with->bytes;
    p.weight = (const bf16 *)((const char *)with->weight + place + skipped);
    p.bias = with->bias ? with->bias + (size_t)expert * with->bias_stride + first : NULL;
    if (w->is_down) {
        p.rows = w->at->inner + (size_t)row * with->num_inputs;
        p.stride = with->num_outputs;
        p.wide = w->at->given + (size_t)row * p.stride + first;
    } else {
        p.rows = w->at->rows + (size_t)row * with->num_inputs;
        p.stride = read_width(w->m);
        p.out = w->at->gate_up + (size_t)row * p.stride + column + first;
    }
    penstock_multiply(&p);
}

static void run_slices(void *data)
{
    struct wave *w = data;
    const struct mixture *m = w->m;
    char *scratch = w->at->of_threads + atomic_fetch_add(&w->next_thread, 1) * w->at->thread_bytes;
    int expert = w->first_expert - 1, before = -1; /* experts with rows, up to this one */
    for (int item; (item = atomic_fetch_add(&w->next_item, 1)) < w->num_items;) {
        int slice = item % w->slices_of_expert, of_gate = w->is_down ? 0 : num_slices(&m->gate);
        while (before < item / w->slices_of_expert) {
            expert++;
            before += w->at->starts[expert + 1] > w->at->starts[expert];
        }
        if (w->is_down)
            multiply_slice(w, &m->down, expert, slice, 0, scratch);
        else if (slice < of_gate)
            multiply_slice(w, &m->gate, expert, slice, 0, scratch);
        else
            multiply_slice(w, &m->up, expert, slice - of_gate, m->gate.weight ? m->gate.num_outputs : 0, scratch);
    }
}

static void multiply_all(struct wave *w, int is_down)
{
    const struct mixture *m = w->m;
    int num_used = 0;
    for (int expert = w->first_expert; expert < w->end_expert; expert++)
        num_used += w->at->starts[expert + 1] > w->at->starts[expert];
    w->is_down = is_down;
    w->slices_of_expert = is_down ? num_slices(&m->down) : num_slices(&m->gate) + num_slices(&m->up);
    w->num_items = num_used * w->slices_of_expert;
    w->next_item = w->next_thread = 0;
    if (m->num_threads > 1 && (size_t)w->num_items * SLICE * m->up.num_inputs / 2 > SHARED_BYTES)
        m->parallel(run_slices, w, m->num_threads, 0);
    else
        run_slices(w);
}

static void activate(const struct wave *w)
{
    const struct mixture *m = w->m;
    const struct gate gate = {
        .gate_up = w->at->gate_up, .out = w->at->inner, .parallel = m->parallel, .activation = m->activation,
        .limit = m->limit, .alpha = m->alpha, .num_rows = w->num_rows, .width = m->up.num_outputs, .num_threads = m->num_threads,
    };
    penstock_gated_activation(&gate);
}

/* Columns of all rows: a token may have several. */
static void add_columns(const void *of, int first, int end)
{
    const struct wave *w = of;
    int width = w->m->down.num_outputs;
    for (int row = 0; row < w->num_rows; row++) {
        int slot = w->at->slots[w->first_row + row];
        floats weight = v_all(w->m->weights[slot]);
        float *to = w->m->out + (size_t)(slot / w->m->num_active) * width;
        const float *from = w->at->given + (size_t)row * width;
        for (int i = first * COLUMNS; i < smaller(end * COLUMNS, width); i += LANES) {
            int count = smaller(LANES, width - i);
            store_wide(to + i, v_mul_add(weight, load_wide(from + i, count), load_wide(to + i, count)), count);
        }
    }
}

static void run_wave(struct wave *w)
{
    const struct mixture *m = w->m;
    size_t row_bytes = sizeof(bf16) * m->up.num_inputs;
    share_rows(gather_rows, w, w->num_rows, row_bytes, m->parallel, m->num_threads);
    multiply_all(w, 0);
    activate(w);
    multiply_all(w, 1);
    int num_columns = (m->down.num_outputs + COLUMNS - 1) / COLUMNS;
    share_rows(add_columns, w, num_columns, sizeof(float) * COLUMNS * w->num_rows, m->parallel, m->num_threads);
}

void penstock_mix(const struct mixture *m)
{
    struct buffers at = buffers_of(m);
    sort_slots(m, &at);
    for (int first = 0, end; first < m->num_experts; first = end) {
        int start = at.starts[first];
        for (end = first + 1; end < m->num_experts && at.starts[end + 1] - start <= most_rows(m); end++)
            ;
        struct wave wave = {.m = m, .at = &at, .first_expert = first, .end_expert = end, .first_row = start,
                            .num_rows = at.starts[end] - start};
        if (wave.num_rows)
            run_wave(&wave);
    }
}
