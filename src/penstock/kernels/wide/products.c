/* Products of rows with a matrix in bfloat16 or in codes, in float32.
 *
 * Beside codes, the inputs of a group are rounded to whole numbers of 12 to 15 bits and a sign, times a power of two that fits the
 * largest of them: an input in bfloat16 loses something only where it is less than 1/16, or 1/128, of that. Products with the numbers of
 * codes are then whole and their sums of a group exact, in float32 and in whole numbers alike, in any order.
 *
 * An output is a lane, and its products are added in the order of the inputs, one by one, whatever is computed beside it
 * and however the matrix lies: a row has the same result among any number of rows. With codes these are sums of a group, or of
 * half of one. One row uses whole numbers; a few use numbers as they are made; many share a panel of them, that a thread has in its cache, and are
 * brought to float32 once.
 */
#include "weights.h"

#define TALL 6         /* rows that are multiplied together with a panel */
#define PART 192       /* rows that share a panel */
#define DEEP 256       /* inputs of a panel */
#define NUM_PANELS 4   /* of a work item */
#define FEW_TALL 4     /* rows that are multiplied together without one */
#define WIDE 4         /* blocks that a thread takes at a time where rows are few */

_Static_assert(PART % TALL == 0 && DEEP % PACKED_GROUP == 0, "parts are whole tiles, panels are whole groups");

INLINE void write_block(const struct product *p, const floats *values, int row, int block)
{
    for (int piece = 0; piece < PIECES; piece++) {
        int output = block * BLOCK_OUTPUTS + piece * LANES, count = smaller(LANES, p->num_outputs - output);
        if (count > 0)
            write_values(p, values[piece], row, output, count);
    }
}

INLINE void clear(floats *sums)
{
    for (int piece = 0; piece < PIECES; piece++)
        sums[piece] = v_zero();
}

INLINE floats first_of_pair(const bf16 *row, int pair)
{
    int32_t both;
    memcpy(&both, row + 2 * pair, sizeof both);
    return v_of_bits(i_left(i_all(both), 16));
}

INLINE floats second_of_pair(const bf16 *row, int pair)
{
    int32_t both;
    memcpy(&both, row + 2 * pair, sizeof both);
    return v_of_bits(i_and(i_all(both), (int)0xffff0000));
}

INLINE const bf16 *row_at(const struct product *p, int row)
{
    return p->rows + (size_t)smaller(row, p->num_rows - 1) * p->num_inputs;
}

/* The sum of a group, or of half of one, comes to what its outputs have so far. */
INLINE floats with_factors(floats total, floats scales, floats sum, floats lowest, const float *group_sum, const int adds_lowest)
{
    total = v_mul_add(scales, sum, total);
    return adds_lowest ? v_mul_add(lowest, v_all(*group_sum), total) : total;
}

INLINE const float *group_sums_at(const struct product *p, int row, int group, const int scales)
{
    return p->group_sums + ((size_t)smaller(row, p->num_rows - 1) * num_groups_of(p) + group) * scales;
}

/* Bits of an input beside codes, so that no sum of a group, or of half of one, needs more than the 24 bits of a float. */
INLINE int input_bits(const enum type type)
{
    const int bits = format_of(type).low + format_of(type).high;
    if (bits == 8 || (book_of(type) && type != MXFP4))
        return 12;
    return bits > 4 ? 14 : 15;
}

/* What the whole numbers of a group are multiplied with, and its inverse. */
INLINE float step_of_group(const bf16 *inputs, const int bits, float *inverse)
{
    int most = 0;
    for (int i = 0; i < PACKED_GROUP; i++)
        most = larger(most, inputs[i] & 0x7fff);
    int exponent = smaller(larger(most >> 7, 32), 254);
    uint32_t step = (uint32_t)(exponent - bits + 1) << 23, other = (uint32_t)(253 - exponent + bits) << 23;
    float found;
    if (most >> 7 == 255)
        step = 0x7fc00000; /* what is not finite makes its group so */
    memcpy(&found, &step, sizeof found);
    memcpy(inverse, &other, sizeof other);
    return found;
}

INLINE float rounded_input(bf16 input, float inverse)
{
    const float middle = 12582912.0f; /* adding it rounds to whole numbers, to even where two are near */
    uint32_t bits = (uint32_t)input << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x * inverse + middle - middle;
}

