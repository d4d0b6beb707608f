/* A tensor map as this stand-in keeps it in the 128 bytes of a CUtensorMap: where a tensor lies and which box of it a copy moves. */
#ifndef TENSOR_MAP_H
#define TENSOR_MAP_H
#include "ptx_runtime.h"

enum { TENSOR_MAP_MAGIC = 0x50414d54, MAX_RANK = 5 };
enum { MAP_U8, MAP_U16, MAP_U32, MAP_S32, MAP_U64, MAP_S64, MAP_F16, MAP_F32, MAP_F64, MAP_BF16, MAP_F32_FTZ, MAP_TF32, MAP_TF32_FTZ, MAP_NUM_TYPES };

/* Axis 0 is the fastest, as in the driver's own arguments. */
typedef struct TensorMap {
    u32 magic;
    u8 type, element_bytes, rank, swizzle, is_nan_filled, is_im2col;
    u64 address;
    u64 size[MAX_RANK];
    u64 stride_bytes[MAX_RANK - 1];   /* of axis 1 and so on */
    u16 box[MAX_RANK];                /* tiled: extent of the box, before `step` */
    u8 step[MAX_RANK];                /* elements from one that is taken to the next */
    s16 lower[3], upper[3];           /* im2col: corners of the box of pixels, by axes 1.. */
    u16 channels, pixels;             /* im2col: the box that is moved */
} TensorMap;
_Static_assert(sizeof(TensorMap) <= 128, "CUtensorMap has 128 bytes");
#endif
