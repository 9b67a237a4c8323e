/* Attention over pages in bfloat16, with the dot products of AVX-512.
 *
 * A work item is one key-value head of some query rows. The query heads that share it are rows of their own, so
 * that each key and value is read once for all of them. Keys are visited in blocks that begin at fixed positions,
 * and a row never looks at its neighbours: its result does not depend on how the prompt was cut into chunks. A
 * chunk of one token is split over its keys instead, and the parts are merged.
 *
 * D head size, H heads, K key-value heads. Pages are [slots, K, D].
 */
#include <stdatomic.h>
#include <string.h>

#include "cpu_vectors.h"

#define SUBTILE 64        /* query rows whose scores are held at once */
#define TILE 128          /* query rows of a work item */
#define KEYS 64           /* keys of a block */
#define SPLIT 256         /* keys of a work item of a single token */
#define MAX_HEAD 256
#define MAX_WIDTH MAX_HEAD
#define LOWEST -1e20f     /* the maximum of a row that saw nothing yet */
#define MASKED -1e30f     /* far below it, and finite: its weight is exactly 0 */

struct scratch {
    uint32_t queries[TILE / SUBTILE][MAX_HEAD / 2][SUBTILE]; /* pairs of dimensions, a row per lane */
    float scores[KEYS][SUBTILE];
    uint32_t weights[KEYS / 2][SUBTILE];                 /* pairs of keys, a row per lane */
    uint32_t values[KEYS / 2 * MAX_WIDTH];               /* pairs of keys, a dimension per lane, in unpacked order */
    float sums[TILE * MAX_WIDTH];
    float highest[TILE], totals[TILE], fading[SUBTILE];
    int32_t positions[TILE];
    const bf16 *key_rows[KEYS], *value_rows[KEYS];
};

struct job {
    const struct attention *of;
    atomic_int next_item, next_thread;
    int num_items;
};

int penstock_is_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

int64_t penstock_workspace_bytes(void) { return (sizeof(struct scratch) + 63) / 64 * 64; }

INLINE int padded(int head_size) { return (head_size + 31) / 32 * 32; }
INLINE int count_of_scores(int num_keys) { return (num_keys + 7) / 8 * 8; }

INLINE float power_of_2(float x) { return _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(x))); }

INLINE __m512 softcapped(__m512 scores, float scale, float cap)
{
    __m512 e = exp2_ps(_mm512_mul_ps(scores, _mm512_set1_ps(2 * LOG2E * scale / cap)));
    __m512 share = _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(e, _mm512_set1_ps(1)));
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(1), share), _mm512_set1_ps(cap));
}

/* Two registers of floats, of one key and the next, as pairs of bfloat16. */
INLINE __m512i pairs(__m512 first, __m512 second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* 32 dimensions in the order that unpacking left them in, divided and written in their own order. */
INLINE void write_dims(bf16 *out, const float *sums, float factor, int num_dims)
{
    const __m512i lower = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i upper = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    __m512 a = _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(factor));
    __m512 b = _mm512_mul_ps(_mm512_loadu_ps(sums + LANES), _mm512_set1_ps(factor));
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(a, upper, b), _mm512_permutex2var_ps(a, lower, b));
    if (num_dims >= 32)
        _mm512_storeu_si512(out, both);
    else
        _mm512_mask_storeu_epi16(out, (1u << num_dims) - 1, both);
}

/* Offset of a position's key and value in the pages. */
INLINE size_t place_of(const struct attention *a, int chunk, int kv_head, int position)
{
    const int32_t *blocks = a->blocks + a->block_starts[chunk];
    size_t slot = (size_t)blocks[position / a->block_size] * a->block_size + position % a->block_size;
    return (slot * a->num_kv_heads + kv_head) * a->head_size;
}

/* Reads keys or values of some heads in the order in which they lie, a word of each line: the processor then guesses the
 * next ones, which it does neither from the order in which heads use them nor from prefetch instructions. */