/* Inputs of a row as they count beside codes, in bfloat16 still, which holds them exactly. */
static void round_row(const bf16 *row, bf16 *to, int num_inputs, int bits)
{
    for (int input = 0; input < num_inputs; input += PACKED_GROUP) {
        float inverse, step = step_of_group(row + input, bits, &inverse);
        for (int i = 0; i < PACKED_GROUP; i++) {
            float x = rounded_input(row[input + i], inverse) * step;
            uint32_t wide;
            memcpy(&wide, &x, sizeof wide);
            to[input + i] = (bf16)(wide >> 16);
        }
    }
}

/* The same as whole numbers, and the steps of groups. */
static void whole_row(const bf16 *row, int16_t *to, float *steps, int num_inputs, int bits)
{
    for (int input = 0; input < num_inputs; input += PACKED_GROUP) {
        float inverse;
        *steps++ = step_of_group(row + input, bits, &inverse);
        for (int i = 0; i < PACKED_GROUP; i++)
            to[input + i] = (int16_t)rounded_input(row[input + i], inverse);
    }
}

INLINE ints whole_inputs(const int16_t *inputs, int pair)
{
    int32_t both;
    memcpy(&both, inputs + 2 * pair, sizeof both);
    return i_all(both);
}

/* One row, in whole numbers, with `num_blocks` blocks of codes as they lie. */
INLINE void multiply_row(const struct product *p, const int16_t *inputs, const float *steps, int block, const int num_blocks,
                         const enum type type)
{
    const int scales = num_scales(type), pairs = NUM_PAIRS / scales;
    const size_t part = set_bytes(type) / groups_of_set(type);
    const char *at[WIDE];
    floats totals[WIDE][PIECES];
    for (int b = 0; b < num_blocks; b++) {
        at[b] = block_at(p, block + b, type);
        clear(totals[b]);
    }
    for (int group = 0; group < num_groups_of(p); group++) {
        for (int b = 0; b < num_blocks; b++)
            for (size_t line = 0; line < part; line += 64)
                ask_for(at[b] + group * part + AHEAD + line);
        floats step = v_all(steps[group]);
#pragma GCC unroll 2
        for (int h = 0; h < scales; h++) {
            ints sums[WIDE][PIECES];
            for (int b = 0; b < num_blocks; b++)
                for (int piece = 0; piece < PIECES; piece++)
                    sums[b][piece] = i_all(0);
#pragma GCC unroll 16
            for (int i = 0; i < pairs; i++) {
                ints x = whole_inputs(inputs, group * NUM_PAIRS + h * pairs + i);
                for (int b = 0; b < num_blocks; b++)
                    for (int piece = 0; piece < PIECES; piece++) {
                        ints numbers = whole_pair(codes_at(at[b], group, type), h * pairs + i, piece, type);
                        sums[b][piece] = i_add(sums[b][piece], i_dot_pairs(numbers, x));
                    }
            }
            for (int b = 0; b < num_blocks; b++)
                for (int piece = 0; piece < PIECES; piece++) {
                    struct factors_of_group f = factors_of(at[b], group, piece, type);
                    floats sum = v_mul(v_of_ints(sums[b][piece]), step);
                    totals[b][piece] = with_factors(totals[b][piece], f.scales[h], sum, f.lowest[h],
                                                    p->group_sums + (size_t)group * scales + h, has_sum(type));
                }
        }
    }
    for (int b = 0; b < num_blocks; b++)
        write_block(p, totals[b], 0, block + b);
}

struct of_type {
    void (*multiply_row)(const struct product *p, const int16_t *inputs, const float *steps, int block);
    void (*unpack_group)(const struct product *p, int block, int group, struct unpacked_group *to);
};

/* One of each, not one wherever it is called. */
#define FUNCTIONS(TYPE)                                                                                            \
    static __attribute__((noinline)) void multiply_row_##TYPE(const struct product *p, const int16_t *inputs,     \
                                                              const float *steps, int block)                       \
    {                                                                                                              \
        multiply_row(p, inputs, steps, block, 2, TYPE);                                                            \
    }                                                                                                              \
    static __attribute__((noinline)) void unpack_group_##TYPE(const struct product *p, int block, int group,                    \
                                                              struct unpacked_group *to)                           \
    {                                                                                                              \
        unpack_group(block_at(p, block, TYPE), group, to, TYPE);                                                \
    }
