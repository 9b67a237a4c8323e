/* Runs the C kernels on made-up numbers and writes what they give, for comparison with other processors: of each result a line with
 * its name and its size, then its floats. Ends with 1 where a row depends on what is computed beside it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "blocks.h"

#define OUTPUTS 88
#define MOST_ROWS 210
#define TOKENS 300
#define PAGE 16
#define NUM_PAGES ((TOKENS + PAGE - 1) / PAGE)

static uint32_t state = 1;
static int num_faults;

static uint32_t some_bits(void)
{
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

/* Between -2 and 2, as what layers make. */
static bf16 some_number(void)
{
    uint32_t bits = some_bits();
    return (bf16)((bits & 0x8000) | (0x3f80 - (bits >> 16) % 3 * 0x80) | (bits & 0x7f));
}

static void *memory(size_t num_bytes)
{
    void *found = aligned_alloc(64, (num_bytes + 127) / 64 * 64); /* and a line that may be asked for */
    memset(found, 0, (num_bytes + 127) / 64 * 64);
    return found;
}

static bf16 *numbers(size_t count)
{
    bf16 *found = memory(sizeof(bf16) * count);
    for (size_t i = 0; i < count; i++)
        found[i] = some_number();
    return found;
}

static void write_floats(const char *name, int variant, const float *values, size_t count)
{
    printf("%s-%d %zu\n", name, variant, count);
    fwrite(values, sizeof *values, count, stdout);
}

static void write_numbers(const char *name, int variant, const bf16 *values, size_t count)
{
    float *wide = memory(sizeof(float) * count);
    for (size_t i = 0; i < count; i++)
        ((uint32_t *)wide)[i] = (uint32_t)values[i] << 16;
    write_floats(name, variant, wide, count);
    free(wide);
}

static void must_equal(const char *name, int variant, int count, const void *one, const void *other, size_t num_bytes)
{
    if (memcmp(one, other, num_bytes))
        num_faults++, fprintf(stderr, "%s-%d: %d rows alone have other bits\n", name, variant, count);
}

struct shared { void (*body)(void *); void *data; };

static void *run_shared(void *of)
{
    struct shared *shared = of;
    shared->body(shared->data);
    return NULL;
}

static void together(void (*body)(void *), void *data, unsigned num_threads, unsigned flags)
{
    struct shared shared = {body, data};
    pthread_t others[8];
    (void)flags;
    for (unsigned i = 1; i < num_threads; i++)
        pthread_create(&others[i], NULL, run_shared, &shared);
    body(data);
    for (unsigned i = 1; i < num_threads; i++)
        pthread_join(others[i], NULL);
}

/* Random codes, and factors of a sane size. */
static char *some_blocks(enum type type, int num_inputs, int num_blocks)
{
    int num_groups = num_inputs / PACKED_GROUP;
    enum factors factors = format_of(type).factors;
    size_t num_bytes = num_blocks * block_bytes(type, num_groups);
    char *blocks = memory(num_bytes);
    for (size_t i = 0; i < num_bytes; i++)
        blocks[i] = (char)(some_bits() >> 9);
    for (char *set = blocks; set < blocks + num_bytes; set += set_bytes(type)) {
        char *at = set + groups_of_set(type) * code_bytes(type);
        for (int i = 0; i < BLOCK_OUTPUTS * (1 + has_lowest(type)); i++)
            if (factors != POWER)
                ((uint16_t *)at)[i] = (uint16_t)(0x2000 | (some_bits() & 0x83ff));
            else
                at[i] = (char)(118 + some_bits() % 4);
    }
    return blocks;
}

