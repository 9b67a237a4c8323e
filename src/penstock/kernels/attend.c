/* Attention over pages in bfloat16.
 *
 * A work item is one key-value head of some query rows. The query heads that share it are rows of their own, so
 * that each key and value is read once for all of them. Keys are visited in blocks that begin at fixed positions,
 * and a row never looks at its neighbours: its result does not depend on how the prompt was cut into chunks. A
 * chunk of one token is split over its keys instead, and the parts are merged.
 */
#include <stdatomic.h>

#include "pages.h"

struct job {
    const struct attention *of;
    atomic_int next_item, next_thread;
    int num_items;
};

struct cursor {
    float *partials;
    int chunk, first_number;
};

int penstock_is_supported(void)
{
    return has_instructions();
}

int64_t penstock_workspace_bytes(void) { return (sizeof(struct scratch) + 63) / 64 * 64; }

/* Rows of a work item: fewer where there would not be enough items for all threads. */
static int tile_rows_of(const struct attention *a, int chunk)
{
    int rows = num_tokens_of(a, chunk) * (a->num_heads / a->num_kv_heads), tile = TILE;
    while (tile > LEAST_TILE && (rows + tile - 1) / tile * a->num_kv_heads < 4 * a->num_threads)
        tile /= 2;
    return tile;
}

/* Key-value heads of a work item: of a single token all, as far as their rows can be held, else one. */
static int heads_of_item(const struct attention *a, int chunk)
{
    int most = larger(1, SUBTILE / (a->num_heads / a->num_kv_heads));
    return is_single(a, chunk) ? smaller(a->num_kv_heads, most) : 1;
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
    return is_single(a, chunk) ? penstock_num_splits(a, chunk) : (rows + tile - 1) / tile;
}

static int num_items_of(const struct attention *a, int chunk) { return num_parts(a, chunk) * head_parts(a, chunk); }

static size_t partials_of(const struct attention *a, int chunk)
{
    return is_single(a, chunk) ? (size_t)a->num_heads * penstock_num_splits(a, chunk) * partial_size(a) : 0;
}

int64_t penstock_num_partials(const struct attention *a)
{
    int64_t count = 0;
    for (int chunk = 0; chunk < a->num_chunks; chunk++)
        count += partials_of(a, chunk);
    return count;
}

/* The next item that nobody has. Numbers only grow, so chunks are passed once by each thread. */
static int take(struct job *job, struct cursor *at, struct item *item)
{
    const struct attention *a = job->of;
    int number = atomic_fetch_add(&job->next_item, 1);
    if (number >= job->num_items)
        return 0;
    for (; number - at->first_number >= num_items_of(a, at->chunk); at->chunk++) {
        at->first_number += num_items_of(a, at->chunk);
        at->partials += partials_of(a, at->chunk);
    }
    int heads = heads_of_item(a, at->chunk), num_parts_of_heads = head_parts(a, at->chunk);
    number -= at->first_number;
    *item = (struct item){.partials = at->partials, .chunk = at->chunk, .part = number / num_parts_of_heads};
    item->first_head = number % num_parts_of_heads * heads;
    item->end_head = smaller(item->first_head + heads, a->num_kv_heads);
    if (!is_single(a, at->chunk)) /* the last rows see the most keys: they come first, so that threads end together */
        item->part = num_parts(a, at->chunk) - 1 - item->part;
    return 1;
}

/* A split is so short that a thread may hold the item after it too, while there are enough left for the others. */
static int may_hold_two(struct job *job, const struct item *item)
{
    return is_single(job->of, item->chunk) && atomic_load(&job->next_item) + job->of->num_threads <= job->num_items;
}

static void run_items(void *data)
{
    struct job *job = data;
    const struct attention *a = job->of;
    int thread = atomic_fetch_add(&job->next_thread, 1);
    struct scratch *w = (void *)((char *)a->workspace + thread * penstock_workspace_bytes());
    struct cursor cursor = {.partials = a->partials};
    struct item item = {0}, next = {0};
    w->is_next_known = 0;
    for (int has_next = take(job, &cursor, &item); has_next; item = next) {
        int is_taken_early = may_hold_two(job, &item);
        if (is_taken_early)
            has_next = take(job, &cursor, &next);
        if (!is_single(a, item.chunk))
            penstock_attend_tile(a, w, &item, tile_rows_of(a, item.chunk));
        else
            penstock_attend_split(a, w, &item, is_taken_early && has_next && is_single(a, next.chunk) ? &next : NULL);
        if (!is_taken_early)
            has_next = take(job, &cursor, &next);
    }
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
        if (is_single(a, chunk))
            for (int head = 0; head < a->num_heads; head++, partials += penstock_num_splits(a, chunk) * partial_size(a))
                penstock_merge_splits(a, chunk, head, partials);
}
