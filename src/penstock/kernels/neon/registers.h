/* Registers of 4 floats, NEON: bfloat16 in memory, float32 in every sum. */
#include <arm_neon.h>

#define LANES 4 /* floats of a register */

typedef float32x4_t floats;

INLINE int has_instructions(void) { return 1; } /* every processor that aarch64 runs on has them */

INLINE void pause_briefly(void) { __asm__ volatile("yield"); }

INLINE floats v_zero(void) { return vdupq_n_f32(0); }
INLINE floats v_all(float x) { return vdupq_n_f32(x); }
INLINE floats v_add(floats a, floats b) { return vaddq_f32(a, b); }
INLINE floats v_sub(floats a, floats b) { return vsubq_f32(a, b); }
INLINE floats v_mul(floats a, floats b) { return vmulq_f32(a, b); }
INLINE floats v_div(floats a, floats b) { return vdivq_f32(a, b); }
INLINE floats v_sqrt(floats a) { return vsqrtq_f32(a); }
INLINE floats v_max(floats a, floats b) { return vmaxq_f32(a, b); }
INLINE floats v_mul_add(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
INLINE floats v_mul_sub(floats a, floats b, floats c) { return vfmaq_f32(vnegq_f32(c), a, b); }
INLINE float v_first(floats a) { return vgetq_lane_f32(a, 0); }
INLINE float v_sum(floats a) { return vaddvq_f32(a); }
INLINE float v_highest(floats a) { return vmaxvq_f32(a); }
INLINE floats v_load(const float *from) { return vld1q_f32(from); }
INLINE void v_store(float *to, floats values) { vst1q_f32(to, values); }

/* The sums of 4 registers, a lane each. */
INLINE floats sum_each(const floats *r) { return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3])); }

/* Whole numbers, and the floats of as many in float16. */
typedef int32x4_t ints;

INLINE ints i_all(int x) { return vdupq_n_s32(x); }
INLINE ints i_load(const void *from) { return vreinterpretq_s32_u8(vld1q_u8(from)); }
INLINE ints i_shorts(const void *from) { return vmovl_s16(vreinterpret_s16_u8(vld1_u8(from))); }
INLINE ints i_signed_bytes(const int8_t *from)
{
    int32_t four;
    memcpy(&four, from, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
INLINE ints i_and(ints a, int bits) { return vandq_s32(a, i_all(bits)); }
INLINE ints i_bytes(const uint8_t *from) { return i_and(i_signed_bytes((const int8_t *)from), 255); }
INLINE ints i_or(ints a, ints b) { return vorrq_s32(a, b); }
INLINE ints i_sub(ints a, ints b) { return vsubq_s32(a, b); }
INLINE ints i_left(ints a, const int count) { return vshlq_s32(a, i_all(count)); }
INLINE ints i_signed_right(ints a, const int count) { return vshlq_s32(a, i_all(-count)); }
INLINE ints i_right(ints a, int count)
{
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), i_all(-count)));
}
INLINE ints i_lanes(int first) { return vaddq_s32(i_all(first), (ints){0, 1, 2, 3}); }

/* Pairs of whole numbers of 16 bits in each lane, and the sum of the products of two pairs. */
INLINE ints i_pairs_of_bytes(const void *from) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(from))); }
INLINE ints i_shorts_left(ints a, const int count)
{
    return vreinterpretq_s32_s16(vshlq_s16(vreinterpretq_s16_s32(a), vdupq_n_s16(count)));
}
INLINE ints i_shorts_right(ints a, const int count)
{
    return vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(a), vdupq_n_s16(-count)));
}
INLINE ints i_add(ints a, ints b) { return vaddq_s32(a, b); }
INLINE ints i_dot_pairs(ints a, ints b)
{
    int16x8_t one = vreinterpretq_s16_s32(a), two = vreinterpretq_s16_s32(b);
    return vpaddq_s32(vmull_s16(vget_low_s16(one), vget_low_s16(two)), vmull_high_s16(one, two));
}

INLINE ints i_pairs_in_book(ints codes, const int8_t *book)
{
    int8x16_t found = vqtbl1q_s8(vld1q_s8(book), vreinterpretq_u8_s32(codes));
    return vreinterpretq_s32_s16(vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s8(found), 8), 8));
}

