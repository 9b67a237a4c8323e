/* Attention of a single token, split over its keys; the parts are merged.
 *
 * Its time is that of reading memory.
 */
#include <string.h>

#include "splits.h"

/* The scores of one query over 16 keys. The first query head of a key-value head also asks for the same keys of the next
 * block. */
INLINE __m512 score_one(const struct scratch *w, const bf16 *query, int head_size, size_t offset, int key, const int asks)
{
    __m512 sums[LANES];
    for (int i = 0; i < LANES; i++)
        sums[i] = _mm512_setzero_ps();
    for (int dim = 0; dim < head_size; dim += 32) {
        __m512i q = load_32(query + dim, head_size - dim);
        for (int i = 0; i < LANES; i++) {
            if (asks)
                ask_for(w->next.keys[key + i] + offset + dim);
            sums[i] = dot(sums[i], q, load_32(w->block.keys[key + i] + offset + dim, head_size - dim));
        }
    }
    return sum_each(sums);
}

/* Scores of query heads of a single token over a block of keys, a key per lane. */
static void score_all(const struct attention *a, struct scratch *w, const struct item *item, int count)
{
    int group = a->num_heads / a->num_kv_heads, num_rows = (item->end_head - item->first_head) * group;
    size_t first = (size_t)a->query_starts[item->chunk] * a->num_heads + item->first_head * group;
    const bf16 *query = a->queries + first * a->head_size;
    for (int key = 0; key < count; key += LANES)
        for (int row = 0; row < num_rows; row++) {
            size_t offset = (size_t)(row / group) * a->head_size;
            const bf16 *of_row = query + (size_t)row * a->head_size;
            _mm512_store_ps(w->scores[row] + key, row % group ? score_one(w, of_row, a->head_size, offset, key, 0)
                                                              : score_one(w, of_row, a->head_size, offset, key, 1));
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
        _mm512_store_si512(w->weights + row * (KEYS / 2) + i / 2 * LANES, (__m512i)_mm512_cvtne2ps_pbh(two, one));
    }
    w->fading[row] = power_of_2(before - highest);
    w->totals[row] = w->totals[row] * w->fading[row] + _mm512_reduce_add_ps(total);
    w->highest[row] = highest;
}

/* Adds the weighted values of a block to `num_rows` rows, which is a constant where this is inlined. */
INLINE void sum_values_of(struct scratch *w, int first_row, int head_size, size_t offset, int count, int asks,
                          const int num_rows)
{
    int width = padded(head_size);
    for (int dim = 0; dim < head_size; dim += 32) {
        __m512 sums[2 * 4];
        for (int r = 0; r < num_rows; r++)
            for (int l = 0; l < 2; l++)
                sums[2 * r + l] = _mm512_mul_ps(_mm512_load_ps(w->sums + (first_row + r) * width + dim + l * LANES),
                                                _mm512_set1_ps(w->fading[first_row + r]));
        for (int key = 0; key < count; key += 2) {
            __m512i one = load_32(w->block.values[key] + offset + dim, head_size - dim);
            __m512i two = load_32(w->block.values[key + 1] + offset + dim, head_size - dim);
            if (asks) {
                ask_for(w->next.values[key] + offset + dim);
                ask_for(w->next.values[key + 1] + offset + dim);
            }
            __m512i low = _mm512_unpacklo_epi16(one, two), high = _mm512_unpackhi_epi16(one, two);
            for (int r = 0; r < num_rows; r++) {
                __m512i weight = _mm512_set1_epi32((int)w->weights[(first_row + r) * (KEYS / 2) + key / 2]);
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
        case 1: sum_values_of(w, row, head_size, offset, count, row == first_row, 1); break;
        case 2: sum_values_of(w, row, head_size, offset, count, row == first_row, 2); break;
        case 3: sum_values_of(w, row, head_size, offset, count, row == first_row, 3); break;
        default: sum_values_of(w, row, head_size, offset, count, row == first_row, 4);
        }
}

int penstock_num_splits(const struct attention *a, int chunk) { return splits_of(a, chunk).count; }

/* A single token over up to 256 keys. All key-value heads of a block of keys come before the next block, so that pages
 * are read in their order. Sums, maximum and total of each query head go to `partials`, [H, splits, ...]. */
void penstock_attend_split(const struct attention *a, struct scratch *w, const struct item *item, const struct item *next)
{
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size);
    int num_heads = item->end_head - item->first_head, num_rows = num_heads * group;
    struct splits splits = splits_of(a, item->chunk);
    struct keys keys = keys_of_split(a, item);
    memset(w->sums, 0, sizeof(float) * num_rows * width);
    for (int row = 0; row < num_rows; row++)
        w->highest[row] = LOWEST, w->totals[row] = 0;
    if (!w->is_next_known)
        locate_first(a, item, &w->next);
    for (int key = keys.first; key < keys.end; key += KEYS) {
        int count = smaller(KEYS, keys.end - key);
        advance(a, w, item, next, key, keys.end);
        score_all(a, w, item, count);
        for (int row = 0; row < num_rows; row++)
            weigh_one(a, w, row, key, count, splits.lowest);
        for (int head = 0; head < num_heads; head++)
            sum_all_values_of(w, head * group, group, a->head_size, (size_t)head * a->head_size, count);
    }
    w->is_next_known = next != NULL;
    for (int row = 0; row < num_rows; row++) {
        size_t place = (size_t)(item->first_head * group + row) * splits.count + item->part;
        float *to = item->partials + place * partial_size(a);
        memcpy(to, w->sums + row * width, sizeof(float) * width);
        to[width] = w->highest[row], to[width + 1] = w->totals[row];
    }
}

/* The parts of one query head of a single token, in the order of their keys. */
void penstock_merge_splits(const struct attention *a, int chunk, int head, float *parts)
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
