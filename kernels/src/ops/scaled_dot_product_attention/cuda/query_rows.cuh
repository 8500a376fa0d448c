// Scores of a warp's queries, down, and of keys, across, made again in the backward pass: for products of warps and of
// warpgroups alike.

// Products become probabilities, of queries `query ..` and keys `key ..`.
template <int M, int N>
DEVICE void probabilities(f32 (&s)[M][N][4], const f32 (&logsumexp)[M][2], const Problem& p, const Place& at, int query,
                          int key) {
    constexpr int KEYS = N * 8;
    const int g = lane_number() / 4, t = lane_number() % 4;
    const Score score(p);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = score.probability(s[m][n][i], logsumexp[m][i / 2], p, at, query + m * 16 + i / 2 * 8 + g,
                                               key + n * 8 + 2 * t + i % 2);
    // Of keys that are not there the exponential may be infinite.
    if (key + KEYS > p.keys || (p.causal && key + KEYS > query + 1)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int seen = p.keys_before(query + m * 16 + i / 2 * 8 + g + 1) - key - 2 * t - i % 2;
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * 8 >= seen) s[m][n][i] = 0;
            }
    }
    if (CUT && key < first_key(p, at.item, at.head, query + 16 * M - 1)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int start = first_key(p, at.item, at.head, query + m * 16 + half * 8 + g) - key - 2 * t;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (n * 8 < start) s[m][n][half * 2] = 0;
                    if (n * 8 + 1 < start) s[m][n][half * 2 + 1] = 0;
                }
            }
    }
}

// What sums.cu has of queries `query` and `query + 8`.
DEVICE void load_sums(f32 (&logsumexp)[2], f32 (&delta)[2], const Problem& p, const Place& at, int query) {
    const i64 rows = (i64)p.batches * p.heads * p.queries, row = ((i64)at.item * p.heads + at.head) * p.queries;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int number = query + half * 8;
        const bool valid = number < p.queries;
        logsumexp[half] = valid ? p.sums[row + number] : 0;
        delta[half] = valid ? p.sums[rows + row + number] : 0;
    }
}
