/* Registers of 8 floats, AVX2 with FMA: bfloat16 in memory, float32 in every sum. */
#include <immintrin.h>

#define LANES 8 /* floats of a register */

typedef __m256 floats;

INLINE int has_instructions(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

INLINE void pause_briefly(void) { _mm_pause(); }

INLINE floats v_zero(void) { return _mm256_setzero_ps(); }
INLINE floats v_all(float x) { return _mm256_set1_ps(x); }
INLINE floats v_add(floats a, floats b) { return _mm256_add_ps(a, b); }
INLINE floats v_sub(floats a, floats b) { return _mm256_sub_ps(a, b); }
INLINE floats v_mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats v_div(floats a, floats b) { return _mm256_div_ps(a, b); }
INLINE floats v_sqrt(floats a) { return _mm256_sqrt_ps(a); }
INLINE floats v_max(floats a, floats b) { return _mm256_max_ps(a, b); }
INLINE floats v_mul_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats v_mul_sub(floats a, floats b, floats c) { return _mm256_fmsub_ps(a, b, c); }
INLINE float v_first(floats a) { return _mm256_cvtss_f32(a); }
INLINE floats v_load(const float *from) { return _mm256_loadu_ps(from); }
INLINE void v_store(float *to, floats values) { _mm256_storeu_ps(to, values); }

INLINE float v_sum(floats a)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float v_highest(floats a)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* The sums of 8 registers, a lane each. */
INLINE floats sum_each(const floats *r)
{
    floats pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm256_hadd_ps(r[2 * i], r[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        fours[i] = _mm256_hadd_ps(pairs[2 * i], pairs[2 * i + 1]);
    return v_add(_mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
}

/* Whole numbers, and the floats of as many in float16. */
typedef __m256i ints;

INLINE ints i_all(int x) { return _mm256_set1_epi32(x); }
INLINE ints i_load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE ints i_shorts(const void *from) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE ints i_bytes(const uint8_t *from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
INLINE ints i_signed_bytes(const int8_t *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
INLINE ints i_and(ints a, int bits) { return _mm256_and_si256(a, _mm256_set1_epi32(bits)); }
INLINE ints i_or(ints a, ints b) { return _mm256_or_si256(a, b); }
INLINE ints i_left(ints a, const int count) { return _mm256_slli_epi32(a, count); }
INLINE ints i_right(ints a, int count) { return _mm256_srli_epi32(a, count); }
INLINE ints i_signed_right(ints a, const int count) { return _mm256_srai_epi32(a, count); }
INLINE ints i_sub(ints a, ints b) { return _mm256_sub_epi32(a, b); }
INLINE ints i_lanes(int first) { return _mm256_add_epi32(i_all(first), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)); }

/* Pairs of whole numbers of 16 bits in each lane, and the sum of the products of two pairs. */
INLINE ints i_pairs_of_bytes(const void *from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)); }
INLINE ints i_shorts_left(ints a, const int count) { return _mm256_slli_epi16(a, count); }
INLINE ints i_shorts_right(ints a, const int count) { return _mm256_srli_epi16(a, count); }
INLINE ints i_add(ints a, ints b) { return _mm256_add_epi32(a, b); }
INLINE ints i_dot_pairs(ints a, ints b) { return _mm256_madd_epi16(a, b); }

INLINE ints i_pairs_in_book(ints codes, const int8_t *book)
{
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)book));
    return _mm256_srai_epi16(_mm256_slli_epi16(_mm256_shuffle_epi8(both, codes), 8), 8);
}

/* What the lowest byte of each lane stands for in a book of 16. */
INLINE ints i_in_book(ints codes, const int8_t *book)
{
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)book));
    return i_signed_right(i_left(_mm256_shuffle_epi8(both, codes), 24), 24);
}

/* Lanes in which a comparison holds. */
typedef __m256i lanes;

INLINE lanes is_more(ints a, ints b) { return _mm256_cmpgt_epi32(a, b); }
INLINE lanes are_both(lanes a, lanes b) { return _mm256_and_si256(a, b); }
INLINE floats v_of_ints(ints a) { return _mm256_cvtepi32_ps(a); }
INLINE floats v_of_bits(ints a) { return _mm256_castsi256_ps(a); }
INLINE floats v_where(lanes is, floats a, floats b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(is)); }
INLINE floats half_floats(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

/* 2 to the power of x; relative error below 4e-6, infinite from 128 up, exactly 0 from -126 down. */
INLINE floats exp2_ps(floats x)
{
    floats is_seen = _mm256_cmp_ps(x, v_all(-126), _CMP_GT_OQ);
    x = _mm256_min_ps(v_max(x, v_all(-126)), v_all(128));
    floats floor = _mm256_floor_ps(x), f = v_sub(x, floor);
    floats p = v_mul_add(v_all(0.0134266838f), f, v_all(0.0522424728f));
    p = v_mul_add(p, f, v_all(0.241280198f));
    p = v_mul_add(p, f, v_all(0.693044841f));
    p = v_mul_add(p, f, v_all(1));
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(floor), 23);
    return _mm256_and_ps(is_seen, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent)));
}

INLINE floats wide_of(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }

/* The nearest numbers in bfloat16, to even where two are. */
INLINE __m128i rounded(floats values)
{
    __m256i bits = _mm256_castps_si256(values);
    __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    bits = _mm256_srli_epi32(bits, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* Up to 8 numbers, 0 in the lanes past them. */
INLINE floats load_floats(const bf16 *from, int count)
{
    if (count >= LANES)
        return wide_of(_mm_loadu_si128((const __m128i *)from));
    bf16 some[LANES] = {0};
    for (int i = 0; i < count; i++)
        some[i] = from[i];
    return wide_of(_mm_loadu_si128((const __m128i *)some));
}

INLINE void store_floats(bf16 *to, floats values, int count)
{
    __m128i bits = rounded(values);
    if (count >= LANES) {
        _mm_storeu_si128((__m128i *)to, bits);
        return;
    }
    bf16 some[LANES];
    _mm_storeu_si128((__m128i *)some, bits);
    for (int i = 0; i < count; i++)
        to[i] = some[i];
}

INLINE lanes lanes_of(int count) { return is_more(i_all(count), i_lanes(0)); }

/* The same of numbers in float32. */
INLINE floats load_wide(const float *from, int count)
{
    return count >= LANES ? v_load(from) : _mm256_maskload_ps(from, lanes_of(count));
}

INLINE void store_wide(float *to, floats values, int count)
{
    if (count >= LANES)
        v_store(to, values);
    else
        _mm256_maskstore_ps(to, lanes_of(count), values);
}

/* Rows become columns: lane j of register i is lane i of register j. */
INLINE void transpose(floats *r)
{
    floats t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            r[i + 2 * k] = _mm256_shuffle_ps(t[i + k], t[i + k + 2], 0x44);
            r[i + 2 * k + 1] = _mm256_shuffle_ps(t[i + k], t[i + k + 2], 0xee);
        }
    for (int k = 0; k < 4; k++) {
        t[k] = _mm256_permute2f128_ps(r[k], r[k + 4], 0x20);
        t[k + 4] = _mm256_permute2f128_ps(r[k], r[k + 4], 0x31);
    }
    for (int k = 0; k < LANES; k++)
        r[k] = t[k];
}
