// What attention's kernels are told, and what of it does not depend on how they compute: places, masks, dropout.
// Sizes: B batch items, H query heads each, T queries, S keys, D depth, E depth of values; H / group key heads.
//
// Compiled for: ELEM (bf16, f16, f32, f64); HEAD, at least D and E; MASK 0 none, 1 bool, 2 of ELEM, 3 first visible keys
// (i64); DROPOUT 0, 1; SLOPES 0, 1: whether the backward pass also gives the scores' gradient; PACKETS 0, 1: whether all
// rows are whole packets, that is all addresses, strides, D and E multiples of 16 bytes. The launcher's numbers, which must
// be the kernel's: BLOCK_ROWS, rows that a block makes; BLOCK_THREADS; BLOCK_BYTES of dynamic shared memory.

typedef ELEM T;
typedef Wide<T> W;

constexpr f64 LOG2_E = 1.44269504088896340736;

// A tensor [B, H, rows, columns] with strides in elements; its columns are contiguous.
struct Operand {
    T* data;
    i64 batch, head, row;

    DEVICE T* at(int item, int number) const { return data + item * batch + number * head; }
};

struct Problem {
    // Null where they are not wanted or not needed.
    Operand query, key, value, out;       // [B, H, T, D] [B, H / group, S, D] [B, H / group, S, E] [B, H, T, E]
    Operand dy, dquery, dkey, dvalue;     // gradients of out, query, key and value
    const void* mask;                     // [B, H, T, S] by its own strides
    i64 mask_batch, mask_head, mask_row, mask_column;
    W* stats;                             // (B H T, 2): the largest score, and the inverse of the sum of exponentials
    W* sums;                              // (2, B H T), by sums.cu: logsumexp in base 2, and the sum of dy out
    W* slopes;                            // (B, H, T, S), the scores' gradient
    u64 drop_below;                       // a probability stays if its word is not below this: p 2^32
    u64 first_head, all_heads;            // the first head's number in the whole, and the heads of its batch items
    Draws draws;
    f64 scale, keep_scale;                // of scores, and of probabilities that stay
    i32 batches, heads, group, queries, keys, depth, value_depth, causal;

    // Keys that the queries before `end` see: the first ones.
    DEVICE int keys_before(int end) const { return causal ? min(keys, end) : keys; }
};

// A head, and one of the blocks that its rows are cut into.
struct Place {
    int item, head, block;
};

// This block's. Blocks of a head are neighbours, so that they share its keys in the cache.
DEVICE Place place_of_block(int heads, int blocks) {
    const int number = blockIdx.x / blocks;
    return Place{number / heads, number % heads, (int)blockIdx.x % blocks};
}

DEVICE int blocks_of(int count, int size) { return (count + size - 1) / size; }

// Whether something is added to scores. Keys before the first visible one are left out by their numbers, as those behind
// the query are.
constexpr bool BIASED = MASK == 1 || MASK == 2, CUT = MASK == 3;

// The first key that a query sees, at most the last query's; from 0 to S. Where MASK is not 3 it is 0.
DEVICE int first_key(const Problem& p, int item, int head, int query) {
    if (!CUT || p.queries == 0) return 0;
    const i64 at = item * p.mask_batch + head * p.mask_head + min(query, p.queries - 1) * p.mask_row;
    return (int)max(i64(0), min(((const i64*)p.mask)[at], (i64)p.keys));
}

// What is added to a score before the softmax; negative infinity hides.
DEVICE W bias_at(const Problem& p, int item, int head, int query, int key) {
    if (!BIASED || query >= p.queries || key >= p.keys) return 0;
    const i64 at = item * p.mask_batch + head * p.mask_head + query * p.mask_row + key * p.mask_column;
    if (MASK == 1) return ((const u8*)p.mask)[at] ? W(0) : least<W>();
    return widen(((const T*)p.mask)[at]);
}

// Which of 32 probabilities stay, those of a query and the keys from `key` on, as bits. A key's draw is that of
// dropout on the whole's probabilities [B, H, T, S].
DEVICE u32 kept(const Problem& p, Stream stream, int item, int head, int query, int key) {
    const u64 row = (p.first_head + item * p.all_heads + head) * p.queries + query;
    const u64 place = row * p.keys + key;
    const int skip = place & 3;
    u64 bits = 0;
#pragma unroll 1
    for (int i = 0; i < 8 + (skip != 0); i++) {
        const uint4 words = stream.block((place >> 2) + i, 0);
        const u32 four = (words.x >= p.drop_below) | (words.y >= p.drop_below) << 1 | (words.z >= p.drop_below) << 2 |
                         (words.w >= p.drop_below) << 3;
        bits |= (u64)four << 4 * i;
    }
    return (u32)(bits >> skip);
}

// Those of `QUERIES` queries and `KEYS` keys, a row of words a query, by all of the block's threads.
template <int QUERIES, int KEYS>
DEVICE void draw_tile(u32* bits, const Problem& p, int item, int head, int query, int key) {
    constexpr int WORDS = (KEYS + 31) / 32;
    const Stream stream = p.draws.stream();
    for (int i = threadIdx.x; i < QUERIES * WORDS; i += blockDim.x)
        bits[i] = kept(p, stream, item, head, query + i / WORDS, key + i % WORDS * 32);
}
