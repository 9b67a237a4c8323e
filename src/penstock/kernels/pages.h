/* Keys and values in their pages, and what the forms of attention share. D head size, H heads, K key-value
 * heads: [slots, K, D]. */
#ifndef PENSTOCK_PAGES
#define PENSTOCK_PAGES

#include "vectors.h"

#define SUBTILE 64        /* query rows whose scores are held at once */
#define TILE 128          /* query rows of a work item */
#define KEYS 64           /* keys of a block */
#define MAX_HEAD 512
#define LOWEST -1e20f     /* the maximum of a row that saw nothing yet */
#define MASKED -1e30f     /* far below it, and finite: its weight is exactly 0 */

/* While one is worked on the next is asked for, a line at a time: many at once would wait for each other. */
struct block { const bf16 *keys[KEYS], *values[KEYS]; };

#include "scratch.h" /* what a thread holds */

/* What a thread takes at a time: query rows of one key-value head, or keys of a single token and some heads. */
struct item {
    float *partials;
    int chunk, part, first_head, end_head;
};

void penstock_attend_tile(const struct attention *a, struct scratch *w, const struct item *item, int tile_rows);
void penstock_attend_split(const struct attention *a, struct scratch *w, const struct item *item, const struct item *next);
void penstock_merge_splits(const struct attention *a, int chunk, int head, float *parts);
int penstock_num_splits(const struct attention *a, int chunk);

INLINE int num_tokens_of(const struct attention *a, int chunk) { return a->query_starts[chunk + 1] - a->query_starts[chunk]; }
INLINE int is_single(const struct attention *a, int chunk) { return num_tokens_of(a, chunk) == 1; }
INLINE int padded(int head_size) { return (head_size + 31) / 32 * 32; }

INLINE float power_of_2(float x) { return v_first(exp2_ps(v_all(x))); }

INLINE floats softcapped(floats scores, float scale, float cap)
{
    floats e = exp2_ps(v_mul(scores, v_all(2 * LOG2E * scale / cap)));
    floats share = v_div(v_all(2), v_add(e, v_all(1)));
    return v_mul(v_sub(v_all(1), share), v_all(cap));
}

/* Floats that a query head leaves of a split: sums, maximum, total. */
INLINE int partial_size(const struct attention *a) { return padded(a->head_size) + LANES; }

INLINE float sink_share(const struct attention *a, int head, float highest)
{
    return a->sinks ? power_of_2(a->sinks[head] * LOG2E - highest) : 0;
}

/* Offset of a position's key and value in the pages. */
INLINE size_t place_of(const struct attention *a, int chunk, int kv_head, int position)
{
    const int32_t *blocks = a->blocks + a->block_starts[chunk];
    size_t slot = (size_t)blocks[position / a->block_size] * a->block_size + position % a->block_size;
    return (slot * a->num_kv_heads + kv_head) * a->head_size;
}

/* Where the keys from `first` on lie; those past `count` repeat the last one. Positions are looked up once per block. */
static inline void locate(const struct attention *a, int chunk, int kv_head, int first, int count, struct block *to)
{
    size_t stride = (size_t)a->num_kv_heads * a->head_size, place = 0;
    for (int i = 0, left = 0; i < count; i++, place += stride, left--) {
        if (!left)
            place = place_of(a, chunk, kv_head, first + i), left = a->block_size - (first + i) % a->block_size;
        to->keys[i] = a->keys + place;
        to->values[i] = a->values + place;
    }
    for (int i = count; i < KEYS; i++)
        to->keys[i] = to->keys[count - 1], to->values[i] = to->values[count - 1];
}

#endif
