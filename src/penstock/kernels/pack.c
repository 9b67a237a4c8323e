/* Rows of a GGUF's bytes into blocks of 16 outputs; blocks.h says how those lie, and gguf_blocks.py does the same without C. */
#include "blocks.h"

#define REGION (REGION_GROUPS * PACKED_GROUP) /* inputs that share their factors, where not each group has its own */

/* Where fields begin in the bytes of a type: its codes, their high bits, the scale; the lowest value follows it. */
struct stored { int bytes, codes, high, scale, scales; };

INLINE struct stored stored_as(const enum type type)
{
    switch (type) {
    case Q4_0: case IQ4_NL: return (struct stored){18, 2, 0, 0, 0};
    case Q4_1: return (struct stored){20, 4, 0, 0, 0};
    case Q5_0: return (struct stored){22, 6, 2, 0, 0};
    case Q5_1: return (struct stored){24, 8, 4, 0, 0};
    case MXFP4: return (struct stored){17, 1, 0, 0, 0};
    case Q2_K: return (struct stored){84, 16, 0, 80, 0};
    case Q3_K: return (struct stored){110, 32, 0, 108, 96};
    case Q4_K: return (struct stored){144, 16, 0, 0, 4};
    case Q5_K: return (struct stored){176, 48, 16, 0, 4};
    case Q6_K: return (struct stored){210, 0, 128, 208, 192};
    case IQ4_XS: return (struct stored){136, 8, 0, 0, 4};
    default: return (struct stored){34, 2, 0, 0, 0}; /* Q8_0 */
    }
}

/* `width` bytes hold the lowest bits of as many codes, then the next ones of as many more. */
INLINE void add_layers(uint8_t *codes, const uint8_t *from, const int num_bytes, const int width, const int bits, const int below)
{
    for (int first = 0; first < num_bytes; first += width)
        for (int shift = 0; shift < 8; shift += bits, codes += width)
            for (int i = 0; i < width; i++)
                codes[i] |= (from[first + i] >> shift & ((1 << bits) - 1)) << below;
}

/* The codes of as many inputs as share their factors, a byte each. */
INLINE void codes_of(const uint8_t *from, uint8_t *codes, const enum type type)
{
    const struct stored at = stored_as(type);
    memset(codes, 0, groups_of_factors(format_of(type).factors) * PACKED_GROUP);
    if (type == Q2_K || type == Q3_K) {
        add_layers(codes, from + at.codes, 64, PACKED_GROUP, 2, 0);
        if (type == Q3_K)
            add_layers(codes, from + at.high, 32, PACKED_GROUP, 1, 2);
    } else if (type == IQ4_XS) {
        add_layers(codes, from + at.codes, 128, PACKED_GROUP / 2, 4, 0);
    } else if (groups_of_factors(format_of(type).factors) > 1) {
        add_layers(codes, from + at.codes, 128, type == Q6_K ? 64 : PACKED_GROUP, 4, 0);
        if (type == Q5_K || type == Q6_K)
            add_layers(codes, from + at.high, type == Q6_K ? 64 : 32, PACKED_GROUP, type == Q6_K ? 2 : 1, 4);
    } else if (type == Q8_0) {
        memcpy(codes, from + at.codes, PACKED_GROUP);
    } else {
        add_layers(codes, from + at.codes, 16, PACKED_GROUP / 2, 4, 0);
        uint32_t fifth = 0;
        if (format_of(type).high)
            memcpy(&fifth, from + at.high, sizeof fifth);
        for (int i = 0; i < PACKED_GROUP; i++)
            codes[i] |= (fifth >> i & 1) << 4;
    }
}

/* Some bits of the 16 pairs of a group, as words of a plane. */
INLINE void pack_plane(const uint8_t *codes, char *plane, int lane, const int bits, const int below)
{
    const int pairs = 16 / bits; /* of a word */
    for (int word = 0; word < NUM_PAIRS / pairs; word++) {
        uint32_t packed = 0;
#pragma GCC unroll 4
        for (int i = 0; i < pairs / 4; i++) {
            uint64_t eight;
            memcpy(&eight, codes + 2 * (word * pairs + 4 * i), sizeof eight);
            eight = eight >> below & 0x0101010101010101u * ((1 << bits) - 1);
            eight |= eight >> (16 - bits); /* the first inputs of two pairs are in one byte, the second in the next */
            uint32_t one = (uint32_t)eight, two = (uint32_t)(eight >> 32);
            one = (one & 0xff) | (one & 0xff00) << 8;
            two = (two & 0xff) | (two & 0xff00) << 8;
            packed |= (one | two << 2 * bits) << 4 * bits * i;
        }
        memcpy(plane + ((size_t)word * BLOCK_OUTPUTS + lane) * sizeof packed, &packed, sizeof packed);
    }
}