static void bring_near(const struct attention *a, const bf16 *pages, int chunk, int first_head, int end_head, int first,
                       int end)
{
    size_t stride = (size_t)a->num_kv_heads * a->head_size, place = 0;
    for (int position = first, left = 0; position < end; position++, place += stride, left--) {
        if (!left)
            place = place_of(a, chunk, first_head, position), left = a->block_size - position % a->block_size;
        for (int dim = 0; dim < (end_head - first_head) * a->head_size; dim += 32)
            (void)*(const volatile bf16 *)(pages + place + dim);
    }
}

/* Where the keys from `first` on lie; those past `count` repeat the last one. Positions are looked up once per block. */
static void locate(const struct attention *a, int chunk, int kv_head, int first, int count, struct scratch *w)
{
    size_t stride = (size_t)a->num_kv_heads * a->head_size, place = 0;
    for (int i = 0, left = 0; i < count; i++, place += stride, left--) {
        if (!left)
            place = place_of(a, chunk, kv_head, first + i), left = a->block_size - (first + i) % a->block_size;
        w->key_rows[i] = a->keys + place;
        w->value_rows[i] = a->values + place;
    }
    for (int i = count; i < KEYS; i++) {
        w->key_rows[i] = w->key_rows[count - 1];
        w->value_rows[i] = w->value_rows[count - 1];
    }
}

static void pack_queries(const struct attention *a, const bf16 *first, int first_row, int num_rows, int start,
                         int kv_head, struct scratch *w)
{
    int group = a->num_heads / a->num_kv_heads, num_pairs = a->head_size / 2;
    for (int row = 0; row < (num_rows + LANES - 1) / LANES * LANES; row++) {
        int folded = first_row + smaller(row, num_rows - 1), token = folded / group, head = folded % group;
        const bf16 *from = first + ((size_t)token * a->num_heads + kv_head * group + head) * a->head_size;
        for (int pair = 0; pair < num_pairs; pair++)
            memcpy(&w->queries[row / SUBTILE][pair][row % SUBTILE], from + 2 * pair, sizeof(uint32_t));
        w->positions[row] = start + token;
    }
}

/* The values of `count` keys; those up to the next multiple of 8 are zeros. */
static void pack_values(int head_size, int count, struct scratch *w)
{
    int width = padded(head_size);
    for (int key = 0; key < count_of_scores(count); key += 2)
        for (int dim = 0; dim < width; dim += 32) {
            __m512i one = _mm512_setzero_si512(), two = _mm512_setzero_si512();
            if (key < count)
                one = load_32(w->value_rows[key] + dim, head_size - dim);
            if (key + 1 < count)
                two = load_32(w->value_rows[key + 1] + dim, head_size - dim);
            uint32_t *to = w->values + key / 2 * width + dim;
            _mm512_store_si512(to, _mm512_unpacklo_epi16(one, two));
            _mm512_store_si512(to + LANES, _mm512_unpackhi_epi16(one, two));
        }
}

/* Scores of `num_keys` keys for 16 * `groups` rows; both are constants where this is inlined. */
INLINE void score_keys(struct scratch *w, int subtile, int num_pairs, int key, const int groups, const int num_keys)
{
    __m512 sums[8 * 4];
    for (int i = 0; i < groups * num_keys; i++)
        sums[i] = _mm512_setzero_ps();
    for (int pair = 0; pair < num_pairs; pair++) {
        __m512i q[4];
        for (int g = 0; g < groups; g++)
            q[g] = _mm512_load_si512(w->queries[subtile][pair] + g * LANES);
        for (int k = 0; k < num_keys; k++) {
            int32_t both;
            memcpy(&both, w->key_rows[key + k] + 2 * pair, sizeof both);
            __m512i shared = _mm512_set1_epi32(both);
            for (int g = 0; g < groups; g++)
                sums[k * groups + g] = dot(sums[k * groups + g], q[g], shared);
        }
    }
    for (int k = 0; k < num_keys; k++)
        for (int g = 0; g < groups; g++)
            _mm512_store_ps(w->scores[key + k] + g * LANES, sums[k * groups + g]);
}