/* What the lowest byte of each lane stands for in a book of 16. */
INLINE ints i_in_book(ints codes, const int8_t *book)
{
    ints found = vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(book), vreinterpretq_u8_s32(codes)));
    return i_signed_right(i_left(found, 24), 24);
}

/* Lanes in which a comparison holds. */
typedef uint32x4_t lanes;

INLINE lanes is_more(ints a, ints b) { return vcgtq_s32(a, b); }
INLINE lanes are_both(lanes a, lanes b) { return vandq_u32(a, b); }
INLINE floats v_where(lanes is, floats a, floats b) { return vbslq_f32(is, a, b); }
INLINE floats v_of_ints(ints a) { return vcvtq_f32_s32(a); }
INLINE floats v_of_bits(ints a) { return vreinterpretq_f32_s32(a); }
INLINE floats half_floats(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }

/* 2 to the power of x; relative error below 4e-6, infinite from 128 up, exactly 0 from -126 down. */
INLINE floats exp2_ps(floats x)
{
    uint32x4_t is_seen = vcgtq_f32(x, v_all(-126));
    x = vminq_f32(v_max(x, v_all(-126)), v_all(128));
    floats floor = vrndmq_f32(x), f = v_sub(x, floor);
    floats p = v_mul_add(v_all(0.0134266838f), f, v_all(0.0522424728f));
    p = v_mul_add(p, f, v_all(0.241280198f));
    p = v_mul_add(p, f, v_all(0.693044841f));
    p = v_mul_add(p, f, v_all(1));
    ints exponent = vshlq_n_s32(vcvtq_s32_f32(floor), 23);
    return v_of_bits(vandq_s32(vreinterpretq_s32_u32(is_seen), vaddq_s32(vreinterpretq_s32_f32(p), exponent)));
}

INLINE floats wide_of(uint16x4_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }

/* The nearest numbers in bfloat16, to even where two are. */
INLINE uint16x4_t rounded(floats values)
{
    uint32x4_t bits = vreinterpretq_u32_f32(values);
    uint32x4_t is_odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(is_odd, vdupq_n_u32(0x7fff))), 16);
}

/* Up to 4 numbers, 0 in the lanes past them. */
INLINE floats load_floats(const bf16 *from, int count)
{
    if (count >= LANES)
        return wide_of(vld1_u16(from));
    bf16 some[LANES] = {0};
    for (int i = 0; i < count; i++)
        some[i] = from[i];
    return wide_of(vld1_u16(some));
}

INLINE void store_floats(bf16 *to, floats values, int count)
{
    bf16 some[LANES];
    if (count >= LANES) {
        vst1_u16(to, rounded(values));
        return;
    }
    vst1_u16(some, rounded(values));
    for (int i = 0; i < count; i++)
        to[i] = some[i];
}

/* The same of numbers in float32. */
INLINE floats load_wide(const float *from, int count)
{
    if (count >= LANES)
        return v_load(from);
    float some[LANES] = {0};
    for (int i = 0; i < count; i++)
        some[i] = from[i];
    return v_load(some);
}

INLINE void store_wide(float *to, floats values, int count)
{
    float some[LANES];
    if (count >= LANES) {
        v_store(to, values);
        return;
    }
    v_store(some, values);
    for (int i = 0; i < count; i++)
        to[i] = some[i];
}

/* Rows become columns: lane j of register i is lane i of register j. */
INLINE void transpose(floats *r)
{
    floats t[LANES] = {vtrn1q_f32(r[0], r[1]), vtrn2q_f32(r[0], r[1]), vtrn1q_f32(r[2], r[3]), vtrn2q_f32(r[2], r[3])};
    for (int i = 0; i < 2; i++) {
        float64x2_t one = vreinterpretq_f64_f32(t[i]), two = vreinterpretq_f64_f32(t[i + 2]);
        r[i] = vreinterpretq_f32_f64(vtrn1q_f64(one, two));
        r[i + 2] = vreinterpretq_f32_f64(vtrn2q_f64(one, two));
    }
}