static void run_product(const char *name, enum type type, int num_inputs)
{
    static const int counts[] = {1, 2, 3, 4, 7, 9, 13, 31, 97};
    const bf16 *rows = numbers((size_t)MOST_ROWS * num_inputs), *bias = numbers(OUTPUTS);
    const void *weight = type == BF16 ? (void *)numbers((size_t)(OUTPUTS + 32) * num_inputs)
                                      : some_blocks(type, num_inputs, (OUTPUTS + 15) / 16);
    float *whole = memory(sizeof(float) * MOST_ROWS * OUTPUTS), *part = memory(sizeof(float) * MOST_ROWS * OUTPUTS);
    bf16 *added = memory(sizeof(bf16) * MOST_ROWS * OUTPUTS);
    struct product p = {.rows = rows, .weight = weight, .wide = whole, .parallel = together, .type = type, .stride = OUTPUTS,
                        .num_rows = MOST_ROWS, .num_inputs = num_inputs, .num_outputs = OUTPUTS, .num_threads = 1};
    p.workspace = memory(penstock_product_bytes(MOST_ROWS, num_inputs, 3));
    p.group_sums = memory(sizeof(float) * MOST_ROWS * (num_inputs / 16 + 1));
    penstock_multiply(&p);
    write_floats(name, type, whole, (size_t)MOST_ROWS * OUTPUTS);
    p.num_threads = 3, p.wide = part;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        p.num_rows = counts[i], p.rows = rows + (size_t)(MOST_ROWS - counts[i]) * num_inputs;
        penstock_multiply(&p);
        size_t first = (size_t)(MOST_ROWS - counts[i]) * OUTPUTS;
        must_equal(name, type, counts[i], part, whole + first, sizeof(float) * counts[i] * OUTPUTS);
    }
    p.wide = NULL, p.out = added, p.bias = bias, p.adds = 1, p.num_rows = 5;
    penstock_multiply(&p);
    write_numbers("added", type, added, 5 * OUTPUTS);
    if (type != BF16) {
        const int64_t ids[] = {3, 87, 16};
        struct unpacking u = {.weight = weight, .ids = ids, .out = added, .parallel = together, .type = type, .num_rows = 3,
                              .num_inputs = num_inputs, .num_threads = 1};
        penstock_unpack_rows(&u);
        write_numbers("rows", type, added, (size_t)3 * num_inputs);
    }
}

struct model {
    int head_size, window, has_sinks;
    float softcap;
    bf16 *queries, *keys, *values, *key_pages, *value_pages, *cosines, *sines;
};

#define HEADS 4
#define KV_HEADS 2

/* Stores and attends the tokens from `first` to `end`; `out`: of these. */
static void attend(const struct model *m, int first, int end, bf16 *rotated, bf16 *out)
{
    static const float sinks[HEADS] = {0.5f, -1, 2, 0};
    int size = m->head_size, half = size / 2, num_threads = 3;
    int32_t starts[] = {0, end - first}, contexts[] = {end}, block_starts[] = {0, NUM_PAGES}, blocks[NUM_PAGES];
    for (int i = 0; i < NUM_PAGES; i++)
        blocks[i] = NUM_PAGES - 1 - i;
    struct heads queries = {m->queries + (size_t)first * HEADS * size, HEADS * size, size};
    struct heads keys = {m->keys + (size_t)first * KV_HEADS * size, KV_HEADS * size, size}, values = keys;
    values.first = m->values + (size_t)first * KV_HEADS * size;
    struct store s = {.queries = queries, .keys = keys, .values = values, .rotated = rotated, .key_pages = m->key_pages,
                      .value_pages = m->value_pages, .cosines = m->cosines + (size_t)first * half,
                      .sines = m->sines + (size_t)first * half, .query_starts = starts, .context_lens = contexts,
                      .blocks = blocks, .block_starts = block_starts, .parallel = together, .num_chunks = 1, .block_size = PAGE,
                      .num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_size = size, .half = half, .num_threads = num_threads};
    penstock_store(&s);
    struct attention a = {.queries = rotated, .out = out, .keys = m->key_pages, .values = m->value_pages, .query_starts = starts,
                          .context_lens = contexts, .blocks = blocks, .block_starts = block_starts, .parallel = together,
                          .sinks = m->has_sinks ? sinks : NULL, .num_chunks = 1, .block_size = PAGE, .num_heads = HEADS,
                          .num_kv_heads = KV_HEADS, .head_size = size, .window = m->window, .scale = 0.125f,
                          .softcap = m->softcap, .num_threads = num_threads};
    a.partials = memory(sizeof(float) * penstock_num_partials(&a));
    a.workspace = memory(num_threads * penstock_workspace_bytes());
    penstock_attend(&a);
    free(a.partials), free(a.workspace);
}

