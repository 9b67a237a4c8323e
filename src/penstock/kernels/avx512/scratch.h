/* What a thread holds while it attends. */
#define LEAST_TILE LANES  /* rows of a work item, where many threads share few */

struct scratch {
    uint32_t queries[TILE / SUBTILE][MAX_HEAD / 2][SUBTILE]; /* pairs of dimensions, a row per lane */
    float scores[KEYS][SUBTILE];
    uint32_t weights[KEYS / 2 * SUBTILE];                /* pairs of keys, a row per lane; of splits, a row after another */
    uint32_t values[KEYS / 2 * MAX_HEAD];                /* pairs of keys, a dimension per lane, in unpacked order */
    float sums[TILE * MAX_HEAD];
    float highest[TILE], totals[TILE], fading[SUBTILE];
    int32_t positions[TILE];
    struct block block, next;
    int32_t is_next_known;                               /* between items: whether `next` is the first block of the one to come */
};

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
