// Vectors of one instruction set: VF of floats or doubles, one series per lane. Sums and products are written with
// fma(), never left to the compiler to contract (-ffp-contract=off), so that every set rounds alike.
//
// No header of the C++ library is included by a unit: an inline function of its own might be compiled for AVX-512 and
// then be the one that the linker keeps for all.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace FLUXUTILS_UNIT {
namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, ACCUMULATORS = 24;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32, ACCUMULATORS = 12;
#else
constexpr int VECTOR_BYTES = 16, ACCUMULATORS = 24;
#endif

// Under a sanitizer, code that is written out again and again takes many minutes to compile.
#if defined(FLUXUTILS_SANITIZED)
#define FK_INLINE inline
#define FK_UNROLL
#elif defined(__clang__)
#define FK_INLINE inline __attribute__((always_inline))
#define FK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FK_INLINE inline __attribute__((always_inline))
#define FK_UNROLL _Pragma("GCC unroll 64")
#endif

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef uint32_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int L = VECTOR_BYTES / 4;
};
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef double Anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef uint64_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int L = VECTOR_BYTES / 8;
};

using VF = Lanes<float>::V;
using VD = Lanes<double>::V;

template <class T> FK_INLINE typename Lanes<T>::V load(const T *p) {
    return *reinterpret_cast<const typename Lanes<T>::Anywhere *>(p);
}
FK_INLINE void store(float *p, VF v) { *reinterpret_cast<Lanes<float>::Anywhere *>(p) = v; }
FK_INLINE void store(double *p, VD v) { *reinterpret_cast<Lanes<double>::Anywhere *>(p) = v; }

