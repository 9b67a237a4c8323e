/* Codes of a pair of inputs, 16 outputs side by side, as whole numbers in bfloat16, which holds them exactly. */
#include "blocks.h"

/* The numbers that codes of up to six bits stand for, in bfloat16; those of fewer bits are repeated. */
struct numbers { __m512i first, second; };

INLINE __m512 numbers_from(int first, const enum type type)
{
    struct format format = format_of(type);
    if (book_of(type))
        return v_of_ints(i_signed_bytes(book_of(type)));
    ints codes = i_and(_mm512_add_epi32(LANE_NUMBERS, _mm512_set1_epi32(first)), (1 << (format.low + format.high)) - 1);
    return v_of_ints(_mm512_sub_epi32(codes, _mm512_set1_epi32(format.offset)));
}

INLINE struct numbers numbers_of(const enum type type)
{
    return (struct numbers){(__m512i)_mm512_cvtne2ps_pbh(numbers_from(16, type), numbers_from(0, type)),
                            (__m512i)_mm512_cvtne2ps_pbh(numbers_from(48, type), numbers_from(32, type))};
}

INLINE __m512i bytes_in_bf16(const char *codes)
{
    __m512 one = v_of_ints(i_signed_bytes((const int8_t *)codes));
    __m512 two = v_of_ints(i_signed_bytes((const int8_t *)codes + LANES));
    return (__m512i)_mm512_cvtne2ps_pbh(two, one);
}

/* `codes`: of a group; what lies above a code is not looked at. */
INLINE __m512i pair_of_numbers(const char *codes, const int pair, struct numbers numbers, const enum type type)
{
    const int low = format_of(type).low, high = format_of(type).high;
    if (low == 8)
        return bytes_in_bf16(codes + 2 * LANES * pair);
    __m512i index = _mm512_srli_epi16(_mm512_loadu_si512(codes + pair * low / 16 * 64), pair * low % 16);
    if (high) {
        __m512i upper = _mm512_loadu_si512(codes + (low + pair * high / 16) * 64);
        const int at = pair * high % 16 - low;
        upper = at < 0 ? _mm512_slli_epi16(upper, -at) : _mm512_srli_epi16(upper, at);
        index = _mm512_ternarylogic_epi64(_mm512_set1_epi16((1 << low) - 1), index, upper, 0xca); /* lower bits, upper ones */
    }
    if (low + high > 5)
        return _mm512_permutex2var_epi16(numbers.first, index, numbers.second);
    return _mm512_permutexvar_epi16(index, numbers.first);
}
