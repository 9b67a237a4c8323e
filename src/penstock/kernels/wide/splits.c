/* Attention of a single token, split over its keys; the parts are merged.
 *
 * Its time is that of reading memory: keys and values are brought to float32 once for all query heads that share them.
 */
#include "splits.h"

/* The queries of an item in float32, a row after another, zeros past their size. */
static void widen_queries(const struct attention *a, struct scratch *w, const struct item *item)
{
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size);
    size_t first = (size_t)a->query_starts[item->chunk] * a->num_heads + item->first_head * group;
    for (int row = 0; row < (item->end_head - item->first_head) * group; row++) {
        const bf16 *from = a->queries + (first + row) * a->head_size;
        widen(from, (float *)w->queries + row * width, a->head_size, width, from);
    }
}

/* The block at hand of one key-value head; values past `count` are zeros. */
static void widen_head(struct scratch *w, int head_size, size_t offset, int count)
{
    int width = padded(head_size);
    for (int key = 0; key < (count + LANES - 1) / LANES * LANES; key++)
        widen(w->block.keys[key] + offset, w->keys + key * width, head_size, width, w->next.keys[key] + offset);
    for (int key = 0; key < count; key++)
        widen(w->block.values[key] + offset, w->values + key * width, head_size, width, w->next.values[key] + offset);
}

static void score_row(const struct scratch *w, const float *query, int width, int count, float *scores)
{
    for (int key = 0; key < count; key += LANES) {
        floats sums[LANES];
        for (int i = 0; i < LANES; i++)
            sums[i] = v_zero();
        for (int dim = 0; dim < width; dim += LANES) {
            floats q = v_load(query + dim);
            for (int i = 0; i < LANES; i++)
                sums[i] = v_mul_add(q, v_load(w->keys + (key + i) * width + dim), sums[i]);
        }
        v_store(scores + key, sum_each(sums));
    }
}

/* Scores of a block become weights, for one query head; those of keys that are not there or not seen are 0. */
static void weigh_row(const struct attention *a, struct scratch *w, int row, int first_key, int count, int lowest)
{
    float factor = a->softcap > 0 ? LOG2E : a->scale * LOG2E, *scores = w->scores + row * KEYS;
    floats found = v_all(MASKED), total = v_zero();
    for (int key = 0; key < count; key += LANES) {
        ints at = i_lanes(key);
        lanes is_seen = are_both(is_more(i_all(count), at), is_more(at, i_all(lowest - first_key - 1)));
        floats score = v_load(scores + key);
        if (a->softcap > 0)
            score = softcapped(score, a->scale, a->softcap);
        score = v_where(is_seen, score, v_all(MASKED));
        found = v_max(found, score);
        v_store(scores + key, score);
    }
    float before = w->highest[row], highest = v_highest(found) * factor;
    highest = highest > before ? highest : before;
    for (int key = 0; key < count; key += LANES) {
        floats weight = exp2_ps(v_mul_sub(v_load(scores + key), v_all(factor), v_all(highest)));
        total = v_add(total, weight);
        v_store(scores + key, weight);
    }
    w->fading[row] = power_of_2(before - highest);
    w->totals[row] = w->totals[row] * w->fading[row] + v_sum(total);
    w->highest[row] = highest;
}

static void sum_rows(struct scratch *w, int first_row, int num_rows, int width, int count)
{
    for (int row = first_row; row < first_row + num_rows; row += 4)
        for (int dim = 0; dim < width; dim += DIMS) {
            float *sums = w->sums + row * width + dim, *fading = w->fading + row, *weights = w->scores + row * KEYS;
            const float *values = w->values + dim;
            switch (smaller(4, first_row + num_rows - row)) {
            case 1: sum_weighted(sums, fading, weights, values, width, count, 1, KEYS, 1); break;
            case 2: sum_weighted(sums, fading, weights, values, width, count, 1, KEYS, 2); break;
            case 3: sum_weighted(sums, fading, weights, values, width, count, 1, KEYS, 3); break;
            default: sum_weighted(sums, fading, weights, values, width, count, 1, KEYS, 4);
            }
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
    widen_queries(a, w, item);
    if (!w->is_next_known)
        locate_first(a, item, &w->next);
    for (int key = keys.first; key < keys.end; key += KEYS) {
        int count = smaller(KEYS, keys.end - key);
        advance(a, w, item, next, key, keys.end);
        for (int head = 0; head < num_heads; head++) {
            widen_head(w, a->head_size, (size_t)head * a->head_size, count);
            for (int row = head * group; row < (head + 1) * group; row++) {
                score_row(w, (float *)w->queries + row * width, width, count, w->scores + row * KEYS);
                weigh_row(a, w, row, key, count, splits.lowest);
            }
            sum_rows(w, head * group, group, width, count);
        }
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
    size_t place = (size_t)a->query_starts[chunk] * a->num_heads + head;
    write_head(a->out + place * a->head_size, parts, 1 / total, a->head_size);
}