static void score(struct scratch *w, int subtile, int groups, int num_pairs, int count)
{
    switch (groups) {
    case 1:
        for (int key = 0; key < count; key += 8)
            score_keys(w, subtile, num_pairs, key, 1, 8);
        break;
    case 2:
        for (int key = 0; key < count; key += 8)
            score_keys(w, subtile, num_pairs, key, 2, 8);
        break;
    case 3:
        for (int key = 0; key < count; key += 4)
            score_keys(w, subtile, num_pairs, key, 3, 4);
        break;
    default:
        for (int key = 0; key < count; key += 4)
            score_keys(w, subtile, num_pairs, key, 4, 4);
    }
}

/* Hides what a row may not see, and caps the scores where the rule says so. */
static void restrict_scores(const struct attention *a, struct scratch *w, int first_row, int groups, int first_key,
                            int count, int is_masked)
{
    for (int g = 0; g < groups; g++) {
        __m512i position = _mm512_loadu_si512(w->positions + first_row + g * LANES);
        __m512i before = _mm512_sub_epi32(position, _mm512_set1_epi32(a->window ? a->window : INT32_MAX));
        for (int key = 0; key < count; key++) {
            float *place = w->scores[key] + g * LANES;
            __m512 scores = _mm512_load_ps(place);
            if (a->softcap > 0)
                scores = softcapped(scores, a->scale, a->softcap);
            if (is_masked) {
                __m512i at = _mm512_set1_epi32(first_key + key);
                __mmask16 is_seen = _mm512_cmple_epi32_mask(at, position) & _mm512_cmpgt_epi32_mask(at, before);
                scores = _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), is_seen, scores);
            }
            _mm512_store_ps(place, scores);
        }
    }
}

/* Scores become weights; sums so far fade where a higher score was found. */
static void weigh(struct scratch *w, int first_row, int groups, int count, float factor)
{
    for (int g = 0; g < groups; g++) {
        float *highest_at = w->highest + first_row + g * LANES, *total_at = w->totals + first_row + g * LANES;
        __m512 found = _mm512_set1_ps(MASKED);
        for (int key = 0; key < count; key++)
            found = _mm512_max_ps(found, _mm512_load_ps(w->scores[key] + g * LANES));
        __m512 before = _mm512_loadu_ps(highest_at), by = _mm512_set1_ps(factor);
        __m512 highest = _mm512_max_ps(before, _mm512_mul_ps(found, by));
        __m512 fading = exp2_ps(_mm512_sub_ps(before, highest)), total = _mm512_setzero_ps();
        for (int key = 0; key < count; key += 2) {
            __m512 one = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(w->scores[key] + g * LANES), by, highest));
            __m512 two = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(w->scores[key + 1] + g * LANES), by, highest));
            total = _mm512_add_ps(total, _mm512_add_ps(one, two));
            _mm512_store_si512(w->weights[key / 2] + g * LANES, pairs(one, two));
        }
        _mm512_storeu_ps(highest_at, highest);
        _mm512_storeu_ps(total_at, _mm512_fmadd_ps(_mm512_loadu_ps(total_at), fading, total));
        _mm512_store_ps(w->fading + g * LANES, fading);
    }
}

