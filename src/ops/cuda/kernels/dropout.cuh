// The mask of ops/cpu/dropout.rs, to the bit: a hash of a seed, the row and the column.
#pragma once
#include "common.cuh"

INLINE unsigned long long mix(unsigned long long x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// Of a row, as `mix` gives it, and a column.
INLINE unsigned hash_of(unsigned long long row, unsigned column) {
    unsigned h = column * 0x9e3779b9 ^ (unsigned)row;
    h = (h ^ h >> 16) * 0x7feb352d;
    h = (h ^ (unsigned)(row >> 32) ^ h >> 15) * 0x846ca68b;
    return h ^ h >> 16;
}

// `key` is mix(seed), `threshold` and `factor` those of the settings. With a threshold of 0 nothing is dropped, and the factor is
// 1.
struct Dropout {
    unsigned long long key;
    unsigned threshold;
    float factor;

    INLINE unsigned long long row(int row) const { return mix(key ^ (unsigned long long)row); }

    INLINE float apply(float x, unsigned long long row, unsigned column) const {
        return hash_of(row, column) >= threshold ? x * factor : 0;
    }
};