EACH_TYPE(FUNCTIONS)

static const struct of_type types[] = {
#define ENTRY(TYPE) [TYPE] = {multiply_row_##TYPE, unpack_group_##TYPE},
    EACH_TYPE(ENTRY)
};

/* `num_rows` rows with a block of codes, each group of which is unpacked for all of them. */
INLINE void multiply_rows(const struct product *p, const bf16 *rounded, int row, int block, const int num_rows)
{
    const bf16 *rows[FEW_TALL];
    floats totals[FEW_TALL][PIECES];
    const int scales = num_scales(p->type), adds_lowest = has_sum(p->type), pairs = NUM_PAIRS / scales;
    for (int r = 0; r < num_rows; r++) {
        rows[r] = rounded + (size_t)r * p->num_inputs;
        clear(totals[r]);
    }
    for (int group = 0; group < num_groups_of(p); group++) {
        struct unpacked_group with;
        types[p->type].unpack_group(p, block, group, &with);
        for (int h = 0; h < scales; h++) {
            floats sums[FEW_TALL][PIECES];
            for (int r = 0; r < num_rows; r++)
                clear(sums[r]);
            for (int pair = h * pairs; pair < (h + 1) * pairs; pair++)
                for (int r = 0; r < num_rows; r++) {
                    floats one = first_of_pair(rows[r], group * NUM_PAIRS + pair);
                    floats two = second_of_pair(rows[r], group * NUM_PAIRS + pair);
                    for (int i = 0; i < PIECES; i++) {
                        sums[r][i] = v_mul_add(v_load(with.numbers[2 * pair] + i * LANES), one, sums[r][i]);
                        sums[r][i] = v_mul_add(v_load(with.numbers[2 * pair + 1] + i * LANES), two, sums[r][i]);
                    }
                }
            for (int r = 0; r < num_rows; r++)
                for (int i = 0; i < PIECES; i++)
                    totals[r][i] = with_factors(totals[r][i], v_load(with.scales[h] + i * LANES), sums[r][i],
                                                v_load(with.lowest[h] + i * LANES),
                                                group_sums_at(p, row + r, group, scales) + h, adds_lowest);
        }
    }
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++)
        write_block(p, totals[r], row + r, block);
}

/* Columns of blocks with rows that a thread rounds for itself. */
static void multiply_one(const struct product *p, int first, int end)
{
    int16_t inputs[p->num_inputs];
    float steps[num_groups_of(p)];
    whole_row(p->rows, inputs, steps, p->num_inputs, input_bits(p->type));
    for (int block = first; block < end; block += 2)
        types[p->type].multiply_row(p, inputs, steps, block);
}

static void multiply_some(const struct product *p, int row, int first, int end)
{
    bf16 rounded[FEW_TALL * p->num_inputs];
    for (int r = 0; r < FEW_TALL; r++)
        round_row(row_at(p, row + r), rounded + (size_t)r * p->num_inputs, p->num_inputs, input_bits(p->type));
    for (int block = first; block < end; block++)
        if (p->num_rows - row <= 2)
            multiply_rows(p, rounded, row, block, 2);
        else
            multiply_rows(p, rounded, row, block, FEW_TALL);
}

