/* Products of rows with a matrix of codes as they lie, and rows of it unpacked to bfloat16.
 *
 * 16 outputs lie side by side, a lane each, in groups of 32 inputs. A code stands for a small whole number, which bfloat16
 * holds exactly: the dot products of a group are of those numbers, and its scales and lowest values come in once per group.
 * One row uses the codes as they lie; several share a group, or a panel of all groups, that was brought to bfloat16 before.
 */
#include "codes.h"

#define WIDE 2           /* blocks that are multiplied together */
#define TALL 12          /* rows that are multiplied together */
#define TILE_ROWS 6      /* and with a panel */
#define MANY 64          /* rows that pay for a panel */
#define PART 192         /* rows that share it */
#define MAX_PANEL_BYTES ((size_t)512 << 10)
#define AHEAD 16384       /* bytes that are asked for before they are needed, into the second cache */

_Static_assert(PART % TALL == 0 && PART % TILE_ROWS == 0, "a tile would write rows of the next part");

INLINE __m512i pair_of_inputs(const bf16 *row, int pair)
{
    int32_t both;
    __builtin_memcpy(&both, row + 2 * pair, sizeof both);
    return _mm512_set1_epi32(both);
}

/* A group of inputs of neighbouring blocks. */
struct unpacked_group {
    __m512i numbers[NUM_PAIRS][WIDE];
    __m512 factors[4][WIDE]; /* the scales, then the lowest values, of those that there are */
};

INLINE size_t group_bytes(const int scales, const int lowest)
{
    return sizeof(__m512i) * WIDE * (NUM_PAIRS + scales * (1 + lowest));
}

/* A group's part of what is ahead: past a block lies the one beside it, which is read already. */
INLINE void ask_ahead(const char *block, size_t bytes, int group, int num_blocks, const enum type type)
{
    const size_t part = set_bytes(type) / groups_of_set(type);
    size_t at = group * part + AHEAD;
    for (size_t end = bytes; at >= end; end += num_blocks * bytes)
        at += (num_blocks - 1) * bytes;
    for (size_t line = 0; line < part; line += 64)
        _mm_prefetch(block + at + line, _MM_HINT_T1);
}

INLINE void unpack_group(const struct product *p, int block, int group, int num_blocks, struct unpacked_group *to,
                         const enum type type)
{
    const struct numbers numbers = numbers_of(type);
    const int scales = num_scales(type);
    for (int b = 0; b < num_blocks; b++) {
        const char *at = block_at(p, block + b, type);
        ask_ahead(at, block_bytes(type, num_groups_of(p)), group, num_blocks, type);
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++)
            to->numbers[pair][b] = pair_of_numbers(codes_at(at, group, type), pair, numbers, type);
        struct factors_of_group factors = factors_at(at, group, 0, type);
        for (int h = 0; h < scales; h++) {
            to->factors[h][b] = factors.scales[h];
            if (has_lowest(type))
                to->factors[scales + h][b] = factors.lowest[h];
        }
    }
}

