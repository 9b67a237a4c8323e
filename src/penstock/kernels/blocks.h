/* Matrices of codes as they lie: 16 outputs side by side, in sets: the codes of the groups that share factors, then those.
 *
 * Inputs come in groups of 32. A code has one or two planes: its low bits, then its high ones. A word of a plane holds those of
 * several pairs of inputs after one another; a register of words is [16 outputs, input of the pair]. Codes of eight bits are bytes,
 * [pair, 16 outputs, input of the pair]. Factors are of one group or of eight: a scale of each group or of each half of it, and in
 * some types its lowest value.
 */
#include "vectors.h"

#define BLOCK_OUTPUTS 16
#define PACKED_GROUP 32  /* inputs */
#define NUM_PAIRS 16     /* of inputs in a group */
#define REGION_GROUPS 8  /* that share their factors, where not each has its own */
#define PLANE_BYTES (NUM_PAIRS * 2 * BLOCK_OUTPUTS / 8) /* of a plane of one bit */

/* Scales, and lowest values, in: */
enum factors {
    HALF,          /* float16 */
    HALF_LOWEST,   /* float16, both */
    POWER,         /* powers of two, half of them */
    BYTE,          /* eight bits of a float16 */
    BYTE_PAIR,     /* the same, of half a group */
    SIX_PAIR,      /* six bits of a float16, of half a group */
    SIX_LOWEST,    /* six bits, of two float16 */
    FOUR_LOWEST,   /* four bits of two float16, of half a group, both */
};

struct format {
    int low, high; /* bits of the planes */
    int offset;    /* of the number that a code stands for */
    enum factors factors;
};

INLINE struct format format_of(const enum type type)
{
    switch (type) {
    case Q4_0: return (struct format){4, 0, 8, HALF};
    case Q4_1: return (struct format){4, 0, 0, HALF_LOWEST};
    case Q5_0: return (struct format){4, 1, 16, HALF};
    case Q5_1: return (struct format){4, 1, 0, HALF_LOWEST};
    case Q2_K: return (struct format){2, 0, 0, FOUR_LOWEST};
    case Q3_K: return (struct format){2, 1, 4, SIX_PAIR};
    case Q4_K: return (struct format){4, 0, 0, SIX_LOWEST};
    case Q5_K: return (struct format){4, 1, 0, SIX_LOWEST};
    case Q6_K: return (struct format){4, 2, 32, BYTE_PAIR};
    case IQ4_NL: return (struct format){4, 0, 0, HALF};
    case IQ4_XS: return (struct format){4, 0, 0, BYTE};
    case MXFP4: return (struct format){4, 0, 0, POWER};
    default: return (struct format){8, 0, 0, HALF}; /* Q8_0 */
    }
}

