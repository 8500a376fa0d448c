//! Accesses where nothing is: by one, before the start, misaligned, after a free, through wrong or overflowing indices, in global, shared and
//! local memory.

use phalanx_ptx::FaultKind::{
    BadLaunch, Deadlock, InvalidCall, InvalidFree, Misaligned, OutOfBounds, SharedRace,
};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let same = |x: &[i32]| x.to_vec();
    vec![
        Case::new(
            "copy_words",
            1,
            256,
            r"
__global__ void copy_words(int *x, int *y, int n) {
    int i = threadIdx.x;
    if (i == n - 1) i = n;                            //+ one_behind
    if (i == 0) i = -1;                               //+ one_before
    if (i == 7) i = 1 << 28;                          //+ far
    y[i] = x[threadIdx.x];                            //! one_behind one_before far
}",
        )
        .gives(same)
        .wrong(
            "one_behind",
            OutOfBounds,
            &["write of 4 bytes at offset 1024 of an allocation of 1024 bytes", "thread (255, 0, 0)"],
        )
        .wrong(
            "one_before",
            OutOfBounds,
            &["write of 4 bytes", "4 bytes before an allocation of 1024 bytes", "thread (0, 0, 0)"],
        )
        .wrong("far", OutOfBounds, &["write of 4 bytes", "thread (7, 0, 0)"]),
        Case::new(
            "loop_to_n",
            1,
            1,
            r"
__global__ void loop_to_n(int *x, int *y, int n) {
    int sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];          //- inclusive
    for (int i = 0; i <= n; i++) sum += x[i];         //+ inclusive //! inclusive
    y[0] = sum;
}",
        )
        .gives(|x| vec![x.iter().sum()])
        .wrong("inclusive", OutOfBounds, &["offset 1024 of an allocation of 1024 bytes"]),
        Case::new(
            "countdown",
            1,
            1,
            r"
__global__ void countdown(int *x, int *y, int n) {
    int sum = 0;
    for (int i = n - 1; i >= 0; i--) sum += x[i];     //- unsigned_index
    for (unsigned i = n - 1; i >= 0; i--) sum += x[i];            //+ unsigned_index //! unsigned_index
    y[0] = sum;
}",
        )
        .gives(|x| vec![x.iter().sum()])
        .wrong("unsigned_index", Deadlock, &["no thread has written anything"]),
        Case::new(
            "stencil",
            4,
            64,
            r"
__global__ void stencil(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int left = i > 0 ? x[i - 1] : 0;                  //- no_left
    int left = x[i - 1];                              //+ no_left //! no_left
    int right = i < n - 1 ? x[i + 1] : 0;             //- no_right late_right
    int right = x[i + 1];                             //+ no_right //! no_right
    int right = i < n ? x[i + 1] : 0;                 //+ late_right //! late_right
    y[i] = left + x[i] + right;
}",
        )
        .gives(|x| {
            let at = |i: i32| x.get(i as usize).copied().unwrap_or(0);
            (0..256).map(|i| at(i - 1) + at(i) + at(i + 1)).collect()
        })
        .wrong("no_left", OutOfBounds, &["4 bytes before an allocation", "thread (0, 0, 0)"])
        .wrong("no_right", OutOfBounds, &["offset 1024", "block (3, 0, 0), thread (63, 0, 0)"])
        .wrong("late_right", OutOfBounds, &["offset 1024", "block (3, 0, 0), thread (63, 0, 0)"]),
        Case::new(
            "large_index",
            1,
            32,
            r"
__global__ void large_index(int *x, int *y, int n) {
    int rows = n * 100, width = n * 400;
    long long size = (long long)rows * width;         //- int_product
    int size = rows * width;                          //+ int_product
    int first = size / 10000000 - 262;                //- short_index
    short first = n * 128;                            //+ short_index
    y[threadIdx.x] = x[first + (int)threadIdx.x];         //! int_product short_index
}",
        )
        .gives(|x| x[..32].to_vec())
        .wrong("int_product", OutOfBounds, &["bytes before an allocation"])
        .wrong("short_index", OutOfBounds, &["bytes before an allocation"]),
        Case::new(
            "matrix_by_columns",
            1,
            1,
            r"
__global__ void matrix_by_columns(int *x, int *y, int n) {
    int row = threadIdx.y, column = threadIdx.x;
    y[row * 32 + column] = x[row * 32 + column];      //- swapped
    y[column * 32 + row] = x[column * 32 + row];      //+ swapped //! swapped
}",
        )
        .block(32, 8)
        .gives(same)
        .wrong(
            "swapped",
            OutOfBounds,
            &["read of 4 bytes at offset", "of an allocation of 1024 bytes"],
        ),
        Case::new(
            "padded_rows",
            1,
            256,
            r"
__global__ void padded_rows(int *x, int *y, int n) {
    int row = threadIdx.x / 30, column = threadIdx.x % 30;
    if (row >= 8) return;
    y[row * 30 + column] = x[row * 32 + column];      //- wrong_pitch
    y[row * 30 + column] = x[row * 320 + column];     //+ wrong_pitch //! wrong_pitch
}",
        )
        .gives(|x| (0..240).map(|i| x[i / 30 * 32 + i % 30]).collect())
        .wrong("wrong_pitch", OutOfBounds, &["at offset"]),
        Case::new(
            "shared_ends",
            1,
            64,
            r"
__global__ void shared_ends(int *x, int *y, int n) {
    __shared__ int s[64];
    int t = threadIdx.x;
    s[t] = x[t];                                      //- one_behind one_before
    s[t + 1] = x[t];                                  //+ one_behind //! one_behind
    s[t - 1] = x[t];                                  //+ one_before //! one_before
    __syncthreads();
    y[t] = s[63 - t];
}",
        )
        .gives(|x| (0..64).map(|i| x[63 - i]).collect())
        .wrong(
            "one_behind",
            OutOfBounds,
            &["write of 4 bytes at offset 256 of 256 bytes of shared memory", "thread (63, 0, 0)"],
        )
        .wrong("one_before", OutOfBounds, &["write of 4 bytes", "shared memory", "thread (0, 0, 0)"]),
        Case::new(
            "shared_neighbours",
            1,
            64,
            r"
__global__ void shared_neighbours(int *x, int *y, int n) {
    __shared__ int a[64];
    __shared__ int b[64];
    int t = threadIdx.x;
    a[t] = x[t];
    b[t] = 2 * x[t];
    __syncthreads();
    y[t] = a[63 - t] + b[t];                          //- into_b
    y[t] = a[64 - t] + b[t];                          //+ into_b //! into_b
}",
        )
        .gives(|x| (0..64).map(|i| x[63 - i] + 2 * x[i]).collect())
        .wrong(
            "into_b",
            OutOfBounds,
            &["read of 4 bytes at offset 256 of 256 bytes of shared memory", "thread (0, 0, 0)"],
        ),
        Case::new(
            "dynamic_shared",
            1,
            64,
            r"
__global__ void dynamic_shared(int *x, int *y, int n) {
    extern __shared__ int s[];
    int t = threadIdx.x;
    s[t] = x[t];
    s[t + 64] = x[t + 64];                            //+ too_little //! too_little
    __syncthreads();
    y[t] = s[63 - t];
}",
        )
        .shared(256)
        .gives(|x| (0..64).map(|i| x[63 - i]).collect())
        .wrong("too_little", OutOfBounds, &["of 256 bytes of shared memory"]),
        Case::new(
            "local_array",
            1,
            32,
            r"
__global__ void local_array(int *x, int *y, int n) {
    int bins[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < 64; i++) bins[x[i] % 8]++;    //- nine negative
    for (int i = 0; i < 64; i++) bins[x[i] % 9]++;    //+ nine //! nine
    for (int i = 0; i < 64; i++) bins[x[i] % 8 - 1]++;            //+ negative //! negative
    int sum = 0;
    for (int i = 0; i < 8; i++) sum = 3 * sum + bins[(i + threadIdx.x) % 8];
    y[threadIdx.x] = sum;
}",
        )
        .gives(|x| {
            let bin = |b: usize| x[..64].iter().filter(|v| **v as usize % 8 == b).count() as i32;
            (0..32).map(|t| (0..8).fold(0, |sum, i| 3 * sum + bin((i + t) % 8))).collect()
        })
        .wrong("nine", OutOfBounds, &["of local memory"])
        .wrong("negative", OutOfBounds, &["local memory"]),
        Case::new(
            "wide_words",
            1,
            32,
            r"
__global__ void wide_words(int *x, int *y, int n) {
    int i = threadIdx.x;
    int4 v = ((int4 *)x)[i];                          //- odd_start too_wide
    int4 v = *(int4 *)(x + 1 + i);                    //+ odd_start
    int4 v = ((int4 *)x)[i + 33];                     //+ too_wide
    ((int4 *)y)[i] = v;
}",
        )
        .gives(|x| x[..128].to_vec())
        .wrong("odd_start", Misaligned, &["read of 16 bytes", "past a multiple of 16"])
        .wrong("too_wide", OutOfBounds, &["read of 16 bytes at offset 1024", "thread (31, 0, 0)"]),
        Case::new(
            "bytes_as_words",
            1,
            32,
            r"
__global__ void bytes_as_words(int *x, int *y, int n) {
    const char *bytes = (const char *)x;
    int i = threadIdx.x;
    y[i] = *(int *)(bytes + 4 * i);                   //- misaligned
    y[i] = *(int *)(bytes + 3 * i);                   //+ misaligned //! misaligned
}",
        )
        .gives(|x| x[..32].to_vec())
        .wrong("misaligned", Misaligned, &["read of 4 bytes", "past a multiple of 4"]),
        Case::new(
            "shared_doubles",
            1,
            32,
            r"
__global__ void shared_doubles(int *x, int *y, int n) {
    __shared__ __align__(8) int s[72];
    int t = threadIdx.x;
    long long *at = (long long *)(s + 2 * t);         //- odd
    long long *at = (long long *)(s + 1 + 2 * t);     //+ odd
    *at = x[t];                                       //! odd
    __syncwarp();
    y[t] = (int)*at;
}",
        )
        .gives(|x| x[..32].to_vec())
        .wrong("odd", Misaligned, &["write of 8 bytes", "past a multiple of 8"]),
        Case::new(
            "misaligned_atomic",
            1,
            32,
            r"
__global__ void misaligned_atomic(int *x, int *y, int n) {
    atomicAdd(y, x[threadIdx.x]);                     //- odd
    atomicAdd((int *)((char *)y + 2), x[threadIdx.x]);            //+ odd //! odd
}",
        )
        .zeros()
        .gives(|x| vec![x[..32].iter().sum()])
        .wrong("odd", Misaligned, &["2 past a multiple of 4"]),
        Case::new(
            "null_pointer",
            1,
            32,
            r"
__global__ void null_pointer(int *x, int *y, int n) {
    int *p = x;                                       //- null
    int *p = (int *)(long long)(n - 256);                 //+ null
    y[threadIdx.x] = p[threadIdx.x];                  //! null
}",
        )
        .gives(|x| x[..32].to_vec())
        .wrong("null", OutOfBounds, &["outside every allocation"]),
        Case::new(
            "heap_of_threads",
            1,
            32,
            r"
__global__ void heap_of_threads(int *x, int *y, int n) {
    int *p = (int *)malloc(8 * sizeof(int));
    for (int i = 0; i < 8; i++) p[i] = x[threadIdx.x] + i;        //- behind
    for (int i = 0; i <= 8; i++) p[i] = x[threadIdx.x] + i;       //+ behind //! behind
    int sum = 0;
    for (int i = 0; i < 8; i++) sum += p[i];
    free(p);                                          //- leak twice interior
    free(p); free(p);                                 //+ twice //! twice
    free(p + 1);                                      //+ interior //! interior
    sum += p[0] - x[threadIdx.x];                     //+ after_free //! after_free
    y[threadIdx.x] = sum;
}",
        )
        .gives(|x| x[..32].iter().map(|v| 8 * v + 28).collect())
        .wrong("behind", OutOfBounds, &["write of 4 bytes at offset 32 of an allocation of 32 bytes"])
        .wrong("twice", InvalidFree, &[])
        .wrong("interior", InvalidFree, &[])
        .wrong("after_free", OutOfBounds, &["that was freed"])
        .leaks("leak"),
        Case::new(
            "function_table",
            1,
            32,
            r"
__device__ int plus(int v) { return v + 1; }
__device__ int twice(int v) { return 2 * v; }
__device__ int (*table[2])(int) = {plus, twice};
__global__ void function_table(int *x, int *y, int n) {
    int which = threadIdx.x % 2;                      //- behind
    int which = threadIdx.x % 3;                      //+ behind
    y[threadIdx.x] = table[which](x[threadIdx.x]);    //! behind
}",
        )
        .gives(|x| (0..32).map(|i| if i % 2 == 0 { x[i] + 1 } else { 2 * x[i] }).collect())
        .wrong("behind", OutOfBounds, &["offset 16 of"]),
        Case::new(
            "null_function",
            1,
            32,
            r"
__device__ int plus(int v) { return v + 1; }
__device__ int (*chosen)(int) = plus;
__global__ void null_function(int *x, int *y, int n) {
    int (*f)(int) = chosen;                           //- null
    int (*f)(int) = (int (*)(int))(long long)(n - 256);     //+ null
    y[threadIdx.x] = f(x[threadIdx.x]);               //! null
}",
        )
        .gives(|x| (0..32).map(|i| x[i] + 1).collect())
        .wrong("null", InvalidCall, &["null pointer"]),
        Case::new(
            "deep_recursion",
            1,
            32,
            r"
__device__ __noinline__ int depth(int *x, int i, int n) {
    volatile int mine[4] = {i, i, i, i};
    if (i >= n) return 0;                             //- endless
    if (i > 100000000) return 0;                      //+ endless
    return depth(x, i + 1, n) + x[i % n] + mine[1] - mine[2];   //! endless
}
__global__ void deep_recursion(int *x, int *y, int n) {
    y[threadIdx.x] = depth(x, 0, 16);
}",
        )
        .gives(|x| vec![x[..16].iter().sum(); 32])
        .wrong("endless", OutOfBounds, &["stack"]),
        Case::new(
            "constant_table",
            1,
            32,
            r"
__constant__ int primes[8] = {2, 3, 5, 7, 11, 13, 17, 19};
__global__ void constant_table(int *x, int *y, int n) {
    y[threadIdx.x] = primes[x[threadIdx.x] % 8];      //- nine
    y[threadIdx.x] = primes[x[threadIdx.x] % 9];      //+ nine //! nine
}",
        )
        .gives(|x| (0..32).map(|i| [2, 3, 5, 7, 11, 13, 17, 19][x[i] as usize % 8]).collect())
        .wrong("nine", OutOfBounds, &["offset 32"]),
        Case::new(
            "local_of_another",
            1,
            64,
            r"
__global__ void local_of_another(int *x, int *y, int n) {
    __shared__ int *p;
    int mine[2] = {x[threadIdx.x], 1};
    if (threadIdx.x == 0) p = x;                      //- passed
    if (threadIdx.x == 0) p = mine;                   //+ passed
    __syncthreads();
    y[threadIdx.x] = p[0];
    mine[1] = y[threadIdx.x];
    if (mine[n % 2] == -1) y[0] = -1;
}",
        )
        .gives(|x| vec![x[0]; 64])
        .values("passed"),
        Case::new(
            "part_of_an_allocation",
            1,
            64,
            r"
__global__ void part_of_an_allocation(int *x, int *y, int n) {
    int *low = x, *high = x + 128;
    int t = threadIdx.x;
    y[t] = low[t] + high[t];                          //- into_the_next
    y[t] = low[t == 63 ? 128 : t] + high[t] + (t == 63 ? low[t] - high[0] : 0);   //+ into_the_next
}",
        )
        .gives(|x| (0..64).map(|i| x[i] + x[i + 128]).collect())
        .missed("into_the_next", "bounds are those of the whole allocation"),
        Case::new(
            "struct_in_shared",
            1,
            32,
            r"
struct Pair { int a[16]; int b[16]; };
__global__ void struct_in_shared(int *x, int *y, int n) {
    __shared__ Pair s;
    int t = threadIdx.x;
    if (t < 16) { s.a[t] = x[t]; s.b[t] = 0; }
    __syncwarp();
    int at = n - 241;                                 //- into_b
    int at = n - 240;                                 //+ into_b
    if (t == 0) y[0] = s.a[at] + (at == 16 ? s.a[15] : 0);
}",
        )
        .gives(|x| vec![x[15]])
        .missed("into_b", "bounds are those of the whole variable"),
        Case::new(
            "ring_buffer",
            1,
            64,
            r"
__global__ void ring_buffer(int *x, int *y, int n) {
    __shared__ int ring[4][64];
    int t = threadIdx.x, sum = 0;
    for (int i = 0; i < 4; i++) {
        ring[i % 4][t] = x[64 * i + t];               //- fifth three
        ring[i + 1][t] = x[64 * i + t];               //+ fifth //! fifth
        ring[i % 3][t] = x[64 * i + t];               //+ three //! three
        if (i >= 2) {
            __syncthreads();
            sum += ring[(i - 2) % 4][63 - t];         //- three
            sum += ring[i - 2][63 - t];               //+ three //! three
        }
    }
    y[t] = sum;
}",
        )
        .gives(|x| (0..64).map(|t| x[63 - t] + x[64 + 63 - t]).collect())
        .wrong("fifth", OutOfBounds, &["of 1024 bytes of shared memory"])
        .wrong("three", SharedRace, &[]),
        Case::new(
            "local_neighbours",
            1,
            32,
            r"
__global__ void local_neighbours(int *x, int *y, int n) {
    struct { int low[8], high[8]; } mine;
    for (int i = 0; i < 8; i++) { mine.low[x[i] % 8] = i; mine.high[x[i] % 8] = 0; }
    int at = x[0] % 8;                                //- into_high
    int at = x[0] % 8 + 8;                            //+ into_high
    y[threadIdx.x] = mine.low[at] >= 0;
}",
        )
        .gives(|_| vec![1; 32])
        .missed("into_high", "bounds are those of all local memory"),
        Case::new(
            "bounded_launch",
            1,
            64,
            r"
__global__ void __launch_bounds__(64) bounded_launch(int *x, int *y, int n) { //- fewer
__global__ void __launch_bounds__(32) bounded_launch(int *x, int *y, int n) { //+ fewer
    y[threadIdx.x] = x[threadIdx.x];
}",
        )
        .gives(|x| x[..64].to_vec())
        .wrong("fewer", BadLaunch, &["a block of [64, 1, 1] threads, where 1 to 32 can be"]),
    ]
}
