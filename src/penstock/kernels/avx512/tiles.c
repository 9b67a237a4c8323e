/* Attention of the tokens of a chunk: tiles of query rows over blocks of keys, a row per lane. */
#include <string.h>

#include "pages.h"

INLINE int count_of_scores(int num_keys) { return (num_keys + 7) / 8 * 8; }

/* Two registers of floats, of one key and the next, as pairs of bfloat16. */
INLINE __m512i pairs(__m512 first, __m512 second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
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
                one = load_32(w->block.values[key] + dim, head_size - dim);
            if (key + 1 < count)
                two = load_32(w->block.values[key + 1] + dim, head_size - dim);
            uint32_t *to = w->values + key / 2 * width + dim;
            _mm512_store_si512(to, _mm512_unpacklo_epi16(one, two));
            _mm512_store_si512(to + LANES, _mm512_unpackhi_epi16(one, two));
        }
}

/* Scores of `num_keys` keys for 16 * `groups` rows; both are constants where this is inlined. The first rows ask for the
 * next block. */
INLINE void score_keys(struct scratch *w, int subtile, int num_pairs, int key, const int groups, const int num_keys)
{
    __m512 sums[8 * 4];
    for (int i = 0; i < groups * num_keys; i++)
        sums[i] = _mm512_setzero_ps();
    for (int pair = 0; pair < num_pairs; pair++) {
        __m512i q[4];
        for (int g = 0; g < groups; g++)
            q[g] = _mm512_load_si512(w->queries[subtile][pair] + g * LANES);
        if (!subtile && pair % LANES < num_keys) {
            ask_for(w->next.keys[key + pair % LANES] + pair / LANES * 32);
            ask_for(w->next.values[key + pair % LANES] + pair / LANES * 32);
        }
        for (int k = 0; k < num_keys; k++) {
            int32_t both;
            memcpy(&both, w->block.keys[key + k] + 2 * pair, sizeof both);
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
            _mm512_store_si512(w->weights + key / 2 * SUBTILE + g * LANES, pairs(one, two));
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
            __m512i weight = _mm512_set1_epi32((int)w->weights[pair * SUBTILE + row + r]);
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
void penstock_attend_tile(const struct attention *a, struct scratch *w, const struct item *item, int tile_rows)
{
    int chunk = item->chunk, first_row = item->part * tile_rows, kv_head = item->first_head;
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size);
    int num_tokens = num_tokens_of(a, chunk), start = a->context_lens[chunk] - num_tokens;
    int num_rows = smaller(tile_rows, num_tokens * group - first_row);
    size_t offset = (size_t)a->query_starts[chunk] * a->num_heads * a->head_size;
    pack_queries(a, a->queries + offset, first_row, num_rows, start, kv_head, w);
    memset(w->sums, 0, sizeof(float) * TILE * width);
    for (int row = 0; row < TILE; row++)
        w->highest[row] = LOWEST, w->totals[row] = 0;
    int lowest = a->window ? larger(0, w->positions[0] - a->window + 1) : 0, last = w->positions[num_rows - 1];
    int first = lowest / KEYS * KEYS;
    locate(a, chunk, kv_head, first, smaller(KEYS, last + 1 - first), &w->next);
    for (int key = first; key <= last; key += KEYS) {
        int count = smaller(KEYS, last + 1 - key), num_left = last + 1 - key - count;
        w->block = w->next;
        if (num_left)
            locate(a, chunk, kv_head, key + KEYS, smaller(KEYS, num_left), &w->next);
        pack_values(a->head_size, count, w);
        for (int row = 0; row < num_rows; row += SUBTILE)
            attend_block(a, w, row, smaller(SUBTILE, num_rows - row), key, count);
    }
    write_rows(a, w, a->out + offset, first_row, num_rows, kv_head);
}
