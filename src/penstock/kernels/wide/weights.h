/* Values of a matrix in float32, 16 outputs side by side, whether it lies in bfloat16 or in codes.
 *
 * Products with codes are of their numbers, which are whole: the scale of a group, and the lowest value of it times the sum of its
 * inputs, come in once. Whoever multiplies adds up in this order.
 */

#include "blocks.h"

#define PIECES (BLOCK_OUTPUTS / LANES) /* registers of a block */
#define AHEAD 4096 /* bytes that are asked for before they are needed, into the second cache */

/* What the sums of a group, or of its halves, are multiplied with. What a code's number is less than the code is in the lowest value. */
INLINE struct factors_of_group factors_of(const char *block, int group, const int piece, const enum type type)
{
    struct format format = format_of(type);
    struct factors_of_group f = factors_at(block, group, piece * LANES, type);
    for (int h = 0; h < num_scales(type) && format.offset; h++)
        f.lowest[h] = v_mul(f.scales[h], v_all(-format.offset));
    return f;
}

INLINE int has_sum(const enum type type) { return has_lowest(type) || format_of(type).offset; }

/* Where a code lies that is made of a word of 32 bits: as low planes have it, so that few are moved, and never in the sign. Its number
 * is that many times as large. */
INLINE int place_of_code(const int pair, const int which, const enum type type)
{
    const int low = format_of(type).low, high = format_of(type).high, place = 16 * which + pair * low % 16;
    if (low == 8)
        return which ? 8 : 24; /* bytes have their sign in the highest bit of a word */
    return book_of(type) ? 0 : smaller(place, 30 - low - high);
}

/* Codes of one input of a pair, from words of 32 bits that hold both. */
INLINE ints codes_of_plane(const char *codes, const int pair, const int piece, const int which, const int bits, const int to)
{
    ints words = i_load(codes + pair * bits / 16 * 64 + piece * 4 * LANES);
    const int at = 16 * which + pair * bits % 16 - to;
    if (at)
        words = at < 0 ? i_left(words, -at) : i_right(words, at);
    return i_and(words, ((1 << bits) - 1) << to);
}

/* The numbers of both inputs of a pair, as large as their places make them, for a register of outputs of a block. */
INLINE void pair_of_numbers(const char *codes, const int pair, const int piece, const enum type type, floats *values)
{
    const int low = format_of(type).low, high = format_of(type).high;
    ints numbers[2];
    if (low == 8) {
        ints both = i_shorts(codes + 2 * BLOCK_OUTPUTS * pair + 2 * LANES * piece);
        numbers[0] = i_left(both, 24), numbers[1] = i_and(both, ~255);
    } else
        for (int i = 0; i < 2; i++) {
            const int place = place_of_code(pair, i, type);
            numbers[i] = codes_of_plane(codes, pair, piece, i, low, place);
            if (high)
                numbers[i] = i_or(numbers[i], codes_of_plane(codes + low * PLANE_BYTES, pair, piece, i, high, place + low));
            if (book_of(type))
                numbers[i] = i_in_book(numbers[i], book_of(type));
        }
    for (int i = 0; i < 2; i++)
        values[i] = v_of_ints(numbers[i]);
}

/* Numbers of a pair as they are, 16 bits each, for a register of outputs: the first input is in the lower half of a lane. */
INLINE ints whole_pair(const char *codes, const int pair, const int piece, const enum type type)
{
    const int low = format_of(type).low, high = format_of(type).high, at = pair * low % 16;
    if (low == 8)
        return i_pairs_of_bytes(codes + 2 * BLOCK_OUTPUTS * pair + 2 * LANES * piece);
    ints numbers = i_load(codes + pair * low / 16 * 64 + piece * 4 * LANES);
    numbers = i_and(at ? i_shorts_right(numbers, at) : numbers, ((1 << low) - 1) * 0x10001);
    if (high) {
        const int from = pair * high % 16 - low;
        ints upper = i_load(codes + low * PLANE_BYTES + pair * high / 16 * 64 + piece * 4 * LANES);
        upper = from < 0 ? i_shorts_left(upper, -from) : from ? i_shorts_right(upper, from) : upper;
        numbers = i_or(numbers, i_and(upper, (((1 << high) - 1) << low) * 0x10001));
    }
    return book_of(type) ? i_pairs_in_book(numbers, book_of(type)) : numbers;
}

/* Of a group of a block, or of the same for several rows: 32 inputs, then their factors, 16 outputs side by side. */
struct unpacked_group {
    float numbers[PACKED_GROUP][BLOCK_OUTPUTS];
    float scales[2][BLOCK_OUTPUTS], lowest[2][BLOCK_OUTPUTS];
};

INLINE void unpack_group(const char *block, int group, struct unpacked_group *to, const enum type type)
{
    for (int piece = 0; piece < PIECES; piece++) {
        struct factors_of_group factors = factors_of(block, group, piece, type);
        for (int h = 0; h < num_scales(type); h++) {
            v_store(to->scales[h] + piece * LANES, factors.scales[h]);
            v_store(to->lowest[h] + piece * LANES, factors.lowest[h]);
        }
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            floats values[2];
            pair_of_numbers(codes_at(block, group, type), pair, piece, type, values);
            for (int i = 0; i < 2; i++) {
                const int place = place_of_code(pair, i, type);
                if (place)
                    values[i] = v_mul(values[i], v_all(1.0f / (1 << place)));
                v_store(to->numbers[2 * pair + i] + piece * LANES, values[i]);
            }
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