/* One row, or two, with two blocks. An output is added up in one order, here and in tiles. */
INLINE void multiply_rows(const struct product *p, int row, int block, const int num_rows, const enum type type)
{
    const struct numbers numbers = numbers_of(type);
    const int scales = num_scales(type);
    int num_groups = num_groups_of(p);
    const bf16 *inputs = p->rows + (size_t)row * p->num_inputs;
    const float *group_sums = p->group_sums + (size_t)row * num_groups * scales;
    const char *blocks[WIDE];
    __m512 totals[2][WIDE];
    for (int b = 0; b < WIDE; b++) /* past the last block it is read again, and not written */
        blocks[b] = block_at(p, block + b, type), totals[0][b] = totals[1][b] = v_zero();
    for (int group = 0; group < num_groups; group++) {
        __m512 sums[2][2][WIDE];
        for (int b = 0; b < WIDE; b++) {
            for (int h = 0; h < 2; h++)
                sums[h][0][b] = sums[h][1][b] = v_zero();
            ask_ahead(blocks[b], block_bytes(type, num_groups), group, WIDE, type);
        }
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            __m512i found[WIDE];
            for (int b = 0; b < WIDE; b++)
                found[b] = pair_of_numbers(codes_at(blocks[b], group, type), pair, numbers, type);
            for (int r = 0; r < num_rows; r++) {
                __m512i both = pair_of_inputs(inputs + (size_t)r * p->num_inputs, group * NUM_PAIRS + pair);
                __m512 *to = sums[pair * scales / NUM_PAIRS][r];
                for (int b = 0; b < WIDE; b++)
                    to[b] = dot(to[b], found[b], both);
            }
        }
        for (int b = 0; b < WIDE; b++) {
            struct factors_of_group factors = factors_at(blocks[b], group, 0, type);
            for (int h = 0; h < scales; h++)
                for (int r = 0; r < num_rows; r++) {
                    totals[r][b] = v_mul_add(factors.scales[h], sums[h][r][b], totals[r][b]);
                    if (has_lowest(type)) {
                        float sum = group_sums[((size_t)r * num_groups + group) * scales + h];
                        totals[r][b] = v_mul_add(factors.lowest[h], v_all(sum), totals[r][b]);
                    }
                }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int b = 0; b < WIDE && block + b <= last_block(p); b++) {
            int output = (block + b) * LANES;
            write_values(p, totals[r][b], row + r, output, smaller(LANES, p->num_outputs - output));
        }
}

struct of_type {
    void (*multiply_one)(const struct product *p, int row, int block);
    void (*multiply_two)(const struct product *p, int row, int block);
    void (*unpack_group)(const struct product *p, int block, int group, int num_blocks, struct unpacked_group *to);
};

#define FUNCTIONS(TYPE)                                                                                            \
    static __attribute__((noinline)) void multiply_one_##TYPE(const struct product *p, int row, int block)        \
    {                                                                                                              \
        multiply_rows(p, row, block, 1, TYPE);                                                                     \
    }                                                                                                              \
    static __attribute__((noinline)) void multiply_two_##TYPE(const struct product *p, int row, int block)        \
    {                                                                                                              \
        multiply_rows(p, row, block, 2, TYPE);                                                                     \
    }                                                                                                              \
    static __attribute__((noinline)) void unpack_group_##TYPE(const struct product *p, int block, int group,      \
                                                              int num_blocks, struct unpacked_group *to)          \
    {                                                                                                              \
        unpack_group(p, block, group, num_blocks, to, TYPE);                                                       \
    }
EACH_TYPE(FUNCTIONS)

static const struct of_type types[] = {
#define ENTRY(TYPE) [TYPE] = {multiply_one_##TYPE, multiply_two_##TYPE, unpack_group_##TYPE},
    EACH_TYPE(ENTRY)
};

/* Several rows with two blocks: with a panel, or with each group as it is unpacked. All but the first four are constants where
 * this is inlined. */
