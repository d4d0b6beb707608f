// The kernels of attention.cu for scores under a cap, of which each is cap * tanh(score / cap) (Gemma 2): a module of its own, so that
// other models do not load them.
#define NAME(kernel) attention_capped_##kernel
enum { IS_CAPPED = true };
#include "attention.cu"
