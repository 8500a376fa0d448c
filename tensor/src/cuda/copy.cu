// Copies a strided view into row-major order.
//
// copy_N moves words of N bytes, one thread a word of the target, striding by the grid. Its writes are coalesced, and its reads are if the
// elements of the view's innermost dimension lie together. transpose_N is for views in which another dimension's elements lie together:
// squares of both dimensions pass through shared memory, so that reads and writes are coalesced, in words of 4 bytes or of one element if
// that is larger. Each kernel reads and writes every element once.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

// Loops over words. Only transpose_N uses the strides of the target.
struct Loops {
    u64 rank;
    u64 sizes[8];
    u64 from[8];
    u64 to[8];
};

template <typename Word>
__device__ __forceinline__ void copy(Word* to, const Word* from, const Loops& loops, u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        u64 rest = i, at = 0;
        for (int d = (int)loops.rank - 1; d > 0; d--) {
            const u64 size = loops.sizes[d];
            at += rest % size * loops.from[d];
            rest /= size;
        }
        to[i] = from[at + rest * loops.from[0]];
    }
}

#define COPY(bytes, Word)                                                                                              \
    extern "C" __global__ void copy_##bytes(Word* to, const Word* from, const __grid_constant__ Loops loops, u64 n) { \
        copy(to, from, loops, n);                                                                                      \
    }
COPY(1, u8)
COPY(2, u16)
COPY(4, u32)
COPY(8, uint2)
COPY(16, uint4)

// The plane of two dimensions that is transposed: `near` elements lie together in the source, `far` ones in the target.
struct Plane {
    u64 near, far;
    u64 from_stride, to_stride;  // of the other one
    u64 tiles_near, tiles_far;
};

// V elements that are moved at once.
template <typename T, int V> union Group {
    typename T::Word word;
    typename T::Element at[V];
};

template <typename E, typename W> struct Types {
    typedef E Element;
    typedef W Word;
};

// A block of 32 x 8 threads transposes one square of 32 V x 32 V elements. The odd row length spreads a column over the banks.
template <typename Element, typename Word>
__device__ __forceinline__ void transpose(Element* to, const Element* from, const Plane& plane, const Loops& outer) {
    constexpr int V = sizeof(Word) / sizeof(Element), SIDE = 32 * V;
    __shared__ Element square[SIDE][SIDE + 1];
    typedef Group<Types<Element, Word>, V> Packet;

    u64 rest = blockIdx.x;
    const u64 near = rest % plane.tiles_near * SIDE;
    rest /= plane.tiles_near;
    const u64 far = rest % plane.tiles_far * SIDE;
    rest /= plane.tiles_far;
    for (int d = (int)outer.rank - 1; d >= 0; d--) {
        const u64 index = rest % outer.sizes[d];
        rest /= outer.sizes[d];
        from += index * outer.from[d];
        to += index * outer.to[d];
    }

    // Rows are taken by fours, so that four loads are in flight.
    const int lane = threadIdx.x * V;
    Packet packets[4] = {};
    for (int first = threadIdx.y; first < SIDE; first += 32) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u64 row = far + first + 8 * r;
            if (row < plane.far && near + lane < plane.near)
                packets[r].word = *(const Word*)(from + row * plane.from_stride + near + lane);
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int v = 0; v < V; v++) square[first + 8 * r][lane + v] = packets[r].at[v];
        }
    }
    __syncthreads();
    for (int first = threadIdx.y; first < SIDE; first += 32) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u64 row = near + first + 8 * r;
#pragma unroll
            for (int v = 0; v < V; v++) packets[r].at[v] = square[lane + v][first + 8 * r];
            if (row < plane.near && far + lane < plane.far)
                *(Word*)(to + row * plane.to_stride + far + lane) = packets[r].word;
        }
    }
}

#define TRANSPOSE(name, Element, Word)                                                                          \
    extern "C" __global__ void name(Element* to, const Element* from, const __grid_constant__ Plane plane, \
                                    const __grid_constant__ Loops outer) {                                 \
        transpose<Element, Word>(to, from, plane, outer);                                                       \
    }
TRANSPOSE(transpose_1, u8, u8)
TRANSPOSE(transpose_2, u16, u16)
TRANSPOSE(transpose_4, u32, u32)
TRANSPOSE(transpose_8, uint2, uint2)
TRANSPOSE(transpose_1_by_4, u8, u32)
TRANSPOSE(transpose_2_by_2, u16, u32)
