// Tensors of one shape and any strides, as the launcher's `Strided` describes them.
#pragma once

struct Strided {
    u64 rank;
    u64 sizes[8];
    u64 strides[5][8];
};

// Where element `i`, in row-major order, lies in each of the first N tensors.
template <int N> DEVICE void locate(const Strided& layout, u64 i, u64 (&at)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) at[n] = 0;
    for (int d = (int)layout.rank - 1; d >= 0; d--) {
        const u64 size = layout.sizes[d], index = d > 0 ? i % size : i;
        i /= size;
#pragma unroll
        for (int n = 0; n < N; n++) at[n] += index * layout.strides[n][d];
    }
}