/* Weighted values of `num_rows` rows, 16 * `lanes` dimensions; both are constants where this is inlined. */
INLINE void sum_values(struct scratch *w, int first_row, int row, int dim, int width, int num_pairs, const int num_rows,
                       const int lanes)
{
    __m512 sums[16];
    float *place = w->sums + (size_t)(first_row + row) * width + dim;
    for (int r = 0; r < num_rows; r++)
        for (int l = 0; l < lanes; l++)
            sums[r * lanes + l] =
                _mm512_mul_ps(_mm512_load_ps(place + r * width + l * LANES), _mm512_set1_ps(w->fading[row + r]));
    for (int pair = 0; pair < num_pairs; pair++) {
        __m512i v[4];
        for (int l = 0; l < lanes; l++)
            v[l] = _mm512_load_si512(w->values + pair * width + dim + l * LANES);
        for (int r = 0; r < num_rows; r++) {
            __m512i weight = _mm512_set1_epi32((int)w->weights[pair][row + r]);
            for (int l = 0; l < lanes; l++)
                sums[r * lanes + l] = dot(sums[r * lanes + l], weight, v[l]);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int l = 0; l < lanes; l++)
            _mm512_store_ps(place + r * width + l * LANES, sums[r * lanes + l]);
}

static void sum_all_values(struct scratch *w, int first_row, int num_rows, int width, int num_pairs)
{
    int dim = 0;
    for (; dim + 64 <= width; dim += 64)
        for (int row = 0; row < num_rows; row += 4)
            sum_values(w, first_row, row, dim, width, num_pairs, 4, 4);
    if (dim < width)
        for (int row = 0; row < num_rows; row += 8)
            sum_values(w, first_row, row, dim, width, num_pairs, 8, 2);
}

/* One block of keys for up to 64 rows of the tile. */
static void attend_block(const struct attention *a, struct scratch *w, int row, int num_rows, int first_key, int count)
{
    int groups = (num_rows + LANES - 1) / LANES, last = w->positions[row + num_rows - 1];
    int window = a->window ? a->window : INT32_MAX;
    if (first_key > last || first_key + KEYS <= w->positions[row] - window + 1)
        return;
    count = count_of_scores(smaller(count, last + 1 - first_key));
    score(w, row / SUBTILE, groups, a->head_size / 2, count);
    int is_masked = first_key + count - 1 > w->positions[row] || first_key <= last - window;
    if (is_masked || a->softcap > 0)
        restrict_scores(a, w, row, groups, first_key, count, is_masked);
    weigh(w, row, groups, count, a->softcap > 0 ? LOG2E : a->scale * LOG2E);
    sum_all_values(w, row, groups * LANES, padded(a->head_size), count / 2);
}

static float sink_share(const struct attention *a, int head, float highest)
{
    return a->sinks ? power_of_2(a->sinks[head] * LOG2E - highest) : 0;
}

static void write_rows(const struct attention *a, const struct scratch *w, bf16 *first, int first_row, int num_rows,
                       int kv_head)
{
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size);
    for (int row = 0; row < num_rows; row++) {
        int token = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
        bf16 *to = first + ((size_t)token * a->num_heads + head) * a->head_size;
        float factor = 1 / (w->totals[row] + sink_share(a, head, w->highest[row]));
        for (int dim = 0; dim < a->head_size; dim += 32)
            write_dims(to + dim, w->sums + (size_t)row * width + dim, factor, a->head_size - dim);
    }
}

/* Some rows of one chunk and one key-value head over all that they see. */
static void attend_tile(const struct attention *a, struct scratch *w, int chunk, int first_row, int tile_rows, int kv_head)
{
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size);
    int num_tokens = a->query_starts[chunk + 1] - a->query_starts[chunk], start = a->context_lens[chunk] - num_tokens;
    int num_rows = smaller(tile_rows, num_tokens * group - first_row);
    size_t offset = (size_t)a->query_starts[chunk] * a->num_heads * a->head_size;
    pack_queries(a, a->queries + offset, first_row, num_rows, start, kv_head, w);
    memset(w->sums, 0, sizeof(float) * TILE * width);
    for (int row = 0; row < TILE; row++)
        w->highest[row] = LOWEST, w->totals[row] = 0;
    int lowest = a->window ? larger(0, w->positions[0] - a->window + 1) : 0, last = w->positions[num_rows - 1];
    for (int key = lowest / KEYS * KEYS; key <= last; key += KEYS) {
        int count = smaller(KEYS, last + 1 - key);
        locate(a, chunk, kv_head, key, count, w);
        pack_values(a->head_size, count, w);
        for (int row = 0; row < num_rows; row += SUBTILE)
            attend_block(a, w, row, smaller(SUBTILE, num_rows - row), key, count);
    }
    write_rows(a, w, a->out + offset, first_row, num_rows, kv_head);
}

