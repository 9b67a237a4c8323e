/* Products of rows with a matrix of 8 or 4 bit codes as they lie, and rows of it unpacked to bfloat16.
 *
 * 16 outputs lie side by side, a lane each, in groups of 32 inputs. A code is a small whole number, which bfloat16
 * holds exactly: the dot products of a group are of codes, and its scale and lowest value come in once per group.
 * Few rows use the codes as they lie; many share a panel of them in bfloat16, that a thread has in its cache.
 */
#include "blocks.h"

#define WIDE 2           /* blocks that are multiplied together */
#define TALL 12          /* rows that are multiplied together with one block */
#define TILE_ROWS 6      /* and with a panel */
#define MANY 64          /* rows that pay for a panel */
#define PART 192         /* rows that share it */
#define MAX_PANEL_BYTES ((size_t)512 << 10)
#define AHEAD 8192       /* bytes that are asked for before they are needed, into the second cache */

_Static_assert(PART % TALL == 0 && PART % TILE_ROWS == 0, "a tile would write rows of the next part");

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

INLINE __m512i pair_of_codes(const char *block, const int pair, __m512i numbers, const int is_int4)
{
    if (is_int4)
        return int4_pair(_mm512_loadu_si512(((const struct int4_block *)block)->codes[pair / 4]), pair % 4, numbers);
    return int8_pair(((const struct int8_block *)block)->codes[pair]);
}

INLINE __m512 block_scales(const char *block, const int is_int4)
{
    return half_floats(is_int4 ? ((const struct int4_block *)block)->scales : ((const struct int8_block *)block)->scales);
}

INLINE __m512 block_lowest(const char *block) { return half_floats(((const struct int4_block *)block)->lowest); }

INLINE __m512i pair_of_inputs(const bf16 *row, int pair)
{
    int32_t both;
    __builtin_memcpy(&both, row + 2 * pair, sizeof both);
    return _mm512_set1_epi32(both);
}

/* A group of inputs of neighbouring blocks. */
struct panel_group {
    __m512i codes[NUM_PAIRS][WIDE];
    __m512 scales[WIDE], lowest[WIDE];
};

INLINE const char *block_at(const struct product *p, int block, const int is_int4)
{
    return (const char *)p->weight + (size_t)block * (p->num_inputs / PACKED_GROUP) * block_bytes(is_int4);
}

INLINE int last_block(const struct product *p) { return (p->num_outputs - 1) / LANES; }

INLINE void unpack_panel(const struct product *p, struct panel_group *panel, int block, const int is_int4)
{
    const __m512i numbers = numbers_in_bf16();
    for (int b = 0; b < WIDE; b++) {
        const char *at = block_at(p, smaller(block + b, last_block(p)), is_int4);
        for (int group = 0; group < p->num_inputs / PACKED_GROUP; group++, at += block_bytes(is_int4)) {
            for (int pair = 0; pair < NUM_PAIRS; pair++)
                panel[group].codes[pair][b] = pair_of_codes(at, pair, numbers, is_int4);
            panel[group].scales[b] = block_scales(at, is_int4);
            panel[group].lowest[b] = is_int4 ? block_lowest(at) : _mm512_setzero_ps();
        }
    }
}

/* The outputs of `num_blocks` blocks, of `num_rows` rows; all but the first four are constants where this is inlined.
 * An output is added up in one order, whatever is computed beside it. */