/* `num_rows` rows with 16 outputs in bfloat16. */
INLINE void multiply_turned(const struct product *p, int row, int block, const int num_rows)
{
    int output = block * BLOCK_OUTPUTS;
    floats sums[FEW_TALL][PIECES];
    const bf16 *rows[FEW_TALL];
    for (int r = 0; r < num_rows; r++) {
        rows[r] = row_at(p, row + r);
        clear(sums[r]);
    }
    for (int input = 0; input < p->num_inputs; input += LANES)
        for (int h = 0; h < PIECES; h++) {
            floats values[LANES];
            if (input % 32 == 0)
                for (int o = 0; o < LANES; o++)
                    ask_for(p->weight + (size_t)(output + BLOCK_OUTPUTS + h * LANES + o) * p->num_inputs + input);
            turned_values(p, output + h * LANES, input, values);
            int count = smaller(LANES, p->num_inputs - input);
            for (int r = 0; r < num_rows; r++) {
                if (count == LANES)
                    for (int i = 0; i < LANES / 2; i++) {
                        sums[r][h] = v_mul_add(values[2 * i], first_of_pair(rows[r], input / 2 + i), sums[r][h]);
                        sums[r][h] = v_mul_add(values[2 * i + 1], second_of_pair(rows[r], input / 2 + i), sums[r][h]);
                    }
                else
                    for (int i = 0; i < count; i++) {
                        float x;
                        uint32_t wide = (uint32_t)rows[r][input + i] << 16;
                        memcpy(&x, &wide, sizeof x);
                        sums[r][h] = v_mul_add(values[i], v_all(x), sums[r][h]);
                    }
            }
        }
    for (int r = 0; r < smaller(num_rows, p->num_rows - row); r++)
        write_block(p, sums[r], row + r, block);
}

static void multiply_few_turned(const struct product *p, int first)
{
    for (int block = first; block < smaller(first + WIDE, last_block(p) + 1); block++)
        for (int row = 0; row < p->num_rows; row += FEW_TALL)
            switch (smaller(FEW_TALL, p->num_rows - row)) {
            case 1: multiply_turned(p, row, block, 1); break;
            case 2: multiply_turned(p, row, block, 2); break;
            default: multiply_turned(p, row, block, FEW_TALL);
            }
}

static void multiply_few(const void *of, int first, int end)
{
    const struct product *p = of;
    int last = smaller(end * WIDE, last_block(p) + 1);
    if (p->type == BF16)
        for (int block = first * WIDE; block < last; block += WIDE)
            multiply_few_turned(p, block);
    else if (p->num_rows == 1)
        multiply_one(p, first * WIDE, last);
    else
        for (int row = 0; row < p->num_rows; row += FEW_TALL)
            multiply_some(p, row, first * WIDE, last);
}

/* Of one thread. */
struct part {
    union {
        float panel[DEEP][BLOCK_OUTPUTS];
        struct unpacked_group groups[DEEP / PACKED_GROUP];
    };
    float sums[NUM_PANELS][PART][BLOCK_OUTPUTS];
};

struct many_rows {
    const struct product *of;
    float *turned; /* [tiles, inputs, 6 rows] */
    int first_row, num_tiles, num_items;
    atomic_int next_item, next_thread;
};

int64_t penstock_panels_bytes(int num_inputs, int num_threads)
{
    (void)num_inputs;
    return (num_threads * sizeof(struct part) + 63) / 64 * 64;
}

int64_t penstock_product_bytes(int num_rows, int num_inputs, int num_threads)
{
    int num_tiles = (smaller(num_rows, PART) + TALL - 1) / TALL;
    return penstock_panels_bytes(num_inputs, num_threads) + sizeof(float) * num_tiles * TALL * num_inputs;
}

/* Rows past the last one repeat it. */
static void turn_tiles(const void *of, int first, int end)
{
    const struct many_rows *job = of;
    for (int tile = first; tile < end; tile++) {
        float *to = job->turned + (size_t)tile * TALL * job->of->num_inputs;
        for (int r = 0; r < TALL; r++) {
            const bf16 *row = row_at(job->of, job->first_row + tile * TALL + r);
            bf16 rounded[job->of->num_inputs];
            if (job->of->type != BF16) {
                round_row(row, rounded, job->of->num_inputs, input_bits(job->of->type));
                row = rounded;
            }
            for (int i = 0; i < job->of->num_inputs; i++) {
                uint32_t wide = (uint32_t)row[i] << 16;
                memcpy(to + i * TALL + r, &wide, sizeof wide);
            }
        }
    }
}

static void fill_panel(const struct product *p, int block, int input, int count, struct part *part)
{
    if (p->type != BF16)
        for (int i = 0; i < count; i += PACKED_GROUP)
            types[p->type].unpack_group(p, block, (input + i) / PACKED_GROUP, &part->groups[i / PACKED_GROUP]);
    else
        for (int i = 0; i < count; i += LANES)
            for (int h = 0; h < PIECES; h++) {
                floats values[LANES];
                turned_values(p, block * BLOCK_OUTPUTS + h * LANES, input + i, values);
                for (int k = 0; k < smaller(LANES, count - i); k++)
                    v_store(part->panel[i + k] + h * LANES, values[k]);
            }
}

