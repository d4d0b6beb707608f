// Eight values of a row, which lie at a multiple of 16 bytes if they are Half: what a thread reads and writes at once.
#pragma once
#include "common.cuh"

struct Eight {
    float of[8];

    Eight() = default;

    INLINE explicit Eight(const Half *from) {
        const uint4 x = *(const uint4 *)from;
        const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) of[2 * i] = low_half(pairs[i]), of[2 * i + 1] = high_half(pairs[i]);
    }

    INLINE explicit Eight(const float *from) {
        const float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
        of[0] = low.x, of[1] = low.y, of[2] = low.z, of[3] = low.w;
        of[4] = high.x, of[5] = high.y, of[6] = high.z, of[7] = high.w;
    }

    INLINE void store(Half *to) const {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = half_pair(of[2 * i], of[2 * i + 1]);
        *(uint4 *)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
};