/* The scores of one query over 16 keys. */
INLINE __m512 score_one(const struct scratch *w, const bf16 *query, int head_size, size_t offset, int key)
{
    __m512 sums[LANES];
    for (int i = 0; i < LANES; i++)
        sums[i] = _mm512_setzero_ps();
    for (int dim = 0; dim < head_size; dim += 32) {
        __m512i q = load_32(query + dim, head_size - dim);
        for (int i = 0; i < LANES; i++)
            sums[i] = dot(sums[i], q, load_32(w->key_rows[key + i] + offset + dim, head_size - dim));
    }
    return sum_each(sums);
}

/* Scores of query heads of a single token over a block of keys, a key per lane. */
static void score_all(const struct attention *a, struct scratch *w, int chunk, int first_head, int end_head, int count)
{
    int group = a->num_heads / a->num_kv_heads, num_rows = (end_head - first_head) * group;
    const bf16 *query = a->queries + ((size_t)a->query_starts[chunk] * a->num_heads + first_head * group) * a->head_size;
    for (int key = 0; key < count; key += LANES)
        for (int row = 0; row < num_rows; row++) {
            size_t offset = (size_t)(row / group) * a->head_size;
            _mm512_store_ps(w->scores[row] + key, score_one(w, query + (size_t)row * a->head_size, a->head_size, offset, key));
        }
}

/* Scores of a block become weights, for one query head of a single token. */
static void weigh_one(const struct attention *a, struct scratch *w, int row, int first_key, int count, int lowest)
{
    float factor = a->softcap > 0 ? LOG2E : a->scale * LOG2E;
    __m512 scores[KEYS / LANES], found = _mm512_set1_ps(MASKED), total = _mm512_setzero_ps();
    for (int i = 0; i < KEYS / LANES; i++) {
        __m512i at = _mm512_add_epi32(_mm512_set1_epi32(i * LANES), LANE_NUMBERS);
        __mmask16 is_seen = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(count)) &
                            _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(lowest - first_key));
        scores[i] = _mm512_maskz_load_ps(is_seen, w->scores[row] + i * LANES);
        if (a->softcap > 0)
            scores[i] = softcapped(scores[i], a->scale, a->softcap);
        scores[i] = _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), is_seen, scores[i]);
        found = _mm512_max_ps(found, scores[i]);
    }
    float before = w->highest[row], highest = _mm512_reduce_max_ps(found) * factor;
    highest = highest > before ? highest : before;
    for (int i = 0; i < KEYS / LANES; i += 2) {
        __m512 one = exp2_ps(_mm512_fmsub_ps(scores[i], _mm512_set1_ps(factor), _mm512_set1_ps(highest)));
        __m512 two = exp2_ps(_mm512_fmsub_ps(scores[i + 1], _mm512_set1_ps(factor), _mm512_set1_ps(highest)));
        total = _mm512_add_ps(total, _mm512_add_ps(one, two));
        _mm512_store_si512(w->weights[0] + row * (KEYS / 2) + i / 2 * LANES, (__m512i)_mm512_cvtne2ps_pbh(two, one));
    }
    w->fading[row] = power_of_2(before - highest);
    w->totals[row] = w->totals[row] * w->fading[row] + _mm512_reduce_add_ps(total);
    w->highest[row] = highest;
}

