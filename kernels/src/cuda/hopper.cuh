// What multiprocessors of compute capability 9.0 have beside those before: boxes of tensors that are copied by maps, barriers
// in shared memory that copies arrive at, and products of warpgroups (four warps) that read shared memory by themselves.
//
// Names of the PTX ISA: tensor maps, `cp.async.bulk.tensor`, `mbarrier`, `wgmma`. Tiles in shared memory are rows of 128 bytes,
// permuted as a map with a 128-byte swizzle does: 16-byte chunk c of row r lies at chunk c ^ (r % 8). They begin at
// multiples of 1024 bytes.

// ---- Copies of boxes, and the barriers at which they arrive ----

// Made on the host (`Args::boxes`), passed as a `__grid_constant__`.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Shared memory that such tiles lie in.
#define TILED_SHARED(name) extern __shared__ __align__(1024) u8 name[]

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to copies. The block synchronises afterwards.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and says that so many bytes will.
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of this parity: 0 for the first one. A new barrier is behind a phase of parity 1.
DEVICE void barrier_wait(u32 barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Starts copying a map's box to shared memory; zeros from outside of the tensor. Coordinates are innermost first.
DEVICE void copy_box(u32 to, const TensorMap& map, u32 barrier, int column, int row, int head, int item) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(item)
        : "memory");
}

// ---- Products of warpgroups ----
// Of C (64 x 8 N) warp w has rows 16 w .. 16 w + 15, in the prelude's fragments of C, one for each 8 columns; of an A in registers
// likewise, in the prelude's fragments of A.

constexpr int WARPGROUP = 128;

// Registers of each thread of a warpgroup from here on; all of its warps do it.
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Synchronises `THREADS` threads at a barrier of the block's sixteen, of which 0 is `__syncthreads`; or arrives there only.
template <int THREADS> DEVICE void meet(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }
template <int THREADS> DEVICE void meet_later(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// A matrix in shared memory: rows of 64 elements and of 128 bytes, of which products take 16 or more. `leading` is the
// distance in bytes between tiles of 64 columns, where columns are what is not added over.
DEVICE u64 matrix_at(u32 address, int leading = 16) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Before the first product, and where other instructions wrote its registers.
DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Numbers that are computed here: the compiler moves nothing of them over this place.
template <int N> DEVICE void settle(f32 (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}
// Waits until at most the last `PENDING` committed groups are under way; `c` is a result that is then there.
template <int PENDING, int N> DEVICE void products_wait(f32 (&c)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    settle(c);
}

#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)
#define OF_TYPES ".f32." TEXT_OF(ELEM) "." TEXT_OF(ELEM) " "
#define QUAD(n, mode) mode(c[n][0]), mode(c[n][1]), mode(c[n][2]), mode(c[n][3])
#define QUADS_8(mode) \
    QUAD(0, mode), QUAD(1, mode), QUAD(2, mode), QUAD(3, mode), QUAD(4, mode), QUAD(5, mode), QUAD(6, mode), QUAD(7, mode)
#define QUADS_16(mode)                                                                                                 \
    QUADS_8(mode), QUAD(8, mode), QUAD(9, mode), QUAD(10, mode), QUAD(11, mode), QUAD(12, mode), QUAD(13, mode), \
        QUAD(14, mode), QUAD(15, mode)
#define QUADS_32(mode)                                                                                                 \
    QUADS_16(mode), QUAD(16, mode), QUAD(17, mode), QUAD(18, mode), QUAD(19, mode), QUAD(20, mode), QUAD(21, mode), \
        QUAD(22, mode), QUAD(23, mode), QUAD(24, mode), QUAD(25, mode), QUAD(26, mode), QUAD(27, mode),             \
        QUAD(28, mode), QUAD(29, mode), QUAD(30, mode), QUAD(31, mode)
#define SET "=f"
#define ADD "+f"
#define NAMES_32                                                                                    \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
    "%26,%27,%28,%29,%30,%31"
#define NAMES_64                                                                                                \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
             "%56,%57,%58,%59,%60,%61,%62,%63"

#define NAMES_128                                                                                                 \
    NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88," \
             "%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,"  \
             "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// c = a bᵀ, or c += a bᵀ if it `adds`: 64 rows of A and 8 N of B, 16 columns of each. `A_ACROSS`, `B_ACROSS`: neighbours in
// memory are neighbours along the operand's rows, not along the columns that are added over. `SETS`: it never adds, and c is
// nothing before. Sums that a loop leaves under way must not have been set by other instructions, not even to 0, or the
// compiler waits for each product; so the first one of a loop does not add.
#define MULTIPLY_ROWS(shape, names, quads, mode, at, bt, adds_at, a_across, b_across)                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " adds_at ", 0;\nwgmma.mma_async.sync.aligned." shape OF_TYPES    \
                 "{" names "}, " at ", " bt ", p, 1, 1, " a_across ", " b_across ";\n}"                             \
                 : quads(mode)                                                                                      \
                 : "l"(a), "l"(b), "r"((int)adds), "n"((int)A_ACROSS), "n"((int)B_ACROSS))
template <bool SETS = false, bool A_ACROSS = false, bool B_ACROSS = false, int N>
DEVICE void multiply_rows(f32 (&c)[N][4], u64 a, u64 b, bool adds) {
    static_assert(N == 8 || N == 16 || N == 32, "64, 128 or 256 columns");
    if constexpr (N == 8 && SETS) MULTIPLY_ROWS("m64n64k16", NAMES_32, QUADS_8, SET, "%32", "%33", "%34", "%35", "%36");
    if constexpr (N == 8 && !SETS) MULTIPLY_ROWS("m64n64k16", NAMES_32, QUADS_8, ADD, "%32", "%33", "%34", "%35", "%36");
    if constexpr (N == 16 && SETS) MULTIPLY_ROWS("m64n128k16", NAMES_64, QUADS_16, SET, "%64", "%65", "%66", "%67", "%68");
    if constexpr (N == 16 && !SETS) MULTIPLY_ROWS("m64n128k16", NAMES_64, QUADS_16, ADD, "%64", "%65", "%66", "%67", "%68");
    if constexpr (N == 32)
        MULTIPLY_ROWS("m64n256k16", NAMES_128, QUADS_32, ADD, "%128", "%129", "%130", "%131", "%132");
}

// c += a b: 16 columns of A, in registers, and 16 rows of B, of 8 N columns.
template <int N> DEVICE void multiply_columns(f32 (&c)[N][4], const u32 (&a)[4], u64 b) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
    if constexpr (N == 8) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16" OF_TYPES "{" NAMES_32
                     "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                     : QUADS_8(ADD)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16" OF_TYPES "{" NAMES_64
                     "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                     : QUADS_16(ADD)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}
