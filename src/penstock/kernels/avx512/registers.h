/* Registers of 16 floats, AVX-512, and its dot products of pairs in bfloat16. */
#include <immintrin.h>

#define LANES 16 /* floats of a register */

typedef __m512 floats;

INLINE int has_instructions(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

INLINE void pause_briefly(void) { _mm_pause(); }

INLINE floats v_zero(void) { return _mm512_setzero_ps(); }
INLINE floats v_all(float x) { return _mm512_set1_ps(x); }
INLINE floats v_add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats v_sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats v_mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats v_div(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats v_sqrt(floats a) { return _mm512_sqrt_ps(a); }
INLINE floats v_mul_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats v_mul_sub(floats a, floats b, floats c) { return _mm512_fmsub_ps(a, b, c); }
INLINE float v_first(floats a) { return _mm512_cvtss_f32(a); }
INLINE float v_sum(floats a) { return _mm512_reduce_add_ps(a); }

/* Whole numbers, and the floats of as many in float16. */
typedef __m512i ints;

INLINE ints i_bytes(const uint8_t *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE ints i_signed_bytes(const int8_t *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE ints i_and(ints a, int bits) { return _mm512_and_si512(a, _mm512_set1_epi32(bits)); }
INLINE ints i_or(ints a, ints b) { return _mm512_or_si512(a, b); }
INLINE ints i_left(ints a, const int count) { return _mm512_slli_epi32(a, count); }
INLINE ints i_right(ints a, int count) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(count)); }
INLINE floats v_of_ints(ints a) { return _mm512_cvtepi32_ps(a); }
INLINE floats v_of_bits(ints a) { return _mm512_castsi512_ps(a); }
INLINE floats half_floats(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

/* 2 to the power of x; relative error below 4e-6, exactly 0 far below. */
INLINE __m512 exp2_ps(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, 1); /* x less its floor, which scalef adds again */
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0134266838f), f, _mm512_set1_ps(0.0522424728f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241280198f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693044841f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, x);
}

INLINE __mmask16 lanes_of(int count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

/* Up to 16 numbers, 0 in the lanes past them. */
INLINE __m512 load_floats(const bf16 *from, int count)
{
    __m256i bits = _mm256_maskz_loadu_epi16(lanes_of(count), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

INLINE void store_floats(bf16 *to, __m512 values, int count)
{
    _mm256_mask_storeu_epi16(to, lanes_of(count), (__m256i)_mm512_cvtneps_pbh(values));
}

/* The same of numbers in float32. */
#define load_wide(from, count) _mm512_maskz_loadu_ps(lanes_of(count), from)
#define store_wide(to, values, count) _mm512_mask_storeu_ps(to, lanes_of(count), values)

#define LANE_NUMBERS _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)

/* Adds the products of 32 pairs, two to a lane. */
INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

INLINE __m512i load_32(const bf16 *from, int count)
{
    return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

/* 16 registers to one: lane i of the result is the sum of register i. */
INLINE __m512 sum_each(__m512 *rows)
{
    for (int i = 0; i < 8; i++) /* lanes of 2 registers, alternating */
        rows[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[i], rows[i + 8]), _mm512_unpackhi_ps(rows[i], rows[i + 8]));
    for (int i = 0; i < 4; i++)
        rows[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[i], rows[i + 4]), _mm512_unpackhi_ps(rows[i], rows[i + 4]));
    for (int i = 0; i < 2; i++)
        rows[i] = _mm512_add_ps(_mm512_shuffle_f32x4(rows[i], rows[i + 2], 0x88),
                                _mm512_shuffle_f32x4(rows[i], rows[i + 2], 0xdd));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(rows[0], rows[1], 0x88), _mm512_shuffle_f32x4(rows[0], rows[1], 0xdd));
    const __m512i order = _mm512_set_epi32(15, 7, 11, 3, 14, 6, 10, 2, 13, 5, 9, 1, 12, 4, 8, 0);
    return _mm512_permutexvar_ps(order, sums);
}

/* Rows become columns: lane j of register i is lane i of register j. */
INLINE void transpose(__m512 *r)
{
    __m512 t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            __m512d one = _mm512_castps_pd(t[i + k]), two = _mm512_castps_pd(t[i + k + 2]);
            r[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(one, two));
            r[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(one, two));
        }
    for (int i = 0; i < LANES; i += 8)
        for (int k = 0; k < 4; k++) {
            t[i + k] = _mm512_shuffle_f32x4(r[i + k], r[i + k + 4], 0x88);
            t[i + k + 4] = _mm512_shuffle_f32x4(r[i + k], r[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 8; k++) {
        r[k] = _mm512_shuffle_f32x4(t[k], t[k + 8], 0x88);
        r[k + 8] = _mm512_shuffle_f32x4(t[k], t[k + 8], 0xdd);
    }
}