/* Adds the products of 6 rows with a panel of inputs. */
INLINE void multiply_panel(const float *rows, float (*panel)[BLOCK_OUTPUTS], int count, floats (*sums)[PIECES])
{
    for (int i = 0; i < count; i++) {
        floats values[PIECES];
        for (int h = 0; h < PIECES; h++)
            values[h] = v_load(panel[i] + h * LANES);
        for (int r = 0; r < TALL; r++) {
            floats x = v_all(rows[i * TALL + r]);
            for (int h = 0; h < PIECES; h++)
                sums[r][h] = v_mul_add(values[h], x, sums[r][h]);
        }
    }
}

/* Sums go on where the panel before it left them. */
INLINE void multiply_tile(const float *rows, struct part *part, int count, float (*kept)[BLOCK_OUTPUTS], int is_first)
{
    floats sums[TALL][PIECES];
    for (int r = 0; r < TALL; r++)
        for (int h = 0; h < PIECES; h++)
            sums[r][h] = is_first ? v_zero() : v_load(kept[r] + h * LANES);
    multiply_panel(rows, part->panel, count, sums);
    for (int r = 0; r < TALL; r++)
        for (int h = 0; h < PIECES; h++)
            v_store(kept[r] + h * LANES, sums[r][h]);
}

/* The same with codes, whose sums are kept with their factors. */
INLINE void multiply_codes(const struct product *p, const float *rows, int row, int input, struct part *part, int count,
                           float (*kept)[BLOCK_OUTPUTS], const int scales, const int adds_lowest)
{
    const int inputs = PACKED_GROUP / scales;
    for (int r = 0; r < TALL && !input; r++)
        for (int h = 0; h < PIECES; h++)
            v_store(kept[r] + h * LANES, v_zero());
    for (int i = 0; i < count; i += inputs) {
        struct unpacked_group *with = &part->groups[i / PACKED_GROUP];
        int h = i % PACKED_GROUP / inputs;
        floats sums[TALL][PIECES];
        for (int r = 0; r < TALL; r++)
            clear(sums[r]);
        multiply_panel(rows + i * TALL, with->numbers + h * inputs, inputs, sums);
        for (int piece = 0; piece < PIECES; piece++) {
            floats scale = v_load(with->scales[h] + piece * LANES), lowest = v_load(with->lowest[h] + piece * LANES);
            for (int r = 0; r < TALL; r++) {
                float *total = kept[r] + piece * LANES;
                const float *group_sum = group_sums_at(p, row + r, (input + i) / PACKED_GROUP, scales) + h;
                v_store(total, with_factors(v_load(total), scale, sums[r][piece], lowest, group_sum, adds_lowest));
            }
        }
    }
}

static void multiply_item(const struct many_rows *job, struct part *part, int item)
{
    const struct product *p = job->of;
    for (int input = 0; input < p->num_inputs; input += DEEP) {
        int count = smaller(DEEP, p->num_inputs - input), is_last = input + count == p->num_inputs;
        for (int i = 0; i < NUM_PANELS && item * NUM_PANELS + i <= last_block(p); i++) {
            int block = item * NUM_PANELS + i;
            fill_panel(p, block, input, count, part);
            for (int tile = 0; tile < job->num_tiles; tile++) {
                const float *rows = job->turned + ((size_t)tile * p->num_inputs + input) * TALL;
                float(*kept)[BLOCK_OUTPUTS] = part->sums[i] + tile * TALL;
                int row = job->first_row + tile * TALL;
                if (p->type == BF16)
                    multiply_tile(rows, part, count, kept, !input);
                else if (num_scales(p->type) == 1)
                    multiply_codes(p, rows, row, input, part, count, kept, 1, has_sum(p->type));
                else
                    multiply_codes(p, rows, row, input, part, count, kept, 2, has_sum(p->type));
                for (int r = 0; is_last && r < smaller(TALL, p->num_rows - job->first_row - tile * TALL); r++) {
                    floats values[PIECES];
                    for (int h = 0; h < PIECES; h++)
                        values[h] = v_load(kept[r] + h * LANES);
                    write_block(p, values, job->first_row + tile * TALL + r, block);
                }
            }
        }
    }
}

