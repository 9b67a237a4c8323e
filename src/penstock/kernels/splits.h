/* Which keys of a single token a work item has, and where they lie. */
#include "pages.h"

#define SPLIT 256         /* keys of a work item */

struct splits { int first, count, lowest; };

static struct splits splits_of(const struct attention *a, int chunk)
{
    int last = a->context_lens[chunk] - 1, lowest = a->window ? larger(0, last - a->window + 1) : 0;
    return (struct splits){.first = lowest / SPLIT, .count = last / SPLIT - lowest / SPLIT + 1, .lowest = lowest};
}

struct keys { int first, end; };

static struct keys keys_of_split(const struct attention *a, const struct item *item)
{
    struct splits splits = splits_of(a, item->chunk);
    int first = (splits.first + item->part) * SPLIT;
    return (struct keys){.first = larger(first, splits.lowest / KEYS * KEYS),
                         .end = smaller(first + SPLIT, a->context_lens[item->chunk])};
}

static void locate_first(const struct attention *a, const struct item *item, struct block *to)
{
    struct keys keys = keys_of_split(a, item);
    locate(a, item->chunk, item->first_head, keys.first, smaller(KEYS, keys.end - keys.first), to);
}

/* Makes the next block the one at hand, and finds the one after it: of the next item where this one ends. */
static void advance(const struct attention *a, struct scratch *w, const struct item *item, const struct item *next, int key,
                    int end)
{
    w->block = w->next;
    if (key + KEYS < end)
        locate(a, item->chunk, item->first_head, key + KEYS, smaller(KEYS, end - key - KEYS), &w->next);
    else if (next)
        locate_first(a, next, &w->next);
}
