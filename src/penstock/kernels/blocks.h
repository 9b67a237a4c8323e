/* Matrices of 8 or 4 bit codes as they lie: 16 outputs side by side, in groups of 32 inputs. */
#include "vectors.h"

#define BLOCK_OUTPUTS 16
#define PACKED_GROUP 32  /* inputs that share a scale */
#define NUM_PAIRS 16     /* of inputs in a group */

struct int4_block {
    uint16_t codes[4][2 * BLOCK_OUTPUTS]; /* four codes to a word, of four pairs after one another */
    uint16_t scales[BLOCK_OUTPUTS], lowest[BLOCK_OUTPUTS];
};

struct int8_block {
    int8_t codes[NUM_PAIRS][2 * BLOCK_OUTPUTS];
    uint16_t scales[BLOCK_OUTPUTS];
};

INLINE size_t block_bytes(int is_int4) { return is_int4 ? sizeof(struct int4_block) : sizeof(struct int8_block); }
