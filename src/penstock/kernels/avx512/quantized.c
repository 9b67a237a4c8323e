/* Products of rows with a matrix of codes as they lie, and rows of it unpacked to bfloat16.
 *
 * 16 outputs lie side by side, a lane each, in groups of 32 inputs. A code stands for a small whole number, which bfloat16
 * holds exactly: the dot products of a group are of those numbers, and its scales and lowest values come in once per group.
 * Few rows use the codes as they lie, in registers; many share a panel of all groups, that was brought to bfloat16 before.
 */
#include "codes.h"

#define WIDE 2           /* blocks that are multiplied together */
#define TALL 12          /* rows that are multiplied together */
#define TILE_ROWS 6      /* and with a panel */
#define MANY 64          /* rows that pay for a panel */
#define PART 192         /* rows that share it */
#define MAX_PANEL_BYTES ((size_t)512 << 10)
#define AHEAD 4096         /* bytes that are asked for before they are needed, into the second cache */

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

INLINE void unpack_group(const struct product *p, int block, int group, int num_blocks, struct unpacked_group *to,
                         const enum type type)
{
    const struct numbers numbers = numbers_of(type);
    const int scales = num_scales(type);
    for (int b = 0; b < num_blocks; b++) {
        const char *at = block_at(p, block + b, type);
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

INLINE void write_totals(const struct product *p, __m512 totals[][WIDE], int row, int block, const int num_rows, const int num_blocks)
{
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++)
        for (int b = 0; b < num_blocks && block + b <= last_block(p); b++) {
            int output = (block + b) * LANES;
            write_values(p, totals[r][b], row + r, output, smaller(LANES, p->num_outputs - output));
        }
}

/* Rows with one block or two: with codes as they lie. An output is added up in one order, here and with a panel. */
INLINE void multiply_rows(const struct product *p, int row, int block, const int num_rows, const int num_blocks,
                          const enum type type)
{
    const struct numbers numbers = numbers_of(type);
    const int scales = num_scales(type);
    const size_t part = set_bytes(type) / groups_of_set(type);
    int num_groups = num_groups_of(p);
    size_t bytes = block_bytes(type, num_groups), together = num_blocks * bytes;
    /* What is asked for ahead lies in the same blocks, or as far into others: past a block lies one that is read beside it. */
    size_t ahead = bytes > AHEAD ? AHEAD : (AHEAD + together - 1) / together * together;
    int turn = bytes > AHEAD ? (int)((bytes - AHEAD) / part) : num_groups;
    const char *blocks[WIDE];
    const bf16 *rows[TALL];
    const float *group_sums[TALL];
    __m512 totals[TALL][WIDE];
    for (int b = 0; b < num_blocks; b++) /* past the last block it is read again, and not written */
        blocks[b] = block_at(p, block + b, type);
    for (int r = 0; r < num_rows; r++) {
        int of = smaller(row + r, p->num_rows - 1);
        rows[r] = p->rows + (size_t)of * p->num_inputs;
        group_sums[r] = p->group_sums + (size_t)of * num_groups * scales;
        for (int b = 0; b < num_blocks; b++)
            totals[r][b] = v_zero();
    }
    for (int group = 0; group < num_groups; group++) {
        size_t at = group * part + ahead + (group < turn ? 0 : together - bytes);
        for (int b = 0; b < num_blocks; b++)
            for (size_t line = 0; line < part; line += 64)
                _mm_prefetch(blocks[b] + at + line, _MM_HINT_T1);
#pragma GCC unroll 2
        for (int h = 0; h < scales; h++) {
            __m512 sums[TALL][WIDE];
            for (int r = 0; r < num_rows; r++)
                for (int b = 0; b < num_blocks; b++)
                    sums[r][b] = v_zero();
#pragma GCC unroll 16
            for (int i = 0; i < NUM_PAIRS / scales; i++) {
                const int pair = h * NUM_PAIRS / scales + i;
                __m512i found[WIDE];
                for (int b = 0; b < num_blocks; b++)
                    found[b] = pair_of_numbers(codes_at(blocks[b], group, type), pair, numbers, type);
                for (int r = 0; r < num_rows; r++) {
                    __m512i inputs = pair_of_inputs(rows[r], group * NUM_PAIRS + pair);
                    for (int b = 0; b < num_blocks; b++)
                        sums[r][b] = dot(sums[r][b], found[b], inputs);
                }
            }
            for (int b = 0; b < num_blocks; b++) {
                struct factors_of_group factors = factors_at(blocks[b], group, 0, type);
                for (int r = 0; r < num_rows; r++) {
                    totals[r][b] = v_mul_add(factors.scales[h], sums[r][b], totals[r][b]);
                    if (has_lowest(type))
                        totals[r][b] = v_mul_add(factors.lowest[h], v_all(group_sums[r][group * scales + h]), totals[r][b]);
                }
            }
        }
    }
    write_totals(p, totals, row, block, num_rows, num_blocks);
}

/* Few rows leave registers for two blocks, whose sums need not wait for each other. */
INLINE void multiply_few(const struct product *p, int row, int block, int num_rows, const enum type type)
{
    int num_blocks = smaller(WIDE, last_block(p) + 1 - block);
    if (num_rows == 1)
        multiply_rows(p, row, block, 1, WIDE, type);
    else if (num_rows == 2)
        multiply_rows(p, row, block, 2, WIDE, type);
    else if (num_rows <= 4)
        multiply_rows(p, row, block, 4, WIDE, type);
    else
        for (int b = 0; b < num_blocks; b++)
            if (num_rows <= 8)
                multiply_rows(p, row, block + b, 8, 1, type);
            else
                multiply_rows(p, row, block + b, TALL, 1, type);
}

struct of_type {
    void (*multiply_few)(const struct product *p, int row, int block, int num_rows);
    void (*unpack_group)(const struct product *p, int block, int group, int num_blocks, struct unpacked_group *to);
};

#define FUNCTIONS(TYPE)                                                                                            \
    static __attribute__((noinline)) void multiply_few_##TYPE(const struct product *p, int row, int block, int num_rows) \
    {                                                                                                              \
        multiply_few(p, row, block, num_rows, TYPE);                                                               \
    }                                                                                                              \
    static __attribute__((noinline)) void unpack_group_##TYPE(const struct product *p, int block, int group,      \
                                                              int num_blocks, struct unpacked_group *to)          \
    {                                                                                                              \
        unpack_group(p, block, group, num_blocks, to, TYPE);                                                       \
    }
