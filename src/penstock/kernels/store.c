/* Queries and keys rotated by their positions, keys and values brought to their pages. */
#include <string.h>

#include "vectors.h"

/* One head: pairs of dimensions `half` apart are turned, those past them copied. */
INLINE void rotate(bf16 *to, const bf16 *from, const bf16 *cosines, const bf16 *sines, int half, int head_size)
{
    for (int dim = 0; dim < half; dim += LANES) {
        int count = half - dim;
        floats cosine = load_floats(cosines + dim, count), sine = load_floats(sines + dim, count);
        floats first = load_floats(from + dim, count), second = load_floats(from + half + dim, count);
        store_floats(to + dim, v_mul_sub(first, cosine, v_mul(second, sine)), count);
        store_floats(to + half + dim, v_mul_add(second, cosine, v_mul(first, sine)), count);
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