/* Adds the weighted values of a block to `num_rows` rows, which is a constant where this is inlined. */
INLINE void sum_values_of(struct scratch *w, int first_row, int head_size, size_t offset, int count, const int num_rows)
{
    int width = padded(head_size);
    for (int dim = 0; dim < head_size; dim += 32) {
        __m512 sums[2 * 4];
        for (int r = 0; r < num_rows; r++)
            for (int l = 0; l < 2; l++)
                sums[2 * r + l] = _mm512_mul_ps(_mm512_load_ps(w->sums + (first_row + r) * width + dim + l * LANES),
                                                _mm512_set1_ps(w->fading[first_row + r]));
        for (int key = 0; key < count; key += 2) {
            __m512i one = load_32(w->value_rows[key] + offset + dim, head_size - dim);
            __m512i two = load_32(w->value_rows[key + 1] + offset + dim, head_size - dim);
            __m512i low = _mm512_unpacklo_epi16(one, two), high = _mm512_unpackhi_epi16(one, two);
            for (int r = 0; r < num_rows; r++) {
                __m512i weight = _mm512_set1_epi32((int)w->weights[0][(first_row + r) * (KEYS / 2) + key / 2]);
                sums[2 * r] = dot(sums[2 * r], weight, low);
                sums[2 * r + 1] = dot(sums[2 * r + 1], weight, high);
            }
        }
        for (int r = 0; r < num_rows; r++)
            for (int l = 0; l < 2; l++)
                _mm512_store_ps(w->sums + (first_row + r) * width + dim + l * LANES, sums[2 * r + l]);
    }
}

/* The rows of one key-value head, whose values lie at `offset` in those of all heads. */
static void sum_all_values_of(struct scratch *w, int first_row, int num_rows, int head_size, size_t offset, int count)
{
    for (int row = first_row; row < first_row + num_rows; row += 4)
        switch (smaller(4, first_row + num_rows - row)) {
        case 1: sum_values_of(w, row, head_size, offset, count, 1); break;
        case 2: sum_values_of(w, row, head_size, offset, count, 2); break;
        case 3: sum_values_of(w, row, head_size, offset, count, 3); break;
        default: sum_values_of(w, row, head_size, offset, count, 4);
        }
}

struct splits { int first, count, lowest; };

static struct splits splits_of(const struct attention *a, int chunk)
{
    int last = a->context_lens[chunk] - 1, lowest = a->window ? larger(0, last - a->window + 1) : 0;
    return (struct splits){.first = lowest / SPLIT, .count = last / SPLIT - lowest / SPLIT + 1, .lowest = lowest};
}

INLINE int partial_size(const struct attention *a) { return padded(a->head_size) + LANES; }

/* A single token over up to 256 keys. All key-value heads of a block of keys come before the next block, so that pages
 * are read in their order. Sums, maximum and total of each query head go to `partials`, [H, splits, ...]. */
static void attend_split(const struct attention *a, struct scratch *w, int chunk, int split, int first_head, int end_head,
                         float *partials)
{
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size), num_rows = (end_head - first_head) * group;
    struct splits splits = splits_of(a, chunk);
    int first = (splits.first + split) * SPLIT, end = smaller(first + SPLIT, a->context_lens[chunk]);
    memset(w->sums, 0, sizeof(float) * num_rows * width);
    for (int row = 0; row < num_rows; row++)
        w->highest[row] = LOWEST, w->totals[row] = 0;
    for (int key = larger(first, splits.lowest / KEYS * KEYS); key < end; key += KEYS) {
        int count = smaller(KEYS, end - key);
        bring_near(a, a->keys, chunk, first_head, end_head, key, key + count);
        bring_near(a, a->values, chunk, first_head, end_head, key, key + count);
        locate(a, chunk, first_head, key, count, w);
        score_all(a, w, chunk, first_head, end_head, count);
        for (int row = 0; row < num_rows; row++)
            weigh_one(a, w, row, key, count, splits.lowest);
        for (int head = 0; head < end_head - first_head; head++)
            sum_all_values_of(w, head * group, group, a->head_size, (size_t)head * a->head_size, count);
    }
    for (int row = 0; row < num_rows; row++) {
        float *to = partials + ((size_t)(first_head * group + row) * splits.count + split) * partial_size(a);
        memcpy(to, w->sums + row * width, sizeof(float) * width);
        to[width] = w->highest[row], to[width + 1] = w->totals[row];
    }
}