static void run_many_rows(void *data)
{
    struct many_rows *job = data;
    struct part *part = (struct part *)job->of->workspace + atomic_fetch_add(&job->next_thread, 1);
    for (int item; (item = atomic_fetch_add(&job->next_item, 1)) < job->num_items;)
        multiply_item(job, part, item);
}

static void multiply_many(const struct product *p)
{
    int num_parts = (p->num_rows + PART - 1) / PART, share = (p->num_rows + num_parts - 1) / num_parts;
    share = (share + TALL - 1) / TALL * TALL; /* parts of one size, of whole tiles */
    for (int first_row = 0; first_row < p->num_rows; first_row += share) {
        struct many_rows job = {.of = p, .first_row = first_row, .num_items = last_block(p) / NUM_PANELS + 1};
        job.turned = (float *)((char *)p->workspace + penstock_panels_bytes(p->num_inputs, p->num_threads));
        job.num_tiles = (smaller(share, p->num_rows - first_row) + TALL - 1) / TALL;
        share_rows(turn_tiles, &job, job.num_tiles, sizeof(float) * TALL * p->num_inputs, p->parallel, p->num_threads);
        if (p->num_threads > 1)
            p->parallel(run_many_rows, &job, p->num_threads, 0);
        else
            run_many_rows(&job);
    }
}

/* What the lowest value of a group, or of half of one, is multiplied with: the sum of its inputs, which is exact too. */
static void sum_groups(const void *of, int first, int end)
{
    const struct product *p = of;
    const int inputs = PACKED_GROUP / num_scales(p->type);
    size_t num_sums = p->num_inputs / inputs;
    bf16 rounded[p->num_inputs];
    for (int row = first; row < end; row++) {
        round_row(row_at(p, row), rounded, p->num_inputs, input_bits(p->type));
        for (size_t at = 0; at < num_sums; at++) {
            floats sum = v_zero();
            for (int i = 0; i < inputs; i += LANES)
                sum = v_add(sum, load_floats(rounded + at * inputs + i, LANES));
            p->group_sums[row * num_sums + at] = v_sum(sum);
        }
    }
}

void penstock_multiply(const struct product *p)
{
    int num_columns = last_block(p) / WIDE + 1;
    size_t bytes = (size_t)WIDE * BLOCK_OUTPUTS * p->num_inputs; /* about */
    if (p->type != BF16 && has_sum(p->type))
        share_rows(sum_groups, p, p->num_rows, sizeof(bf16) * p->num_inputs, p->parallel, p->num_threads);
    if (p->num_rows <= FEW_ROWS)
        share_rows(multiply_few, p, num_columns, bytes, p->parallel, p->num_threads);
    else
        multiply_many(p);
}

void penstock_multiply_packed(const struct product *p) { penstock_multiply(p); }

static void unpack_wanted(const void *of, int first, int end)
{
    const struct unpacking *u = of;
    const struct product p = {.weight = u->weight, .num_inputs = u->num_inputs, .num_outputs = INT32_MAX};
    for (int row = first; row < end; row++) {
        int lane = u->ids[row] % BLOCK_OUTPUTS, block = u->ids[row] / BLOCK_OUTPUTS;
        for (int input = 0; input < u->num_inputs; input += PACKED_GROUP) {
            struct unpacked_group with;
            float values[PACKED_GROUP];
            types[u->type].unpack_group(&p, block, input / PACKED_GROUP, &with);
            for (int i = 0; i < PACKED_GROUP; i++) {
                int h = i * num_scales(u->type) / PACKED_GROUP;
                values[i] = with.numbers[i][lane] * with.scales[h][lane] + with.lowest[h][lane];
            }
            for (int i = 0; i < PACKED_GROUP; i += LANES)
                store_floats(u->out + (size_t)row * u->num_inputs + input + i, v_load(values + i), LANES);
        }
    }
}

void penstock_unpack_rows(const struct unpacking *u)
{
    share_rows(unpack_wanted, u, u->num_rows, sizeof(bf16) * BLOCK_OUTPUTS * u->num_inputs, u->parallel, u->num_threads);
}