// The smaller or larger of a bound and a value; the value if that is NaN.
#if defined(__AVX512F__)
FK_INLINE VF every(float a) { return _mm512_set1_ps(a); }
FK_INLINE VD every(double a) { return _mm512_set1_pd(a); }
FK_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
FK_INLINE VD fma(VD a, VD b, VD c) { return _mm512_fmadd_pd(a, b, c); }
FK_INLINE VF at_most(float bound, VF a) { return _mm512_min_ps(every(bound), a); }
FK_INLINE VD at_most(double bound, VD a) { return _mm512_min_pd(every(bound), a); }
FK_INLINE VF at_least(float bound, VF a) { return _mm512_max_ps(every(bound), a); }
FK_INLINE VD at_least(double bound, VD a) { return _mm512_max_pd(every(bound), a); }
#elif defined(__AVX2__)
FK_INLINE VF every(float a) { return _mm256_set1_ps(a); }
FK_INLINE VD every(double a) { return _mm256_set1_pd(a); }
FK_INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
FK_INLINE VD fma(VD a, VD b, VD c) { return _mm256_fmadd_pd(a, b, c); }
FK_INLINE VF at_most(float bound, VF a) { return _mm256_min_ps(every(bound), a); }
FK_INLINE VD at_most(double bound, VD a) { return _mm256_min_pd(every(bound), a); }
FK_INLINE VF at_least(float bound, VF a) { return _mm256_max_ps(every(bound), a); }
FK_INLINE VD at_least(double bound, VD a) { return _mm256_max_pd(every(bound), a); }
#elif defined(__aarch64__)
FK_INLINE VF every(float a) { return (VF)vdupq_n_f32(a); }
FK_INLINE VD every(double a) { return (VD)vdupq_n_f64(a); }
FK_INLINE VF fma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
FK_INLINE VD fma(VD a, VD b, VD c) { return (VD)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
FK_INLINE VF at_most(float bound, VF a) { return (VF)vminq_f32(vdupq_n_f32(bound), (float32x4_t)a); }
FK_INLINE VD at_most(double bound, VD a) { return (VD)vminq_f64(vdupq_n_f64(bound), (float64x2_t)a); }
FK_INLINE VF at_least(float bound, VF a) { return (VF)vmaxq_f32(vdupq_n_f32(bound), (float32x4_t)a); }
FK_INLINE VD at_least(double bound, VD a) { return (VD)vmaxq_f64(vdupq_n_f64(bound), (float64x2_t)a); }
#else
#error "no kernels for this instruction set"
#endif

// -- transposition in registers: N features of L series, between rows of the tensor and vectors of lanes ---------------
// A block is 128 bits wide: 4 floats or 2 doubles of each row. Vector j of a block holds, in its q-th 128 bits, those
// of row N q + j before, and feature j of the rows N q ... N q + N - 1 after.

template <class T> constexpr int N_BLOCK = 16 / sizeof(T);

#if defined(__AVX512F__)
FK_INLINE VF quads(const float *p, int64_t apart) {
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + apart), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 2 * apart), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(p + 3 * apart), 3);
}
FK_INLINE VD quads(const double *p, int64_t apart) {
    __m512d v = _mm512_castpd128_pd512(_mm_loadu_pd(p));
    v = _mm512_insertf64x2(v, _mm_loadu_pd(p + apart), 1);
    v = _mm512_insertf64x2(v, _mm_loadu_pd(p + 2 * apart), 2);
    return _mm512_insertf64x2(v, _mm_loadu_pd(p + 3 * apart), 3);
}
FK_INLINE void put_quads(float *p, int64_t apart, VF v) {
    _mm_storeu_ps(p, _mm512_castps512_ps128(v));
    _mm_storeu_ps(p + apart, _mm512_extractf32x4_ps(v, 1));
    _mm_storeu_ps(p + 2 * apart, _mm512_extractf32x4_ps(v, 2));
    _mm_storeu_ps(p + 3 * apart, _mm512_extractf32x4_ps(v, 3));
}
FK_INLINE void put_quads(double *p, int64_t apart, VD v) {
    _mm_storeu_pd(p, _mm512_castpd512_pd128(v));
    _mm_storeu_pd(p + apart, _mm512_extractf64x2_pd(v, 1));
    _mm_storeu_pd(p + 2 * apart, _mm512_extractf64x2_pd(v, 2));
    _mm_storeu_pd(p + 3 * apart, _mm512_extractf64x2_pd(v, 3));
}
FK_INLINE void transpose(VF v[4]) {
    VF a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    VF c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_shuffle_ps(a, c, 0x44), v[1] = _mm512_shuffle_ps(a, c, 0xee);
    v[2] = _mm512_shuffle_ps(b, d, 0x44), v[3] = _mm512_shuffle_ps(b, d, 0xee);
}
FK_INLINE void transpose(VD v[2]) {
    VD a = v[0], b = v[1];
    v[0] = _mm512_unpacklo_pd(a, b), v[1] = _mm512_unpackhi_pd(a, b);
}
#elif defined(__AVX2__)
FK_INLINE VF quads(const float *p, int64_t apart) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + apart), 1);
}
FK_INLINE VD quads(const double *p, int64_t apart) {
    return _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(p)), _mm_loadu_pd(p + apart), 1);
}
FK_INLINE void put_quads(float *p, int64_t apart, VF v) {
    _mm_storeu_ps(p, _mm256_castps256_ps128(v));
    _mm_storeu_ps(p + apart, _mm256_extractf128_ps(v, 1));
}
FK_INLINE void put_quads(double *p, int64_t apart, VD v) {
    _mm_storeu_pd(p, _mm256_castpd256_pd128(v));
    _mm_storeu_pd(p + apart, _mm256_extractf128_pd(v, 1));
}
FK_INLINE void transpose(VF v[4]) {
    VF a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
    VF c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
    v[0] = _mm256_shuffle_ps(a, c, 0x44), v[1] = _mm256_shuffle_ps(a, c, 0xee);
    v[2] = _mm256_shuffle_ps(b, d, 0x44), v[3] = _mm256_shuffle_ps(b, d, 0xee);
}
FK_INLINE void transpose(VD v[2]) {
    VD a = v[0], b = v[1];
    v[0] = _mm256_unpacklo_pd(a, b), v[1] = _mm256_unpackhi_pd(a, b);
}
#else
template <class T> FK_INLINE typename Lanes<T>::V quads(const T *p, int64_t) { return load(p); }
template <class T> FK_INLINE void put_quads(T *p, int64_t, typename Lanes<T>::V v) { store(p, v); }
FK_INLINE void transpose(VF v[4]) {
    float32x4x2_t a = vtrnq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    float32x4x2_t b = vtrnq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
    v[0] = (VF)vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    v[1] = (VF)vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    v[2] = (VF)vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    v[3] = (VF)vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
FK_INLINE void transpose(VD v[2]) {
    float64x2_t a = (float64x2_t)v[0], b = (float64x2_t)v[1];
    v[0] = (VD)vzip1q_f64(a, b), v[1] = (VD)vzip2q_f64(a, b);
}
#endif

}  // namespace
}  // namespace FLUXUTILS_UNIT
