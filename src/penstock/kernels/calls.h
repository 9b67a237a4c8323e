/* What each C kernel is called with. Python reads this file too, and fills the structs by these names. */
#ifndef PENSTOCK_CALLS
#define PENSTOCK_CALLS

#include <stdint.h>

#define FEW_ROWS 16      /* of a product whose time is that of reading the matrix */

typedef uint16_t bf16;
/* GOMP_parallel, or a function like it. */
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
    const void *rows;             /* [outer, inner, width]; floats where it is wide */
    int64_t outer_stride, inner_stride;
    bf16 *out;                    /* as `rows`, without gaps */
    const float *weight;          /* [width] */
    void *sums;                   /* as `out`: what it is added to as well, or NULL */
    parallel_t parallel;
    int32_t num_outer, num_inner, width, num_threads, is_wide, sums_are_wide;
    float eps;
};

enum activation {
    SILU, GELU_TANH,
    CLAMPED_SILU,                 /* (up + 1) * gate * sigmoid(alpha * gate), both clamped */
    SQUARED_RELU                  /* there is no gate */
};

struct gate {
    const bf16 *gate_up;          /* [rows, 2 * width] */
    bf16 *out;                    /* [rows, width] */
    parallel_t parallel;
    enum activation activation;
    float limit, alpha;           /* where it is clamped */
    int32_t num_rows, width, num_threads;
};

/* What a matrix is stored in, as GGUF numbers it. */
enum type {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

struct product {
    const bf16 *rows;       /* [rows, inputs] */
    const bf16 *weight;     /* [outputs, inputs]; of codes, their blocks */
    const bf16 *bias;       /* [outputs], or NULL */
    bf16 *out;              /* [rows, outputs], rows `stride` apart */
    float *wide;            /* the same, in place of `out` where it is not NULL */
    void *workspace;        /* [penstock_product_bytes], of many rows */
    float *group_sums;      /* [rows, inputs / 16], of codes */
    parallel_t parallel;
    enum type type;         /* of the matrix */
    int32_t num_rows, num_inputs, num_outputs, stride, adds, num_threads; /* adds: to what is there */
};

struct unpacking {
    const bf16 *weight;     /* blocks of codes */
    const int64_t *ids;     /* of the rows that are wanted */
    bf16 *out;              /* [rows, inputs] */
    parallel_t parallel;
    enum type type;
    int32_t num_rows, num_inputs, num_threads;
};

/* Rows as a GGUF has them, and where they go. */
struct packing {
    const uint8_t *rows;
    const int64_t *outputs; /* of the rows, in `weight` */
    char *weight;           /* blocks of codes */
    parallel_t parallel;
    enum type type;
    int32_t num_rows, num_inputs, num_threads;
};

/* A matrix of each expert, one after another. */
struct of_experts {
    const bf16 *weight;     /* of the first */
    const bf16 *bias;       /* of the first, or NULL */
    const int64_t *places;  /* [experts]: bytes from the first's matrix to each, or NULL: they lie one after another */
    int64_t bytes;          /* from an expert's matrix to that of the next */
    enum type type;
    int32_t num_inputs, num_outputs;
    int32_t bias_stride;
};

struct mixture {
    const bf16 *rows;       /* [tokens, inputs] */
    const int32_t *experts; /* [tokens, active], each once */
    const float *weights;   /* the same */
    float *out;             /* [tokens, inputs], added to */
    void *workspace;        /* [penstock_mixture_bytes] */
    parallel_t parallel;
    struct of_experts gate, up, down; /* no gate: its weight is NULL */
    enum activation activation;
    float limit, alpha;
    int32_t num_tokens, num_active, num_experts, num_threads;
};

struct routing {
    const bf16 *rows;       /* [tokens, inputs] */
    const bf16 *router;     /* [experts, inputs] */
    const bf16 *bias;       /* [experts], or NULL */
    float *logits;          /* [tokens, experts] */
    int32_t *experts;       /* [tokens, active], the largest first; NULL: logits are all that is wanted */
    float *weights;         /* the same: a softmax over the chosen, or over all */
    parallel_t parallel;
    int32_t num_tokens, num_inputs, num_experts, num_active, is_over_all, num_threads;
};

enum kind { NORM, PRODUCT, STORE, ATTENTION, GATE, ROUTING, MIXTURE };

struct call {
    const void *with;       /* the struct of its kind */
    enum kind kind;
};

struct step {
    const struct call *calls;
    const struct attention *layout; /* of all layers of this step */
    void *workspace;                /* of products with many rows, and of mixtures */
    int32_t num_calls, num_rows;
};

int penstock_is_supported(void);
void penstock_run_step(const struct step *step);
void penstock_attend(const struct attention *a);
int64_t penstock_num_partials(const struct attention *a);
int64_t penstock_workspace_bytes(void);
void penstock_store(const struct store *s);
void penstock_rms_norm(const struct norm *n);
void penstock_gated_activation(const struct gate *g);
void penstock_multiply(const struct product *p);
void penstock_multiply_packed(const struct product *p);
void penstock_unpack_rows(const struct unpacking *u);
void penstock_pack(const struct packing *p);
void penstock_route(const struct routing *r);
void penstock_mix(const struct mixture *m);
int64_t penstock_mixture_bytes(const struct mixture *m);
int64_t penstock_product_bytes(int num_rows, int num_inputs, int num_threads);
int64_t penstock_panels_bytes(int num_inputs, int num_threads);
/* Of torch's OpenMP library; nothing here links to it. */
void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

#endif
