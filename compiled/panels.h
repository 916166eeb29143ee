// What the networks in C are made of: exp and tanh that the compiler can vectorise, and products of small matrices.
//
// A matrix on the right is read in panels of 16 columns, which stay in the nearest cache while all rows pass by.
#ifndef ENVFLEET_PANELS_H
#define ENVFLEET_PANELS_H
#include <stdint.h>

#define PANEL 16
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
// Functions that multiply are compiled twice: with vectors of eight numbers (as FAST), and of sixteen for processors with AVX-512, which
// learn in two thirds of the time, with the same bits. The vectors may lie anywhere; the compiler splits them where registers are shorter.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target("arch=x86-64-v4")))
#define HAS_WIDE (__builtin_cpu_init(), __builtin_cpu_supports("x86-64-v4") != 0)
#else
#define WIDE
#define HAS_WIDE 0
#endif
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef Py_ssize_t N;

static int use_wide; // set when the module is loaded

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

// c (+)= a b for `count` rows by `panels` panels at once: as many sums as fit into the registers.
// Element (r, k) of a is at a[r * a_row + k * a_k]; row k of a panel of b is at b[k * b_k], the next panel `b_panel` further.
// Every sum runs over k in order, whatever the size of the tile and of the registers: a row has the same bits in any company.
#define TILE(name, vector)                                                                                             \
    INLINE void name(const int count, const int panels, const float *a, N a_row, N a_k, N depth, const float *b,      \
                     N b_k, N b_panel, float *c, N c_row, int add) {                                                   \
        enum { EACH = sizeof(vector) / sizeof(float), PER = PANEL / EACH };                                            \
        vector sum[12], column[6];                                                                                     \
        for (int r = 0; r < count; r++)                                                                                \
            for (int p = 0; p < PER * panels; p++)                                                                     \
                sum[r * PER * panels + p] = add ? *(const vector *)(c + r * c_row + EACH * p) : (vector){0};           \
        for (N k = 0; k < depth; k++) {                                                                                \
            for (int p = 0; p < PER * panels; p++)                                                                     \
                column[p] = *(const vector *)(b + (p / PER) * b_panel + k * b_k + EACH * (p % PER));                   \
            for (int r = 0; r < count; r++) {                                                                          \
                float x = a[r * a_row + k * a_k];                                                                      \
                for (int p = 0; p < PER * panels; p++) sum[r * PER * panels + p] += x * column[p];                     \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < count; r++)                                                                                \
            for (int p = 0; p < PER * panels; p++) *(vector *)(c + r * c_row + EACH * p) = sum[r * PER * panels + p];  \
    }
TILE(narrow_tile, v8)
TILE(wide_tile, v16)

INLINE void tile(const int wide, const int count, const int panels, const float *a, N a_row, N a_k, N depth, const float *b, N b_k,
                 N b_panel, float *c, N c_row, int add) {
    if (wide) wide_tile(count, panels, a, a_row, a_k, depth, b, b_k, b_panel, c, c_row, add);
    else narrow_tile(count, panels, a, a_row, a_k, depth, b, b_k, b_panel, c, c_row, add);
}

// The same for any number of rows and one panel.
INLINE void rows_by_panel(const int wide, const float *a, N a_row, N a_k, N rows, N depth, const float *b, N b_k, float *c, N c_row, int add) {
    while (rows > 0) {
        N done = wide && rows >= 12 ? 12 : rows == 8 ? 4 : rows < 6 ? rows : 6;
        switch (done) {
        case 1: tile(wide, 1, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add); break;
        case 2: tile(wide, 2, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add); break;
        case 3: tile(wide, 3, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add); break;
        case 4: tile(wide, 4, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add); break;
        case 5: tile(wide, 5, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add); break;
        case 6: tile(wide, 6, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add); break;
        default: if (wide) wide_tile(12, 1, a, a_row, a_k, depth, b, b_k, 0, c, c_row, add);
        }
        rows -= done, a += done * a_row, c += done * c_row;
    }
}

#endif