INLINE void pack_sixes(struct sixes *to, int group, int lane, int one, int two)
{
    uint8_t high = one >> 4 | two >> 4 << 2;
    to->low[group][lane] = (one & 15) | (two & 15) << 4;
    to->high[group / 2][lane] = group % 2 ? to->high[group / 2][lane] | high << 4 : high;
}

INLINE void pack_factors(const uint8_t *from, void *to, int lane, const enum type type)
{
    const struct stored at = stored_as(type);
    const enum factors factors = format_of(type).factors;
    const uint8_t *scales = from + at.scales;
    struct halves *halves = to;
    if (factors == POWER) {
        ((uint8_t *)to)[lane] = from[0];
        return;
    }
    memcpy(halves->scales + lane, from + at.scale, sizeof(uint16_t));
    if (has_lowest(type))
        memcpy(halves->lowest + lane, from + at.scale + 2, sizeof(uint16_t));
    for (int g = 0; g < REGION_GROUPS && factors > POWER; g++)
        if (factors == BYTE) {
            int high = from[2 + g / 4] >> g % 4 * 2 & 3;
            ((struct byte *)to)->of_group[g][lane] = (int8_t)((scales[g / 2] >> g % 2 * 4 & 15) + 16 * high - 32);
        } else if (factors == BYTE_PAIR) {
            for (int h = 0; h < 2; h++)
                ((struct byte_pair *)to)->of_half[g][h][lane] = (int8_t)scales[2 * g + h];
        } else if (factors == FOUR_LOWEST) {
            struct four_lowest *four = to;
            four->scales[g][lane] = (scales[2 * g] & 15) | scales[2 * g + 1] << 4;
            four->lowest[g][lane] = scales[2 * g] >> 4 | (scales[2 * g + 1] & 0xf0);
        } else if (factors == SIX_PAIR) {
            int of[2];
            for (int h = 0; h < 2; h++) {
                int n = 2 * g + h;
                of[h] = (scales[n % 8] >> n / 8 * 4 & 15) | (scales[8 + n % 4] >> n / 4 * 2 & 3) << 4;
            }
            pack_sixes(&((struct six_pair *)to)->of_halves, g, lane, of[0], of[1]);
        } else {
            int n = g % 4, one = scales[n] & 63, two = scales[n + 4] & 63;
            if (g > 3)
                one = (scales[n + 8] & 15) | scales[n] >> 6 << 4, two = scales[n + 8] >> 4 | scales[n + 4] >> 6 << 4;
            pack_sixes(&((struct six_lowest *)to)->scale_and_lowest, g, lane, one, two);
        }
}

INLINE void pack_row(const struct packing *p, int row, const enum type type)
{
    const int low = format_of(type).low, high = format_of(type).high;
    const int num_groups = groups_of_factors(format_of(type).factors), num_sets = p->num_inputs / PACKED_GROUP / num_groups;
    const uint8_t *from = p->rows + (size_t)row * num_sets * stored_as(type).bytes;
    char *block = p->weight + p->outputs[row] / BLOCK_OUTPUTS * block_bytes(type, p->num_inputs / PACKED_GROUP);
    int lane = p->outputs[row] % BLOCK_OUTPUTS;
    for (int set = 0; set < num_sets; set++, from += stored_as(type).bytes, block += factor_bytes(format_of(type).factors)) {
        uint8_t codes[REGION];
        codes_of(from, codes, type);
        for (int g = 0; g < num_groups; g++, block += code_bytes(type)) {
            const uint8_t *of_group = codes + g * PACKED_GROUP;
            if (low == 8) {
                for (int pair = 0; pair < NUM_PAIRS; pair++)
                    memcpy(block + 2 * (BLOCK_OUTPUTS * pair + lane), of_group + 2 * pair, 2);
                continue;
            }
            pack_plane(of_group, block, lane, low == 8 ? 4 : low, 0);
            if (high)
                pack_plane(of_group, block + low * PLANE_BYTES, lane, high ? high : 1, low);
        }
        pack_factors(from, block, lane, type);
    }
}

#define PACK(TYPE)                                                                      \
    static __attribute__((noinline)) void pack_##TYPE(const void *of, int first, int end) \
    {                                                                                   \
        for (int row = first; row < end; row++)                                         \
            pack_row(of, row, TYPE);                                                    \
    }
EACH_TYPE(PACK)

static void (*const packs[])(const void *, int, int) = {
#define ENTRY(TYPE) [TYPE] = pack_##TYPE,
    EACH_TYPE(ENTRY)
};

void penstock_pack(const struct packing *p)
{
    share_rows(packs[p->type], p, p->num_rows, p->num_inputs, p->parallel, p->num_threads);
}