/* What codes stand for in types with a book of them; NULL in all others. */
INLINE const int8_t *book_of(const enum type type)
{
    static const int8_t bent[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int8_t floats_of_four_bits[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return type == IQ4_NL || type == IQ4_XS ? bent : type == MXFP4 ? floats_of_four_bits : NULL;
}

INLINE int has_lowest(const enum type type)
{
    enum factors factors = format_of(type).factors;
    return factors == HALF_LOWEST || factors == SIX_LOWEST || factors == FOUR_LOWEST;
}

/* Scales of a group. */
INLINE int num_scales(const enum type type)
{
    enum factors factors = format_of(type).factors;
    return 1 + (factors == BYTE_PAIR || factors == SIX_PAIR || factors == FOUR_LOWEST);
}

struct halves { uint16_t scales[BLOCK_OUTPUTS], lowest[BLOCK_OUTPUTS]; };
struct byte { uint16_t scales[BLOCK_OUTPUTS]; int8_t of_group[REGION_GROUPS][BLOCK_OUTPUTS]; };
struct byte_pair { uint16_t scales[BLOCK_OUTPUTS]; int8_t of_half[REGION_GROUPS][2][BLOCK_OUTPUTS]; };
/* Two numbers of six bits for each group: their low four in a byte, and their high two in half a byte of two groups. */
struct sixes { uint8_t low[REGION_GROUPS][BLOCK_OUTPUTS], high[REGION_GROUPS / 2][BLOCK_OUTPUTS]; };
struct six_pair { uint16_t scales[BLOCK_OUTPUTS]; struct sixes of_halves; };
struct six_lowest { struct halves of_region; struct sixes scale_and_lowest; };
struct four_lowest {
    struct halves of_region;
    uint8_t scales[REGION_GROUPS][BLOCK_OUTPUTS], lowest[REGION_GROUPS][BLOCK_OUTPUTS]; /* of the first half in the low bits */
};

INLINE size_t factor_bytes(const enum factors factors)
{
    switch (factors) {
    case HALF: return sizeof(uint16_t) * BLOCK_OUTPUTS;
    case HALF_LOWEST: return sizeof(struct halves);
    case POWER: return BLOCK_OUTPUTS;
    case BYTE: return sizeof(struct byte);
    case BYTE_PAIR: return sizeof(struct byte_pair);
    case SIX_PAIR: return sizeof(struct six_pair);
    case SIX_LOWEST: return sizeof(struct six_lowest);
    default: return sizeof(struct four_lowest);
    }
}

INLINE int groups_of_factors(const enum factors factors) { return factors <= POWER ? 1 : REGION_GROUPS; }

INLINE size_t code_bytes(const enum type type) { return (format_of(type).low + format_of(type).high) * PLANE_BYTES; }

INLINE int groups_of_set(const enum type type) { return groups_of_factors(format_of(type).factors); }

INLINE size_t set_bytes(const enum type type)
{
    return groups_of_set(type) * code_bytes(type) + factor_bytes(format_of(type).factors);
}

/* A block with `num_groups` groups. */
INLINE size_t block_bytes(const enum type type, int num_groups) { return num_groups / groups_of_set(type) * set_bytes(type); }

INLINE const char *set_at(const char *block, int group, const enum type type)
{
    return block + group / groups_of_set(type) * set_bytes(type);
}

/* The codes of a group. */
INLINE const char *codes_at(const char *block, int group, const enum type type)
{
    return set_at(block, group, type) + group % groups_of_set(type) * code_bytes(type);
}

/* Scales and lowest values of a group, of both halves where those have their own, for a register of outputs from `first` on. */
struct factors_of_group { floats scales[2], lowest[2]; };

INLINE void six_bits(const struct sixes *from, int group, int first, ints *one, ints *two)
{
    ints low = i_bytes(from->low[group] + first), high = i_right(i_bytes(from->high[group / 2] + first), group % 2 * 4);
    *one = i_or(i_and(low, 15), i_left(i_and(high, 3), 4));
    *two = i_or(i_right(low, 4), i_left(i_and(high, 12), 2));
}

INLINE floats minus(floats a) { return v_sub(v_zero(), a); }

INLINE struct factors_of_group factors_at(const char *block, int group, int first, const enum type type)
{
    struct factors_of_group f = {{v_zero(), v_zero()}, {v_zero(), v_zero()}};
    const enum factors factors = format_of(type).factors;
    const void *at = set_at(block, group, type) + groups_of_set(type) * code_bytes(type);
    const struct halves *halves = at;
    ints one, two;
    group %= groups_of_set(type);
    if (factors == POWER) {
        f.scales[0] = v_mul(v_of_bits(i_left(i_bytes((const uint8_t *)at + first), 23)), v_all(0.5f));
        return f;
    }
    floats scale = half_floats(halves->scales + first);
    switch (factors) {
    case HALF: f.scales[0] = scale; break;
    case HALF_LOWEST: f.scales[0] = scale, f.lowest[0] = half_floats(halves->lowest + first); break;
    case BYTE: f.scales[0] = v_mul(scale, v_of_ints(i_signed_bytes(((const struct byte *)at)->of_group[group] + first))); break;
    case BYTE_PAIR:
        for (int h = 0; h < 2; h++)
            f.scales[h] = v_mul(scale, v_of_ints(i_signed_bytes(((const struct byte_pair *)at)->of_half[group][h] + first)));
        break;
    case SIX_PAIR:
        six_bits(&((const struct six_pair *)at)->of_halves, group, first, &one, &two);
        f.scales[0] = v_mul(scale, v_sub(v_of_ints(one), v_all(32)));
        f.scales[1] = v_mul(scale, v_sub(v_of_ints(two), v_all(32)));
        break;
    case SIX_LOWEST:
        six_bits(&((const struct six_lowest *)at)->scale_and_lowest, group, first, &one, &two);
        f.scales[0] = v_mul(scale, v_of_ints(one));
        f.lowest[0] = v_mul(minus(half_floats(halves->lowest + first)), v_of_ints(two));
        break;
    default: {
        const struct four_lowest *four = at;
        one = i_bytes(four->scales[group] + first), two = i_bytes(four->lowest[group] + first);
        floats lowest = minus(half_floats(halves->lowest + first));
        f.scales[0] = v_mul(scale, v_of_ints(i_and(one, 15))), f.scales[1] = v_mul(scale, v_of_ints(i_right(one, 4)));
        f.lowest[0] = v_mul(lowest, v_of_ints(i_and(two, 15))), f.lowest[1] = v_mul(lowest, v_of_ints(i_right(two, 4)));
    }
    }
    return f;
}

INLINE int num_groups_of(const struct product *p) { return p->num_inputs / PACKED_GROUP; }

INLINE int last_block(const struct product *p) { return (p->num_outputs - 1) / BLOCK_OUTPUTS; }

/* A block of codes; past the last one it is that one again. */
INLINE const char *block_at(const struct product *p, int block, const enum type type)
{
    return (const char *)p->weight + smaller(block, last_block(p)) * block_bytes(type, num_groups_of(p));
}

#define EACH_TYPE(DO) \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_NL) DO(IQ4_XS) DO(MXFP4)