INLINE void multiply_tile(const struct product *p, const char *panel, int row, int block, const int num_rows,
                          const int scales, const int lowest)
{
    int num_groups = num_groups_of(p);
    const bf16 *rows[TALL];
    const float *group_sums[TALL];
    __m512 totals[TALL][WIDE];
    struct unpacked_group unpacked;
    for (int r = 0; r < num_rows; r++) {
        int of = smaller(row + r, p->num_rows - 1);
        rows[r] = p->rows + (size_t)of * p->num_inputs;
        group_sums[r] = p->group_sums + (size_t)of * num_groups * scales;
        for (int b = 0; b < WIDE; b++)
            totals[r][b] = v_zero();
    }
    for (int group = 0; group < num_groups; group++) {
        const struct unpacked_group *with = (const void *)(panel + group * group_bytes(scales, lowest));
        if (!panel) {
            types[p->type].unpack_group(p, block, group, WIDE, &unpacked);
            with = &unpacked;
        }
        __m512 sums[TALL][WIDE];
        for (int h = 0; h < scales; h++) {
            for (int r = 0; r < num_rows; r++)
                for (int b = 0; b < WIDE; b++)
                    sums[r][b] = v_zero();
#pragma GCC unroll 16
            for (int i = 0; i < NUM_PAIRS / scales; i++) {
                const int pair = h * NUM_PAIRS / scales + i;
                for (int r = 0; r < num_rows; r++) {
                    __m512i inputs = pair_of_inputs(rows[r], group * NUM_PAIRS + pair);
                    for (int b = 0; b < WIDE; b++)
                        sums[r][b] = dot(sums[r][b], with->numbers[pair][b], inputs);
                }
            }
            for (int b = 0; b < WIDE; b++)
                for (int r = 0; r < num_rows; r++) {
                    totals[r][b] = v_mul_add(with->factors[h][b], sums[r][b], totals[r][b]);
                    if (lowest)
                        totals[r][b] = v_mul_add(with->factors[scales + h][b], v_all(group_sums[r][group * scales + h]), totals[r][b]);
                }
        }
    }
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++)
        for (int b = 0; b < WIDE && block + b <= last_block(p); b++) {
            int output = (block + b) * LANES;
            write_values(p, totals[r][b], row + r, output, smaller(LANES, p->num_outputs - output));
        }
}

INLINE void multiply_blocks(const struct product *p, int first, int end, int block, const int scales, const int lowest)
{
    for (int row = first; row < end; row += TALL)
        switch (smaller(TALL, end - row)) {
        case 1: types[p->type].multiply_one(p, row, block); break;
        case 2: types[p->type].multiply_two(p, row, block); break;
        case 3:
        case 4: multiply_tile(p, NULL, row, block, 4, scales, lowest); break;
        case 5:
        case 6:
        case 7:
        case 8: multiply_tile(p, NULL, row, block, 8, scales, lowest); break;
        default: multiply_tile(p, NULL, row, block, TALL, scales, lowest);
        }
}

INLINE int num_columns(const struct product *p) { return (p->num_outputs + WIDE * LANES - 1) / (WIDE * LANES); }

INLINE size_t panel_bytes(int num_inputs, const int scales, const int lowest)
{
    return num_inputs / PACKED_GROUP * group_bytes(scales, lowest);
}

/* Enough for products with fewer inputs too, of any type: those have a panel where this one has none. */
int64_t penstock_panels_bytes(int num_inputs, int num_threads)
{
    size_t bytes = panel_bytes(num_inputs, 2, 1);
    return (bytes > MAX_PANEL_BYTES ? MAX_PANEL_BYTES : bytes) * num_threads;
}

/* An item is a part of the rows by two blocks; those of a part follow one another, so that its rows stay in the cache. */
INLINE void multiply_item(const struct product *p, char *panel, int item, const int scales, const int lowest)
{
    int first = item / num_columns(p) * PART, end = smaller(first + PART, p->num_rows);
    int block = item % num_columns(p) * WIDE;
    if (!panel || end - first < MANY) {
        multiply_blocks(p, first, end, block, scales, lowest);
        return;
    }
    for (int group = 0; group < num_groups_of(p); group++)
        types[p->type].unpack_group(p, block, group, WIDE, (void *)(panel + group * group_bytes(scales, lowest)));
    for (int row = first; row < end; row += TILE_ROWS)
        multiply_tile(p, panel, row, block, TILE_ROWS, scales, lowest);
}

/* One of each, not one wherever it is called. */
#define SOME(SCALES, LOWEST)                                                                                       \
    static __attribute__((noinline)) void multiply_item_##SCALES##_##LOWEST(const struct product *p, char *panel, int item) \
    {                                                                                                              \
        multiply_item(p, panel, item, SCALES, LOWEST);                                                             \
    }
SOME(1, 0)
SOME(1, 1)
SOME(2, 0)
SOME(2, 1)

static void multiply_one_item(const struct product *p, char *panel, int item)
{
    if (num_scales(p->type) == 1)
        (has_lowest(p->type) ? multiply_item_1_1 : multiply_item_1_0)(p, panel, item);
    else
        (has_lowest(p->type) ? multiply_item_2_1 : multiply_item_2_0)(p, panel, item);
}