INLINE void multiply_tile(const struct product *p, const struct panel_group *panel, int row, int block,
                          const int num_rows, const int num_blocks, const int is_int4, const int has_panel)
{
    int num_groups = p->num_inputs / PACKED_GROUP;
    size_t row_bytes = num_groups * block_bytes(is_int4); /* past them lies the block beside it, which is read already */
    const __m512i numbers = numbers_in_bf16();
    const char *codes_at[WIDE];
    const bf16 *rows[TALL];
    const float *group_sums[TALL];
    __m512 totals[TALL][WIDE];
    for (int b = 0; b < num_blocks; b++) /* past the last block it is read again, and not written */
        codes_at[b] = block_at(p, smaller(block + b, last_block(p)), is_int4);
    for (int r = 0; r < num_rows; r++) {
        int of = smaller(row + r, p->num_rows - 1);
        rows[r] = p->rows + (size_t)of * p->num_inputs;
        group_sums[r] = p->group_sums + (size_t)of * num_groups;
        for (int b = 0; b < num_blocks; b++)
            totals[r][b] = _mm512_setzero_ps();
    }
    for (int group = 0; group < num_groups; group++, panel++) {
        __m512 sums[TALL][WIDE];
        size_t ahead = AHEAD + (group * block_bytes(is_int4) + AHEAD < row_bytes ? 0 : (num_blocks - 1) * row_bytes);
        for (int b = 0; b < num_blocks; b++) {
            for (int r = 0; r < num_rows; r++)
                sums[r][b] = _mm512_setzero_ps();
            for (size_t line = 0; line < block_bytes(is_int4) && !has_panel; line += 64)
                _mm_prefetch(codes_at[b] + ahead + line, _MM_HINT_T1);
        }
#pragma GCC unroll 16
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            __m512i codes[WIDE];
            for (int b = 0; b < num_blocks; b++)
                codes[b] = has_panel ? panel->codes[pair][b] : pair_of_codes(codes_at[b], pair, numbers, is_int4);
            for (int r = 0; r < num_rows; r++) {
                __m512i inputs = pair_of_inputs(rows[r], group * NUM_PAIRS + pair);
                for (int b = 0; b < num_blocks; b++)
                    sums[r][b] = dot(sums[r][b], codes[b], inputs);
            }
        }
        for (int b = 0; b < num_blocks; b++) {
            __m512 scales = has_panel ? panel->scales[b] : block_scales(codes_at[b], is_int4);
            for (int r = 0; r < num_rows; r++)
                totals[r][b] = _mm512_fmadd_ps(scales, sums[r][b], totals[r][b]);
            for (int r = 0; r < num_rows && is_int4; r++) {
                __m512 lowest = has_panel ? panel->lowest[b] : block_lowest(codes_at[b]);
                totals[r][b] = _mm512_fmadd_ps(lowest, _mm512_set1_ps(group_sums[r][group]), totals[r][b]);
            }
            codes_at[b] += block_bytes(is_int4);
        }
    }
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++)
        for (int b = 0; b < num_blocks && block + b <= last_block(p); b++) {
            int output = (block + b) * LANES;
            write_values(p, totals[r][b], row + r, output, smaller(LANES, p->num_outputs - output));
        }
}

/* Few rows leave registers for two blocks, whose sums need not wait for each other. */
INLINE void multiply_blocks(const struct product *p, int first, int end, int block, const int is_int4)
{
    int num_blocks = smaller(WIDE, last_block(p) + 1 - block);
    for (int row = first; row < end; row += TALL)
        switch (smaller(TALL, end - row)) {
        case 1: multiply_tile(p, NULL, row, block, 1, WIDE, is_int4, 0); break;
        case 2: multiply_tile(p, NULL, row, block, 2, WIDE, is_int4, 0); break;
        case 3:
        case 4: multiply_tile(p, NULL, row, block, 4, WIDE, is_int4, 0); break;
        default:
            for (int b = 0; b < num_blocks; b++)
                if (end - row <= 8)
                    multiply_tile(p, NULL, row, block + b, 8, 1, is_int4, 0);
                else
                    multiply_tile(p, NULL, row, block + b, TALL, 1, is_int4, 0);
        }
}

INLINE int num_columns(const struct product *p) { return (p->num_outputs + WIDE * LANES - 1) / (WIDE * LANES); }

INLINE size_t panel_bytes(int num_inputs) { return num_inputs / PACKED_GROUP * sizeof(struct panel_group); }

/* Enough for products with fewer inputs too: those have a panel where this one has none. */
int64_t penstock_panels_bytes(int num_inputs, int num_threads)
{
    size_t bytes = panel_bytes(num_inputs);
    return (bytes > MAX_PANEL_BYTES ? MAX_PANEL_BYTES : bytes) * num_threads;
}