/* The parts of one query head of a single token, in the order of their keys. */
static void merge_splits(const struct attention *a, int chunk, int head, float *parts)
{
    int count = splits_of(a, chunk).count, width = padded(a->head_size), size = partial_size(a);
    float highest = LOWEST, total;
    for (int i = 0; i < count; i++)
        highest = parts[i * size + width] > highest ? parts[i * size + width] : highest;
    total = sink_share(a, head, highest);
    for (int i = 0; i < count; i++) {
        float *part = parts + i * size, share = power_of_2(part[width] - highest);
        total += share * part[width + 1];
        for (int dim = 0; dim < width; dim++)
            parts[dim] = (i ? parts[dim] : 0) + share * part[dim];
    }
    bf16 *to = a->out + ((size_t)a->query_starts[chunk] * a->num_heads + head) * a->head_size;
    for (int dim = 0; dim < a->head_size; dim += 32)
        write_dims(to + dim, parts + dim, 1 / total, a->head_size - dim);
}

INLINE int num_tokens_of(const struct attention *a, int chunk) { return a->query_starts[chunk + 1] - a->query_starts[chunk]; }

/* Rows of a work item: fewer where there would not be enough items for all threads. */
static int tile_rows_of(const struct attention *a, int chunk)
{
    int rows = num_tokens_of(a, chunk) * (a->num_heads / a->num_kv_heads), tile = TILE;
    while (tile > LANES && (rows + tile - 1) / tile * a->num_kv_heads < 4 * a->num_threads)
        tile /= 2;
    return tile;
}

/* Key-value heads of a work item: of a single token all, as far as their rows can be held, else one. */
static int heads_of_item(const struct attention *a, int chunk)
{
    int most = larger(1, SUBTILE / (a->num_heads / a->num_kv_heads));
    return num_tokens_of(a, chunk) == 1 ? smaller(a->num_kv_heads, most) : 1;
}

static int head_parts(const struct attention *a, int chunk)
{
    int heads = heads_of_item(a, chunk);
    return (a->num_kv_heads + heads - 1) / heads;
}

/* Work items of a chunk for each of its parts of the heads. */
static int num_parts(const struct attention *a, int chunk)
{
    int rows = num_tokens_of(a, chunk) * (a->num_heads / a->num_kv_heads), tile = tile_rows_of(a, chunk);
    return num_tokens_of(a, chunk) == 1 ? splits_of(a, chunk).count : (rows + tile - 1) / tile;
}

static int num_items_of(const struct attention *a, int chunk) { return num_parts(a, chunk) * head_parts(a, chunk); }

static size_t partials_of(const struct attention *a, int chunk)
{
    return num_tokens_of(a, chunk) == 1 ? (size_t)a->num_heads * splits_of(a, chunk).count * partial_size(a) : 0;
}

int64_t penstock_num_partials(const struct attention *a)
{
    int64_t count = 0;
    for (int chunk = 0; chunk < a->num_chunks; chunk++)
        count += partials_of(a, chunk);
    return count;
}

static void run_item(const struct attention *a, struct scratch *w, int item)
{
    float *partials = a->partials;
    int chunk = 0;
    for (; item >= num_items_of(a, chunk); chunk++) {
        item -= num_items_of(a, chunk);
        partials += partials_of(a, chunk);
    }
    int heads = heads_of_item(a, chunk), tile = tile_rows_of(a, chunk);
    int part = item / head_parts(a, chunk), kv_head = item % head_parts(a, chunk) * heads;
    if (num_tokens_of(a, chunk) == 1)
        attend_split(a, w, chunk, part, kv_head, smaller(kv_head + heads, a->num_kv_heads), partials);
    else /* the last rows see the most keys: they come first, so that threads end together */
        attend_tile(a, w, chunk, (num_parts(a, chunk) - 1 - part) * tile, tile, kv_head);
}

