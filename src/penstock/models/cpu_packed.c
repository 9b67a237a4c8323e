/* Products of a few rows with a matrix of 8 or 4 bit codes, and the matrix unpacked to bfloat16 for many.
 *
 * 16 outputs lie side by side, a lane each, in groups of 32 inputs. A code is a small whole number, which bfloat16
 * holds exactly: the dot products of a group are of codes, and its scale and lowest value come in once per group.
 */
#include "cpu_vectors.h"

#define PACKED_GROUP 32  /* inputs that share a scale */
#define NUM_PAIRS 16     /* of inputs in a group */
#define MOST_TOGETHER 8  /* rows that share one pass over a block */
#define AHEAD 1024       /* bytes that are asked for before they are needed */

struct int4_block {
    uint16_t codes[4][2 * LANES]; /* four codes to a word, of four pairs after one another */
    uint16_t scales[LANES], lowest[LANES];
};

struct int8_block {
    int8_t codes[NUM_PAIRS][2 * LANES];
    uint16_t scales[LANES];
};

INLINE size_t block_bytes(int is_int4) { return is_int4 ? sizeof(struct int4_block) : sizeof(struct int8_block); }

INLINE __m512 half_floats(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

/* The whole numbers 0 to 15 in bfloat16, twice: whatever lies above the four bits is not looked at. */
INLINE __m512i numbers_in_bf16(void)
{
    __m256i once = (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(LANE_NUMBERS));
    return _mm512_broadcast_i64x4(once);
}

/* The codes of one pair of inputs, in bfloat16. */
INLINE __m512i int4_pair(__m512i words, const int which, __m512i numbers)
{
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * which), numbers);
}

INLINE __m512i int8_pair(const int8_t *codes)
{
    __m512 one = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
    __m512 two = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + LANES))));
    return (__m512i)_mm512_cvtne2ps_pbh(two, one);
}

INLINE __m512i pair_of_inputs(const bf16 *row, int pair)
{
    int32_t both;
    __builtin_memcpy(&both, row + 2 * pair, sizeof both);
    return _mm512_set1_epi32(both);
}

/* 16 outputs of `num_rows` rows, a constant where this is inlined. Sums are added up in one order for any number. */
INLINE void multiply_block(const struct product *p, int row, int block, const int num_rows, const int is_int4)
{
    int num_groups = p->num_inputs / PACKED_GROUP;
    const char *at = (const char *)p->weight + (size_t)block * num_groups * block_bytes(is_int4);
    const __m512i numbers = numbers_in_bf16();
    const bf16 *rows[MOST_TOGETHER];
    const float *group_sums[MOST_TOGETHER];
    __m512 totals[MOST_TOGETHER];
    for (int r = 0; r < num_rows; r++) {
        int of = smaller(row + r, p->num_rows - 1);
        rows[r] = p->rows + (size_t)of * p->num_inputs;
        group_sums[r] = (const float *)p->workspace + (size_t)of * num_groups;
        totals[r] = _mm512_setzero_ps();
    }
    for (int group = 0; group < num_groups; group++, at += block_bytes(is_int4)) {
        __m512 sums[MOST_TOGETHER][2];
        for (int r = 0; r < num_rows; r++)
            sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        for (size_t line = 0; line < block_bytes(is_int4); line += 64)
            _mm_prefetch(at + AHEAD + line, _MM_HINT_T0);
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            __m512i codes;
            if (is_int4)
                codes = int4_pair(_mm512_loadu_si512(((const struct int4_block *)at)->codes[pair / 4]), pair % 4, numbers);
            else
                codes = int8_pair(((const struct int8_block *)at)->codes[pair]);
            for (int r = 0; r < num_rows; r++)
                sums[r][pair % 2] = dot(sums[r][pair % 2], codes, pair_of_inputs(rows[r], group * NUM_PAIRS + pair));
        }
        __m512 scales = half_floats(is_int4 ? ((const struct int4_block *)at)->scales : ((const struct int8_block *)at)->scales);
        for (int r = 0; r < num_rows; r++) {
            totals[r] = _mm512_fmadd_ps(scales, _mm512_add_ps(sums[r][0], sums[r][1]), totals[r]);
            if (is_int4)
                totals[r] = _mm512_fmadd_ps(half_floats(((const struct int4_block *)at)->lowest),
                                            _mm512_set1_ps(group_sums[r][group]), totals[r]);
        }
    }
    int output = block * LANES;
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++)
        write_values(p, totals[r], row + r, output, smaller(LANES, p->num_outputs - output));
}

INLINE void multiply_rows(const struct product *p, int block, const int is_int4)
{
    for (int row = 0; row < p->num_rows; row += MOST_TOGETHER)
        switch (smaller(MOST_TOGETHER, p->num_rows - row)) {
        case 1: multiply_block(p, row, block, 1, is_int4); break;
        case 2: multiply_block(p, row, block, 2, is_int4); break;
        case 3:
        case 4: multiply_block(p, row, block, 4, is_int4); break;
        default: multiply_block(p, row, block, MOST_TOGETHER, is_int4);
        }
}