/* An item is a part of the rows by two blocks; those of a part follow one another, so that its rows stay in the cache. */
INLINE void multiply_item(const struct product *p, struct panel_group *panel, int item, const int is_int4)
{
    int first = item / num_columns(p) * PART, end = smaller(first + PART, p->num_rows);
    int block = item % num_columns(p) * WIDE;
    if (!panel || end - first < MANY) {
        multiply_blocks(p, first, end, block, is_int4);
        return;
    }
    unpack_panel(p, panel, block, is_int4);
    for (int row = first; row < end; row += TILE_ROWS)
        multiply_tile(p, panel, row, block, TILE_ROWS, WIDE, is_int4, 1);
}

static void multiply_items(const void *of, int first, int end)
{
    const struct product *p = of;
    for (int item = first; item < end; item++)
        if (p->bits == 4)
            multiply_item(p, NULL, item, 1);
        else
            multiply_item(p, NULL, item, 0);
}

struct with_panels {
    const struct product *of;
    atomic_int next_item, next_panel;
    int num_items;
};

static void run_with_panels(void *data)
{
    struct with_panels *job = data;
    const struct product *p = job->of;
    struct panel_group *panel = (void *)((char *)p->workspace + atomic_fetch_add(&job->next_panel, 1) * panel_bytes(p->num_inputs));
    for (int item; (item = atomic_fetch_add(&job->next_item, 1)) < job->num_items;)
        if (p->bits == 4)
            multiply_item(p, panel, item, 1);
        else
            multiply_item(p, panel, item, 0);
}

/* What the lowest value of a group is multiplied with: the sum of its inputs. */
static void sum_groups(const void *of, int first, int end)
{
    const struct product *p = of;
    size_t num_groups = p->num_inputs / PACKED_GROUP;
    for (size_t group = first * num_groups; group < end * num_groups; group++) {
        const bf16 *from = p->rows + group * PACKED_GROUP;
        __m512 pairs = _mm512_add_ps(load_floats(from, LANES), load_floats(from + LANES, LANES));
        p->group_sums[group] = _mm512_reduce_add_ps(pairs);
    }
}

void penstock_multiply_packed(const struct product *p)
{
    int num_items = (p->num_rows + PART - 1) / PART * num_columns(p);
    size_t bytes = WIDE * p->num_inputs / PACKED_GROUP * block_bytes(p->bits == 4);
    if (p->bits == 4)
        share_rows(sum_groups, p, p->num_rows, sizeof(bf16) * p->num_inputs, p->parallel, p->num_threads);
    if (p->num_rows < MANY || panel_bytes(p->num_inputs) > MAX_PANEL_BYTES) {
        share_rows(multiply_items, p, num_items, bytes, p->parallel, p->num_threads);
        return;
    }
    struct with_panels job = {.of = p, .num_items = num_items};
    if (p->num_threads > 1)
        p->parallel(run_with_panels, &job, p->num_threads, 0);
    else
        run_with_panels(&job);
}

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
    const __m512i numbers = numbers_in_bf16();
    __m512 scales = block_scales(at, is_int4), lowest = is_int4 ? block_lowest(at) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int pair = 0; pair < NUM_PAIRS; pair++)
        rows[pair] = pair_of_values(pair_of_codes(at, pair, numbers, is_int4), scales, lowest);
    transpose(rows);
}

static void unpack_wanted(const void *of, int first, int end)
{
    const struct unpacking *u = of;
    int num_groups = u->num_inputs / PACKED_GROUP;
    for (int row = first; row < end; row++) {
        int lane = u->ids[row] % LANES;
        const char *at = u->blocks + (size_t)(u->ids[row] / LANES) * num_groups * block_bytes(u->bits == 4);
        for (int group = 0; group < num_groups; group++, at += block_bytes(u->bits == 4)) {
            __m512 rows[LANES];
            if (u->bits == 4)
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