static void run_items(void *data)
{
    struct job *job = data;
    int thread = atomic_fetch_add(&job->next_thread, 1);
    struct scratch *w = (void *)((char *)job->of->workspace + thread * penstock_workspace_bytes());
    for (int item; (item = atomic_fetch_add(&job->next_item, 1)) < job->num_items;)
        run_item(job->of, w, item);
}

void penstock_attend(const struct attention *a)
{
    struct job job = {.of = a};
    for (int chunk = 0; chunk < a->num_chunks; chunk++)
        job.num_items += num_items_of(a, chunk);
    int num_threads = smaller(a->num_threads, job.num_items);
    if (num_threads > 1)
        a->parallel(run_items, &job, num_threads, 0);
    else
        run_items(&job);
    float *partials = a->partials;
    for (int chunk = 0; chunk < a->num_chunks; chunk++)
        if (num_tokens_of(a, chunk) == 1)
            for (int head = 0; head < a->num_heads; head++, partials += splits_of(a, chunk).count * partial_size(a))
                merge_splits(a, chunk, head, partials);
}

/* One head: pairs of dimensions `half` apart are turned, those past them copied. */
INLINE void rotate(bf16 *to, const bf16 *from, const bf16 *cosines, const bf16 *sines, int half, int head_size)
{
    for (int dim = 0; dim < half; dim += LANES) {
        int count = half - dim;
        __m512 cosine = load_floats(cosines + dim, count), sine = load_floats(sines + dim, count);
        __m512 first = load_floats(from + dim, count), second = load_floats(from + half + dim, count);
        store_floats(to + dim, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)), count);
        store_floats(to + half + dim, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)), count);
    }
    memcpy(to + 2 * half, from + 2 * half, sizeof(bf16) * (head_size - 2 * half));
}

static void store_rows(const void *of, int first, int end)
{
    const struct store *s = of;
    int chunk = 0, size = s->head_size;
    for (int row = first; row < end; row++) {
        while (row >= s->query_starts[chunk + 1])
            chunk++;
        int position = s->context_lens[chunk] - s->query_starts[chunk + 1] + row;
        size_t block = s->blocks[s->block_starts[chunk] + position / s->block_size];
        size_t slot = block * s->block_size + position % s->block_size;
        int half = s->cosines ? s->half : 0;
        const bf16 *cosines = s->cosines + (size_t)row * half, *sines = s->sines + (size_t)row * half;
        for (int head = 0; head < s->num_heads; head++)
            rotate(s->rotated + ((size_t)row * s->num_heads + head) * size,
                   s->queries.first + row * s->queries.row_stride + head * s->queries.head_stride, cosines, sines, half, size);
        for (int head = 0; head < s->num_kv_heads; head++) {
            size_t place = (slot * s->num_kv_heads + head) * size;
            rotate(s->key_pages + place, s->keys.first + row * s->keys.row_stride + head * s->keys.head_stride, cosines,
                   sines, half, size);
            memcpy(s->value_pages + place, s->values.first + row * s->values.row_stride + head * s->values.head_stride,
                   sizeof(bf16) * size);
        }
    }
}

/* Queries are rotated to a tensor of their own; keys, rotated, and values go to their pages. */
void penstock_store(const struct store *s)
{
    size_t row_bytes = sizeof(bf16) * (s->num_heads + 2 * s->num_kv_heads) * s->head_size;
    share_rows(store_rows, s, s->query_starts[s->num_chunks], row_bytes, s->parallel, s->num_threads);
}