static void multiply_items(const void *of, int first, int end)
{
    for (int item = first; item < end; item++)
        multiply_one_item(of, NULL, item);
}

struct with_panels {
    const struct product *of;
    size_t panel_bytes;
    atomic_int next_item, next_panel;
    int num_items;
};

static void run_with_panels(void *data)
{
    struct with_panels *job = data;
    char *panel = (char *)job->of->workspace + atomic_fetch_add(&job->next_panel, 1) * job->panel_bytes;
    for (int item; (item = atomic_fetch_add(&job->next_item, 1)) < job->num_items;)
        multiply_one_item(job->of, panel, item);
}

/* What the lowest value of a group, or of half of one, is multiplied with: the sum of its inputs. */
static void sum_groups(const void *of, int first, int end)
{
    const struct product *p = of;
    size_t num_halves = p->num_inputs / LANES;
    int scales = num_scales(p->type);
    for (size_t half = first * num_halves; half < end * num_halves; half += 2) {
        __m512 one = load_floats(p->rows + half * LANES, LANES), two = load_floats(p->rows + (half + 1) * LANES, LANES);
        if (scales == 1) {
            p->group_sums[half / 2] = v_sum(v_add(one, two));
        } else {
            p->group_sums[half] = v_sum(one);
            p->group_sums[half + 1] = v_sum(two);
        }
    }
}

void penstock_multiply_packed(const struct product *p)
{
    int num_items = (p->num_rows + PART - 1) / PART * num_columns(p);
    struct with_panels job = {.of = p, .num_items = num_items};
    job.panel_bytes = panel_bytes(p->num_inputs, num_scales(p->type), has_lowest(p->type));
    if (has_lowest(p->type))
        share_rows(sum_groups, p, p->num_rows, sizeof(bf16) * p->num_inputs, p->parallel, p->num_threads);
    if (p->num_rows < MANY || job.panel_bytes > MAX_PANEL_BYTES)
        share_rows(multiply_items, p, num_items, WIDE * block_bytes(p->type, num_groups_of(p)), p->parallel, p->num_threads);
    else if (p->num_threads > 1)
        p->parallel(run_with_panels, &job, p->num_threads, 0);
    else
        run_with_panels(&job);
}

/* A pair of numbers in each lane to a pair of values. */
INLINE __m512 pair_of_values(__m512i numbers, __m512 scales, __m512 lowest)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16));
    __m512 two = _mm512_castsi512_ps(_mm512_and_si512(numbers, _mm512_set1_epi32((int)0xffff0000)));
    one = v_mul_add(one, scales, lowest);
    two = v_mul_add(two, scales, lowest);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(two, one)));
}

static void unpack_wanted(const void *of, int first, int end)
{
    const struct unpacking *u = of;
    const struct product p = {.weight = u->weight, .type = u->type, .num_inputs = u->num_inputs, .num_outputs = INT32_MAX};
    const int scales = num_scales(u->type);
    for (int row = first; row < end; row++)
        for (int group = 0; group < num_groups_of(&p); group++) {
            struct unpacked_group with;
            __m512 rows[LANES]; /* lane i of register j holds pair i of row j */
            types[u->type].unpack_group(&p, u->ids[row] / LANES, group, 1, &with);
            for (int pair = 0; pair < NUM_PAIRS; pair++) {
                int half = pair * scales / NUM_PAIRS;
                __m512 lowest = has_lowest(u->type) ? with.factors[scales + half][0] : v_zero();
                rows[pair] = pair_of_values(with.numbers[pair][0], with.factors[half][0], lowest);
            }
            transpose(rows);
            _mm512_storeu_ps(u->out + (size_t)row * u->num_inputs + group * PACKED_GROUP, rows[u->ids[row] % LANES]);
        }
}

void penstock_unpack_rows(const struct unpacking *u)
{
    share_rows(unpack_wanted, u, u->num_rows, sizeof(bf16) * LANES * u->num_inputs, u->parallel, u->num_threads);
}
