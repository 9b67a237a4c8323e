/* What each C kernel is called with. */
#ifndef PENSTOCK_CALLS
#define PENSTOCK_CALLS

#include <stdint.h>

#define FEW_ROWS 16      /* of a product whose time is that of reading the matrix */

typedef uint16_t bf16;
/* GOMP_parallel of the OpenMP library that torch uses, or a function like it. */
typedef void (*parallel_t)(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

struct attention {
    const bf16 *queries;          /* [tokens, H, D] */
    bf16 *out;                    /* the same */
    const bf16 *keys, *values;    /* pages of this layer */
    const int32_t *query_starts;  /* [chunks + 1] */
    const int32_t *context_lens;  /* [chunks] */
    const int32_t *blocks;        /* of all chunks, one after another */
    const int32_t *block_starts;  /* [chunks + 1] */
    const float *sinks;           /* [H], or NULL */
    float *partials;              /* of single tokens: [penstock_num_partials] */
    void *workspace;              /* [threads, penstock_workspace_bytes] */
    parallel_t parallel;
    int32_t num_chunks, block_size, num_heads, num_kv_heads, head_size;
    int32_t window;               /* 0: none */
    float scale, softcap;         /* softcap 0: none */
    int32_t num_threads;
};

struct heads {
    const bf16 *first;
    int64_t row_stride, head_stride;
};

struct store {
    struct heads queries, keys, values;
    bf16 *rotated;              /* [tokens, H, D] */
    bf16 *key_pages, *value_pages;
    const bf16 *cosines, *sines; /* [tokens, half], or NULL: nothing is rotated */
    const int32_t *query_starts, *context_lens, *blocks, *block_starts;
    parallel_t parallel;
    int32_t num_chunks, block_size, num_heads, num_kv_heads, head_size, half, num_threads;
};

struct norm {
    const void *from;             /* [outer, inner, width]; floats where it is wide */
    int64_t outer_stride, inner_stride;
    bf16 *to;                     /* as `from`, without gaps */
    const float *weight;          /* [width] */
    parallel_t parallel;
    int32_t num_outer, num_inner, width, num_threads, is_wide;
    float eps;
};

struct gate {
    const bf16 *gate_up;          /* [rows, 2 * width] */
    bf16 *to;                     /* [rows, width] */
    parallel_t parallel;
    int32_t num_rows, width, is_gelu, num_threads;
};

struct product {
    const bf16 *rows;       /* [rows, inputs] */
    const bf16 *weight;     /* [outputs, inputs]; of packed codes, their blocks */
    const bf16 *bias;       /* [outputs], or NULL */
    bf16 *out;              /* [rows, outputs] */
    float *wide;            /* the same, in place of `out` where it is not NULL */
    void *workspace;        /* [penstock_product_bytes], of many rows */
    float *group_sums;      /* [rows, groups], of packed codes */
    parallel_t parallel;
    int32_t num_rows, num_inputs, num_outputs, adds, num_threads, is_int4; /* adds: to what is there */
};

void penstock_attend(const struct attention *a);
int64_t penstock_num_partials(const struct attention *a);
void penstock_store(const struct store *s);
void penstock_rms_norm(const struct norm *n);
void penstock_gated_activation(const struct gate *g);
void penstock_multiply(const struct product *p);
void penstock_multiply_many(const struct product *p);
void penstock_multiply_packed(const struct product *p);
int64_t penstock_product_bytes(int num_rows, int num_inputs, int num_threads);
int64_t penstock_panels_bytes(int num_inputs, int num_threads);

#endif
