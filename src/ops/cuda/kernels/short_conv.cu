// Short causal convolution of every channel by itself and SiLU: y[t] = silu(u[t]), u[t] the sum over j < TAPS of weight[j]
// x[t - TAPS + 1 + j], without tokens before the document of t; and its gradient.
//
// x, y, dy and dx are Half, [tokens, channels], weight is f32, [TAPS, channels], contiguous. Channels and strides are multiples of
// 8, pointers of 16 bytes. first and last: of the document of every token. Grid: (channels / 1024, tokens / RUN upwards), block 128.
//
// The gated ones take b, c and x side by side, [tokens, 3 channels]: y[t] = c[t] u[t], u[t] the same sum of b x.
#include "eight.cuh"

// Tokens that a thread takes, one after another, of eight channels.
enum { TAPS = 4, BLOCK = 128, RUN = 32 };

struct Channels {
    int channel, begin, end;
    Eight weights[TAPS];

    INLINE Channels(const float *weight, int tokens, int channels)
        : channel((blockIdx.x * BLOCK + threadIdx.x) * 8), begin(blockIdx.y * RUN), end(min(begin + RUN, tokens)) {
        if (channel >= channels) {
            end = begin;
            return;
        }
#pragma unroll
        for (int j = 0; j < TAPS; j++) weights[j] = Eight(weight + (long long)j * channels + channel);
    }

    INLINE Eight of(const Half *x, int stride, int token) const { return Eight(x + (long long)token * stride + channel); }
};

// The last TAPS tokens, the last of them at the end.
struct Window {
    Eight rows[TAPS];

    INLINE void push(const Eight &row) {
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) rows[j] = rows[j + 1];
        rows[TAPS - 1] = row;
    }
};

// Those before `begin`.
INLINE Window window_before(const Channels &channels, const Half *x, int stride) {
    Window window = {};
#pragma unroll
    for (int j = 1; j < TAPS; j++) {
        const int token = channels.begin - TAPS + j;
        if (token >= 0) window.rows[j] = channels.of(x, stride, token);
    }
    return window;
}

// u of the last token of a window, `behind` tokens of its document before it.
INLINE Eight convolved(const Channels &channels, const Window &window, int behind) {
    Eight u;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u.of[i] = channels.weights[TAPS - 1].of[i] * window.rows[TAPS - 1].of[i];
#pragma unroll
        for (int j = 1; j < TAPS; j++)
            if (j <= behind) u.of[i] += channels.weights[TAPS - 1 - j].of[i] * window.rows[TAPS - 1 - j].of[i];
    }
    return u;
}

// The gradient of the first token of a window from those of u, `ahead` tokens of its document behind it.
INLINE Eight gathered(const Channels &own, const Window &gradients, int ahead) {
    Eight sum;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum.of[i] = own.weights[TAPS - 1].of[i] * gradients.rows[0].of[i];
#pragma unroll
        for (int j = 1; j < TAPS; j++)
            if (j <= ahead) sum.of[i] += own.weights[TAPS - 1 - j].of[i] * gradients.rows[j].of[i];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    short_conv(const Half *x, const float *weight, const int *first, Half *y, int x_stride, int y_stride, int tokens, int channels) {
    const Channels own(weight, tokens, channels);
    if (own.begin == own.end) return;
    Window window = window_before(own, x, x_stride);
    for (int token = own.begin; token < own.end; token++) {
        window.push(own.of(x, x_stride, token));
        Eight u = convolved(own, window, token - first[token]);
#pragma unroll
        for (int i = 0; i < 8; i++) u.of[i] /= 1 + expf(-u.of[i]);
        u.store(y + (long long)token * y_stride + own.channel);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    short_conv_backward(const Half *dy, const Half *x, const float *weight, const int *first, const int *last, Half *dx,
                        int dy_stride, int x_stride, int dx_stride, int tokens, int channels) {
    const Channels own(weight, tokens, channels);
    if (own.begin == own.end) return;
    Window window = window_before(own, x, x_stride), gradients = {};
    for (int token = own.begin; token < own.end + TAPS - 1; token++) {
        Eight du = {};
        if (token < tokens) {
            window.push(own.of(x, x_stride, token));
            const Eight u = convolved(own, window, token - first[token]), gradient = own.of(dy, dy_stride, token);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float sigmoid = 1 / (1 + expf(-u.of[i]));
                du.of[i] = gradient.of[i] * sigmoid * (1 + u.of[i] * (1 - sigmoid));
            }
        }
        gradients.push(du);
        // The first of the window: all that read it are there.
        const int from = token - TAPS + 1;
        if (from < own.begin) continue;
        const Eight sum = gathered(own, gradients, last[from] - from);
        sum.store(dx + (long long)from * dx_stride + own.channel);
    }
}

INLINE Eight product(const Eight &a, const Eight &b) {
    Eight product;
#pragma unroll
    for (int i = 0; i < 8; i++) product.of[i] = a.of[i] * b.of[i];
    return product;
}

// b, c and x of a token.
struct Gated {
    const Half *bcx;
    int stride, channels;

    INLINE Eight part(const Channels &own, int token, int part) const {
        return own.of(bcx + part * channels, stride, token);
    }
    // What the convolution takes.
    INLINE Eight taken(const Channels &own, int token) const {
        return product(part(own, token, 0), part(own, token, 2));
    }
    INLINE Window before(const Channels &own) const {
        Window window = {};
#pragma unroll
        for (int j = 1; j < TAPS; j++) {
            const int token = own.begin - TAPS + j;
            if (token >= 0) window.rows[j] = taken(own, token);
        }
        return window;
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
    gated_conv(const Half *bcx, const float *weight, const int *first, Half *y, int stride, int y_stride, int tokens, int channels) {
    const Channels own(weight, tokens, channels);
    if (own.begin == own.end) return;
    const Gated gated = {bcx, stride, channels};
    Window window = gated.before(own);
    for (int token = own.begin; token < own.end; token++) {
        window.push(gated.taken(own, token));
        const Eight u = convolved(own, window, token - first[token]);
        product(gated.part(own, token, 1), u).store(y + (long long)token * y_stride + own.channel);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    gated_conv_backward(const Half *dy, const Half *bcx, const float *weight, const int *first, const int *last, Half *d_bcx,
                        int dy_stride, int stride, int d_stride, int tokens, int channels) {
    const Channels own(weight, tokens, channels);
    if (own.begin == own.end) return;
    const Gated gated = {bcx, stride, channels};
    Window window = gated.before(own), gradients = {};
    for (int token = own.begin; token < own.end + TAPS - 1; token++) {
        Eight du = {};
        if (token < tokens) {
            const Eight gradient = own.of(dy, dy_stride, token);
            du = product(gradient, gated.part(own, token, 1));
            if (token < own.end) {
                window.push(gated.taken(own, token));
                const Eight u = convolved(own, window, token - first[token]);
                product(gradient, u).store(d_bcx + (long long)token * d_stride + channels + own.channel);
            }
        }
        gradients.push(du);
        // The first of the window: all that read it are there.
        const int from = token - TAPS + 1;
        if (from < own.begin) continue;
        const Eight sum = gathered(own, gradients, last[from] - from);
        Half *to = d_bcx + (long long)from * d_stride + own.channel;
        product(sum, gated.part(own, from, 2)).store(to);
        product(sum, gated.part(own, from, 0)).store(to + 2 * channels);
    }
}
