/* Values of a matrix in float32, 16 outputs side by side, whether it lies in bfloat16 or in codes.
 *
 * A value is the number of its code times the scale, plus the lowest value of its group, as the format says: whoever multiplies
 * with it has the same value.
 */
#include "blocks.h"

#define HALVES 2 /* registers of a block */
#define AHEAD 4096 /* bytes that are asked for before they are needed, into the second cache */

/* The same, with what a code's number is less than the code in the lowest value: one multiplication gives the value. */
INLINE struct factors_of_group factors_of(const char *block, int group, const int half, const enum type type)
{
    struct format format = format_of(type);
    struct factors_of_group f = factors_at(block, group, half * LANES, format.factors);
    for (int h = 0; h < num_scales(type) && format.offset; h++)
        f.lowest[h] = v_mul(f.scales[h], v_all(-format.offset));
    return f;
}

/* Codes of one input of a pair, from words of 32 bits that hold both. */
INLINE __m256i codes_of_plane(const char *codes, const int pair, const int half, const int which, const int bits, const int to)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)(codes + pair * bits / 16 * 64 + half * 32));
    const int at = 16 * which + pair * bits % 16 - to;
    words = at < 0 ? _mm256_slli_epi32(words, -at) : _mm256_srli_epi32(words, at);
    return _mm256_and_si256(words, _mm256_set1_epi32(((1 << bits) - 1) << to));
}

INLINE __m256i numbers_in_book(__m256i codes, const enum type type)
{
    __m256i book = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)book_of(type)));
    return _mm256_srai_epi32(_mm256_slli_epi32(_mm256_shuffle_epi8(book, codes), 24), 24);
}

/* The values of both inputs of a pair, for 8 outputs of a block. */
INLINE void pair_of_values(const char *codes, const int pair, const int half, const struct factors_of_group *f,
                           const enum type type, floats *values)
{
    const int low = format_of(type).low, high = format_of(type).high;
    const int of = num_scales(type) * pair / NUM_PAIRS;
    __m256i numbers[2];
    if (low == 8) {
        const char *from = codes + 2 * BLOCK_OUTPUTS * pair + 2 * LANES * half;
        __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
        numbers[0] = _mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24), numbers[1] = _mm256_srai_epi32(both, 8);
    } else
        for (int i = 0; i < 2; i++) {
            numbers[i] = codes_of_plane(codes, pair, half, i, low, 0);
            if (high)
                numbers[i] = i_or(numbers[i], codes_of_plane(codes + low * PLANE_BYTES, pair, half, i, high, low));
            if (book_of(type))
                numbers[i] = numbers_in_book(numbers[i], type);
        }
    int has_sum = has_lowest(type) || format_of(type).offset;
    for (int i = 0; i < 2; i++)
        values[i] = has_sum ? v_mul_add(v_of_ints(numbers[i]), f->scales[of], f->lowest[of])
                            : v_mul(v_of_ints(numbers[i]), f->scales[of]);
}

/* A group of a block; `panel`: [32 inputs, 16 outputs]. */
INLINE void unpack_group(const struct product *p, const char *block, int group, float *panel, const enum type type)
{
    const char *factors_at = block + num_groups_of(p) * code_bytes(type);
    for (int h = 0; h < HALVES; h++) {
        struct factors_of_group factors = factors_of(factors_at, group, h, type);
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            floats values[2];
            pair_of_values(block + group * code_bytes(type), pair, h, &factors, type, values);
            v_store(panel + 2 * pair * BLOCK_OUTPUTS + h * LANES, values[0]);
            v_store(panel + (2 * pair + 1) * BLOCK_OUTPUTS + h * LANES, values[1]);
        }
    }
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