EACH_TYPE(FUNCTIONS)

static const struct of_type types[] = {
#define ENTRY(TYPE) [TYPE] = {multiply_few_##TYPE, unpack_group_##TYPE},
    EACH_TYPE(ENTRY)
};

/* Rows with a panel of two blocks. All but the first four are constants where this is inlined. */
INLINE void multiply_tile(const struct product *p, const char *panel, int row, int block, const int num_rows,
                          const int scales, const int lowest)
{
    int num_groups = num_groups_of(p);
    const bf16 *rows[TILE_ROWS];
    const float *group_sums[TILE_ROWS];
    __m512 totals[TILE_ROWS][WIDE];
    for (int r = 0; r < num_rows; r++) {
        int of = smaller(row + r, p->num_rows - 1);
        rows[r] = p->rows + (size_t)of * p->num_inputs;
        group_sums[r] = p->group_sums + (size_t)of * num_groups * scales;
        for (int b = 0; b < WIDE; b++)
            totals[r][b] = v_zero();
    }
    for (int group = 0; group < num_groups; group++) {
        const struct unpacked_group *with = (const void *)(panel + group * group_bytes(scales, lowest));
        __m512 sums[TILE_ROWS][WIDE];
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
    write_totals(p, totals, row, block, num_rows, WIDE);
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
        for (int row = first; row < end; row += TALL)
            types[p->type].multiply_few(p, row, block, end - row);
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
