// Merges the moments of several parts of a batch, in order of the parts, by Chan, Golub and LeVeque's formula; never a difference of
// large squares.
//
// A part is 1 + 2 * channels numbers: the elements of a channel, each channel's mean, each channel's sum of squared deviations.
// One thread a channel, striding by the grid; the parts in a loop.

extern "C" __global__ void merge_moments(f64* out, const f64* parts, u64 count, u64 channels) {
    const u64 step = (u64)gridDim.x * blockDim.x, first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 stride = 1 + 2 * channels;
    for (u64 c = first; c < channels; c += step) {
        f64 elements = 0.0, mean = 0.0, squares = 0.0;
        for (u64 i = 0; i < count; i++) {
            const f64* part = parts + i * stride;
            const f64 added = part[0], its_mean = part[1 + c], its_squares = part[1 + channels + c];
            if (added == 0.0) continue;
            if (elements == 0.0) {
                elements = added, mean = its_mean, squares = its_squares;
                continue;
            }
            const f64 all = __dadd_rn(elements, added), apart = __dadd_rn(its_mean, -mean);
            const f64 weight = __ddiv_rn(__dmul_rn(elements, added), all);
            mean = __dadd_rn(mean, __dmul_rn(apart, __ddiv_rn(added, all)));
            squares = __dadd_rn(squares, __dadd_rn(its_squares, __dmul_rn(__dmul_rn(apart, apart), weight)));
            elements = all;
        }
        out[1 + c] = mean;
        out[1 + channels + c] = squares;
    }
    if (first == 0) {
        f64 elements = 0.0;
        for (u64 i = 0; i < count; i++) elements = __dadd_rn(elements, parts[i * stride]);
        out[0] = elements;
    }
}
