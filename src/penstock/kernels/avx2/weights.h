/* Values of a matrix in float32, 16 outputs side by side, whether it lies in bfloat16 or in codes of 8 or 4 bits.
 *
 * A value is its code times the scale, plus the lowest value of its group, as the format says: whoever multiplies with it
 * has the same value.
 */
#include "blocks.h"

#define HALVES 2 /* registers of a block */
#define AHEAD 4096 /* bytes that are asked for before they are needed, into the second cache */

/* Scales and lowest values of a group of a block. */
struct factors { floats scales[HALVES], lowest[HALVES]; };

INLINE floats half_floats(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

INLINE struct factors factors_of(const char *block, const int bits)
{
    struct factors f;
    for (int h = 0; h < HALVES; h++)
        if (bits == 4) {
            f.scales[h] = half_floats(((const struct int4_block *)block)->scales + h * LANES);
            f.lowest[h] = half_floats(((const struct int4_block *)block)->lowest + h * LANES);
        } else
            f.scales[h] = half_floats(((const struct int8_block *)block)->scales + h * LANES), f.lowest[h] = v_zero();
    return f;
}

/* The values of both inputs of a pair, for 8 outputs of a block. */
INLINE void pair_of_values(const char *block, const int pair, const int half, const struct factors *f, const int bits,
                           floats *values)
{
    if (bits == 4) {
        const uint16_t *from = ((const struct int4_block *)block)->codes[pair / 4] + 2 * LANES * half;
        __m256i words = _mm256_loadu_si256((const __m256i *)from), code = _mm256_set1_epi32(15);
        __m256i one = _mm256_and_si256(_mm256_srli_epi32(words, pair % 4 * 4), code);
        __m256i two = _mm256_and_si256(_mm256_srli_epi32(words, 16 + pair % 4 * 4), code);
        values[0] = v_mul_add(_mm256_cvtepi32_ps(one), f->scales[half], f->lowest[half]);
        values[1] = v_mul_add(_mm256_cvtepi32_ps(two), f->scales[half], f->lowest[half]);
    } else {
        const int8_t *from = ((const struct int8_block *)block)->codes[pair] + 2 * LANES * half;
        __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
        __m256i one = _mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24), two = _mm256_srai_epi32(both, 8);
        values[0] = v_mul(_mm256_cvtepi32_ps(one), f->scales[half]);
        values[1] = v_mul(_mm256_cvtepi32_ps(two), f->scales[half]);
    }
}

INLINE int num_groups_of(const struct product *p) { return p->num_inputs / PACKED_GROUP; }

INLINE int last_block(const struct product *p) { return (p->num_outputs - 1) / BLOCK_OUTPUTS; }

/* A block of codes; past the last one it is that one again. */
INLINE const char *block_at(const struct product *p, int block, const int bits)
{
    return (const char *)p->weight + (size_t)smaller(block, last_block(p)) * num_groups_of(p) * block_bytes(bits == 4);
}

/* 8 inputs from `input` on of 8 outputs in bfloat16, turned: register i holds input i, of those that are there. */
INLINE void turned_values(const struct product *p, int output, int input, floats *values)
{
    for (int o = 0; o < LANES; o++) {
        const bf16 *row = p->weight + (size_t)smaller(output + o, p->num_outputs - 1) * p->num_inputs;
        values[o] = load_floats(row + input, p->num_inputs - input);
    }
    transpose(values);
}
