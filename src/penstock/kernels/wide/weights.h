/* Values of a matrix in float32, 16 outputs side by side, whether it lies in bfloat16 or in codes.
 *
 * A value is the number of its code times the scale, plus the lowest value of its group, as the format says: whoever multiplies
 * with it has the same value.
 */

#include "blocks.h"

#define PIECES (BLOCK_OUTPUTS / LANES) /* registers of a block */
#define AHEAD 4096 /* bytes that are asked for before they are needed, into the second cache */

/* The same, with what a code's number is less than the code in the lowest value: one multiplication gives the value. */
INLINE struct factors_of_group factors_of(const char *block, int group, const int piece, const enum type type)
{
    struct format format = format_of(type);
    struct factors_of_group f = factors_at(block, group, piece * LANES, format.factors);
    for (int h = 0; h < num_scales(type) && format.offset; h++)
        f.lowest[h] = v_mul(f.scales[h], v_all(-format.offset));
    return f;
}

/* Codes of one input of a pair, from words of 32 bits that hold both. */
INLINE ints codes_of_plane(const char *codes, const int pair, const int piece, const int which, const int bits, const int to)
{
    ints words = i_load(codes + pair * bits / 16 * 64 + piece * 4 * LANES);
    const int at = 16 * which + pair * bits % 16 - to;
    words = at < 0 ? i_left(words, -at) : i_right(words, at);
    return i_and(words, ((1 << bits) - 1) << to);
}

/* The values of both inputs of a pair, for a register of outputs of a block. */
INLINE void pair_of_values(const char *codes, const int pair, const int piece, const struct factors_of_group *f,
                           const enum type type, floats *values)
{
    const int low = format_of(type).low, high = format_of(type).high;
    const int of = num_scales(type) * pair / NUM_PAIRS;
    ints numbers[2];
    if (low == 8) {
        ints both = i_shorts(codes + 2 * BLOCK_OUTPUTS * pair + 2 * LANES * piece);
        numbers[0] = i_signed_right(i_left(both, 24), 24), numbers[1] = i_signed_right(both, 8);
    } else
        for (int i = 0; i < 2; i++) {
            numbers[i] = codes_of_plane(codes, pair, piece, i, low, 0);
            if (high)
                numbers[i] = i_or(numbers[i], codes_of_plane(codes + low * PLANE_BYTES, pair, piece, i, high, low));
            if (book_of(type))
                numbers[i] = i_in_book(numbers[i], book_of(type));
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
    for (int piece = 0; piece < PIECES; piece++) {
        struct factors_of_group factors = factors_of(factors_at, group, piece, type);
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            floats values[2];
            pair_of_values(block + group * code_bytes(type), pair, piece, &factors, type, values);
            v_store(panel + 2 * pair * BLOCK_OUTPUTS + piece * LANES, values[0]);
            v_store(panel + (2 * pair + 1) * BLOCK_OUTPUTS + piece * LANES, values[1]);
        }
    }
}

/* Inputs from `input` on of as many outputs in bfloat16, turned: register i holds input i, of those that are there. */
INLINE void turned_values(const struct product *p, int output, int input, floats *values)
{
    for (int o = 0; o < LANES; o++) {
        const bf16 *row = p->weight + (size_t)smaller(output + o, p->num_outputs - 1) * p->num_inputs;
        values[o] = load_floats(row + input, p->num_inputs - input);
    }
    transpose(values);
}
