// What the networks in C are made of: exp and tanh that the compiler can vectorise, and products of small matrices.
//
// A matrix on the right is read in panels of 16 columns, which stay in the nearest cache while all rows pass by.
#ifndef ENVFLEET_PANELS_H
#define ENVFLEET_PANELS_H
#include <stdint.h>

#define PANEL 16
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FAST
#endif
// Eight numbers that may lie anywhere; the compiler splits them where registers are shorter.
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef Py_ssize_t N;

// exp to about two units in the last place: 2^n by its bits, the rest by a polynomial. NaN stays NaN.
INLINE float exp_of(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    union { float f; uint32_t u; } shifted = {x * 1.44269504f + 12582912.0f}, power;
    float n = shifted.f - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    power.u = (shifted.u + 127u) << 23; // the low bits of `shifted` are n
    return p * power.f;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }
INLINE float tanh_of(float x) { return 2.0f / (1.0f + exp_of(-2.0f * x)) - 1.0f; }

INLINE N padded(N columns) { return (columns + PANEL - 1) / PANEL * PANEL; }

// Element (k, n) of the matrix is at from[k * by_k + n * by_n]: a transposed one is packed by swapping the strides.
static void pack(const float *from, N by_k, N by_n, N depth, N columns, float *to) {
    for (N first = 0; first < columns; first += PANEL)
        for (N k = 0; k < depth; k++)
            for (N n = 0; n < PANEL; n++) *to++ = first + n < columns ? from[k * by_k + (first + n) * by_n] : 0.0f;
}

// c (+)= a b for `count` rows by `panels` panels at once: as many sums as fit into the registers of AVX2.
// Element (r, k) of a is at a[r * a_row + k * a_k]; row k of a panel of b is at b[k * b_k], the next panel `b_panel` further.
// Every sum runs over k in order, whatever the size of the tile: a row has the same bits in any company.
INLINE void tile(const int count, const int panels, const float *a, N a_row, N a_k, N depth, const float *b, N b_k, N b_panel,
                 float *c, N c_row, int add) {
    v8 sum[12];
    for (int r = 0; r < count; r++)
        for (int p = 0; p < 2 * panels; p++)
            sum[r * 2 * panels + p] = add ? *(const v8 *)(c + r * c_row + 8 * p) : (v8){0};
    for (N k = 0; k < depth; k++) {
        v8 column[6];
        for (int p = 0; p < 2 * panels; p++) column[p] = *(const v8 *)(b + (p / 2) * b_panel + k * b_k + 8 * (p % 2));
        for (int r = 0; r < count; r++) {
            float x = a[r * a_row + k * a_k];
            for (int p = 0; p < 2 * panels; p++) sum[r * 2 * panels + p] += x * column[p];
        }
    }
    for (int r = 0; r < count; r++)
        for (int p = 0; p < 2 * panels; p++) *(v8 *)(c + r * c_row + 8 * p) = sum[r * 2 * panels + p];
}

#endif