static void run_attention(int variant, struct model m)
{
    int row = HEADS * m.head_size;
    size_t page_bytes = sizeof(bf16) * NUM_PAGES * PAGE * KV_HEADS * m.head_size;
    m.queries = numbers((size_t)TOKENS * row);
    m.keys = numbers((size_t)TOKENS * row), m.values = numbers((size_t)TOKENS * row);
    m.cosines = numbers((size_t)TOKENS * m.head_size), m.sines = numbers((size_t)TOKENS * m.head_size);
    m.key_pages = memory(page_bytes), m.value_pages = memory(page_bytes);
    bf16 *rotated = memory(sizeof(bf16) * TOKENS * row), *whole = memory(sizeof(bf16) * TOKENS * row);
    bf16 *parts = memory(sizeof(bf16) * TOKENS * row);
    attend(&m, 0, TOKENS, rotated, whole);
    write_numbers("rotated", variant, rotated, (size_t)TOKENS * row);
    write_numbers("attended", variant, whole, (size_t)TOKENS * row);
    for (int first = 0; first < TOKENS; first += 37)
        attend(&m, first, smaller(first + 37, TOKENS), rotated, parts + (size_t)first * row);
    must_equal("attended", variant, 37, parts, whole, sizeof(bf16) * TOKENS * row);
    attend(&m, TOKENS - 1, TOKENS, rotated, parts);
    write_numbers("single", variant, parts, row);
}

/* A norm, a product that adds, a norm that adds, and a gate, as a step of three threads. */
static void run_step(int is_wide)
{
    enum { WIDTH = 72, ROWS = 40 };
    bf16 *normed = memory(sizeof(bf16) * ROWS * WIDTH), *gated = memory(sizeof(bf16) * ROWS * WIDTH / 2);
    bf16 *narrow = numbers(ROWS * WIDTH), *weight = numbers((WIDTH + 32) * WIDTH);
    float *wide = memory(sizeof(float) * ROWS * WIDTH), *scale = memory(sizeof(float) * WIDTH);
    for (int i = 0; i < ROWS * WIDTH; i++)
        ((uint32_t *)wide)[i] = (uint32_t)narrow[i] << 16;
    for (int i = 0; i < WIDTH; i++)
        scale[i] = 0.5f + i % 7;
    void *hidden = is_wide ? (void *)wide : narrow;
    struct norm first = {.rows = hidden, .outer_stride = WIDTH, .out = normed, .weight = scale, .num_inner = 1, .width = WIDTH,
                         .is_wide = is_wide, .eps = 1e-6f};
    struct norm second = {.rows = normed, .outer_stride = WIDTH, .out = normed, .weight = scale, .num_inner = 1, .width = WIDTH,
                          .eps = 1e-6f, .sums = hidden, .sums_are_wide = is_wide};
    struct product product = {.rows = normed, .weight = weight, .type = BF16, .stride = WIDTH, .num_inputs = WIDTH,
                              .num_outputs = WIDTH, .adds = 1, .out = is_wide ? NULL : narrow, .wide = is_wide ? wide : NULL};
    struct gate gate = {.gate_up = normed, .out = gated, .width = WIDTH / 2, .activation = is_wide ? GELU_TANH : SILU};
    struct call calls[] = {{&first, NORM}, {&product, PRODUCT}, {&second, NORM}, {&gate, GATE}};
    struct attention layout = {.num_threads = 3, .parallel = together};
    struct step step = {.calls = calls, .layout = &layout, .num_calls = 4, .num_rows = ROWS};
    step.workspace = memory(penstock_product_bytes(ROWS, WIDTH, 3));
    penstock_run_step(&step);
    write_numbers("normed", is_wide, normed, ROWS * WIDTH);
    write_numbers("gated", is_wide, gated, ROWS * WIDTH / 2);
    if (is_wide)
        write_floats("hidden", is_wide, wide, ROWS * WIDTH);
    else
        write_numbers("hidden", is_wide, narrow, ROWS * WIDTH);
}

