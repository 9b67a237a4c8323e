/* What a thread holds while it attends: all in float32. */

#define ROW_GROUP 16         /* query rows that are scored together */
#define DIMS 16              /* dimensions that are summed together */
#define LEAST_TILE ROW_GROUP /* rows of a work item, where many threads share few */

struct scratch {
    float queries[TILE / ROW_GROUP][MAX_HEAD][ROW_GROUP]; /* a row per lane; of splits, a row after another */
    float keys[KEYS * MAX_HEAD], values[KEYS * MAX_HEAD]; /* of one key-value head */
    float scores[KEYS * SUBTILE];                         /* of a key, a row per lane; of splits, a key per lane */
    float sums[TILE * MAX_HEAD];
    float highest[TILE], totals[TILE], fading[SUBTILE];
    int32_t positions[TILE];
    struct block block, next;
    int32_t is_next_known;
};

/* Numbers of a key or value in float32; 0 from its head's size up to `width`. What comes next is asked for. */
INLINE void widen(const bf16 *from, float *to, int head_size, int width, const bf16 *next)
{
    for (int dim = 0; dim < width; dim += LANES) {
        if (dim % 32 == 0)
            ask_for(next + dim);
        v_store(to + dim, dim < head_size ? load_floats(from + dim, head_size - dim) : v_zero());
    }
}

/* Adds the weighted values of `num_keys` keys to 4 rows, `DIMS` dimensions of them, after fading what is there. The steps
 * from weight to weight are constants where this is inlined, and so is the number of rows. */
INLINE void sum_weighted(float *sums, const float *fading, const float *weights, const float *values, int width,
                         int num_keys, const int key_step, const int row_step, const int num_rows)
{
    floats kept[4][DIMS / LANES];
    for (int r = 0; r < num_rows; r++)
        for (int i = 0; i < DIMS / LANES; i++)
            kept[r][i] = v_mul(v_load(sums + r * width + i * LANES), v_all(fading[r]));
    for (int key = 0; key < num_keys; key++, values += width) {
        floats value[DIMS / LANES];
        for (int i = 0; i < DIMS / LANES; i++)
            value[i] = v_load(values + i * LANES);
        for (int r = 0; r < num_rows; r++) {
            floats weight = v_all(weights[key * key_step + r * row_step]);
            for (int i = 0; i < DIMS / LANES; i++)
                kept[r][i] = v_mul_add(weight, value[i], kept[r][i]);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int i = 0; i < DIMS / LANES; i++)
            v_store(sums + r * width + i * LANES, kept[r][i]);
}

/* Dimensions divided and written. */
INLINE void write_head(bf16 *out, const float *sums, float factor, int head_size)
{
    for (int dim = 0; dim < head_size; dim += LANES)
        store_floats(out + dim, v_mul(v_load(sums + dim), v_all(factor)), head_size - dim);
}