static void multiply_blocks(const void *of, int first, int end)
{
    const struct product *p = of;
    for (int block = first; block < end; block++)
        if (p->is_int4)
            multiply_rows(p, block, 1);
        else
            multiply_rows(p, block, 0);
}

/* What the lowest value of a group is multiplied with: the sum of its inputs. */
static void sum_groups(const struct product *p)
{
    float *sums = p->workspace;
    for (size_t group = 0; group < (size_t)p->num_rows * p->num_inputs / PACKED_GROUP; group++) {
        const bf16 *from = p->rows + group * PACKED_GROUP;
        sums[group] = _mm512_reduce_add_ps(_mm512_add_ps(load_floats(from, LANES), load_floats(from + LANES, LANES)));
    }
}

void penstock_multiply_packed(const struct product *p)
{
    int num_blocks = (p->num_outputs + LANES - 1) / LANES;
    size_t bytes = p->num_inputs / PACKED_GROUP * block_bytes(p->is_int4);
    if (p->is_int4)
        sum_groups(p);
    share_rows(multiply_blocks, p, num_blocks, bytes, p->parallel, p->num_threads);
}

struct unpacking {
    const char *blocks;
    const int64_t *ids;   /* rows that are wanted, or NULL: all of them */
    bf16 *out;            /* [rows, inputs] */
    parallel_t parallel;
    int32_t num_rows, num_inputs, is_int4, num_threads;
};

/* A pair of codes in each lane to a pair of values. */
INLINE __m512 pair_of_values(__m512i codes, __m512 scales, __m512 lowest)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(codes, 16));
    __m512 two = _mm512_castsi512_ps(_mm512_and_si512(codes, _mm512_set1_epi32((int)0xffff0000)));
    one = _mm512_fmadd_ps(one, scales, lowest);
    two = _mm512_fmadd_ps(two, scales, lowest);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(two, one)));
}

/* 16 rows of 32 values: lane i of register j holds pair i of row j. */
INLINE void unpack_block(const char *at, __m512 *rows, const int is_int4)
{
    const struct int4_block *four = (const void *)at;
    const struct int8_block *eight = (const void *)at;
    const __m512i numbers = numbers_in_bf16();
    __m512 scales = half_floats(is_int4 ? four->scales : eight->scales);
    __m512 lowest = is_int4 ? half_floats(four->lowest) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int pair = 0; pair < NUM_PAIRS; pair++) {
        __m512i codes = is_int4 ? int4_pair(_mm512_loadu_si512(four->codes[pair / 4]), pair % 4, numbers)
                                : int8_pair(eight->codes[pair]);
        rows[pair] = pair_of_values(codes, scales, lowest);
    }
    transpose(rows);
}

INLINE void unpack_outputs(const struct unpacking *u, int block, const int is_int4)
{
    int num_groups = u->num_inputs / PACKED_GROUP, count = smaller(LANES, u->num_rows - block * LANES);
    const char *at = u->blocks + (size_t)block * num_groups * block_bytes(is_int4);
    bf16 *out = u->out + (size_t)block * LANES * u->num_inputs;
    for (int group = 0; group < num_groups; group++, at += block_bytes(is_int4)) {
        __m512 rows[LANES];
        unpack_block(at, rows, is_int4);
        for (int r = 0; r < count; r++)
            _mm512_storeu_ps(out + (size_t)r * u->num_inputs + group * PACKED_GROUP, rows[r]);
    }
}

static void unpack_blocks(const void *of, int first, int end)
{
    const struct unpacking *u = of;
    for (int block = first; block < end; block++)
        if (u->is_int4)
            unpack_outputs(u, block, 1);
        else
            unpack_outputs(u, block, 0);
}

void penstock_unpack(const struct unpacking *u)
{
    int num_blocks = (u->num_rows + LANES - 1) / LANES;
    share_rows(unpack_blocks, u, num_blocks, sizeof(bf16) * LANES * u->num_inputs, u->parallel, u->num_threads);
}

static void unpack_wanted(const void *of, int first, int end)
{
    const struct unpacking *u = of;
    int num_groups = u->num_inputs / PACKED_GROUP;
    for (int row = first; row < end; row++) {
        int lane = u->ids[row] % LANES;
        const char *at = u->blocks + (size_t)(u->ids[row] / LANES) * num_groups * block_bytes(u->is_int4);
        for (int group = 0; group < num_groups; group++, at += block_bytes(u->is_int4)) {
            __m512 rows[LANES];
            if (u->is_int4)
                unpack_block(at, rows, 1);
            else
                unpack_block(at, rows, 0);
            _mm512_storeu_ps(u->out + (size_t)row * u->num_inputs + group * PACKED_GROUP, rows[lane]);
        }
    }
}

void penstock_unpack_rows(const struct unpacking *u)
{
    share_rows(unpack_wanted, u, u->num_rows, sizeof(bf16) * LANES * u->num_inputs, u->parallel, u->num_threads);
}
