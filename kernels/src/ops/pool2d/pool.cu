// Pooling and its transposes: a thread an element of the result, striding by the grid.
//
// `largest` and `mean` read each window; `spread` reads the windows that hold a pixel, rows and then columns ascending, as
// the CPU adds them; `pick` reads one place and one pixel. Windows overlap little, so each moves about every element of its
// input once in, and one element out (`largest` 4 bytes).
//
// ELEMENT: the pixels; INDEX: u32, or u64 from 2^31 pixels on, so that a stride by the grid never leaves it. Windows and
// margins may be larger than any image: places in them are u64.

typedef ELEMENT T;
typedef INDEX Index;

// Windows along one axis. `kind`: 0 divides by pixels alone, 1 by margins too, 2 is adaptive.
struct Axis {
    u64 image, count, kernel, stride, padding, kind;

    struct Span {
        Index begin, end;
        u64 divisor;
    };

    DEVICE Index inside(u64 x) const { return x < padding ? 0 : (Index)min(x - padding, image); }

    DEVICE Span span(Index at) const {
        if (kind == 2) {
            const u64 begin = (u64)at * image / count, end = (((u64)at + 1) * image + count - 1) / count;
            return {(Index)begin, (Index)end, end - begin};
        }
        const u64 start = at * stride, stop = min(start + kernel, image + 2 * padding);
        const Index begin = inside(start), end = inside(stop);
        return {begin, end, kind == 1 ? stop - start : end - begin};
    }

    // The windows that hold a pixel, from the first to before the last.
    DEVICE void holding(Index pixel, Index& first, Index& last) const {
        if (kind == 2) {
            first = (u64)pixel * count / image;
            last = (((u64)pixel + 1) * count - 1) / image + 1;
            return;
        }
        const u64 place = pixel + padding;
        first = place < kernel ? 0 : (Index)((place - kernel) / stride + 1);
        last = (Index)min(place / stride + 1, count);
    }
};

DEVICE f64 divisor(u64 a, u64 b) { return fmax((f64)a * (f64)b, 1.0); }

#define FOR_EACH(i, n)                                                                                        \
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x, step_ = (Index)gridDim.x * blockDim.x; i < n; \
         i += step_)

extern "C" __global__ void mean(T* out, const T* x, Axis rows, Axis cols, u64 n) {
    const Index width = cols.image, plane = width * rows.image;
    FOR_EACH(i, n) {
        const Index rest = i / (Index)cols.count;
        const Axis::Span across = cols.span(i % (Index)cols.count), down = rows.span(rest % (Index)rows.count);
        const T* from = x + (u64)(rest / (Index)rows.count) * plane;
        f64 sum = 0;
        for (Index r = down.begin; r < down.end; r++)
            for (Index c = across.begin; c < across.end; c++) sum += (f64)widen(from[r * width + c]);
        out[i] = narrow<T>((Wide<T>)(sum / divisor(down.divisor, across.divisor)));
    }
}

extern "C" __global__ void spread(T* out, const T* dy, Axis rows, Axis cols, u64 n) {
    const Index width = cols.count, outputs = width * rows.count;
    FOR_EACH(i, n) {
        const Index rest = i / (Index)cols.image, row = rest % (Index)rows.image;
        const T* from = dy + (u64)(rest / (Index)rows.image) * outputs;
        Index top, bottom, left, right;
        rows.holding(row, top, bottom);
        cols.holding(i % (Index)cols.image, left, right);
        f64 sum = 0;
        for (Index r = top; r < bottom; r++) {
            const u64 down = rows.span(r).divisor;
            f64 here = 0;
            for (Index c = left; c < right; c++)
                here += (f64)widen(from[r * width + c]) / divisor(down, cols.span(c).divisor);
            sum += here;
        }
        out[i] = narrow<T>((Wide<T>)sum);
    }
}

// Which of a window's pixels are inside the image, of those that begin at `start` and are `step` apart.
DEVICE void inside(i64 start, i64 step, i64 kernel, i64 image, i64& first, i64& last) {
    last = min(((image > start ? image - start : 0) + step - 1) / step, kernel);
    first = min(((start < 0 ? -start : 0) + step - 1) / step, last);
}

struct Windows {
    i64 image, count, kernel, stride, padding, dilation;
};

// Where the largest pixel of each window is in its plane: the first of equal ones, the first NaN if there is one, -1
// without any.
extern "C" __global__ void largest(i32* places, const T* x, Windows rows, Windows cols, u64 n) {
    FOR_EACH(i, n) {
        const Index rest = i / (Index)cols.count;
        const T* from = x + (u64)(rest / (Index)rows.count) * rows.image * cols.image;
        const i64 top = (i64)(rest % (Index)rows.count) * rows.stride - rows.padding;
        const i64 left = (i64)(i % (Index)cols.count) * cols.stride - cols.padding;
        i64 r0, r1, c0, c1;
        inside(top, rows.dilation, rows.kernel, rows.image, r0, r1);
        inside(left, cols.dilation, cols.kernel, cols.image, c0, c1);
        i32 found = -1;
        Wide<T> best = 0;
        for (i64 r = r0; r < r1; r++) {
            for (i64 c = c0; c < c1; c++) {
                const i32 at = (i32)((top + r * rows.dilation) * cols.image + left + c * cols.dilation);
                const Wide<T> value = widen(from[at]);
                if (found < 0 || value > best || (value != value && best == best)) {
                    best = value;
                    found = at;
                }
            }
        }
        places[i] = found;
    }
}

// The pixels at places; minus infinity where a place is outside.
extern "C" __global__ void pick(T* out, const T* x, const i32* places, u64 outputs, u64 plane, u64 n) {
    FOR_EACH(i, n) {
        const u64 place = (u64)(i64)places[i];
        out[i] = place < plane ? x[(u64)(i / (Index)outputs) * plane + place] : narrow<T>(least<Wide<T>>());
    }
}