/* A router and its experts, of codes or in bfloat16. */
static void run_mixture(enum type type)
{
    enum { WIDTH = 256, INNER = 288, EXPERTS = 6, ACTIVE = 3, ROWS = 45 };
    const bf16 *rows = numbers(ROWS * WIDTH), *router = numbers((EXPERTS + 16) * WIDTH);
    float *logits = memory(sizeof(float) * ROWS * EXPERTS), *weights = memory(sizeof(float) * ROWS * ACTIVE);
    float *whole = memory(sizeof(float) * ROWS * WIDTH), *part = memory(sizeof(float) * ROWS * WIDTH);
    int32_t *experts = memory(sizeof(int32_t) * ROWS * ACTIVE);
    struct routing r = {.rows = rows, .router = router, .logits = logits, .experts = experts, .weights = weights,
                        .parallel = together, .num_tokens = ROWS, .num_inputs = WIDTH, .num_experts = EXPERTS,
                        .num_active = ACTIVE, .num_threads = 3};
    penstock_route(&r);
    write_floats("routed", type, weights, ROWS * ACTIVE);
    struct of_experts up = {.type = type, .num_inputs = WIDTH, .num_outputs = INNER}, down = up;
    down.num_inputs = INNER, down.num_outputs = WIDTH;
    up.bytes = type == BF16 ? sizeof(bf16) * WIDTH * INNER : INNER / 16 * block_bytes(type, WIDTH / PACKED_GROUP);
    down.bytes = type == BF16 ? up.bytes : (int64_t)WIDTH / 16 * block_bytes(type, INNER / PACKED_GROUP);
    up.weight = type == BF16 ? numbers((EXPERTS + 1) * WIDTH * INNER) : (void *)some_blocks(type, WIDTH, EXPERTS * INNER / 16);
    down.weight = type == BF16 ? numbers((EXPERTS + 1) * WIDTH * INNER) : (void *)some_blocks(type, INNER, EXPERTS * WIDTH / 16);
    struct mixture m = {.rows = rows, .experts = experts, .weights = weights, .out = whole, .parallel = together, .gate = up,
                        .up = up, .down = down, .num_tokens = ROWS, .num_active = ACTIVE, .num_experts = EXPERTS,
                        .num_threads = 3};
    m.workspace = memory(penstock_mixture_bytes(&m));
    penstock_mix(&m);
    write_floats("mixed", type, whole, ROWS * WIDTH);
    for (int token = 0; token < ROWS; token++) {
        m.rows = rows + token * WIDTH, m.experts = experts + token * ACTIVE, m.weights = weights + token * ACTIVE;
        m.num_tokens = 1, m.out = part + token * WIDTH;
        penstock_mix(&m);
    }
    must_equal("mixed", type, 1, part, whole, sizeof(float) * ROWS * WIDTH);
}

int main(void)
{
    if (!penstock_is_supported())
        return 2;
#define PRODUCT_OF(TYPE) run_product("product", TYPE, 512);
    EACH_TYPE(PRODUCT_OF)
    run_product("product", BF16, 512);
    run_product("odd", BF16, 70);
    run_attention(0, (struct model){.head_size = 64});
    run_attention(1, (struct model){.head_size = 80, .window = 100, .has_sinks = 1});
    run_attention(2, (struct model){.head_size = 256, .softcap = 30});
    run_step(0);
    run_step(1);
    run_mixture(BF16);
    run_mixture(Q4_0);
    return num_faults > 0;
}
