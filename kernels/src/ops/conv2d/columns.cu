// What a convolution multiplies: for each point of the grid a column of the pixels that its kernel elements meet.
//
// `unfold` makes columns [image, row, point] or [row, image, point], where a row is a channel and a kernel element; a row of
// blocks takes a row of one image, a thread its points in turn. Moves each element of the columns once out, and the image,
// from the caches, as often as kernel elements meet it.
//
// `fold` is the transpose: a thread a pixel, which adds the columns' elements that meet it in the order of the kernel
// elements, so nothing is scattered. Moves the columns once in, the image once out.
//
// ELEMENT: the image's elements. Columns to fold are of the type that is computed in.

typedef ELEMENT T;
typedef Wide<T> W;

// Along height or width.
struct Axis {
    i64 image, grid, kernel, stride, padding, dilation;
};

// Rows are channels x kernel elements, of one image `channels`.
extern "C" __global__ void unfold(T* columns, const T* image, Axis down, Axis across, u64 images, u64 rows, u64 image_step,
                                  u64 row_step) {
    const i64 points = down.grid * across.grid, elements = down.kernel * across.kernel;
    for (u64 job = blockIdx.y; job < images * rows; job += gridDim.y) {
        const u64 row = job % rows, n = job / rows;
        const i64 element = (i64)(row % elements), channel = (i64)(row / elements);
        const i64 top = element / across.kernel * down.dilation - down.padding;
        const i64 left = element % across.kernel * across.dilation - across.padding;
        const T* from = image + (n * (rows / elements) + channel) * down.image * across.image;
        T* to = columns + n * image_step + row * row_step;
        for (i64 p = (i64)blockIdx.x * blockDim.x + threadIdx.x; p < points; p += (i64)gridDim.x * blockDim.x) {
            const i32 at = (i32)p / (i32)across.grid;
            const i64 y = top + at * down.stride, x = left + (p - at * across.grid) * across.stride;
            const bool inside = (u64)y < (u64)down.image && (u64)x < (u64)across.image;
            to[p] = inside ? from[y * across.image + x] : narrow<T>(W(0));
        }
    }
}

// A kernel element's point of the grid along an axis for a pixel, if it has one.
DEVICE bool meets(const Axis& axis, i64 pixel, i64 element, i64& point) {
    const i64 distance = pixel + axis.padding - element * axis.dilation;
    point = distance / axis.stride;
    return distance >= 0 && point * axis.stride == distance && point < axis.grid;
}

// Columns are [image, channel, kernel element, point].
extern "C" __global__ void fold(T* image, const W* columns, const T* bias, Axis down, Axis across, u64 channels, u64 planes) {
    const i64 points = down.grid * across.grid, elements = down.kernel * across.kernel;
    const i64 pixels = down.image * across.image;
    for (u64 plane = blockIdx.y; plane < planes; plane += gridDim.y) {
        const W* from = columns + plane * elements * points;
        const W start = bias ? widen(bias[plane % channels]) : W(0);
        for (i64 p = (i64)blockIdx.x * blockDim.x + threadIdx.x; p < pixels; p += (i64)gridDim.x * blockDim.x) {
            const i64 y = p / across.image, x = p - y * across.image;
            W sum = 0;
            i64 row, column;
            for (i64 i = 0; i < down.kernel; i++) {
                if (!meets(down, y, i, row)) continue;
                for (i64 j = 0; j < across.kernel; j++) {
                    if (!meets(across, x, j, column)) continue;
                    sum += from[(i * across.kernel + j) * points + row * across.grid + column];
                }
            }
            image[plane * pixels + p] = narrow<T>(sum + start);
        }
    }
}
