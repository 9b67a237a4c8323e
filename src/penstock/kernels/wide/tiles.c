/* Attention of the tokens of a chunk: tiles of query rows over blocks of keys, a row per lane. */
#include "pages.h"

#define TOGETHER 4 /* keys whose scores are held at once */

INLINE int padded_keys(int count) { return (count + TOGETHER - 1) / TOGETHER * TOGETHER; }

/* Rows past the last one repeat it. */
static void pack_queries(const struct attention *a, const bf16 *first, int first_row, int num_rows, int start,
                         int kv_head, struct scratch *w)
{
    int group = a->num_heads / a->num_kv_heads;
    for (int row = 0; row < (num_rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP; row++) {
        int folded = first_row + smaller(row, num_rows - 1), token = folded / group, head = folded % group;
        const bf16 *from = first + ((size_t)token * a->num_heads + kv_head * group + head) * a->head_size;
        for (int dim = 0; dim < a->head_size; dim++) {
            uint32_t bits = (uint32_t)from[dim] << 16;
            memcpy(&w->queries[row / ROW_GROUP][dim][row % ROW_GROUP], &bits, sizeof bits);
        }
        w->positions[row] = start + token;
    }
}

/* The block at hand in float32; keys up to the next multiple of 4 repeat the last one, and their values are zeros. */
static void widen_block(const struct attention *a, int count, struct scratch *w)
{
    int width = padded(a->head_size);
    for (int key = 0; key < padded_keys(count); key++) {
        widen(w->block.keys[key], w->keys + key * width, a->head_size, width, w->next.keys[key]);
        widen(w->block.values[key], w->values + key * width, key < count ? a->head_size : 0, width, w->next.values[key]);
    }
}

/* Scores of 4 keys for 16 rows. */
INLINE void score_keys(struct scratch *w, int group, int head_size, int width, int key, float *scores)
{
    floats sums[TOGETHER][ROW_GROUP / LANES];
    for (int k = 0; k < TOGETHER; k++)
        for (int i = 0; i < ROW_GROUP / LANES; i++)
            sums[k][i] = v_zero();
    const float *keys = w->keys + key * width;
    for (int dim = 0; dim < head_size; dim++) {
        floats queries[ROW_GROUP / LANES];
        for (int i = 0; i < ROW_GROUP / LANES; i++)
            queries[i] = v_load(w->queries[group][dim] + i * LANES);
        for (int k = 0; k < TOGETHER; k++) {
            floats shared = v_all(keys[k * width + dim]);
            for (int i = 0; i < ROW_GROUP / LANES; i++)
                sums[k][i] = v_mul_add(queries[i], shared, sums[k][i]);
        }
    }
    for (int k = 0; k < TOGETHER; k++)
        for (int i = 0; i < ROW_GROUP / LANES; i++)
            v_store(scores + k * SUBTILE + i * LANES, sums[k][i]);
}

static void score(struct scratch *w, int first_row, int num_groups, int head_size, int count)
{
    for (int g = 0; g < num_groups; g++)
        for (int key = 0; key < count; key += TOGETHER)
            score_keys(w, first_row / ROW_GROUP + g, head_size, padded(head_size), key,
                       w->scores + key * SUBTILE + g * ROW_GROUP);
}

/* Hides what a row may not see, and caps the scores where the rule says so. */
static void restrict_scores(const struct attention *a, struct scratch *w, int first_row, int num_rows, int first_key,
                            int count, int is_masked)
{
    for (int row = 0; row < num_rows; row += LANES) {
        ints position = i_load(w->positions + first_row + row);
        ints after = i_sub(position, i_all(-1)), before = i_sub(position, i_all(a->window ? a->window : INT32_MAX));
        for (int key = 0; key < count; key++) {
            floats scores = v_load(w->scores + key * SUBTILE + row);
            if (a->softcap > 0)
                scores = softcapped(scores, a->scale, a->softcap);
            if (is_masked) {
                ints at = i_all(first_key + key);
                lanes is_seen = are_both(is_more(after, at), is_more(at, before));
                scores = v_where(is_seen, scores, v_all(MASKED));
            }
            v_store(w->scores + key * SUBTILE + row, scores);
        }
    }
}

/* Scores become weights; sums so far fade where a higher score was found. */
static void weigh(struct scratch *w, int first_row, int num_rows, int count, float factor)
{
    for (int row = 0; row < num_rows; row += LANES) {
        float *scores = w->scores + row, *highest_at = w->highest + first_row + row, *total_at = w->totals + first_row + row;
        floats found = v_all(MASKED), by = v_all(factor), before = v_load(highest_at), total = v_zero();
        for (int key = 0; key < count; key++)
            found = v_max(found, v_load(scores + key * SUBTILE));
        floats highest = v_max(before, v_mul(found, by)), fading = exp2_ps(v_sub(before, highest));
        for (int key = 0; key < count; key++) {
            floats weight = exp2_ps(v_mul_sub(v_load(scores + key * SUBTILE), by, highest));
            total = v_add(total, weight);
            v_store(scores + key * SUBTILE, weight);
        }
        v_store(highest_at, highest);
        v_store(total_at, v_mul_add(v_load(total_at), fading, total));
        v_store(w->fading + row, fading);
    }
}

/* One block of keys for up to 64 rows of the tile. */
static void attend_block(const struct attention *a, struct scratch *w, int row, int num_rows, int first_key, int count)
{
    int num_groups = (num_rows + ROW_GROUP - 1) / ROW_GROUP, last = w->positions[row + num_rows - 1];
    int window = a->window ? a->window : INT32_MAX, width = padded(a->head_size);
    if (first_key > last || first_key + KEYS <= w->positions[row] - window + 1)
        return;
    count = padded_keys(smaller(count, last + 1 - first_key));
    num_rows = num_groups * ROW_GROUP;
    score(w, row, num_groups, a->head_size, count);
    int is_masked = first_key + count - 1 > w->positions[row] || first_key <= last - window;
    if (is_masked || a->softcap > 0)
        restrict_scores(a, w, row, num_rows, first_key, count, is_masked);
    weigh(w, row, num_rows, count, a->softcap > 0 ? LOG2E : a->scale * LOG2E);
    for (int r = 0; r < num_rows; r += 4)
        for (int dim = 0; dim < width; dim += DIMS)
            sum_weighted(w->sums + (size_t)(row + r) * width + dim, w->fading + r, w->scores + r, w->values + dim, width,
                         count, SUBTILE, 1, 4);
}

static void write_rows(const struct attention *a, const struct scratch *w, bf16 *first, int first_row, int num_rows,
                       int kv_head)
{
    int group = a->num_heads / a->num_kv_heads, width = padded(a->head_size);
    for (int row = 0; row < num_rows; row++) {
        int token = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
        float factor = 1 / (w->totals[row] + sink_share(a, head, w->highest[row]));
        write_head(first + ((size_t)token * a->num_heads + head) * a->head_size, w->sums + (size_t)row * width, factor,
                   a->head_size);
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
        widen_block(a, count, w);
        for (int row = 0; row < num_rows; row += SUBTILE)
            attend_block(a, w, row, smaller(SUBTILE, num_rows - row), key, count);
    }
    write_rows(a, w, a->out + offset, first_row, num_rows, kv_head);
}
